"""Backward kernels that take what they read straight from the stash, and give memory back as soon as they can.

A saved tensor is unpacked before its node's formula begins, and what was unpacked lives until the formula is over. So
a convolution's decoded input would lie beside both of its gradients, and a relu's mask would be written out as floats
to be read once. Here the formulas' own ops are taken over: for a reader named in ``READERS`` the Session unpacks a
*claim*, a stand-in with a layout and no data, and the kernel that autograd's node calls with it - registered here on
the dispatcher, in front of ATen's - takes from the stash what it needs, when it needs it:

* a convolution computes the gradients of weight and bias first, lets go of its decoded input, and computes the input's
  gradient from the input's shape; a linear layer, whose formula asks for the input's gradient first, does alike;
* relu, threshold and hardtanh read the mask's bits, a max pooling its window codes: nothing is decoded;
* where the gradient is multiplied by one of a few factors, dropout's noise or what few-bit codes stand for, it is
  multiplied by the factor of each code: nothing is decoded either;
* pointwise formulas and norms (norms.py) write over the incoming gradient when nobody else holds it.

Every bit is what ATen's kernels make of the decoded tensors. The graph is autograd's own: names, hooks, checkpoint and
double backward are untouched, as nothing is replaced before backward runs.

Note: [claims]
    A claim that something else reads would be read as zeros. So it is handed out only while the very node that saved
    the tensor runs (its sequence number tells), without grad mode (a graph of second order would save the claim) and
    without dispatch modes or functorch, and only for nodes that in this version of torch pass it on to the kernel and
    to nothing else, which a tiny step of each proves before the first one is handed out.

Note: [factors]
    The gradient of a product is a product, and ``aten::mul`` is everybody's: taken over, it would stand in the way of
    every step, and a kernel in Python is not told which of its arguments were numbers. So the claim for a factor is a
    tensor of a class of its own, without data, that is asked when it is multiplied. Whatever else is asked of it runs
    on the decoded tensor.

Note: [exclusive gradients]
    A gradient may be overwritten when only the node that received it holds it: not the sum that sent it both ways, a
    hook's list, ``autograd.grad`` for a tensor in between, or the caller of backward. All of them hold the tensor, its
    Python object or its storage, so three counts tell. A gradient that a reshape made is a view that holds its base, of
    which two more tell; a formula that calls ``grad.contiguous()`` first holds it once more. What the counts are when
    nobody else holds it is measured, on tiny steps, not known.
"""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils._pytree import tree_map_only

from backstash import accumulation, norms
from backstash.codecs.base import Encoded, flat, is_dense
from backstash.codecs.bitmask import Binary, Bitmask
from backstash.codecs.fewbit import FewBit
from backstash.codecs.narrow import Narrow
from backstash.codecs.shape import stand_in
from backstash.codecs.sliced import Sliced
from backstash.ops import cpu
from backstash.saved import TensorSpec

KERNELS: dict[str, str] = {
    "convolution_backward": "Convolution",
    "threshold_backward": "Relu Threshold",
    "hardtanh_backward": "Hardtanh",
    "max_pool2d_with_indices_backward": "MaxPool2DWithIndices",
    "leaky_relu_backward": "LeakyRelu",
    "gelu_backward": "Gelu",
    "silu_backward": "Silu",
    "elu_backward": "Elu",
    "tanh_backward": "Tanh",
    "sigmoid_backward": "Sigmoid",
    "softplus_backward": "Softplus",
    "hardsigmoid_backward": "Hardsigmoid",
    "_softmax_backward_data": "Softmax",
    "_log_softmax_backward_data": "LogSoftmax",
    "native_batch_norm_backward": "NativeBatchNorm",
    "native_layer_norm_backward": "NativeLayerNorm",
    "native_group_norm_backward": "NativeGroupNorm",
}
"""The ops that are taken over, and the autograd nodes on whose behalf they do anything of their own."""

READERS: dict[tuple[str, str], str] = {
    ("Convolution", "input"): "convolution_backward",
    ("Addmm", "mat1"): "mm",
    ("Mm", "self"): "mm",
    ("Relu", "result"): "threshold_backward",
    ("Threshold", "self"): "threshold_backward",
    ("Hardtanh", "self"): "hardtanh_backward",
    ("MaxPool2DWithIndices", "result1"): "max_pool2d_with_indices_backward",
    ("LeakyRelu", "self"): "leaky_relu_backward",
    ("LeakyRelu", "result"): "leaky_relu_backward",
    ("Gelu", "self"): "gelu_backward",
    ("Silu", "self"): "silu_backward",
    ("Elu", "self"): "elu_backward",
    ("Elu", "result"): "elu_backward",
    ("Tanh", "result"): "tanh_backward",
    ("Sigmoid", "result"): "sigmoid_backward",
    ("Softplus", "self"): "softplus_backward",
    ("Mul", "self"): "mul",
    ("Mul", "other"): "mul",
}
"""Saved tensors, by node and role, that are unpacked as claims, and the op that redeems them."""

_NORMS = {f"native_{norm}_backward": norm for norm in ("batch_norm", "layer_norm", "group_norm")}
"""Ops that functions of norms.py of these names compute."""

_NOT_POINTWISE = ("convolution_backward", "max_pool2d_with_indices_backward", *_NORMS)
_IN_PLACE = {
    op: "out" if op.endswith("softmax_backward_data") else "grad_input" for op in KERNELS if op not in _NOT_POINTWISE
}
"""Formulas whose overload of this name may write over the gradient that they read."""

_LAST = ("elu_backward",)
"""Formulas that take what was saved as their last argument, and not behind the gradient."""

_PRODUCT = "MulBackward0"

Aten = Callable[..., Any]
"""ATen's own kernel for the op, for the dispatch keys of the call."""

_NONE: Mapping[str, Any] = MappingProxyType({})

_SELECTED = (torch.float32, torch.float64, torch.float16)
"""Where zeroing leaves a NaN in the gradient as it is: for bfloat16 ATen's vectors give it other bits."""

_SCALED = (torch.float32, torch.float64)
"""Where a product is one multiplication."""


class Stashed(Protocol):
    """A saved tensor as a kernel here sees it."""

    def whole(self) -> Tensor:
        """The tensor, decoded or made again, in its original layout."""

    def encoded(self) -> tuple[Any, Encoded] | None:
        """Codec and planes in which exactly this reader's need is stored; None where something else is stored."""

    def settle(self) -> None:
        """The reader has what it needed: let go of what was decoded for it."""

    def adopt(self, dead: Tensor) -> None:
        """Memory that nobody will read any more, to decode into from now on."""


@dataclass(frozen=True, slots=True)
class _Counts:
    """Who holds a tensor: Python references, tensor references, storage references; and who the base of a view."""

    python: int
    tensor: int
    storage: int
    base_python: int
    base_tensor: int


@dataclass(slots=True)
class _Linear:
    """A linear layer's node that runs, whose input was unpacked as a claim.

    Attributes:
        node: its sequence number.
        stashed: the input.
        grad: the gradient of the output, and
        made: that of the weight, where it has been made already.
    """

    node: int
    stashed: weakref.ref[Any]
    grad: Tensor | None = None
    made: Tensor | None = None


class _Probe:
    """What the tiny steps of :func:`_examine` see."""

    def __init__(self) -> None:
        self.counts: list[_Counts] = []
        self.redeemed = False


_lock = threading.RLock()
_library: torch.library.Library | None = None
_entered = 0
_waiting = 0
_claims: dict[int, tuple[StorageWeakRef, weakref.ref[Any]]] = {}
_exclusive: dict[str, frozenset[_Counts]] = {}
_works: frozenset[str] | None = None
_examining = threading.local()  # .probe, where the tiny steps run: other threads train meanwhile
_running = threading.local()  # .linear


# -- claims ----------------------------------------------------------------------------------------------------------


def can_claim(op: str, role: str, spec: TensorSpec) -> bool:
    """Whether that saved tensor of that node may be unpacked as a claim."""
    kernel = READERS.get((op, role))
    return (
        kernel is not None
        and _works is not None
        and kernel in _works
        and spec.device.type == "cpu"
        and not spec.dtype.is_complex  # the conjugate view of a claim would be redeemed as the claim
        and is_dense(spec.shape, spec.stride)
    )


def claim(stashed: Stashed, spec: TensorSpec, node: int) -> Tensor | None:
    """A stand-in for a tensor that the running node's kernel will redeem; None where nobody can promise that.

    Args:
        stashed: what it stands for; alive as long as its node runs.
        spec: its layout.
        node: the sequence number of the node that saved it.
    """
    if _library is None or torch.is_grad_enabled() or _get_current_dispatch_mode() is not None:
        return None
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return None
    running = torch._C._current_autograd_node()
    if running is None or running._sequence_nr() != node:
        return None
    is_linear = type(running).__name__ in accumulation.LINEAR
    _running.linear = _Linear(node, weakref.ref(stashed)) if is_linear else None
    if type(running).__name__ == _PRODUCT:
        known = stashed.encoded()
        return _Factor(stashed, spec, known[1]) if known is not None and isinstance(known[0], Binary) else None
    return _hand_out(stashed, spec)


def _hand_out(stashed: Stashed, spec: TensorSpec) -> Tensor:
    tensor = stand_in(spec)
    storage = tensor.untyped_storage()
    with _lock:
        if len(_claims) >= 64:
            for cdata in [cdata for cdata, (alive, _) in _claims.items() if alive.expired()]:
                del _claims[cdata]
        # The weak reference keeps the storage's address from being given to another.
        _claims[storage._cdata] = StorageWeakRef(storage), weakref.ref(stashed)
    return tensor


def _redeem(tensor: Tensor) -> Any:
    """What a kernel's argument stands for; None where it is a tensor like any other."""
    known = _claims.get(tensor.untyped_storage()._cdata) if _claims else None
    stashed = known[1]() if known is not None and not known[0].expired() else None
    probe = getattr(_examining, "probe", None)
    if stashed is not None and probe is not None:
        probe.redeemed = True
    return stashed


class _Factor(Tensor):
    """A claim for a stored factor of a product (Note: [factors]).

    Args:
        stashed: what it stands for.
        spec: its layout.
        encoded: its planes, where codecs.Binary stored it.
    """

    stashed: Stashed
    encoded: Encoded | None

    @staticmethod
    def __new__(cls, stashed: Stashed, spec: TensorSpec, encoded: Encoded | None) -> _Factor:
        made: _Factor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, spec.shape, strides=spec.stride, dtype=spec.dtype, device=spec.device
        )
        made.stashed, made.encoded = stashed, encoded
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        with torch._C.DisableTorchFunction():
            if func is torch.ops.aten.mul.Tensor and type(args[0]) is Tensor and args[0].layout is torch.strided:
                return _multiplied(args[1], args[0], _is_exclusive(args[0], "product"))
            args, kwargs = tree_map_only(_Factor, lambda factor: factor.stashed.whole(), (args, kwargs or {}))
            return func(*args, **kwargs)


def _multiplied(factor: _Factor, grad: Tensor, exclusive: bool) -> Tensor:
    """The gradient times the factor."""
    stashed, encoded = factor.stashed, factor.encoded
    probe = getattr(_examining, "probe", None)
    if probe is not None:
        probe.redeemed = True
    alike = grad.dtype is factor.dtype and _same_order(grad, factor)
    if encoded is not None and alike:
        made = _scaled(grad, encoded.planes["mask"], encoded.planes["pair"], exclusive)
        if made is not None:
            stashed.settle()
            return made
    whole = stashed.whole()
    return torch.mul(grad, whole, out=grad) if exclusive and alike else torch.mul(grad, whole)


# -- kernels ---------------------------------------------------------------------------------------------------------


_Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def _convolution_backward(
    aten: Aten, grad: Tensor, x: Tensor, weight: Tensor, bias: Any, *geometry_and_mask: Any
) -> _Gradients:
    """Weight gradient, then let go of the input, then the input's gradient."""
    *geometry, (of_input, of_weight, of_bias) = geometry_and_mask
    stashed = _redeem(x)
    if stashed is None:
        made: _Gradients = aten(grad, x, weight, bias, *geometry, [of_input, of_weight, of_bias])
        return made
    weight_grad = bias_grad = input_grad = None
    known = stashed.encoded() if of_weight else None
    if known is not None and isinstance(known[0], Sliced):
        return _sliced_convolution(aten, known[0], known[1], grad, x, weight, bias, geometry, of_input, of_bias)
    if of_weight:
        whole = stashed.whole()
        _, weight_grad, bias_grad = aten(grad, whole, weight, bias, *geometry, [False, True, of_bias])
        del whole
        stashed.settle()
    elif of_bias:
        _, _, bias_grad = aten(grad, x, weight, bias, *geometry, [False, False, True])
    if of_input:  # reads the input's sizes only
        input_grad, _, _ = aten(grad, x, weight, bias, *geometry, [True, False, False])
    if _is_exclusive(grad):
        stashed.adopt(grad)
    return input_grad, weight_grad, bias_grad


def _sliced_convolution(
    aten: Aten,
    codec: Sliced,
    encoded: Encoded,
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Any,
    geometry: list[Any],
    of_input: bool,
    of_bias: bool,
) -> _Gradients:
    """A slice of the batch at a time, the weight's and the bias's gradients added up.

    In channels_last the library makes no reordered copies, so the input's gradient is made at once.
    """
    weight_grad = bias_grad = input_grad = None
    at_once = grad.dim() == 4 and grad.is_contiguous(memory_format=torch.channels_last) and not grad.is_contiguous()
    for number, (begin, end) in enumerate(codec.ranges(encoded.spec)):
        part, some = grad[begin:end], codec.decode_part(encoded, number)
        _, more, more_bias = aten(part, some, weight, bias, *geometry, [False, True, of_bias])
        del some
        weight_grad = more if weight_grad is None or more is None else weight_grad.add_(more)
        bias_grad = more_bias if bias_grad is None or more_bias is None else bias_grad.add_(more_bias)
        if of_input and not at_once:
            made, _, _ = aten(part, x[begin:end], weight, bias, *geometry, [True, False, False])
            assert made is not None
            if input_grad is None:
                input_grad = torch.empty(x.shape, dtype=made.dtype, device=made.device)
            input_grad[begin:end] = made
    if of_input and at_once:
        input_grad, _, _ = aten(grad, x, weight, bias, *geometry, [True, False, False])
    return input_grad, weight_grad, bias_grad


def _mm(aten: Aten, a: Tensor, b: Tensor) -> Tensor:
    """A linear layer's weight gradient, then let go of its input, then the input's gradient.

    The formula asks for them the other way round: [rows, out] times [out, in], and then [out, rows] times [rows, in].
    """
    linear: _Linear | None = getattr(_running, "linear", None)
    stashed, of_a = _redeem(b), None
    if stashed is None:
        stashed = of_a = _redeem(a)
    if stashed is not None:
        _running.linear = None
        if linear is not None and linear.made is not None and linear.stashed() is stashed:
            grad, made = linear.grad, linear.made
            if grad is not None and of_a is None and _is_transposed(a, grad):
                return made
        whole = stashed.whole()
        if of_a is None:
            b = _seen_as(whole, b)
        else:
            a = _seen_as(whole, a)
        made = accumulation.mm(aten, a, b)
        del whole, a, b
        stashed.settle()
        return made
    if linear is not None:
        node = torch._C._current_autograd_node()
        stashed = linear.stashed()
        if node is None or node._sequence_nr() != linear.node or stashed is None or linear.made is not None:
            _running.linear = None
        elif b.is_contiguous() and accumulation.will_run(node.next_functions[-1][0]):
            # b is the weight, so the formula will ask for the product of these two next.
            whole = stashed.whole()
            if whole.shape == (a.shape[0], b.shape[1]):
                linear.made, linear.grad = accumulation.mm(aten, a.t(), whole), a
                del whole
                stashed.settle()
    return accumulation.mm(aten, a, b)


def _is_transposed(a: Tensor, grad: Tensor) -> bool:
    """Whether ``a`` is ``grad.t()``."""
    sizes = a.shape == grad.shape[::-1] and a.stride() == grad.stride()[::-1]
    return sizes and a.data_ptr() == grad.data_ptr() and a.dtype is grad.dtype


def _seen_as(whole: Tensor, claim: Tensor) -> Tensor:
    """The tensor through the view that a formula made of the claim for it."""
    return whole.as_strided(claim.shape, claim.stride(), whole.storage_offset() + claim.storage_offset())


def _threshold_backward(aten: Aten, grad: Tensor, x: Tensor, threshold: Any) -> Tensor:
    """Zeroes the gradient where a bit is clear."""
    exclusive = _is_exclusive(grad)
    return _masked(aten, "threshold_backward", grad, x, (threshold,), exclusive)


def _hardtanh_backward(aten: Aten, grad: Tensor, x: Tensor, low: Any, high: Any) -> Tensor:
    """Zeroes the gradient where a bit is clear."""
    exclusive = _is_exclusive(grad)
    return _masked(aten, "hardtanh_backward", grad, x, (low, high), exclusive)


def _masked(aten: Aten, op: str, grad: Tensor, x: Tensor, scalars: tuple[Any, ...], exclusive: bool) -> Tensor:
    stashed = _redeem(x)
    if stashed is None:
        return _pointwise(aten, op, grad, x, scalars, exclusive)
    known = stashed.encoded()
    if known is not None and grad.dtype in _SELECTED and _same_order(grad, x):
        _, encoded = known
        if set(encoded.planes) == {"mask"}:  # neither NaN by position nor a sign of three values
            out = grad if exclusive else torch.empty_like(grad)
            if cpu.mask_select(flat(grad), encoded.planes["mask"], flat(out)):
                stashed.settle()
                return out
    whole = stashed.whole()
    result = _pointwise(aten, op, grad, whole, scalars, exclusive)
    del whole
    stashed.settle()
    return result


def _coded(
    aten: Aten,
    op: str,
    grad: Tensor,
    x: Tensor,
    rest: tuple[Any, ...],
    exclusive: bool,
    named: Mapping[str, Any],
) -> Tensor:
    """The gradient times the derivative at what each code stands for, where the derivative depends on the code alone.

    It is rounded as ATen rounds the derivative and then the product. Where ATen multiplies in another order (silu,
    sigmoid), few-bit codes differ from decoding first by that rounding; the bits of leaky_relu do not.
    """
    stashed = _redeem(x)
    if stashed is None:
        return _pointwise(aten, op, grad, x, rest, exclusive, named)
    alike = grad.dtype is x.dtype and grad.dtype in _SCALED and _same_order(grad, x)
    known = stashed.encoded() if alike else None
    if known is not None:
        codec, encoded = known
        packed = encoded.planes.get("packed" if isinstance(codec, FewBit) else "mask")
        if packed is not None and isinstance(codec, (FewBit, Bitmask)):
            at = torch.tensor(codec.stand_ins, dtype=grad.dtype, device="cpu")
            made = _scaled(grad, packed, aten(*_arguments(op, torch.ones_like(at), at, rest), **named), exclusive)
            if made is not None:
                stashed.settle()
                return made
    return _pointwise(aten, op, grad, stashed.whole(), rest, exclusive, named)


def _scaled(grad: Tensor, packed: Tensor, table: Tensor, exclusive: bool) -> Tensor | None:
    """The gradient times what each code stands for; None where the bits might not be those of ATen's product."""
    if grad.dtype not in _SCALED or table.isnan().any():  # of two NaN either may stay
        return None
    out = grad if exclusive else torch.empty_like(grad)
    if not exclusive:
        cpu.advise_huge(out)
    return out if cpu.scale_by_codes(flat(grad), packed, table, flat(out)) else None


def _arguments(op: str, grad: Tensor, x: Tensor, rest: tuple[Any, ...]) -> tuple[Any, ...]:
    return (grad, *rest, x) if op in _LAST else (grad, x, *rest)


def _pointwise(
    aten: Aten,
    op: str,
    grad: Tensor,
    x: Tensor,
    rest: tuple[Any, ...],
    exclusive: bool,
    named: Mapping[str, Any] = _NONE,
) -> Tensor:
    if op.endswith("softmax_backward_data"):  # rest: dim, the input's dtype
        exclusive &= rest[0] in (-1, grad.dim() - 1) and rest[1] is grad.dtype
    if exclusive and _same_order(grad, x) and grad.dtype is x.dtype:
        overload = getattr(getattr(torch.ops.aten, op), _IN_PLACE[op])
        out = {overload._schema.arguments[-1].name: grad}
        written: Tensor = overload(*_arguments(op, grad, x, rest), **named, **out)
        return written
    made: Tensor = aten(*_arguments(op, grad, x, rest), **named)
    return made


def _same_order(grad: Tensor, x: Tensor) -> bool:
    """Whether element i in memory is the same element of both."""
    return grad.shape == x.shape and grad.stride() == x.stride() and is_dense(tuple(x.shape), x.stride())


def _max_pool2d_with_indices_backward(
    aten: Aten,
    grad: Tensor,
    x: Tensor,
    kernel: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    ceil: Any,
    indices: Tensor,
) -> Tensor:
    """Adds the gradient up where the window codes say."""
    stashed = _redeem(indices)
    if stashed is None:
        made: Tensor = aten(grad, x, kernel, stride, padding, dilation, ceil, indices)
        return made
    known = stashed.encoded()
    if known is not None and _same_order(grad, indices):
        codec, encoded = known
        if isinstance(codec, Narrow) and codec.window is not None:
            geometry = codec.geometry(encoded.spec)
            channels_last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
            if x.is_contiguous() if geometry[0] == 1 else channels_last:
                stashed.settle()  # gives back decode buffers, for a gradient that is larger than these
                out = torch.empty_strided(x.shape, x.stride(), dtype=grad.dtype, device="cpu")
                cpu.advise_huge(out)
                if cpu.window_scatter(encoded.planes["packed"], geometry, flat(grad), flat(out)):
                    return out
    whole = stashed.whole()
    result: Tensor = aten(grad, x, kernel, stride, padding, dilation, ceil, whole)
    del whole
    stashed.settle()
    return result


def _norm_kernel(op: str) -> Callable[..., _Gradients]:
    def kernel(aten: Aten, grad: Tensor, *rest: Any) -> _Gradients:
        exclusive = _is_exclusive(grad, "contiguous" if op == "native_group_norm_backward" else "positional")
        if not torch.is_grad_enabled():
            written: _Gradients | None = getattr(norms, _NORMS[op])(aten, exclusive, grad, *rest)
            if written is not None:
                return written
        made: _Gradients = aten(grad, *rest)
        return made

    kernel.__name__ = f"_{op}"
    kernel.__doc__ = f"Writes over the gradient on behalf of {KERNELS[op]}, if nobody else holds it."
    return kernel


def _in_place_kernel(op: str) -> Callable[..., Tensor]:
    nodes = KERNELS[op].split()

    def kernel(aten: Aten, grad: Tensor, *args: Any, **named: Any) -> Tensor:
        x, rest = (args[-1], args[:-1]) if op in _LAST else (args[0], args[1:])
        exclusive = _is_exclusive(grad, "named" if named else "positional")
        return _coded(aten, op, grad, x, rest, exclusive, named)

    kernel.__name__ = f"_{op}"
    kernel.__doc__ = f"Writes over the gradient on behalf of {' and '.join(nodes)}, if nobody else holds it."
    return kernel


_NODES = {f"{node}Backward{number}" for names in KERNELS.values() for node in names.split() for number in range(3)}


def _is_exclusive(grad: Tensor, call: str = "positional") -> bool:
    """Whether nobody but the node that runs holds ``grad``, a kernel's argument (Note: [exclusive gradients]).

    To be called before anything else, in a statement of its own: what is on the interpreter's stack counts.

    Args:
        grad: the argument.
        call: how it was given: to a kernel without or with ``"named"`` arguments, to one whose formula makes it
            ``"contiguous"`` first, or to a ``_Factor``'s ``"product"``, whose node must not multiply it by another
            factor as well.
    """
    tensors = grad._use_count()  # type: ignore[attr-defined]
    storages = torch._C._storage_Use_Count(grad.untyped_storage()._cdata)
    base: Any = grad._base
    of_base = (0, 0) if base is None else (sys.getrefcount(base), base._use_count())
    counts = _Counts(sys.getrefcount(grad), tensors, storages, *of_base)
    probe = getattr(_examining, "probe", None)
    if probe is not None:
        probe.counts.append(counts)
        return False
    if counts not in _exclusive.get(call, ()) or torch.is_grad_enabled():
        return False
    if not is_dense(tuple(grad.shape), grad.stride()):
        return False
    if grad.untyped_storage().nbytes() != grad.numel() * grad.element_size():
        return False
    running = torch._C._current_autograd_node()
    if call == "product":
        only = running is not None and sum(node is not None for node, _ in running.next_functions) == 1
        return only and type(running).__name__ == _PRODUCT
    return running is not None and type(running).__name__ in _NODES


# -- coming and going ------------------------------------------------------------------------------------------------


def install() -> None:
    """Put the kernels in front of ATen's; once for all Sessions that are entered."""
    global _entered, _works
    with _lock:
        _entered += 1  # without it the kernels do nothing of their own
        try:
            _register()
            if _works is None:
                _examine()
        except BaseException:
            _entered -= 1
            raise


def uninstall(waits: bool) -> None:
    """A Session is left, and ``waits`` for the backward of graphs that it made: until :func:`finished` is called.

    The kernels go with the last Session that does not wait. Until then they do what ATen's do while nobody is entered
    and nobody waits.
    """
    global _entered, _waiting, _library
    with _lock:
        _entered -= 1
        _waiting += waits
        if not _entered and not _waiting and _library is not None:
            _library._destroy()
            _library = None
            _claims.clear()
            _running.linear = None


def finished() -> None:
    """A Session waits no longer."""
    global _waiting
    with _lock:
        _waiting -= 1


def _register() -> None:
    global _library
    if _library is not None:
        return
    own: dict[str, Callable[..., Any]] = {
        **{op: _in_place_kernel(op) for op in _IN_PLACE},
        **{op: _norm_kernel(op) for op in _NORMS},
        "convolution_backward": _convolution_backward,
        "threshold_backward": _threshold_backward,
        "hardtanh_backward": _hardtanh_backward,
        "max_pool2d_with_indices_backward": _max_pool2d_with_indices_backward,
        "mm": _mm,
    }
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():  # torch says once that a kernel is overridden
        warnings.simplefilter("ignore")
        for op, kernel in own.items():
            original = torch.library.get_kernel(f"aten::{op}", "CPU")
            library.impl(op, _unseen(original, kernel), "CPU", with_keyset=True, allow_override=True)
    _library = library


def _unseen(original: Any, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel, out of sight of torch function modes: what it calls is no part of the program."""

    @wraps(kernel)
    def call(keys: Any, *args: Any, **named: Any) -> Any:
        if not _entered and not _waiting:
            return original.call_boxed(keys, *args, **named)
        with torch._C.DisableTorchFunction():
            return kernel(partial(original.call_boxed, keys), *args, **named)

    return call


class _Sample:
    """A stashed tensor of the tiny steps."""

    def __init__(self, x: Tensor) -> None:
        self.x = x.detach()
        self.spec = TensorSpec.of(x)

    def whole(self) -> Tensor:
        return self.x

    def encoded(self) -> None:
        return None

    def settle(self) -> None:
        pass

    def adopt(self, dead: Tensor) -> None:
        pass


@contextmanager
def _probing() -> Iterator[_Probe]:
    _examining.probe = probe = _Probe()
    try:
        yield probe
    finally:
        del _examining.probe


def _examine() -> None:
    """Find out, on tiny steps, which nodes pass claims on to their kernel, and what exclusive gradients look like."""
    global _works
    x = torch.tensor([[[[0.5, -1.0, 2.0], [7.0, -3.0, 0.0], [1.0, 4.0, -2.0]]]], device="cpu", requires_grad=True)
    weight = torch.tensor([[[[1.0, -2.0], [0.5, 3.0]]]], device="cpu", requires_grad=True)
    factor = (x.detach() > 0) * 1.25
    functional = torch.nn.functional
    steps: dict[tuple[str, str], Callable[[Tensor], Tensor]] = {
        ("Convolution", "input"): lambda x: functional.conv2d(x, weight),
        ("Addmm", "mat1"): lambda x: functional.linear(x[0, 0, :, :2], weight.view(2, 2), torch.zeros(2, device="cpu")),
        ("Mm", "self"): lambda x: x[0, 0, :, :2].mm(weight.view(2, 2).t()),
        ("Relu", "result"): functional.relu,
        ("Threshold", "self"): lambda x: functional.threshold(x, 1.0, 0.0),
        ("Hardtanh", "self"): lambda x: functional.hardtanh(x, -1.0, 1.5),
        ("MaxPool2DWithIndices", "result1"): lambda x: functional.max_pool2d(x, 2, 1),
        ("LeakyRelu", "self"): lambda x: functional.leaky_relu(x, 0.2),
        ("LeakyRelu", "result"): lambda x: functional.leaky_relu_(x * 1.0, 0.2),
        ("Gelu", "self"): functional.gelu,
        ("Silu", "self"): functional.silu,
        ("Elu", "self"): functional.elu,
        ("Elu", "result"): lambda x: functional.elu_(x * 1.0),
        ("Tanh", "result"): torch.tanh,
        ("Sigmoid", "result"): torch.sigmoid,
        ("Softplus", "self"): functional.softplus,
        ("Mul", "self"): lambda x: factor * x,
        ("Mul", "other"): lambda x: x * factor,
    }
    failed = set()
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        for (node, role), step in steps.items():
            expected = torch.autograd.grad(step(x).square().sum(), (x, weight), allow_unused=True)
            with _probing() as probe:
                got = torch.autograd.grad(_claimed(step(x), role).square().sum(), (x, weight), allow_unused=True)
            same = all(
                (a is None) == (b is None) and (a is None or torch.equal(a, b))
                for a, b in zip(expected, got, strict=True)
            )
            if not (probe.redeemed and same):
                failed.add(READERS[node, role])
        _exclusive["positional"] = _what_exclusive_is(x, torch.relu)
        _exclusive["named"] = _what_exclusive_is(x, lambda x: functional.gelu(x, approximate="tanh"))
        _exclusive["contiguous"] = _what_exclusive_is(x, lambda x: functional.group_norm(x, 1))
        _exclusive["product"] = _what_exclusive_is(x, lambda x: _claimed(x * factor, "other"))
    _works = frozenset(READERS.values()) - failed


def _claimed(y: Tensor, role: str) -> Tensor:
    """The tensor, whose node will be given a claim in place of what it saved as ``role``."""
    samples: list[_Sample] = []

    def pack(x: Tensor) -> _Sample:
        samples.append(_Sample(x))
        return samples[-1]

    def unpack(sample: _Sample) -> Tensor:
        product = type(y.grad_fn).__name__ == _PRODUCT
        return _Factor(sample, sample.spec, None) if product else _hand_out(sample, sample.spec)

    getattr(y.grad_fn, f"_raw_saved_{role}").register_hooks(pack, unpack)
    return y


def _what_exclusive_is(x: Tensor, function: Callable[[Tensor], Tensor]) -> frozenset[_Counts]:
    """The counts of a gradient that nobody else holds, and of a view like that; without those of one that is held.

    The function is called last, so that its kernel is the first: a later one may be the last to hold what was shared.
    """
    kept: list[Tensor] = []

    def shared(x: Tensor) -> Tensor:
        other = (x * 2.0).tanh()
        return other + function(x * 1.0)

    def shared_base(x: Tensor) -> Tensor:
        other = (x * 2.0).tanh().view(-1)
        return other + function(x * 1.0).view(-1)

    def hooked(y: Tensor) -> Tensor:
        y.register_hook(kept.append)
        return y

    def counts(step: Callable[[Tensor], Tensor]) -> _Counts:
        with _probing() as probe:
            (step(x) * 2.0).sum().backward(inputs=[x])
        return probe.counts[0]

    alone = counts(function), counts(lambda x: function(x).view(-1))
    held = (
        counts(shared),
        counts(lambda x: hooked(function(x))),
        counts(lambda x: shared(x).view(-1)),
        counts(lambda x: hooked(function(x)).view(-1)),
        counts(shared_base),
        counts(lambda x: hooked(function(x).view(-1))),
    )
    x.grad = None
    return frozenset(alone) - frozenset(held)
