"""A linear layer's backward: the weight's gradient, then the input is freed, then the input's gradient.

Autograd's formula asks for the two products the other way round: first [rows, out] times [out, in], which is the
input's gradient, and then [out, rows] times [rows, in], the weight's. So the layer's weight is unpacked as a claim as
well. When the first product is asked of that claim, the second one is computed before it, and kept until the formula
asks for it.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from backstash.redeem import accumulation, claims, table
from backstash.redeem.claims import Claim, Stashed, Unstashed, redeems
from backstash.saved import PLAIN, TensorSpec
from backstash.torch_internals import running_node


@dataclass(slots=True)
class _Layer:
    """The linear layer's node that runs, whose input was unpacked as a claim.

    Attributes:
        node: its sequence number.
        stashed: the input.
        grad: the gradient of the output, where the weight's has been computed already.
        weight_grad: the gradient of the weight, where it has been computed already.
    """

    node: int
    stashed: weakref.ref[Stashed]
    grad: Tensor | None = None
    weight_grad: Tensor | None = None


_running = threading.local()  # .layer

INPUT_SIZES = {"AddmmBackward0": "_saved_mat1_sym_sizes", "MmBackward0": "_saved_self_sym_sizes"}
"""A linear layer's nodes, and the name under which they have saved the sizes of the input."""


class _Input(Unstashed):
    """A layer's input, which is held as it is."""

    __slots__ = ("__weakref__",)


class _Weight(Unstashed):
    """A layer's weight, which is held as it is."""

    __slots__ = ()


def begin(stashed: Stashed, node: int) -> None:
    """Notes that the input of the linear layer's node that runs was unpacked as a claim."""
    _running.layer = _Layer(node, weakref.ref(stashed))


def claim_input(x: Tensor) -> Tensor:
    """A claim for a small input of the linear layer's node that runs, if its weight's gradient is large; else ``x``."""
    if type(x) not in PLAIN or x.dim() != 2 or x.is_complex() or torch.is_grad_enabled():
        return x
    if not accumulation.awaits_large_weight():
        return x
    node, stashed = running_node()._sequence_nr(), _Input(x)
    claim = claims.claim(stashed, TensorSpec.of(x), node)
    if claim is None:
        return x
    begin(stashed, node)
    return claim


def claim_weight(weight: Tensor) -> Tensor:
    """A claim for the other matrix of a linear layer's node that runs, or the matrix itself.

    Only where the input is large: of a smaller one nothing is gained by freeing it early (see table.LARGE).
    """
    if type(weight) not in PLAIN or weight.dim() != 2 or weight.is_complex() or torch.is_grad_enabled():
        return weight
    node = running_node()
    sizes = INPUT_SIZES.get(type(node).__name__)
    if sizes is None or math.prod(getattr(node, sizes)) * weight.element_size() < table.LARGE:
        return weight
    claim = claims.claim(_Weight(weight), TensorSpec.of(weight), node._sequence_nr())
    return weight if claim is None else claim


@redeems(torch.ops.aten.mm.default, position=None, call=None)
def mm(claim: Claim, aten: accumulation.Mm, args: tuple[Any, ...], kwargs: Mapping[str, Any], alone: bool) -> Tensor:
    """A product with the layer's input or with its weight."""
    layer: _Layer | None = getattr(_running, "layer", None)
    a, b = args
    if isinstance(claim.stashed, _Weight):
        if a is claim:
            a = claim.whole()
        else:
            b = claim.whole()
            _compute_weight_grad(aten, layer, a, b)
        return accumulation.deferring_mm(aten, a, b)
    _running.layer = None
    known = layer if layer is not None and layer.stashed() is claim.stashed and b is claim else None
    if known is not None and known.grad is not None and _is_transposed(a, known.grad):
        assert known.weight_grad is not None
        return known.weight_grad
    whole = claim.whole()
    product = accumulation.deferring_mm(aten, whole, b) if a is claim else accumulation.deferring_mm(aten, a, whole)
    del whole
    claim.stashed.release()
    return product


def _compute_weight_grad(aten: accumulation.Mm, layer: _Layer | None, grad: Tensor, weight: Tensor) -> None:
    """Computes the product that the formula will ask for next, and frees the layer's input."""
    if layer is None or layer.weight_grad is not None:
        return
    node, stashed = running_node(), layer.stashed()
    if node is None or node._sequence_nr() != layer.node or stashed is None:
        _running.layer = None
    elif weight.is_contiguous() and accumulation.will_run(node.next_functions[-1][0]):
        whole = stashed.whole()
        if whole.shape == (grad.shape[0], weight.shape[1]):
            layer.weight_grad, layer.grad = accumulation.deferring_mm(aten, grad.t(), whole), grad
            del whole
            stashed.release()


def _is_transposed(a: Tensor, grad: Tensor) -> bool:
    """Whether ``a`` is ``grad.t()``."""
    sizes = a.shape == grad.shape[::-1] and a.stride() == grad.stride()[::-1]
    return sizes and a.data_ptr() == grad.data_ptr() and a.dtype is grad.dtype
