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

import torch
from torch import Tensor, nn

from backstash.arguments import check_count
from backstash.errors import RewriteError
from backstash.rewrites.chunked_loss import CHUNK_NBYTES
from backstash.rewrites.cross_entropy import check_classes, product_dtype
from backstash.rewrites.deferred import Deferred
from backstash.rewrites.logit_steps import LogitFormula
from backstash.rewrites.row_numbers import RowNumbers, RowSettings


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
    rows = max(1, chunk_nbytes // max(1, classes * own.formula.precise.itemsize))
    chosen = None if target is None else target.reshape(-1)
    of_teacher = None if other is None else other.formula
    settings = RowSettings(rows, float(temperature), ignore_index, own.formula, of_teacher)
    others = (None, None, None) if other is None else other.tensors
    found = RowNumbers.apply(*own.tensors, chosen, None, *others, settings)
    log_probs, normaliser, entropy, *divergences, _ = found
    shaped = [None if x is None else x.view(shape) for x in (log_probs, *divergences)]
    return LogitRows(shaped[0], normaliser.view(shape), entropy.view(shape), *shaped[1:])


@dataclass(frozen=True, eq=False)
class _Head:
    """A head and its input."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    formula: LogitFormula

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The input, [n, d], the weight, and the bias."""
        return self.hidden.reshape(-1, self.hidden.shape[-1]), self.weight, self.bias


def _head_call(hidden: object, head: object, name: str) -> _Head:
    """Returns the head and the input that a user has passed."""
    if head is None and isinstance(hidden, Deferred) and not hidden.is_output and not hidden.classes_second:
        hidden.check()
        return _Head(*hidden.inputs, hidden.formula)
    if not isinstance(head, nn.Linear):
        if head is None:
            raise RewriteError(
                f"chunked_rows was asked for {name} without a head, but it is no result of a head under chunked_loss "
                f"with the classes last. Pass the head, or call the model under backstash.rewrites.chunked_loss(model)."
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
    return _Head(hidden, head.weight, head.bias, LogitFormula(product_dtype(hidden)))


def _check_target(target: object, shape: torch.Size, classes: int, ignore_index: int) -> None:
    if not isinstance(target, Tensor) or target.dtype is not torch.int64 or target.shape != shape:
        got = f"{target.dtype} {tuple(target.shape)}" if isinstance(target, Tensor) else f"{target!r:.80}"
        raise RewriteError(
            f"chunked_rows was asked for the target {got}, but there are {tuple(shape)} rows. Pass int64 of that shape."
        )
    check_classes(target, classes, ignore_index)
