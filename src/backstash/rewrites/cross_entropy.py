"""The cross entropy of a head's logits, and its gradients, a few rows of logits at a time."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from backstash.rewrites.logit_steps import LogitFormula

FLOAT16_SCALE = 256.0
"""What gradients of logits are multiplied by before they are rounded to float16.

They are between -1 and 1, and those of most classes are far below the least number of float16, 6e-8. The scale of a
GradScaler is not known when they are computed.
"""

PIECE = 1 << 22
"""How many elements of a gradient are converted at a time."""


@dataclass(frozen=True, eq=False)
class EntropySettings:
    """How a cross entropy is computed.

    Attributes:
        ignore_index: the target of rows that do not count.
        is_mean: whether the loss is the mean over the rows that count, and not their sum.
        rows: number of rows whose logits exist at a time.
        result: the dtype of the loss.
        smoothing: the share of each target that is spread over all classes.
        with_grad: whether gradients are wanted at all.
    """

    ignore_index: int
    is_mean: bool
    rows: int
    own: LogitFormula
    result: torch.dtype
    smoothing: float
    with_grad: bool


def product_dtype(hidden: Tensor) -> torch.dtype:
    """Returns the dtype in which a layer computes its product now."""
    device = hidden.device.type
    autocasts = hidden.dtype is not torch.float64 and _can_autocast(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if autocasts else hidden.dtype


def loss_dtype(logits: Tensor) -> torch.dtype:
    """Returns the dtype of the cross entropy of logits now: under autocast it is computed in float32."""
    device, is_half = logits.device.type, logits.dtype in (torch.bfloat16, torch.float16)
    autocasts = is_half and _can_autocast(device) and torch.is_autocast_enabled(device)
    return torch.float32 if autocasts else logits.dtype


def without_autocast(device: str) -> AbstractContextManager[object]:
    """Returns a context without autocast, also for kinds of devices that have none."""
    return torch.autocast(device, enabled=False) if _can_autocast(device) else nullcontext()


def _can_autocast(device: str) -> bool:
    return device != "meta" and torch.amp.is_autocast_available(device)


def check_classes(target: Tensor, classes: int, ignore_index: int) -> None:
    """Checks on CPU that targets are classes. Elsewhere, and in a compiled graph, the kernels check it.

    Raises:
        IndexError: one is none.
    """
    if target.device.type != "cpu" or torch.compiler.is_compiling() or type(target) is not Tensor:
        return
    outside = (target != ignore_index) & ((target < 0) | (target >= classes))
    if bool(outside.any()):
        raise IndexError(f"Target {int(target[outside][0])} is out of bounds.")  # the message of cross_entropy


def refuse_gradients_of_gradients() -> None:
    """Refuses a backward pass whose gradients would be differentiated.

    Raises:
        RuntimeError: gradients of gradients were asked for.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            "backward was asked to go through logits in chunks with create_graph=True, but their gradients have no "
            "gradients. Leave create_graph out, or undo the rewrite for what needs gradients of gradients."
        )


def accumulator(weight: Tensor, is_in_parts: bool) -> Tensor:
    """Returns zeros in which a weight's gradient is added up.

    Hundreds of small summands in bfloat16 would lose most of their bits, so several of them are added up in float32.
    """
    is_half = weight.dtype in (torch.bfloat16, torch.float16)
    dtype = torch.float32 if is_half and is_in_parts else weight.dtype
    return torch.zeros_like(weight, dtype=dtype, memory_format=torch.contiguous_format)


def add_product(total: Tensor, gradient: Tensor, x: Tensor) -> None:
    """Adds ``gradient.t() @ x`` to a weight's gradient, without a copy where the dtypes are the same."""
    if total.dtype is gradient.dtype:
        total.addmm_(gradient.t(), x)
    elif gradient.dtype is torch.float16 and x.numel() and gradient.numel():
        # The sum over rows may exceed the largest number of float16 where neither factor does.
        most = gradient.abs().amax().float() * x.abs().amax().float() * x.shape[0]
        scale = (2.0**15 / most).log2().floor().clamp(max=0.0).exp2()
        total += (gradient.t() @ (x * scale).to(x.dtype)).to(total.dtype) / scale
    else:
        total += gradient.t() @ x


class ChunkedCrossEntropy(torch.autograd.Function):
    """Computes the loss, and its gradients in the same pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        class_weight: Tensor | None,
        settings: EntropySettings,
    ) -> Tensor:
        """The loss, a scalar.

        Args:
            hidden: the head's input, [n, d].
            weight: the head's weight, [classes, d].
            bias: the head's bias, [classes], or None.
            target: indices of classes, [n].
            class_weight: what each class counts, [classes], or None.
        """
        wanted = [settings.with_grad and needed for needed in ctx.needs_input_grad[:3]]
        formula, smoothing, rows = settings.own, settings.smoothing, settings.rows
        product, precise = formula.product, formula.precise
        with without_autocast(hidden.device.type):
            kept = target != settings.ignore_index
            safe = torch.where(kept, target, 0)
            counts = kept.to(precise)
            spread = torch.full((), smoothing / max(1, weight.shape[0]), dtype=precise, device=hidden.device)
            spread_sum: Tensor | float = smoothing
            if class_weight is not None:
                class_weight = class_weight.to(precise)
                counts, spread = counts * class_weight[safe], spread * class_weight
                spread_sum = spread.sum()
            total = counts.sum() if settings.is_mean else torch.ones((), dtype=precise, device=hidden.device)
            cast, cast_bias = weight.to(product), formula.cast(bias)
            # In float16 gradients are computed in other units, and added up in float32, until backward.
            held = FLOAT16_SCALE if product is torch.float16 else 1.0
            is_in_parts = rows < hidden.shape[0] or held != 1.0
            hidden_grad = torch.empty_like(hidden) if wanted[0] else None
            weight_grad = accumulator(weight, is_in_parts) if wanted[1] else None
            bias_grad = accumulator(bias, is_in_parts) if wanted[2] and bias is not None else None
            loss = torch.zeros((), dtype=precise, device=hidden.device)
            for begin in range(0, hidden.shape[0], rows):
                part = slice(begin, begin + rows)
                x, classes = hidden[part].to(product), safe[part].unsqueeze(1)
                logits, results = formula.logits(x, cast, cast_bias)
                normaliser = logits.logsumexp(1, keepdim=True)
                own = (1.0 - smoothing) * counts[part].unsqueeze(1)
                losses = (normaliser - logits.gather(1, classes)) * own
                if smoothing:
                    sums = (logits @ spread).unsqueeze(1) if spread.dim() else logits.sum(1, keepdim=True) * spread
                    losses = losses + (normaliser * spread_sum - sums)
                # A row that does not count may have infinite logits: nothing times infinity is no number.
                loss += torch.where(kept[part], losses.squeeze(1), 0.0).sum()
                if not any(wanted):
                    continue
                # From here on the logits' memory holds their gradient.
                gradient = logits.sub_(normaliser).exp_().mul_(own + spread_sum if smoothing else own)
                if smoothing:
                    gradient -= spread
                gradient.scatter_add_(1, classes, -own)
                if smoothing:
                    gradient *= kept[part].unsqueeze(1)
                gradient = formula.before(results, gradient if held == 1.0 else gradient.mul_(held))
                if hidden_grad is not None:
                    hidden_grad[part] = gradient @ cast
                if weight_grad is not None:
                    add_product(weight_grad, gradient, x)
                if bias_grad is not None:
                    bias_grad += gradient.sum(0, dtype=bias_grad.dtype)
                del logits, gradient, results
        parts = (hidden_grad, hidden), (weight_grad, weight), (bias_grad, bias)
        ctx.gradients = [x if x is None or of is None or held != 1.0 else x.to(of.dtype) for x, of in parts]
        ctx.dtypes = [None if x is None else x.dtype for x in (hidden, weight, bias)]
        # Where no row counts, the loss is no number, but gradients are 0.
        ctx.factor = torch.where(total == 0, 0.0, 1.0 / total) / held
        return (loss / total).to(settings.result)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of hidden, weight and bias, times the gradient of the loss."""
        refuse_gradients_of_gradients()
        if ctx.gradients is None:
            raise RuntimeError(
                "backward was asked to go through a chunked loss a second time, but its gradients were computed in the "
                "forward pass and are gone. Compute the loss again, or undo the rewrite for what needs retain_graph."
            )
        gradients, ctx.gradients = ctx.gradients, None
        factor = ctx.factor * outer[0].to(ctx.factor.dtype)
        scaled = [
            None if x is None else _multiply(x, factor).to(dtype)
            for x, dtype in zip(gradients, ctx.dtypes, strict=True)
        ]
        gradients.clear()
        return (*scaled, None, None, None)


def _multiply(x: Tensor, factor: Tensor) -> Tensor:
    """Multiplies a gradient by a scalar in place. The scalar is not rounded to the gradient's dtype before."""
    if x.dtype is factor.dtype or x.dtype is torch.float64:
        return x.mul_(factor)
    for piece in x.split(max(1, PIECE * x.shape[0] // max(1, x.numel()))):
        piece.copy_(piece.to(factor.dtype).mul_(factor))
    return x
