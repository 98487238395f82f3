"""Batch norm, a sum and an activation remade in one pass over memory, from the statistics that batch norm has saved."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from backstash.codecs.base import Encoded, flat
from backstash.ops import backends
from backstash.ops.bits import bits_of
from backstash.ops.layout import Activation, Rounding, images, per_channel
from backstash.ops.norms import reference as _kernels  # noqa: F401  # which enter the table of kernels
from backstash.proofs import proofs
from backstash.remake.calls import INPUT, Held, Leaf, Memory, View
from backstash.saved import TensorSpec
from backstash.torch_internals import batch_norm_with_statistics, no_torch_function, without_gradients

if TYPE_CHECKING:
    from backstash.remake.calls import Call
    from backstash.remake.recipes import Recipe

APPLIED = 1 << 17
"""Elements of a remade value that a mask is applied to at a time on CPU, a multiple of 8: 512 KiB of float32."""

SHORT = (torch.bfloat16, torch.float16)

CHANNELS, SOME_CHANNELS = 256, 4
"""Of the batch norms that orders are tried on: in numbers of 16 bits, and in float32."""

_Activation = tuple[Activation, float, float]
"""An activation and its numbers, as the kernel ``affine`` takes them."""

_NOTHING: _Activation = (Activation.NONE, 0.0, 0.0)


def affine(
    recipe: Recipe, fetch: Callable[[Leaf], Tensor], out: Memory | None, mask: Tensor | None = None
) -> Tensor | None:
    """``activation(batch_norm(x) [+ y])`` in one pass; None where the recipe has another form or no kernel takes it.

    Args:
        recipe: what makes the value.
        fetch: returns the tensor that a leaf stands for.
        out: makes memory for the result.
        mask: a bit per element of the result in memory order: where it is clear the result is zero, elsewhere no less
            than the smallest normal number.
    """
    parts = parts_of(recipe)
    if parts is None:
        return None
    activation, norm, source, residual = parts
    spec = recipe.call.spec
    inner = norm_within(residual, recipe.call)
    y = None  # It is fetched before x: if it is made from other values, these would lie beside x.
    if inner is not None:
        y = fetch(inner.inputs[0])  # type: ignore[arg-type]  # norm_within has seen that it is a leaf
    elif residual is not None:
        y = fetch(residual) if isinstance(residual, Leaf) else residual[0].run(fetch)
    x = None if y is not None and not _is_image(y, spec) else fetch(source)
    if x is None or not _is_image(x, spec):
        return None
    vectors, of_residual = _vectors(norm.call), () if inner is None else _vectors(inner.call)
    layout = images(x)
    if layout is None or not per_channel(x.shape[1], *vectors, *of_residual) or may_mix_nans(*vectors):
        return None
    rounding = rounding_of(spec, layout[1] == 1)
    if not rounding:
        return None
    result = out() if out is not None else None
    if result is None or TensorSpec.of(result) != spec:  # the memory is for what a later call converts the result to
        result = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)
    kernel, sample = backends.serving(spec.device.type).affine, recipe.sample
    given = x, *vectors, y, *(activation or _NOTHING), *layout, result, mask, Rounding[rounding]
    picked = None if sample is None or mask is not None else sample.room(result)
    if sample is None or picked is None:
        kernel(*given, None, 0, 1, *of_residual)
    else:
        kernel(*given, picked, sample.begin, sample.step, *of_residual)
        sample.picked = picked
    return result


def may_mix_nans(*vectors: Tensor | None) -> bool:
    """Whether a norm of these statistics and weights is left to ATen, because they are not all finite.

    On a CPU the compiler chooses which of two NaN a sum or a product keeps; an accelerator has one NaN only.
    """
    given = [each for each in vectors if each is not None and each.is_cpu]
    return not all(math.isfinite(float(each.sum())) for each in given)


def _is_image(x: Tensor, spec: TensorSpec) -> bool:
    return x.dtype is torch.float32 and x.stride() == spec.stride and x.shape == spec.shape


def norm_within(residual: Leaf | tuple[Recipe, View] | None, of: Call) -> Recipe | None:
    """The batch norm whose result is added, if an accelerator's kernel may compute it as well."""
    if of.spec.device.type == "cpu" or not isinstance(residual, tuple) or not _is_norm(residual):
        return None
    norm, call = residual[0], residual[0].call
    is_same = call.spec == of.spec and call.settings is of.settings and call.autocast is None
    return norm if is_same and call.statistics is not None and isinstance(norm.inputs[0], Leaf) else None


def _vectors(norm: Call) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Mean, inverse standard deviation, weight and bias of a batch norm."""
    assert norm.statistics is not None
    mean, invstd = (held.get() for held in norm.statistics)
    weight, bias = norm.named_input("weight"), norm.named_input("bias")
    return (
        mean,
        invstd,
        weight.get() if isinstance(weight, Held) else None,
        bias.get() if isinstance(bias, Held) else None,
    )


def rounding_of(x: TensorSpec, is_channels_last: bool) -> str:
    """The name of the order in which a batch norm of ``x`` computes under the settings of the process; "" for none.

    Note: [orders of a batch norm]
        On x86 there is one. On an accelerator there is one for each kernel of each library, and cuDNN takes its kernel
        by the shape. So all orders are tried on a batch norm of some channels of that shape. Whether the one that is
        found is that of all channels is left to the proof of each recipe. Numbers of 16 bits hide most differences: one
        element in a million tells two orders apart. So the bias takes away what the weight has made of an element of
        each channel, and what is left of that is the rounding alone. ATen has one kernel for all shapes of bfloat16;
        for float16, which is cuDNN's, nothing is tried.
    """
    if x.device.type == "cpu":
        return Rounding.SCALED.name
    if x.dtype is torch.float16:
        return ""
    shape = (4, CHANNELS, 5, 5) if x.dtype in SHORT else (x.shape[0], min(SOME_CHANNELS, x.shape[1]), *x.shape[2:])

    def prove() -> str:
        with no_torch_function():
            return without_gradients(lambda: _matching(x.device, shape, is_channels_last, x.dtype))

    return proofs.ask("rounding", (x.device, shape, is_channels_last, x.dtype), prove, device_type=x.device.type) or ""


def _matching(device: torch.device, shape: tuple[int, ...], is_channels_last: bool, dtype: torch.dtype) -> str:
    channels = shape[1]
    numbers = torch.arange(math.prod(shape), dtype=torch.float32, device=device)
    x = numbers.sin_().mul_(3).add_(1).view(shape).to(dtype)
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(len(shape)) if is_channels_last else None
    x = x.contiguous(memory_format=layout or torch.contiguous_format)
    vector = torch.arange(channels, dtype=torch.float32, device=device)
    weight, bias = vector.cos() + 2, torch.zeros(channels, dtype=torch.float32, device=device)
    mean, invstd = batch_norm_with_statistics(x, weight, bias)[1:]
    bias = -(weight * (x.reshape(shape[0], channels, -1)[0, :, 0].float() - mean) * invstd)
    expected, mean, invstd = batch_norm_with_statistics(x, weight, bias)
    sizes = images(x)
    assert sizes is not None
    kernels = backends.serving(device.type)
    for rounding in Rounding:
        result = torch.empty_like(x)
        given = x, mean, invstd, weight, bias, None, *_NOTHING, *sizes
        if dtype is torch.float32:
            kernels.affine(*given, result, None, rounding)
        else:
            kernels.channel_norm(*given, 0, result, rounding)
        if torch.equal(bits_of(result), bits_of(expected)):
            return rounding.name
    return ""


Parts = tuple["_Activation | None", "Recipe", Leaf, "Leaf | tuple[Recipe, View] | None"]
"""The activation, batch norm, its input and what is added."""


def parts_of(recipe: Recipe) -> Parts | None:
    """The parts of a recipe that :func:`affine` may run; None where it has another form."""
    if not backends.has_own_kernel("affine", recipe.call.spec.device.type):
        return None
    found = parts_of_any(recipe)
    if found is None or recipe.call.spec.dtype is not torch.float32:
        return None
    return found if found[1].call.autocast is None and recipe.call.autocast is None else None


def parts_of_any(recipe: Recipe) -> Parts | None:
    """As :func:`parts_of`, of any dtype and under autocast."""
    name = recipe.call.name
    if name not in NUMBERS and name not in ("add", "batch_norm"):
        return None
    numbers = activation_of(recipe.call)
    inner = recipe if numbers is None else _only_input(recipe)
    if inner is None:
        return None
    norm, residual = _norm_and_residual(inner)
    if norm.call.name != "batch_norm" or norm.call.statistics is None or isinstance(residual, Held):
        return None
    source = norm.inputs[0]
    if any(each.call.settings is not recipe.call.settings for each in (inner, norm)):
        return None
    return (numbers, norm, source, residual) if isinstance(source, Leaf) else None


def activation_of(call: Call) -> _Activation | None:
    """Returns the activation that a call computes of its only tensor; None where the kernel knows no such function."""
    numbers = NUMBERS.get(call.name)
    if numbers is None:
        return None
    given = call.args[1:] if call.args and call.args[0] is INPUT else call.args
    try:
        code, lo, hi = numbers(*given, **{name: given for name, given in call.kwargs.items() if given is not INPUT})
    except TypeError:  # a keyword that only this function knows
        return None
    if not all(isinstance(number, (int, float)) and not math.isnan(number) for number in (lo, hi)):
        return None
    return code, float(lo), float(hi)


def _clamp(min: Any = None, max: Any = None) -> tuple[Activation, Any, Any]:
    return Activation.CLAMP, -math.inf if min is None else min, math.inf if max is None else max


def _hardtanh(min_val: Any = -1.0, max_val: Any = 1.0, inplace: bool = False) -> tuple[Activation, Any, Any]:
    return Activation.CLAMP, min_val, max_val


def _leaky_relu(negative_slope: Any = 0.01, inplace: bool = False) -> tuple[Activation, Any, Any]:
    return Activation.LEAKY_RELU, negative_slope, 0.0


NUMBERS: dict[str, Callable[..., tuple[Activation, Any, Any]]] = {
    "relu": lambda inplace=False: (Activation.CLAMP, 0.0, math.inf),
    "relu6": lambda inplace=False: (Activation.CLAMP, 0.0, 6.0),
    "hardtanh": _hardtanh,
    "clamp": _clamp,
    "leaky_relu": _leaky_relu,
}
"""Of each activation by its function's name: makes the kernel's numbers of the function's arguments but the tensor."""


def _norm_and_residual(recipe: Recipe) -> tuple[Recipe, Leaf | Held | tuple[Recipe, View] | None]:
    """Batch norm's recipe and what is added to its result; where nothing is added, the recipe itself and None."""
    call, inputs = recipe.call, recipe.inputs
    if call.name == "add" and len(inputs) == 2 == len(call.args) and not call.kwargs:
        first, second = inputs
        if isinstance(first, tuple) and _is_norm(first):
            return first[0], second
        if isinstance(second, tuple) and _is_norm(second):
            return second[0], first
    return recipe, None


def _is_norm(given: tuple[Recipe, View]) -> bool:
    return given[0].call.name == "batch_norm" and fills(given)


def _only_input(recipe: Recipe) -> Recipe | None:
    """The recipe of the only input, where that input is all of what this recipe makes."""
    given = recipe.inputs[0] if len(recipe.inputs) == 1 else None
    return given[0] if isinstance(given, tuple) and fills(given) else None


def fills(given: tuple[Recipe, View]) -> bool:
    """Whether the view shows all of what its recipe makes."""
    recipe, view = given
    return view.offset == 0 and view.spec == recipe.call.spec


def made(recipe: Recipe, fetch: Callable[[Leaf], Tensor], memory: Memory | None, encoded: Encoded | None) -> Tensor:
    """Runs a recipe and applies what is stored of the result's form, in one pass where there is a kernel for it."""
    if encoded is None:
        return recipe.run(fetch, memory)
    if recipe.fused:
        whole = affine(recipe, fetch, memory, encoded.planes["mask"])
        if whole is not None:
            return whole
        recipe = recipe.unfused()  # without the mask, the kernel would decline for the same reason
    whole = recipe.run(fetch, memory)
    _apply(encoded, whole)
    return whole


def _apply(encoded: Encoded, remade: Tensor) -> None:
    """Where the mask is clear a relu's result becomes zero, elsewhere the smallest positive number if it is less.

    On CPU that is done a piece at a time, so that the second pass finds the piece in a cache.
    """
    tiny = torch.finfo(remade.dtype).tiny
    x, bits = flat(remade), encoded.planes["mask"]
    kernels, step = backends.serving(x.device.type), APPLIED if x.device.type == "cpu" else max(1, x.numel())
    for begin in range(0, x.numel(), step):
        piece = x[begin : begin + step].clamp_(min=tiny)
        kernels.mask_select(piece, bits[begin // 8 : -(-(begin + piece.numel()) // 8)], piece)
