"""A large weight's gradient is added to ``.grad`` where it belongs, some rows at a time.

Where ``.grad`` is there already - ``zero_grad(set_to_none=False)``, or the second of several backward passes that add
up - autograd makes the new gradient first and adds it then. Of VGG16's first fully connected layer that is 411 MB, the
peak of a step whose activations have long been stored smaller. Here the product of matrices that makes it is put off
until it is added, and then made and added in slices of its rows.

Note: [deferred gradients]
    What the product returns is a tensor that has yet to be computed. It goes from the linear layer's node through a
    transposition to the node that accumulates, which adds it to ``.grad`` in place: that is done in slices. Whatever
    else is done with it computes it first; if the weight was used twice, the engine adds both gradients before it
    accumulates. It is made only on that path, and not under ``autograd.grad``.

    Every element of the product is the same bits in a slice of rows as in the whole; that depends on the library and
    the shapes, so it is compared once for each shape before it is relied on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from backstash.ops.reference import bits_of
from backstash.saved import PLAIN
from backstash.torch_internals import no_torch_function, running_node, tree_map_only, will_run_node

LARGE = 16 << 20
"""Bytes of a gradient from which it is put off: below, it is no peak."""

CHUNK = 8 << 20
"""Bytes of a slice."""

ROWS = 64
"""Of a slice, a multiple."""

LINEAR = ("AddmmBackward0", "MmBackward0")
"""Nodes of linear layers."""

_proven: dict[tuple[Any, ...], bool] = {}


class _Product:
    """A product of matrices, [rows, k] times [k, columns], that is going to be added to a weight's gradient."""

    def __init__(self, aten: Callable[..., Any], a: Tensor, b: Tensor, weight: Tensor) -> None:
        self.aten, self.a, self.b, self.weight = aten, a, b, weight

    @property
    def step(self) -> int:
        """Rows of a slice: whole blocks of the library's kernels, or the bits would differ more often."""
        return max(ROWS, CHUNK // (self.b.shape[1] * self.a.element_size()) // ROWS * ROWS)

    def whole(self) -> Tensor:
        """All of it."""
        made: Tensor = self.aten(self.a, self.b)
        return made

    def rows(self, begin: int) -> Tensor:
        """A slice of it."""
        made: Tensor = self.aten(self.a[begin : begin + self.step], self.b)
        return made

    def add_to(self, out: Tensor) -> None:
        """Add it, slice by slice."""
        for begin in range(0, out.shape[0], self.step):
            out[begin : begin + self.step] += self.rows(begin)

    def repeats_itself(self) -> bool:
        """Whether slices have the bits of the whole; computed once for each shape and layout."""
        facts = (self.a.shape, self.a.stride(), self.b.shape, self.b.stride(), self.a.dtype, torch.get_num_threads())
        if facts not in _proven:
            whole = self.whole()
            _proven[facts] = all(
                torch.equal(bits_of(whole[begin : begin + self.step]), bits_of(self.rows(begin)))
                for begin in range(0, whole.shape[0], self.step)
            )
        return _proven[facts]


class _Deferred(Tensor):
    """A product that has yet to be computed, or its transpose (Note: [deferred gradients])."""

    product: _Product
    transposed: bool
    dense: Tensor | None
    __class__ = property(lambda self: Tensor)  # type: ignore[assignment]  # what a hook of the program is told

    @staticmethod
    def __new__(cls, product: _Product, transposed: bool) -> _Deferred:
        rows, columns = product.a.shape[0], product.b.shape[1]
        made: _Deferred = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            (columns, rows) if transposed else (rows, columns),
            strides=(1, columns) if transposed else (columns, 1),
            dtype=product.a.dtype,
            device=product.a.device,
        )
        made.product, made.transposed, made.dense = product, transposed, None
        return made

    def compute(self) -> Tensor:
        """The numbers."""
        if self.dense is None:
            whole = self.product.whole()
            self.dense = whole.t() if self.transposed else whole
        return self.dense

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """A hook of the program looks at it: it meets the numbers, in an ordinary tensor."""
        with no_torch_function():
            args, kwargs = tree_map_only(_Deferred, _Deferred.compute, (args, kwargs or {}))
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0]
        if func is torch.ops.aten.t.default and first.dense is None:
            return _Deferred(first.product, not first.transposed)
        if func is torch.ops.aten.detach.default and first.dense is None:
            return _Deferred(first.product, first.transposed)
        if func is torch.ops.aten.add_.Tensor and not kwargs:
            other = args[1]
            if not isinstance(first, _Deferred) and other.dense is None and not other.transposed:
                if first is other.product.weight.grad:
                    other.product.add_to(first)
                    return first
            elif isinstance(first, _Deferred):  # the engine adds up two gradients of one weight
                first.compute().add_(_computed(other))
                return first
        return func(*(_computed(arg) for arg in args), **{key: _computed(arg) for key, arg in kwargs.items()})


def _computed(arg: Any) -> Any:
    if isinstance(arg, _Deferred):
        return arg.compute()
    if isinstance(arg, (list, tuple)) and any(isinstance(one, _Deferred) for one in arg):
        return type(arg)(_computed(one) for one in arg)
    return arg


def mm(aten: Callable[..., Any], a: Tensor, b: Tensor) -> Tensor:
    """``aten::mm``; puts off what makes a large weight's gradient that is only going to be added."""
    product, held = a.shape[0] * b.shape[1], a.numel() + b.numel()
    # Who waits for the gradient of another use of the weight holds what the product is made of.
    if product * a.element_size() >= LARGE and 4 * held <= product and not torch.is_grad_enabled():
        weight = _destination(a, b)
        if weight is not None:
            later = _Product(aten, a, b, weight)
            if later.repeats_itself():
                return _Deferred(later, transposed=False)
    made: Tensor = aten(a, b)
    return made


def _destination(a: Tensor, b: Tensor) -> Tensor | None:
    """The weight to whose ``.grad`` the product of ``a`` and ``b`` is going to be added, and nothing else."""
    node = running_node()
    if node is None or type(node).__name__ not in LINEAR or a.dtype not in (torch.float32, torch.float64):
        return None
    transposition: Any = node.next_functions[-1][0]
    if type(transposition).__name__ != "TBackward0":
        return None
    leaf = transposition.next_functions[0][0]
    weight = getattr(leaf, "variable", None)
    if weight is None or type(weight) not in PLAIN or weight.shape != (a.shape[0], b.shape[1]):
        return None
    grad = weight.grad
    if grad is None or type(grad) not in PLAIN or grad.dtype is not a.dtype or not grad.is_contiguous():
        return None
    if weight._backward_hooks or torch.is_anomaly_enabled() or weight.device.type != "cpu":
        return None
    of_input = b.untyped_storage()._cdata == weight.untyped_storage()._cdata
    if of_input or grad.requires_grad or not will_run(leaf):
        return None
    return weight  # type: ignore[no-any-return]


def awaits_large_weight() -> bool:
    """Whether the node that runs is a linear layer's that makes the gradient of a large weight with a ``.grad``."""
    node = running_node()
    if node is None or type(node).__name__ not in LINEAR:
        return False
    following = node.next_functions[-1][0]
    leaf = following.next_functions[0][0] if type(following).__name__ == "TBackward0" else None
    weight = getattr(leaf, "variable", None)
    return weight is not None and weight.nbytes >= LARGE and weight.grad is not None


def will_run(node: Any) -> bool:
    """Whether the engine is certain to run that node: not, as far as it tells, under ``autograd.grad``."""
    try:
        return bool(will_run_node(node))
    except RuntimeError:  # it says that autograd.grad asked for the leaf
        return False
