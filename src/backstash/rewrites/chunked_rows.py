"""Numbers of each row of logits that losses of language models read, for a few rows of logits at a time.

Policy gradients (PPO, GRPO) read the log-probability of each token and the entropy; preferences (DPO, ORPO) sums of
log-probabilities; a z-loss the normaliser; a distillation the divergence from a teacher. Each of these is a number for
each row of logits. So the logits of some rows are computed, reduced to these numbers, and freed; backward computes
them once more, for their gradient. With 64,000 tokens and 152,000 words there would be 39 GB of them.

The logits are those of a head and its input, or those that a model returns under :func:`chunked_loss`: with all that
the model does to them, such as a scale or a soft cap.

The numbers are sums in another order: equal mathematically, but not bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backstash.arguments import check_count
from backstash.errors import RewriteError
from backstash.rewrites.chunked_loss import CHUNK_NBYTES
from backstash.rewrites.cross_entropy import accumulator, add_product
from backstash.rewrites.deferred import Deferred
from backstash.rewrites.logit_steps import LogitStep, apply_steps, gradient_before


@dataclass(frozen=True, eq=False)
class LogitRows:
    """Numbers of each row of logits, in float32 (float64 for float64 logits), through which gradients flow.

    Attributes:
        log_probs: log-probability of the row's target, [...]; None without targets.
        normaliser: ``logits.logsumexp(-1)``, [...]; a z-loss is the mean of its square.
        entropy: entropy of the row's distribution in nats, [...].
        from_teacher: Kullback-Leibler divergence ``KL(teacher || this)`` of the distributions, [...]; None without a
            teacher.
        to_teacher: the reverse, ``KL(this || teacher)``, [...]; None without a teacher.
    """

    log_probs: Tensor | None
    normaliser: Tensor
    entropy: Tensor
    from_teacher: Tensor | None = None
    to_teacher: Tensor | None = None


def chunked_rows(
    hidden: Tensor,
    head: nn.Linear | None = None,
    target: Tensor | None = None,
    *,
    temperature: float = 1.0,
    teacher: tuple[Tensor, nn.Linear] | Tensor | None = None,
    ignore_index: int = -100,
    chunk_nbytes: int = CHUNK_NBYTES,
) -> LogitRows:
    """Returns what losses read of ``head(hidden) / temperature``, without all of these logits at once.

    The products are computed in the dtype of ``hidden``, or of autocast, and everything else in float32. Twice the
    logits' product is computed, as under a checkpoint.

    Args:
        hidden: the head's input, [..., d]; or the logits that a model returned under :func:`chunked_loss`, of which no
            number was read yet, [..., classes].
        head: the layer that computes the logits, [..., classes]; None for such logits.
        target: the class of each row, int64 [...]; None if no log-probabilities are wanted.
        temperature: what the logits are divided by, the teacher's as well.
        teacher: the input of another head, [..., d'], and that head, for the same classes, which get no gradient; or
            the logits that the teacher returned under ``chunked_loss(teacher, evaluation=True)``.
        ignore_index: a target of which the log-probability is 0 and has no gradient.
        chunk_nbytes: bytes of logits that may exist at a time. It is at least one row.

    Returns:
        A number for each row. Rows that are masked out of the loss may be left out before: they cost as much.

    Raises:
        RewriteError: shapes do not fit together, or a number is out of range.
        IndexError: on CPU, a target is no class, as in ``cross_entropy``.

    Example:
        >>> head, hidden = nn.Linear(8, 50), torch.randn(2, 6, 8, requires_grad=True)
        >>> words = torch.arange(12).view(2, 6)
        >>> rows = chunked_rows(hidden, head, words, chunk_nbytes=1000)
        >>> loss = -(rows.log_probs + 0.01 * rows.entropy).mean() + 1e-4 * rows.normaliser.square().mean()
        >>> loss.backward()
        >>> hidden.grad.shape
        torch.Size([2, 6, 8])
    """
    check_count(chunk_nbytes, "chunk_nbytes", "bytes", "chunked_rows")
    own = _head_call(hidden, head, "hidden")
    if not (isinstance(temperature, (int, float)) and 0.0 < temperature < 1e30):
        raise RewriteError(
            f"chunked_rows was asked for temperature={temperature!r:.80}, but it takes a number above 0."
        )
    if not (isinstance(ignore_index, int) and -(1 << 63) <= ignore_index < 1 << 63):
        raise RewriteError(f"chunked_rows was asked for ignore_index={ignore_index!r:.80}, but it takes an int64.")
    shape, classes = own.hidden.shape[:-1], own.weight.shape[0]
    if target is not None:
        _check_target(target, shape, classes, ignore_index)
    other = None
    if teacher is not None:
        if not (isinstance(teacher, Tensor) or (isinstance(teacher, tuple) and len(teacher) == 2)):
            raise RewriteError(
                f"chunked_rows was asked for teacher={teacher!r:.80}. Pass a pair: its input and its head."
            )
        other_hidden, other_head = (teacher, None) if isinstance(teacher, Tensor) else teacher
        other = _head_call(other_hidden, other_head, "the teacher's input")
        if other.hidden.shape[:-1] != shape or other.weight.shape[0] != classes:
            raise RewriteError(
                f"chunked_rows was asked to compare {tuple(shape)} rows of {classes} classes with a teacher's "
                f"{tuple(other.hidden.shape[:-1])} rows of {other.weight.shape[0]}. Pass the same rows and classes."
            )
    rows = max(1, chunk_nbytes // max(1, classes * (8 if own.product is torch.float64 else 4)))
    chosen = None if target is None else target.reshape(-1)
    settings = _Settings(rows, float(temperature), ignore_index, own.way, None if other is None else other.way)
    others = (None, None, None) if other is None else other.tensors
    found = _Rows.apply(*own.tensors, chosen, *others, settings)
    log_probs, normaliser, entropy, *divergences = found
    shaped = [None if x is None else x.view(shape) for x in (log_probs, *divergences)]
    return LogitRows(shaped[0], normaliser.view(shape), entropy.view(shape), *shaped[1:])


@dataclass(frozen=True, eq=False)
class _Way:
    """How a head's logits are computed. It holds no tensor that backward reads: autograd does, as its hooks say.

    Attributes:
        product: the dtype of the product.
        steps: what is done to the logits.
    """

    product: torch.dtype
    steps: tuple[LogitStep, ...]

    def cast(self, x: Tensor | None) -> Tensor | None:
        """Returns a weight or a bias in the dtype of the product."""
        return None if x is None else x.detach().to(self.product)

    def logits(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, temperature: float
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Returns the logits of some rows, over the temperature, [rows, classes], and what their gradient reads."""
        assert weight is not None
        found, results = apply_steps(self.steps, F.linear(x.to(self.product), weight, bias))
        if any(found is result for result in results):
            found = found.clone()  # it is written over, and its gradient reads it
        found = found if found.dtype is torch.float64 else found.float()
        return found if temperature == 1.0 else found / temperature, results

    def before(self, results: list[Tensor | None], gradient: Tensor, temperature: float) -> Tensor:
        """Returns the gradient of the head's product from that of the logits over the temperature."""
        gradient = gradient if temperature == 1.0 else gradient / temperature
        return gradient_before(self.steps, results, gradient).to(self.product)


@dataclass(frozen=True, eq=False)
class _Head:
    """A head and its input.

    Attributes:
        hidden: the input, [..., d].
        weight: the weight, [classes, d].
        bias: the bias, [classes], or None.
        product: the dtype of the product.
        steps: what is done to the logits.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    product: torch.dtype
    steps: tuple[LogitStep, ...] = ()

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The input, [n, d], the weight, and the bias."""
        return self.hidden.reshape(-1, self.hidden.shape[-1]), self.weight, self.bias

    @property
    def way(self) -> _Way:
        """How its logits are computed."""
        return _Way(self.product, self.steps)


def _head_call(hidden: object, head: object, name: str) -> _Head:
    """Returns the head and the input that a user has passed."""
    if head is None and isinstance(hidden, Deferred):
        hidden.call.check()
        call = hidden.call
        return _Head(hidden.hidden, call.weight, call.bias, call.product, hidden.steps)
    if not isinstance(head, nn.Linear):
        if head is None:
            raise RewriteError(
                f"chunked_rows was asked for {name} without a head, but it is no result of a head under chunked_loss. "
                f"Pass the head, or call the model under backstash.rewrites.chunked_loss(model)."
            )
        raise RewriteError(f"chunked_rows was asked for the head {head!r:.80}, but it computes logits of an nn.Linear.")
    if (
        not isinstance(hidden, Tensor)
        or isinstance(hidden, Deferred)
        or not hidden.is_floating_point()
        or hidden.shape[-1:] != head.weight.shape[1:]
    ):
        got = f"{hidden.dtype} {tuple(hidden.shape)}" if isinstance(hidden, Tensor) else f"{hidden!r:.80}"
        raise RewriteError(
            f"chunked_rows was asked for {name}, {got}, but the head takes floats [..., {head.weight.shape[1]}]."
        )
    device = hidden.device.type
    product = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    return _Head(hidden, head.weight, head.bias, product)


def _check_target(target: object, shape: torch.Size, classes: int, ignore_index: int) -> None:
    if not isinstance(target, Tensor) or target.dtype is not torch.int64 or target.shape != shape:
        got = f"{target.dtype} {tuple(target.shape)}" if isinstance(target, Tensor) else f"{target!r:.80}"
        raise RewriteError(
            f"chunked_rows was asked for the target {got}, but there are {tuple(shape)} rows. Pass int64 of that shape."
        )
    outside = (target != ignore_index) & ((target < 0) | (target >= classes))
    if target.device.type == "cpu" and bool(outside.any()):
        raise IndexError(f"Target {int(target[outside][0])} is out of bounds.")  # the message of cross_entropy


@dataclass(frozen=True, eq=False)
class _Settings:
    """How rows are computed.

    Attributes:
        rows: how many at a time.
        temperature, ignore_index: as for :func:`chunked_rows`.
        own: how the logits are computed.
        other: how the teacher's are; None without a teacher.
    """

    rows: int
    temperature: float
    ignore_index: int
    own: _Way
    other: _Way | None


class _Rows(torch.autograd.Function):
    """Numbers of rows of logits; the logits are computed again in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor | None,
        other_hidden: Tensor | None,
        other_weight: Tensor | None,
        other_bias: Tensor | None,
        settings: _Settings,
    ) -> tuple[Tensor | None, ...]:
        """Returns log-probabilities, normalisers, entropies, and the divergences from and to the teacher, each [n].

        Args:
            ctx: holds what backward reads.
            hidden: [n, d].
            weight: [classes, d].
            bias: [classes], or None.
            target: [n], or None.
            other_hidden: the teacher's, [n, d'], or None.
            other_weight: [classes, d'], or None.
            other_bias: [classes], or None.
            settings: how they are computed.
        """
        count, own, other = hidden.shape[0], settings.own, settings.other
        precise = torch.float64 if own.product is torch.float64 else torch.float32
        normaliser, entropy = (torch.empty(count, dtype=precise, device=hidden.device) for _ in range(2))
        log_probs = None if target is None else torch.empty_like(normaliser)
        away, back = (None if other is None else torch.empty_like(normaliser) for _ in range(2))
        with torch.autocast(hidden.device.type, enabled=False):
            cast = own.cast(weight), own.cast(bias)
            other_cast = (None, None) if other is None else (other.cast(other_weight), other.cast(other_bias))
            for begin in range(0, count, settings.rows):
                part = slice(begin, begin + settings.rows)
                logits, _ = own.logits(hidden[part], *cast, settings.temperature)
                normaliser[part] = logits.logsumexp(1)
                if target is not None and log_probs is not None:
                    kept = target[part] != settings.ignore_index
                    classes = torch.where(kept, target[part], 0).unsqueeze(1)
                    log_probs[part] = torch.where(kept, logits.gather(1, classes).squeeze(1) - normaliser[part], 0.0)
                logs = logits.sub_(normaliser[part].unsqueeze(1))
                probabilities = logs.exp()
                entropy[part] = -_products(probabilities, logs)
                if away is not None and back is not None and other is not None and other_hidden is not None:
                    others = other.logits(other_hidden[part], *other_cast, settings.temperature)[0].log_softmax(1)
                    back[part] = -entropy[part] - _products(probabilities, others)
                    away[part] = _products(others.exp(), others - logs)
                    del others
                del logits, logs, probabilities
        ctx.settings = settings
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            hidden, weight, bias, target, other_hidden, other_weight, other_bias, normaliser, entropy, back
        )
        return log_probs, normaliser, entropy, away, back

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *outer: Tensor | None) -> tuple[Tensor | None, ...]:
        """Returns the gradients of hidden, weight and bias."""
        hidden, weight, bias, target, other_hidden, other_weight, other_bias, normaliser, entropy, back = (
            ctx.saved_tensors
        )
        settings: _Settings = ctx.settings
        own, other, temperature = settings.own, settings.other, settings.temperature
        wanted = ctx.needs_input_grad[:3]
        of_log_probs, of_normaliser, of_entropy, of_away, of_back = (
            None if x is None else x.unsqueeze(1) for x in outer
        )
        is_in_parts = settings.rows < hidden.shape[0]
        hidden_grad = torch.empty_like(hidden) if wanted[0] else None
        weight_grad = accumulator(weight, is_in_parts) if wanted[1] else None
        bias_grad = accumulator(bias, is_in_parts) if wanted[2] else None
        with torch.autocast(hidden.device.type, enabled=False):
            cast = weight.detach().to(own.product), own.cast(bias)
            other = other if of_away is not None or of_back is not None else None
            other_cast = (None, None) if other is None else (other.cast(other_weight), other.cast(other_bias))
            for begin in range(0, hidden.shape[0], settings.rows):
                part = slice(begin, begin + settings.rows)
                x = hidden[part].to(own.product)
                logits, results = own.logits(x, *cast, temperature)
                logs = logits.sub_(normaliser[part].unsqueeze(1))
                probabilities = logs.exp()
                factors = torch.zeros_like(normaliser[part]).unsqueeze(1)  # of the probabilities
                if of_normaliser is not None:
                    factors = factors + of_normaliser[part]
                if of_log_probs is not None and target is not None:
                    kept = (target[part] != settings.ignore_index).unsqueeze(1)
                    of_chosen = of_log_probs[part] * kept
                    factors = factors - of_chosen
                others = None
                if other is not None:
                    others = other.logits(other_hidden[part], *other_cast, temperature)[0].log_softmax(1)
                if of_away is not None:
                    factors = factors + of_away[part]
                gradient = probabilities * factors
                if of_entropy is not None:
                    gradient -= (logs + entropy[part].unsqueeze(1)).mul_(probabilities).mul_(of_entropy[part])
                if others is not None and of_back is not None:
                    less = back[part].unsqueeze(1)
                    gradient += (logs - others - less).mul_(probabilities).mul_(of_back[part])
                if others is not None and of_away is not None:
                    gradient -= others.exp() * of_away[part]
                if of_log_probs is not None and target is not None:
                    gradient.scatter_add_(1, torch.where(kept, target[part].unsqueeze(1), 0), of_chosen)
                del logits, logs, probabilities, others
                gradient = own.before(results, gradient, temperature)
                del results
                if hidden_grad is not None:
                    hidden_grad[part] = gradient @ cast[0]
                if weight_grad is not None:
                    add_product(weight_grad, gradient, x)
                if bias_grad is not None:
                    bias_grad += gradient.sum(0, dtype=bias_grad.dtype)
        parts = (hidden_grad, hidden), (weight_grad, weight), (bias_grad, bias)
        return *(x if x is None else x.to(of.dtype) for x, of in parts), *[None] * 5


def _products(weights: Tensor, numbers: Tensor) -> Tensor:
    """Returns the sum over classes of two [rows, classes], where 0 times an infinity is 0: [rows]."""
    return torch.where(weights == 0, 0.0, weights * numbers).sum(1)
