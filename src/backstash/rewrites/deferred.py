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
from backstash.rewrites.cross_entropy import (
    ChunkedCrossEntropy,
    EntropySettings,
    check_classes,
    loss_dtype,
    product_dtype,
)
from backstash.rewrites.logit_steps import LogitFormula, LogitStep, step_for
from backstash.rewrites.row_numbers import RowNumbers, RowSettings
from backstash.torch_internals import break_graphs_at, no_torch_function_subclass


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
        weight: the head's weight as it was then (see as_now), [classes, d].
        bias: the head's bias as it was then, [classes], or None.
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
    def defer(cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, chunk_nbytes: int, tally: Tally) -> Deferred:
        """Returns the logits of ``hidden``, [..., d], as they are now: all three may be something else at the loss."""
        read = (x for x in (hidden, weight, bias) if x is not None and not x.is_inference())
        versions = tuple((x, x._version) for x in read)
        product = product_dtype(hidden)
        hidden, weight, bias = as_now(hidden), as_now(weight), None if bias is None else as_now(bias)
        return Deferred(hidden, cls(weight, bias, chunk_nbytes, product, versions, tally))

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


def as_now(x: Tensor) -> Tensor:
    """Returns a view of ``x`` that keeps what a product would keep: the memory, and whether it asks for a gradient.

    A program may freeze or thaw a layer between its call and the loss, or give ``x.data`` other memory. In plain
    PyTorch the logits are computed by then, from the numbers and for the gradients that were there at the call.
    """
    return x.view_as(x)


class Deferred(Tensor):
    """Logits that are not computed yet (Note: [deferred logits]).

    Attributes:
        hidden: the head's input as it was at the call, [..., d].
        call: the call of the head.
        steps: what is done to the logits.
        with_grad: whether the program had gradients enabled.
        classes_second: whether the classes are the second dimension, and not the last one.
        origin: computes them from the logits that they follow from; None for the result of the head.
        parent: the logits that they follow from; None for the result of the head.
        logits: the logits, if a function has needed them, [..., classes].
        version: the version that ``logits`` had when they were computed.
    """

    hidden: Tensor
    call: HeadCall
    steps: tuple[LogitStep, ...]
    with_grad: bool
    classes_second: bool
    origin: Callable[[str], Tensor] | None
    parent: Deferred | None
    logits: Tensor | None
    version: int

    def __new__(
        cls, hidden: Tensor, call: HeadCall, steps: tuple[LogitStep, ...] = (), classes_second: bool = False
    ) -> Deferred:
        """Returns the logits of ``hidden``, [..., classes], which are not computed yet."""
        rows, classes = hidden.shape[:-1], call.weight.shape[0]
        deferred: Deferred = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            (rows[0], classes, *rows[1:]) if classes_second else (*rows, classes),
            dtype=LogitFormula(call.product, steps).dtype,
            device=hidden.device,
        )
        deferred.hidden, deferred.call, deferred.steps = hidden, call, steps
        deferred.with_grad, deferred.classes_second = torch.is_grad_enabled(), classes_second
        deferred.origin, deferred.parent, deferred.logits, deferred.version = None, None, None, 0
        return deferred

    @property
    def formula(self) -> LogitFormula:
        """How they are computed."""
        return LogitFormula(self.call.product, self.steps)

    def check(self) -> None:
        """Checks that the logits still have the numbers that they had when the program made them.

        Raises:
            RewriteError: the weights, the head's input, or logits that they follow from were changed since.
        """
        self.call.check()
        parent = self.parent
        while parent is not None:
            logits = parent.logits
            if logits is not None and not logits.is_inference() and logits._version != parent.version:
                raise RewriteError(
                    "logits were asked for that the rewrite chunked_loss had put off, but those that they were made "
                    "from were changed in place since. Change logits before others are made from them, or undo the "
                    "rewrite for this program."
                )
            parent = parent.parent

    def compute(self, name: str = "") -> Tensor:
        """Returns the logits, which are computed at the first call, as a plain program would have computed them."""
        if self.logits is None:
            self.check()
            # Somebody who looks at them without gradients must not be the reason why the loss has none.
            with torch.set_grad_enabled(self.with_grad):
                self.logits = self._product(name) if self.origin is None else self.origin(name)
            if self.is_output:
                with torch.enable_grad(), no_torch_function_subclass():
                    self.logits = self.clone()
            self.version = 0 if self.logits.is_inference() else self.logits._version
        return self.logits

    @property
    def is_output(self) -> bool:
        """Whether a function of autograd has returned them, such as a reentrant checkpoint, whose gradient it takes."""
        with no_torch_function_subclass():
            return bool(self.requires_grad)

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The head's input, weight and bias, without gradients if the program had none enabled."""
        hidden, weight, bias = self.hidden, self.call.weight, self.call.bias
        if self.with_grad:
            return hidden, weight, bias
        return hidden.detach(), weight.detach(), None if bias is None else bias.detach()

    def _product(self, name: str) -> Tensor:
        call = self.call
        call.tally.whole.setdefault(name)
        with torch.autocast(self.device.type, dtype=call.product, enabled=call.product is not call.weight.dtype):
            return F.linear(self.hidden, call.weight, call.bias)

    def of(self, hidden: Tensor, *more: LogitStep) -> Deferred:
        """Returns the deferred logits of other rows, or after more steps."""
        return Deferred(hidden, self.call, (*self.steps, *more), self.classes_second)

    def _follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the result of a call without computing all logits, or None if that cannot be done."""
        if self.is_output:
            return None
        follow = None if self.classes_second and func not in _FOLLOWED_ANYWHERE else _FOLLOWED.get(func)
        followed = None if follow is None else follow(self, *args, **kwargs)
        if followed is None and not kwargs:
            step = step_for(func, args, self.call.weight.shape[0])
            if step is not None and not (self.classes_second and step.kind == "plus"):
                followed = self.of(self.hidden, step)
        if isinstance(followed, Deferred) and followed is not self:
            followed.origin, followed.parent = lambda name: func(self.compute(name), *args, **kwargs), self
            followed.with_grad = followed.with_grad and self.with_grad
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


break_graphs_at(vars(Deferred)["__torch_function__"].__func__, "logits in chunks are computed between compiled graphs")


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


def _view(logits: Deferred, *shape: Any, **named: Any) -> Deferred | None:
    sizes = list(shape[0] if len(shape) == 1 and isinstance(shape[0], (list, tuple)) else shape)
    if named or not sizes or not all(isinstance(size, int) for size in sizes):
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


def _requires_grad(logits: Deferred) -> bool:
    return logits.with_grad and any(x is not None and x.requires_grad for x in logits.inputs)


def _float(logits: Deferred, *, memory_format: object = None) -> Deferred:
    return logits.of(logits.hidden, LogitStep("as", torch.float32))


def _contiguous(logits: Deferred, *, memory_format: object = None) -> Deferred:
    return logits


def _clone(logits: Deferred, *, memory_format: object = None) -> Deferred:
    return logits.of(logits.hidden)


def _detach(logits: Deferred) -> Deferred:
    with torch.no_grad():
        return logits.of(logits.hidden)


def _transpose(logits: Deferred, dim0: int, dim1: int) -> Deferred | None:
    dims = list(range(logits.dim()))
    dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
    return _permute(logits, *dims)


def _permute(logits: Deferred, *dims: Any, **named: Any) -> Deferred | None:
    """Puts the classes second, where ``cross_entropy`` has them for logits of more dimensions."""
    order = list(dims[0] if len(dims) == 1 and isinstance(dims[0], (list, tuple)) else dims)
    last = logits.dim() - 1
    if named or last < 2 or [dim % logits.dim() for dim in order] != [0, last, *range(1, last)]:
        return None
    return Deferred(logits.hidden, logits.call, logits.steps, classes_second=True)


def _index(logits: Deferred, index: Any) -> Deferred | None:
    """Indexes ``hidden`` in the same way, if the index takes all classes or the first ones."""
    if type(index) is Tensor and index.dtype in (torch.bool, torch.int64):
        taken = index.dim() if index.dtype is torch.bool else 1
        return logits.of(logits.hidden[index]) if index.dim() > 0 and taken < logits.dim() else None
    parts = list(index) if isinstance(index, tuple) else [index]
    explicit = sum(part is not Ellipsis for part in parts)
    # A bool is an int in Python, but as an index it makes a dimension.
    if not all(part is Ellipsis or (isinstance(part, (slice, int)) and not isinstance(part, bool)) for part in parts):
        return None
    if explicit > logits.dim() or len(parts) > explicit + 1:
        return None
    # One part for each dimension: an Ellipsis stands for as many as are left, which may be none.
    split = parts.index(Ellipsis) if explicit < len(parts) else len(parts)
    rows = [*parts[:split], *[slice(None)] * (logits.dim() - explicit), *parts[split + 1 :]]
    first, call = rows.pop(), logits.call
    hidden = logits.hidden[(*rows, slice(None))]
    if first == slice(None):
        return logits.of(hidden)
    is_first = isinstance(first, slice) and isinstance(first.stop, int) and (first.start, first.step) == (None, None)
    if not is_first or first.stop <= 0 or any(step.kind == "plus" for step in logits.steps):
        return None
    bias = None if call.bias is None else call.bias[: first.stop]
    return Deferred(hidden, replace(call, weight=call.weight[: first.stop], bias=bias), logits.steps)


def _add(logits: Deferred, other: object, **named: Any) -> Deferred | None:
    """Takes a parameter that is added to the result of a head without a bias for the head's bias."""
    call = logits.call
    if not isinstance(other, nn.Parameter) or other.dtype is not logits.dtype or call.bias is not None or logits.steps:
        return None
    if named or other.shape != call.weight.shape[:1]:
        return None
    versions = (*call.versions, (other, other._version))
    return Deferred(logits.hidden, replace(call, bias=as_now(other), versions=versions))


def _to(logits: Deferred, *args: Any, dtype: Any = None, device: Any = None, **kwargs: Any) -> Deferred | None:
    for arg in args:
        if isinstance(arg, torch.dtype):
            dtype = arg
        elif isinstance(arg, (str, torch.device)):
            device = arg
        else:
            return None
    if set(kwargs) - {"non_blocking"} or (dtype is not None and not dtype.is_floating_point):
        return None
    if device is not None and torch.device(device) != logits.device:
        return None
    return logits if dtype is None else logits.of(logits.hidden, LogitStep("as", dtype))


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
    plain = size_average is None and reduce is None and 0.0 <= label_smoothing <= 1.0
    if not plain or reduction not in ("mean", "sum", "none") or isinstance(target, Deferred):
        return None
    (hidden, head, bias), call = logits.inputs, logits.call
    rows, classes = hidden.shape[:-1], head.shape[0]
    if not (logits.classes_second or logits.dim() == 2) or target.dtype is not torch.int64 or target.shape != rows:
        return None
    result = loss_dtype(logits)
    if weight is not None:
        casts = result is not logits.dtype
        is_plain = isinstance(weight, Tensor) and not weight.requires_grad and weight.shape == (classes,)
        if not is_plain or (weight.dtype is not logits.dtype and not (casts and weight.is_floating_point())):
            return None
    check_classes(target, classes, ignore_index)
    logits.check()
    chosen = target.reshape(-1)
    if reduction == "none":
        loss = _entropy_of_rows(logits, chosen, weight, ignore_index, label_smoothing).to(result).view(rows)
    else:
        settings = EntropySettings(
            ignore_index,
            reduction == "mean",
            logits.rows_in_chunk(logits.dtype.itemsize),
            logits.formula,
            result,
            label_smoothing,
            torch.is_grad_enabled(),
        )
        flat = hidden.reshape(-1, hidden.shape[-1])
        loss = ChunkedCrossEntropy.apply(flat, head, bias, chosen, weight, settings)
    call.tally.chunked += 1
    return loss


def _entropy_of_rows(
    logits: Deferred, target: Tensor, weight: Tensor | None, ignore_index: int, smoothing: float
) -> Tensor:
    """Returns the cross entropy of each row, [n], whose gradients are known in backward only."""
    (hidden, head, bias), formula = logits.inputs, logits.formula
    precise = formula.precise
    spread = None
    if smoothing:
        spread = torch.full(head.shape[:1], smoothing / head.shape[0], dtype=precise, device=hidden.device)
        spread = spread if weight is None else spread * weight.to(precise)
    settings = RowSettings(logits.rows_in_chunk(precise.itemsize), 1.0, ignore_index, formula, with_entropy=False)
    others = (None, None, None)
    found = RowNumbers.apply(hidden.reshape(-1, hidden.shape[-1]), head, bias, target, spread, *others, settings)
    kept = target != ignore_index
    counts = kept.to(precise) if weight is None else weight.to(precise)[torch.where(kept, target, 0)]
    loss: Tensor = -(1.0 - smoothing) * counts * found[0]
    if spread is not None:
        loss = loss - torch.where(kept, found[-1], 0.0)
    return loss


_FOLLOWED: dict[Any, Callable[..., Any]] = {
    Tensor.view: _view,
    Tensor.reshape: _view,
    Tensor.flatten: _flatten,
    Tensor.__getitem__: _index,
    Tensor.float: _float,
    Tensor.to: _to,
    Tensor.add: _add,
    Tensor.__add__: _add,
    Tensor.contiguous: _contiguous,
    Tensor.requires_grad.__get__: _requires_grad,  # type: ignore[attr-defined]
    Tensor.clone: _clone,
    torch.clone: _clone,
    Tensor.detach: _detach,
    Tensor.transpose: _transpose,
    torch.transpose: _transpose,
    Tensor.permute: _permute,
    torch.permute: _permute,
    F.cross_entropy: _cross_entropy,
}
"""Functions that programs apply between a head and its loss, and how deferred logits follow them.

Each returns deferred logits or the loss, or None if it cannot follow the call.
"""

_FOLLOWED_ANYWHERE = {
    Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
    *(Tensor.float, Tensor.to, Tensor.contiguous, Tensor.clone, torch.clone, Tensor.detach, F.cross_entropy),
}
"""Those of them that deferred logits follow also where the classes are their second dimension."""
