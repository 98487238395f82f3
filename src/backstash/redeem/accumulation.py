"""A large weight's gradient is added to ``.grad`` where it belongs, some rows at a time.

Where a weight has a ``.grad`` already - after ``zero_grad(set_to_none=False)``, or in the second of several backward
passes that add up - autograd computes a new gradient and adds it then. Of VGG16's first fully connected layer the new
gradient takes 411 MB: the peak of a step whose activations have long been stored smaller. Here the product of matrices
that gives the gradient is put off until it is added, and then computed and added in slices of its rows.

Note: [deferred gradients]
    The product returns a tensor that has yet to be computed. It goes from the linear layer's node through a
    transposition to the node that accumulates, which adds it to ``.grad`` in place: that is done in slices. Anything
    else that is done with the tensor computes it first. If the weight was used twice, the engine adds both gradients
    before it accumulates. The product is put off only on that path, and not under ``autograd.grad``.

    A hook of the program would be given that tensor. So nothing is put off where one is on the weight, on one of the
    three nodes, or on a bias, whose hooks run in between and could add one. All nodes are asked when the product is to
    be computed, so hooks may have come after the forward pass.

    Whether every element of a slice has the bits of the whole product depends on the library and the shapes, so the
    bits are compared once for each shape before a product is put off (:mod:`backstash.proofs`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from backstash.ops.bits import bits_of
from backstash.proofs import proofs
from backstash.saved import PLAIN
from backstash.torch_internals import (
    has_hooks,
    hide_from_dynamo,
    no_torch_function,
    running_node,
    tree_map_only,
    will_run_node,
)

if TYPE_CHECKING:
    from torch.autograd.graph import Node

LARGE = 16 << 20
"""Bytes of a gradient from which its product is put off; a smaller one is no peak."""

CHUNK = 8 << 20
"""Bytes of a slice."""

ROWS = 64
"""A slice has a multiple of this many rows."""

WIDEST = 16
"""Bytes of an element of the widest type, complex128."""

LINEAR = ("AddmmBackward0", "MmBackward0")
"""Nodes of linear layers."""

Mm = Callable[[Tensor, Tensor], Tensor]
"""``aten::mm``."""

_add_ = torch.ops.aten.add_.Tensor
_detach = torch.ops.aten.detach.default
_transpose = torch.ops.aten.t.default


class _Product:
    """A product of matrices, [rows, k] times [k, columns], that is going to be added to a weight's gradient."""

    def __init__(self, aten: Mm, a: Tensor, b: Tensor, weight: Tensor) -> None:
        self.aten, self.a, self.b, self.weight = aten, a, b, weight

    @property
    def step(self) -> int:
        """Rows of a slice: whole blocks of the library's kernels, or the bits would differ more often."""
        return max(ROWS, CHUNK // (self.b.shape[1] * self.a.element_size()) // ROWS * ROWS)

    def whole(self) -> Tensor:
        """The product, [rows, columns]."""
        return self.aten(self.a, self.b)

    def rows(self, begin: int) -> Tensor:
        """The slice of the product that begins with that row."""
        return self.aten(self.a[begin : begin + self.step], self.b)

    def add_to(self, out: Tensor) -> None:
        """Adds the product to ``out``, [rows, columns], slice by slice."""
        for begin in range(0, out.shape[0], self.step):
            out[begin : begin + self.step] += self.rows(begin)

    def is_proven(self) -> bool:
        """Whether slices have the bits of the whole."""
        a, b = self.a, self.b
        return proofs.ask("mm by rows", (a.shape, a.stride(), b.shape, b.stride(), a.dtype, self.step), self._prove)

    def _prove(self) -> bool:
        whole = self.whole()
        return all(
            torch.equal(bits_of(whole[begin : begin + self.step]), bits_of(self.rows(begin)))
            for begin in range(0, whole.shape[0], self.step)
        )


class _Deferred(Tensor):
    """A product that has yet to be computed, or its transpose (Note: [deferred gradients])."""

    product: _Product
    transposed: bool
    dense: Tensor | None
    __class__ = property(lambda self: Tensor)  # type: ignore[assignment]  # for whoever sees it in spite of has_hooks

    @staticmethod
    def __new__(cls, product: _Product, transposed: bool) -> _Deferred:
        rows, columns = product.a.shape[0], product.b.shape[1]
        deferred: _Deferred = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            (columns, rows) if transposed else (rows, columns),
            strides=(1, columns) if transposed else (columns, 1),
            dtype=product.a.dtype,
            device=product.a.device,
        )
        deferred.product, deferred.transposed, deferred.dense = product, transposed, None
        return deferred

    def compute(self) -> Tensor:
        """The numbers, computed on the first call."""
        if self.dense is None:
            whole = self.product.whole()
            self.dense = whole.t() if self.transposed else whole
        return self.dense

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Whoever looks at it meets the numbers in an ordinary tensor."""
        with no_torch_function():
            args, kwargs = tree_map_only(_Deferred, _Deferred.compute, (args, kwargs or {}))
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0]
        if func is _transpose and first.dense is None:
            return _Deferred(first.product, not first.transposed)
        if func is _detach and first.dense is None:
            return _Deferred(first.product, first.transposed)
        if func is _add_ and not kwargs:
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
    """An op's argument with the numbers in place of every deferred product."""
    if isinstance(arg, _Deferred):
        return arg.compute()
    if isinstance(arg, (list, tuple)) and any(isinstance(item, _Deferred) for item in arg):
        return type(arg)(_computed(item) for item in arg)
    return arg


def deferring_mm(aten: Mm, a: Tensor, b: Tensor) -> Tensor:
    """``aten::mm``, put off where it is the gradient of a large weight and is only going to be added."""
    product, held = a.shape[0] * b.shape[1], a.numel() + b.numel()
    # A gradient that waits for that of another use of the weight holds both factors, so these have to be small.
    if product * a.element_size() >= LARGE and 4 * held <= product and not torch.is_grad_enabled():
        weight = _destination(a, b)
        if weight is not None:
            later = _Product(aten, a, b, weight)
            if later.is_proven():
                return _Deferred(later, transposed=False)
    return aten(a, b)


def _destination(a: Tensor, b: Tensor) -> Tensor | None:
    """The weight to whose ``.grad`` the product of ``a`` and ``b`` is going to be added, and used for nothing else."""
    node = running_node()
    if node is None or type(node).__name__ not in LINEAR or a.dtype not in (torch.float32, torch.float64):
        return None
    transposition = node.next_functions[-1][0]
    if type(transposition).__name__ != "TBackward0":
        return None
    leaf = transposition.next_functions[0][0]
    weight: Tensor | None = getattr(leaf, "variable", None)
    if weight is None or type(weight) not in PLAIN or weight.shape != (a.shape[0], b.shape[1]):
        return None
    grad = weight.grad
    if grad is None or type(grad) not in PLAIN or grad.dtype is not a.dtype or not grad.is_contiguous():
        return None
    if torch.is_anomaly_enabled() or weight.device.type != "cpu":
        return None
    is_input_grad = b.untyped_storage()._cdata == weight.untyped_storage()._cdata
    if is_input_grad or grad.requires_grad or not will_run(leaf):
        return None
    biases = [each for each, _ in node.next_functions if hasattr(each, "variable")]
    if any(bias.variable._post_accumulate_grad_hooks for bias in biases):
        return None
    return None if any(map(has_hooks, (node, transposition, leaf, *biases))) else weight


def awaits_large_weight() -> bool:
    """Whether the running node is a linear layer's that computes the gradient of a large weight with a ``.grad``."""
    node = running_node()
    if node is None or type(node).__name__ not in LINEAR or math.prod(node._saved_mat2_sym_sizes) < LARGE // WIDEST:
        return False  # in a fraction of the time that the rest takes
    following = node.next_functions[-1][0]
    leaf = following.next_functions[0][0] if type(following).__name__ == "TBackward0" else None
    weight = getattr(leaf, "variable", None)
    return weight is not None and weight.nbytes >= LARGE and weight.grad is not None


def will_run(node: Node) -> bool:
    """Whether the engine is certain to run that node: not, as far as it tells, under ``autograd.grad``."""
    try:
        return bool(will_run_node(node))
    except RuntimeError:  # the engine says so where autograd.grad asked for the leaf
        return False


for _function in (vars(_Deferred)["__torch_function__"], vars(_Deferred)["__torch_dispatch__"]):
    hide_from_dynamo(_function.__func__, and_all_below=True)
