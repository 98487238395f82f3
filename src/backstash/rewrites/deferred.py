"""Logits that are not computed yet, which follow what programs do with them until a loss is asked for.

Note: [deferred logits]
    Under the rewrite the head returns a tensor whose numbers are not computed yet. It follows the views, conversions,
    scales, biases and soft caps that programs apply between a head and its loss, and its ``cross_entropy`` is computed
    in chunks. Any other function gets the logits, computed as the head would have computed them. So a program that
    reads the logits gets them, and pays for them; if the weights have changed since, that is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backstash.errors import RewriteError
from backstash.rewrites.cross_entropy import ChunkedCrossEntropy, EntropySettings
from backstash.rewrites.logit_steps import LogitStep, step_for
from backstash.torch_internals import no_torch_function_subclass


@dataclass(eq=False)
class Tally:
    """What became of a rewritten head's logits.

    Attributes:
        chunked: how many losses were computed in chunks.
        whole: names of the functions that got all logits, in the order in which they came first.
    """

    chunked: int = 0
    whole: dict[str, None] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class HeadCall:
    """One call of a head.

    Attributes:
        weight: the head's weight, [classes, d].
        bias: the head's bias, [classes], or None.
        chunk_nbytes: bytes of logits that may exist at a time.
        product: the dtype in which the product is computed.
        versions: what the product is of, and its version then.
        tally: what becomes of the logits.
    """

    weight: Tensor
    bias: Tensor | None
    chunk_nbytes: int
    product: torch.dtype
    versions: tuple[tuple[Tensor, int], ...]
    tally: Tally

    @classmethod
    def begin(cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, chunk_nbytes: int, tally: Tally) -> HeadCall:
        """Returns the call that computes the logits of ``hidden`` now, [..., d]."""
        device = hidden.device.type
        product = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        read = (x for x in (hidden, weight, bias) if x is not None and not x.is_inference())
        return cls(weight, bias, chunk_nbytes, product, tuple((x, x._version) for x in read), tally)

    def check(self) -> None:
        """Checks that the product still has the numbers that it had when the head was called.

        Raises:
            RewriteError: the weights or the head's input were changed since.
        """
        if any(x._version != version for x, version in self.versions):
            raise RewriteError(
                "logits were asked for that the rewrite chunked_loss had put off, but the head's weights or its input "
                "were changed in place since the head was called. Read the logits before the optimizer's step, or undo "
                "the rewrite for this program."
            )


class Deferred(Tensor):
    """Logits that are not computed yet (Note: [deferred logits]).

    Attributes:
        hidden: the head's input, [..., d].
        call: the call of the head.
        steps: what is done to the logits.
        with_grad: whether the program had gradients enabled.
        origin: computes them from the logits that they follow from; None for the result of the head.
        logits: the logits, if a function has needed them, [..., classes].
    """

    hidden: Tensor
    call: HeadCall
    steps: tuple[LogitStep, ...]
    with_grad: bool
    origin: Callable[[str], Tensor] | None
    logits: Tensor | None

    def __new__(cls, hidden: Tensor, call: HeadCall, steps: tuple[LogitStep, ...] = ()) -> Deferred:
        """Returns the logits of ``hidden``, [..., classes], which are not computed yet."""
        dtype = call.product
        for step in steps:
            dtype = step.dtype(dtype)
        deferred: Deferred = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, (*hidden.shape[:-1], call.weight.shape[0]), dtype=dtype, device=hidden.device
        )
        deferred.hidden, deferred.call, deferred.steps = hidden, call, steps
        deferred.with_grad, deferred.origin, deferred.logits = torch.is_grad_enabled(), None, None
        return deferred

    def compute(self, name: str = "") -> Tensor:
        """Returns the logits, which are computed at the first call, as a plain program would have computed them.

        Args:
            name: the function that needs them.
        """
        if self.logits is None:
            # Somebody who looks at them without gradients must not be the reason why the loss has none.
            with torch.set_grad_enabled(self.with_grad):
                self.logits = self._product(name) if self.origin is None else self.origin(name)
        return self.logits

    def _product(self, name: str) -> Tensor:
        call = self.call
        call.check()
        call.tally.whole.setdefault(name)
        with torch.autocast(self.device.type, dtype=call.product, enabled=call.product is not call.weight.dtype):
            return F.linear(self.hidden, call.weight, call.bias)

    def of(self, hidden: Tensor, *more: LogitStep) -> Deferred:
        """Returns the deferred logits of other rows, or after more steps."""
        return Deferred(hidden, self.call, (*self.steps, *more))

    def _follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the result of a call without computing all logits, or None if that cannot be done."""
        follow = _FOLLOWED.get(func)
        followed = None if follow is None else follow(self, *args, **kwargs)
        if followed is None and not kwargs:
            step = step_for(func, args, self.call.weight.shape[0])
            followed = None if step is None else self.of(self.hidden, step)
        if isinstance(followed, Deferred) and followed is not self:
            followed.origin = lambda name: func(self.compute(name), *args, **kwargs)
        return followed

    def rows_in_chunk(self, itemsize: int) -> int:
        """Returns how many rows of logits may exist at a time, of so many bytes for each logit."""
        return max(1, self.call.chunk_nbytes // max(1, self.call.weight.shape[0] * itemsize))

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _FACTS:
            with no_torch_function_subclass():
                return func(*args, **kwargs)
        if args and isinstance(args[0], Deferred) and args[0].logits is None:
            followed = args[0]._follow(func, args[1:], kwargs)
            if followed is not None:
                return followed
        name = getattr(func, "__name__", str(func))
        return func(*_computed(args, name), **{key: _compute(arg, name) for key, arg in kwargs.items()})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # calls that reach C++ without a torch function
        name = str(func)
        return func(*_computed(args, name), **{key: _compute(arg, name) for key, arg in (kwargs or {}).items()})


def _compute(arg: Any, name: str) -> Any:
    """An argument with computed logits in place of deferred ones, one level of lists deep."""
    if isinstance(arg, Deferred):
        return arg.compute(name)
    if isinstance(arg, (list, tuple)) and any(isinstance(item, Deferred) for item in arg):
        return type(arg)(_computed(arg, name))
    return arg


def _computed(args: Any, name: str) -> Iterator[Any]:
    return (_compute(arg, name) for arg in args)


_FACTS = {
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.is_floating_point,
    Tensor.__len__,
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "ndim", "layout", "is_sparse", "is_cuda", "is_nested", "is_quantized")
    ),
}
"""Functions that read no number of the logits."""


def _view(logits: Deferred, *shape: Any) -> Deferred | None:
    sizes = list(shape[0] if len(shape) == 1 and isinstance(shape[0], (list, tuple)) else shape)
    if not sizes or not all(isinstance(size, int) for size in sizes):
        return None
    classes = logits.call.weight.shape[0]
    if sizes[-1] == -1:  # view infers this size, which must be the number of classes
        others = 1
        for size in sizes[:-1]:
            others *= size
        sizes[-1] = classes if others > 0 and others * classes == logits.numel() else 0
    if sizes[-1] != classes:
        return None
    return logits.of(logits.hidden.reshape(*sizes[:-1], logits.hidden.shape[-1]))


def _flatten(logits: Deferred, start_dim: int = 0, end_dim: int = -1) -> Deferred | None:
    last = end_dim % logits.dim()
    return logits.of(logits.hidden.flatten(start_dim, last)) if last < logits.dim() - 1 else None


def _index(logits: Deferred, index: Any) -> Deferred | None:
    """Indexes ``hidden`` in the same way, if the index takes all classes or the first ones."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(part, (slice, int)) or part is Ellipsis for part in parts):
        return None
    explicit = sum(part is not Ellipsis for part in parts)
    reaches_classes = Ellipsis in parts or explicit == logits.dim()
    if not reaches_classes or parts[-1] is Ellipsis or parts[-1] == slice(None):
        return logits.of(logits.hidden[index])
    first, call = parts[-1], logits.call
    is_first = isinstance(first, slice) and isinstance(first.stop, int) and (first.start, first.step) == (None, None)
    if not is_first or first.stop <= 0 or any(step.kind == "plus" for step in logits.steps):
        return None
    hidden = logits.hidden[(*parts[:-1], slice(None))]
    bias = None if call.bias is None else call.bias[: first.stop]
    return Deferred(hidden, replace(call, weight=call.weight[: first.stop], bias=bias), logits.steps)


def _add(logits: Deferred, other: object) -> Deferred | None:
    """Takes a parameter that is added to the result of a head without a bias for the head's bias."""
    call = logits.call
    if not isinstance(other, nn.Parameter) or other.dtype is not logits.dtype or call.bias is not None or logits.steps:
        return None
    if other.shape != call.weight.shape[:1]:
        return None
    versions = (*call.versions, (other, other._version))
    return Deferred(logits.hidden, replace(call, bias=other, versions=versions))


def _to(logits: Deferred, *args: Any, **kwargs: Any) -> Deferred | None:
    if kwargs or len(args) != 1:
        return None
    dtype, device = (args[0], None) if isinstance(args[0], torch.dtype) else (None, args[0])
    if dtype is not None:
        return logits.of(logits.hidden, LogitStep("as", dtype)) if dtype.is_floating_point else None
    return logits if isinstance(device, (str, torch.device)) and torch.device(device) == logits.device else None


def _cross_entropy(
    logits: Deferred,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    plain = weight is None and size_average is None and reduce is None and 0.0 <= label_smoothing <= 1.0
    if not plain or reduction not in ("mean", "sum") or logits.dim() != 2 or isinstance(target, Deferred):
        return None
    if target.dtype is not torch.int64 or target.shape != logits.shape[:1]:
        return None
    classes = logits.call.weight.shape[0]
    outside = (target != ignore_index) & ((target < 0) | (target >= classes))
    if target.device.type == "cpu" and bool(outside.any()):
        raise IndexError(f"Target {int(target[outside][0])} is out of bounds.")  # the message of cross_entropy
    call = logits.call
    call.check()
    rows = logits.rows_in_chunk(logits.dtype.itemsize)
    settings = EntropySettings(
        ignore_index, reduction == "mean", rows, call.product, logits.dtype, label_smoothing, logits.steps
    )
    loss: Tensor = ChunkedCrossEntropy.apply(logits.hidden, call.weight, call.bias, target, settings)
    call.tally.chunked += 1
    return loss


_FOLLOWED: dict[Any, Callable[..., Any]] = {
    Tensor.view: _view,
    Tensor.reshape: _view,
    Tensor.flatten: _flatten,
    Tensor.__getitem__: _index,
    Tensor.float: lambda logits: logits.of(logits.hidden, LogitStep("as", torch.float32)),
    Tensor.to: _to,
    Tensor.add: _add,
    Tensor.__add__: _add,
    Tensor.contiguous: lambda logits: logits,
    F.cross_entropy: _cross_entropy,
}
"""Functions that programs apply between a head and its loss, and how deferred logits follow them.

Each returns deferred logits or the loss, or None if it cannot follow the call.
"""
