"""The cross entropy of a head's logits, and its gradients, a few rows of logits at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from backstash.rewrites.logit_steps import LogitStep, apply_steps, gradient_before


@dataclass(frozen=True, eq=False)
class EntropySettings:
    """How a cross entropy is computed.

    Attributes:
        ignore_index: the target of rows that do not count.
        is_mean: whether the loss is the mean over the rows that count, and not their sum.
        rows: number of rows whose logits exist at a time.
        product: the dtype of the products.
        dtype: the dtype of the logits that the loss reads.
        smoothing: the share of each target that is spread over all classes.
        steps: what is done to the logits before.
    """

    ignore_index: int
    is_mean: bool
    rows: int
    product: torch.dtype
    dtype: torch.dtype
    smoothing: float
    steps: tuple[LogitStep, ...]


def accumulator(weight: Tensor, is_in_parts: bool) -> Tensor:
    """Returns zeros in which a weight's gradient is added up.

    Hundreds of small summands in bfloat16 would lose most of their bits, so several of them are added up in float32.

    Args:
        weight: the weight.
        is_in_parts: whether there are several summands.
    """
    is_half = weight.dtype in (torch.bfloat16, torch.float16)
    dtype = torch.float32 if is_half and is_in_parts else weight.dtype
    return torch.zeros_like(weight, dtype=dtype, memory_format=torch.contiguous_format)


def add_product(total: Tensor, gradient: Tensor, x: Tensor) -> None:
    """Adds ``gradient.t() @ x`` to a weight's gradient, without a copy where the dtypes are the same."""
    if total.dtype is gradient.dtype:
        total.addmm_(gradient.t(), x)
    else:
        total += gradient.t() @ x


class ChunkedCrossEntropy(torch.autograd.Function):
    """Computes the loss, and its gradients in the same pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, settings: EntropySettings
    ) -> Tensor:
        """The loss, a scalar.

        Args:
            ctx: holds the gradients for ``backward``.
            hidden: the head's input, [n, d].
            weight: the head's weight, [classes, d].
            bias: the head's bias, [classes], or None.
            target: indices of classes, [n].
            settings: how it is computed.
        """
        wanted = ctx.needs_input_grad[:3]
        product, smoothing, rows = settings.product, settings.smoothing, settings.rows
        with torch.autocast(hidden.device.type, enabled=False):
            kept = target != settings.ignore_index
            safe = torch.where(kept, target, 0)
            precise = torch.float64 if settings.dtype is torch.float64 else torch.float32
            factor = torch.ones((), dtype=precise, device=hidden.device)
            if settings.is_mean:
                factor = 1.0 / kept.sum().to(precise)
            cast = weight.to(product)
            cast_bias = bias.to(product) if bias is not None else None
            is_in_parts = rows < hidden.shape[0]
            hidden_grad = torch.empty_like(hidden) if wanted[0] else None
            weight_grad = accumulator(weight, is_in_parts) if wanted[1] else None
            bias_grad = accumulator(bias, is_in_parts) if wanted[2] and bias is not None else None
            loss = torch.zeros((), dtype=precise, device=hidden.device)
            for begin in range(0, hidden.shape[0], rows):
                part = slice(begin, begin + rows)
                x, classes = hidden[part].to(product), safe[part].unsqueeze(1)
                logits, results = apply_steps(settings.steps, F.linear(x, cast, cast_bias))
                if logits.dtype is precise and any(logits is result for result in results):
                    logits = logits.clone()  # it is written over below, and its gradient reads it
                logits = logits.to(precise)
                normaliser = logits.logsumexp(1, keepdim=True)
                chosen = logits.gather(1, classes)
                if smoothing:
                    chosen = chosen.lerp(logits.mean(1, keepdim=True), smoothing)
                # A row that does not count may have infinite logits: nothing times infinity is no number.
                loss += torch.where(kept[part], (normaliser - chosen).squeeze(1), 0.0).sum()
                if not any(wanted):
                    continue
                # From here on the logits' memory holds their gradient.
                gradient = logits.sub_(normaliser).exp_()
                if smoothing:
                    gradient -= smoothing / gradient.shape[1]
                gradient.scatter_add_(1, classes, torch.full_like(normaliser, smoothing - 1.0))
                gradient *= (kept[part] * factor).unsqueeze(1)
                gradient = gradient_before(settings.steps, results, gradient).to(product)
                if hidden_grad is not None:
                    hidden_grad[part] = gradient @ cast
                if weight_grad is not None:
                    add_product(weight_grad, gradient, x)
                if bias_grad is not None:
                    bias_grad += gradient.sum(0, dtype=bias_grad.dtype)
                del logits, gradient, results
        parts = (hidden_grad, hidden), (weight_grad, weight), (bias_grad, bias)
        ctx.gradients = [x if x is None or of is None else x.to(of.dtype) for x, of in parts]
        return (loss * factor).to(settings.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of hidden, weight and bias, times the gradient of the loss."""
        if ctx.gradients is None:
            raise RuntimeError(
                "backward was asked to go through a chunked loss a second time, but its gradients were computed in the "
                "forward pass and are gone. Compute the loss again, or undo the rewrite for what needs retain_graph."
            )
        gradients, ctx.gradients = ctx.gradients, None
        scaled = [None if x is None else x.mul_(outer[0].to(x.dtype)) for x in gradients]
        gradients.clear()
        return (*scaled, None, None)
