"""Norms and curves made again in one pass over memory: which recipes are of that form, and what they read.

Layer norms and group norms are made from the statistics that they have saved, RMS norms from the ones that the program
has computed. A chain of functions of one 16-bit number, such as the parts of a GELU, is a table of its 65,536 values.

Note: [tables of curves]
    The table is made by the very calls of the recipe, on all numbers that there are. So it has their bits on whatever
    processor and library, and for each number there is. Once is not enough: where ATen runs no vectors, which is at the
    end of each thread's chunk, it calls the C library, which may round differently (Note: [tails of curves] in
    ops/onepass/reference.py). On numbers that do not lie next to each other it never runs vectors. That makes the
    second table.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from backstash.codecs.base import flat
from backstash.numerics import settings
from backstash.ops import backends
from backstash.ops.bits import bits_of
from backstash.ops.layout import Activation, ComputedCurve, NormOrder, Rounding, images, per_channel
from backstash.ops.onepass import reference as _kernels  # noqa: F401  # which enter the table of kernels
from backstash.proofs import proofs
from backstash.remake import fused
from backstash.remake.calls import INPUT, Held, Leaf, Memory
from backstash.remake.fused import SHORT
from backstash.remake.repeating import repeat
from backstash.saved import TensorSpec
from backstash.torch_internals import no_torch_function, without_gradients

if TYPE_CHECKING:
    from backstash.remake.calls import Call
    from backstash.remake.recipes import Recipe

CODES = 1 << 16

MOST_TABLES = 16
"""How many curves are remembered, of 128 or 256 KiB each: a network has a few."""

TABLE_FROM = 1 << 14
"""Elements from which a table is used: to make one is as much work as two passes over 65,536 elements."""

GRAIN = 1 << 15
"""Elements that ATen gives to a thread at least."""

STEPS = {"AVX2": 64, "DEFAULT": 64, "AVX512": 128}
"""Bytes that ATen's loops take in one step, by the vectors that it uses on x86: two of these."""

LINE = 64
"""Of so many elements a row has to have a multiple where it is rounded to 16 bits: then ATen runs vectors alone."""

PROOF_WIDTH = 4096
"""Of the rows on which the order of a layer norm is found out: a multiple of all steps of ATen's loops."""

MEAN, RSTD = -1, -2
"""The places of a norm's saved statistics among the inputs of its call."""

CURVES = frozenset(
    {"exp", "tanh", "sigmoid", "silu", "gelu", "mish", "softplus", "elu", "selu", "celu", "hardswish", "hardsigmoid"}
)
"""Functions of one number that take longer than the memory does."""

ARITHMETIC = frozenset({"add", "sub", "rsub", "mul", "div", "neg", "pow", "square", "sqrt", "rsqrt", "relu", "clamp"})
"""Functions of one or two numbers that may be parts of a curve."""

CASTS = frozenset({"to", "half", "bfloat16"})


@dataclass(frozen=True, slots=True)
class PassInput:
    """A tensor that a pass reads.

    Attributes:
        given: a leaf, or something held.
        call: the call that reads it, or that has saved it.
        place: which of the call's inputs it is; MEAN or RSTD for a statistic.
    """

    given: Leaf | Held
    call: Call
    place: int


@dataclass(frozen=True, slots=True)
class OnePass:
    """How a value is made in one pass.

    Attributes:
        operands: what is read.
        make: fills a tensor, given those of the operands in their order; False where it does not take them as they are
            now, and then nothing is filled.
    """

    operands: tuple[PassInput, ...]
    make: Callable[[Sequence[Tensor], Tensor], bool]


def make_in_one_pass(recipe: Recipe, fetch: Callable[[Leaf], Tensor], out: Memory | None) -> Tensor | None:
    """Makes a value in one pass; None where the recipe has no such form, or no kernel takes what it reads.

    Args:
        recipe: what makes the value.
        fetch: returns the tensor that a leaf stands for.
        out: makes memory for the result.
    """
    found = one_pass_of(recipe)
    if found is None:
        return None
    tensors = [
        fetch(each.given) if isinstance(each.given, Leaf) else each.given.get()  # type: ignore[union-attr]
        for each in found.operands
    ]
    spec = recipe.call.spec
    result = None if out is None else out()
    if result is None or TensorSpec.of(result) != spec:  # the memory is for what a later call makes of the result
        result = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)
    return result if found.make(tensors, result) else None


def one_pass_of(recipe: Recipe) -> OnePass | None:
    """How a recipe's value is made in one pass; None where it is not."""
    search = FORMS.get(recipe.call.name)
    device = recipe.call.spec.device.type
    if search is None or not backends.has_own_kernel("row_norm", device):
        return None
    return search(recipe)


def has_form(recipe: Recipe) -> bool:
    """Whether a recipe is of a form that is made in one pass; its tensors may still have other layouts."""
    return fused.parts_of(recipe) is not None or one_pass_of(recipe) is not None


# -- norms of rows -----------------------------------------------------------------------------------------------------


def _layer_norm(recipe: Recipe, out: TensorSpec | None = None) -> OnePass | None:
    """``layer_norm(x)`` from the statistics that it has saved, perhaps converted to the dtype of ``out``."""
    call, x = recipe.call, _source(recipe)
    out = out or call.spec
    if call.statistics is None or x is None or x.spec.dtype is not call.spec.dtype:
        return None
    width = _width(call)
    held = _held(call, ("weight", 2), ("bias", 3))
    if width is None or not _is_contiguous(x.spec) or x.spec != call.spec or not _has_numbers_of(out, x.spec):
        return None
    if held is None or not _takes_vectors(held, width, x.spec.dtype):
        return None
    if out.dtype not in (x.spec.dtype, *SHORT) or (out.dtype in SHORT and width % LINE):
        return None
    vectors = [each.given.tensor.dtype for each in held if each is not None]  # type: ignore[union-attr]
    order = order_of(x.spec.device, x.spec.dtype, vectors[0] if vectors else None)
    if not order:
        return None
    return _row_norm(x, call, held, NormOrder[order], out)


def _width(call: Call) -> int | None:
    shape = _argument(call, "normalized_shape", 1)
    if isinstance(shape, int):
        return shape
    return math.prod(shape) if isinstance(shape, (list, tuple, torch.Size)) else None


def _row_norm(
    x: Leaf, call: Call, held: tuple[PassInput | None, PassInput | None], order: NormOrder, made: TensorSpec
) -> OnePass:
    assert call.statistics is not None
    mean, rstd = (PassInput(each, call, place) for each, place in zip(call.statistics, (MEAN, RSTD), strict=True))
    operands, has = _listed(PassInput(x, call, 0), mean, rstd, *held)
    kernel, spec = backends.serving(x.spec.device.type).row_norm, x.spec  # `make` outlives the leaf

    def make(tensors: Sequence[Tensor], out: Tensor) -> bool:
        values, mean, rstd, weight, bias = _spread(tensors, has)
        if not _fits(values, spec) or mean.numel() != rstd.numel() or mean.dtype is not torch.float32:
            return False
        if fused.may_mix_nans(mean, rstd):
            return False
        if bias is None:  # ATen adds a zero, which makes one of a negative zero
            bias = torch.zeros(values.numel() // rstd.numel(), dtype=torch.float32, device=values.device)
            if weight is not None:
                weight = weight.float()
        kernel(values, None, mean, rstd, weight, bias, order, nan_of(made), out.view(values.shape))
        return True

    return OnePass(operands, make)


def order_of(device: torch.device, dtype: torch.dtype, held: torch.dtype | None) -> str:
    """The name of the order in which a layer norm computes; "" where none is known.

    Note: [orders of a layer norm]
        ATen has another kernel for 16-bit numbers with float32 weights than for float32, which rounds in another order,
        and numbers of 16 bits hide that in all but rare elements. So the order is found out
        for each pair of dtypes, on numbers that lie far from zero, where the bias takes away what the weight has made
        of a row. What is left of that row is the rounding alone.

    Args:
        device: where it runs.
        dtype: of what it reads, and makes.
        held: the dtype of weight and bias; None where it has none.
    """

    def prove() -> str:
        with no_torch_function():
            return without_gradients(lambda: _matching(device, dtype, held))

    return proofs.ask("order of a layer norm", (device, dtype, held), prove, device_type=device.type)


def _matching(device: torch.device, dtype: torch.dtype, held: torch.dtype | None) -> str:
    numbers = torch.arange(2 * PROOF_WIDTH, dtype=torch.float32, device=device).sin_().mul_(3).add_(50)
    x, weight, bias = numbers.view(2, PROOF_WIDTH).to(dtype), None, None
    if held is not None:
        weight = (x[1].float().cos() + 2).to(held)
        mean, rstd = torch.native_layer_norm(x, (PROOF_WIDTH,), weight, weight, 1e-5)[1:]
        bias = (-weight.float() * ((x[0].float() - mean[0].float()) * rstd[0].float())).to(held)
    expected, mean, rstd = torch.native_layer_norm(x, (PROOF_WIDTH,), weight, bias, 1e-5)
    if mean.dtype is not torch.float32:
        return ""
    added = torch.zeros(PROOF_WIDTH, dtype=torch.float32, device=device) if bias is None else bias
    for order in NormOrder:
        result = torch.empty_like(x)
        given = x, None, mean.flatten(), rstd.flatten(), weight, added
        backends.serving(device.type).row_norm(*given, order, nan_of(TensorSpec.of(x)), result)
        if torch.equal(bits_of(result), bits_of(expected)):
            return order.name
    return ""


def _rounded_norm(recipe: Recipe) -> OnePass | None:
    """A layer norm in another dtype; or ``(x * r).to(...)`` of float32 ``x`` [..., width] and held ``r`` [..., 1].

    Autocast converts the former for each layer that reads it, perhaps in another shape; the latter is the first half of
    an RMS norm.
    """
    inner = _only_inner(recipe, reshaped=True)
    if inner is not None and inner.call.name == "layer_norm":
        return _layer_norm(inner, recipe.call.spec)
    return None if inner is None or recipe.call.spec.dtype not in SHORT else _times_rows(inner, recipe.call.spec, None)


def _product(recipe: Recipe) -> OnePass | None:
    """An RMS norm with its weight; or a curve of 16-bit numbers times another value."""
    inputs = recipe.inputs
    if len(inputs) != 2 or recipe.call.kwargs or len(recipe.call.args) != 2:
        return _curve(recipe)
    for place in (0, 1):
        other, given = inputs[place], inputs[1 - place]
        if not isinstance(given, tuple) or not _fills(given) or given[0].call.settings is not recipe.call.settings:
            continue
        inner = given[0]
        if isinstance(other, Held):
            if inner.call.name in CASTS and (cast := _only_inner(inner)) is not None:
                return _times_rows(cast, recipe.call.spec, PassInput(other, recipe.call, place))
            return _times_rows(inner, recipe.call.spec, PassInput(other, recipe.call, place))
        if isinstance(other, Leaf):
            return _gated(recipe, inner, other, place) or _curve(recipe)
    return _curve(recipe)


def _times_rows(product: Recipe, spec: TensorSpec, weight: PassInput | None) -> OnePass | None:
    """``x * r``, rounded to a dtype, and perhaps times a weight [width]."""
    call, inputs = product.call, product.inputs
    if call.name != "mul" or len(inputs) != 2 or call.spec.dtype is not torch.float32 or not call.spec.shape:
        return None
    place = 0 if isinstance(inputs[0], Leaf) else 1
    x, scale = inputs[place], inputs[1 - place]
    if not isinstance(x, Leaf) or not isinstance(scale, Held) or x.spec != call.spec or not _is_contiguous(x.spec):
        return None
    width, rows = x.spec.shape[-1], math.prod(x.spec.shape[:-1])
    if scale.tensor.shape != (*x.spec.shape[:-1], 1) or scale.tensor.dtype is not torch.float32 or rows == 0:
        return None
    if not _has_numbers_of(spec, x.spec) or width % LINE:
        return None
    vector = None if weight is None else weight.given.tensor  # type: ignore[union-attr]
    if vector is not None and (vector.shape != (width,) or vector.dtype is not spec.dtype):
        return None
    operands, has = _listed(PassInput(x, call, place), PassInput(scale, call, 1 - place), weight)
    kernel, wide = backends.serving(x.spec.device.type).row_norm, x.spec

    def make(tensors: Sequence[Tensor], out: Tensor) -> bool:
        values, rstd, vector = _spread(tensors, has)
        if not _fits(values, wide) or not rstd.is_contiguous() or fused.may_mix_nans(rstd):
            return False
        kernel(values, None, None, rstd, vector, None, NormOrder.ROUNDED, nan_of(spec), out.view(values.shape))
        return True

    return OnePass(operands, make)


# -- norms of groups ---------------------------------------------------------------------------------------------------


def _group_norm(recipe: Recipe) -> OnePass | None:
    """``group_norm(x)`` from the statistics that it has saved."""
    return _grouped(recipe, None)


def _grouped(recipe: Recipe, curve: Recipe | None) -> OnePass | None:
    """A group norm, and perhaps a function of each of its numbers."""
    call, x = recipe.call, _source(recipe)
    groups = _argument(call, "num_groups", 1)
    if call.name != "group_norm" or call.statistics is None or x is None or not isinstance(groups, int):
        return None
    spec = x.spec
    held = _held(call, ("weight", 2), ("bias", 3))
    if held is None or None in held or spec != call.spec or len(spec.shape) < 2:
        return None
    if spec.dtype in SHORT and (spec.shape[1] % LINE or math.prod(spec.shape[2:]) % LINE):
        return None
    if images(torch.empty_strided(spec.shape, spec.stride, device="meta")) is None:
        return None
    if not _takes_vectors(held, spec.shape[1], spec.dtype):
        return None
    mean, rstd = (PassInput(each, call, place) for each, place in zip(call.statistics, (MEAN, RSTD), strict=True))
    operands = (PassInput(x, call, 0), mean, rstd, *held)
    kernel = backends.serving(spec.device.type).grouped_norm
    chain = None if curve is None else Chain(curve.call.without_inputs(), (None,))

    def make(tensors: Sequence[Tensor], out: Tensor) -> bool:
        values, mean, rstd, weight, bias = tensors
        if not _fits(values, spec) or mean.dtype is not torch.float32 or fused.may_mix_nans(mean, rstd):
            return False
        table = no_table if chain is None else table_of(chain, values.numel())
        if table is None:
            return False
        given = values, mean, rstd, weight, bias, groups, ComputedCurve.NONE
        kernel(*given, table.whole, table.tail, table.chunk, table.step, nan_of(spec), out, None)
        return True

    return OnePass(operands, make)  # type: ignore[arg-type]  # of `held`, None is none


# -- norms of channels -------------------------------------------------------------------------------------------------


def _channel_norm(recipe: Recipe) -> OnePass | None:
    """A batch norm of 16-bit images from the statistics that it has saved, perhaps with a sum and an activation."""
    spec = recipe.call.spec
    parts = fused.parts_of_any(recipe) if spec.dtype in SHORT else None
    if parts is None:
        return None
    activation, norm, x, residual = parts
    if norm.call.spec != spec or x.spec != spec or isinstance(residual, tuple):
        return None
    sizes = images(torch.empty_strided(spec.shape, spec.stride, device="meta"))
    if sizes is None or (residual is not None and residual.spec != spec):
        return None
    if (spec.shape[1] if sizes[1] == 1 else sizes[1]) % LINE:
        return None
    call = norm.call
    assert call.statistics is not None
    weight, bias = (_named(call, name) for name in ("weight", "bias"))
    mean, invstd = (PassInput(each, call, place) for each, place in zip(call.statistics, (MEAN, RSTD), strict=True))
    added = None if residual is None else _reader_of(recipe, residual)
    operands, has = _listed(_reader_of(norm, x), mean, invstd, weight, bias, added)
    rounding = fused.rounding_of(spec, sizes[1] == 1)
    if not rounding:
        return None
    kernel, order = backends.serving(spec.device.type).channel_norm, Rounding[rounding]
    numbers = activation or (Activation.NONE, 0.0, 0.0)

    def make(tensors: Sequence[Tensor], out: Tensor) -> bool:
        values, mean, invstd, weight, bias, added = _spread(tensors, has)
        fits = _fits(values, spec) and (added is None or _fits(added, spec))
        if not fits or not per_channel(spec.shape[1], mean, invstd, weight, bias) or fused.may_mix_nans(mean, invstd):
            return False
        kernel(values, mean, invstd, weight, bias, added, *numbers, *sizes, nan_of(spec), out, order)
        return True

    return OnePass(operands, make)


def _named(call: Call, name: str) -> PassInput | None:
    given = call.named_input(name)
    if not isinstance(given, Held):
        return None
    return PassInput(given, call, next(place for place, each in enumerate(call.inputs) if each is given))


def _reader_of(recipe: Recipe, leaf: Leaf) -> PassInput:
    """A leaf as what a recipe's calls read first."""
    for place, given in enumerate(recipe.inputs):
        if given is leaf:
            return PassInput(leaf, recipe.call, place)
    inner = [given[0] for given in recipe.inputs if isinstance(given, tuple)]
    return _reader_of(inner[0], leaf)


# -- functions of one number -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CurveTable:
    """The values of a function of 16-bit numbers, and where those of ``tail`` are meant: see the kernels."""

    whole: Tensor | None
    tail: Tensor | None
    chunk: int
    step: int


no_table = CurveTable(None, None, 0, 0)


@dataclass(frozen=True, slots=True)
class Chain:
    """Calls without what they read, and the calls that make it; None for the number that a chain begins from."""

    call: Call
    inner: tuple[Chain | None, ...]


_tables: OrderedDict[Hashable, tuple[Tensor, Tensor | None]] = OrderedDict()


def _curve(recipe: Recipe) -> OnePass | None:
    """A chain of functions of one 16-bit number, of which at least one takes longer than the memory does."""
    call = recipe.call
    if call.name == "silu" and (inner := _only_inner(recipe)) is not None and inner.call.name == "group_norm":
        return _grouped(inner, recipe) if call.spec.dtype in SHORT and call.spec == inner.call.spec else None
    leaf = _begins_from(recipe)
    if leaf is None or not _is_worth_a_table(recipe):
        return None
    spec, chain = leaf.spec, _chain(recipe)
    kernel = backends.serving(spec.device.type).curve

    def make(tensors: Sequence[Tensor], out: Tensor) -> bool:
        (values,) = tensors
        table = table_of(chain, values.numel()) if _fits(values, spec) else None
        if table is None:
            return False
        kernel(
            flat(values), ComputedCurve.NONE, table.whole, table.tail, table.chunk, table.step, nan_of(spec), flat(out)
        )
        return True

    return OnePass((_reader(recipe, leaf),), make)


def _gated(recipe: Recipe, inner: Recipe, other: Leaf, place: int) -> OnePass | None:
    """``silu(x) * y``, or another curve times a value."""
    leaf, spec = _begins_from(inner), recipe.call.spec
    if leaf is None or leaf.spec != spec or other.spec != spec or not _is_worth_a_table(inner):
        return None
    kernel, chain = backends.serving(spec.device.type).gated, _chain(inner)
    operands = (_reader(inner, leaf), PassInput(other, recipe.call, place))

    def make(tensors: Sequence[Tensor], out: Tensor) -> bool:
        gate, up = tensors
        table = table_of(chain, gate.numel()) if _fits(gate, spec) and _fits(up, spec) else None
        if table is None:
            return False
        whole, tail = table.whole, table.whole if table.tail is None else table.tail
        chunk, step = chunk_of(gate)
        given = flat(gate), flat(up), whole, tail, chunk, step, nan_of(spec), nan_of(spec, in_tail=True), flat(out)
        kernel(*given, None)
        return True

    return OnePass(operands, make)


def nan_of(spec: TensorSpec, in_tail: bool = False) -> int:
    """Bits of a NaN that is rounded to 16 bits: by NVIDIA's instruction, or on x86 by ATen, in vectors or not."""
    if spec.dtype is torch.float32:
        return 0
    if spec.device.type == "cuda":
        return 0x7FFF
    if spec.dtype is torch.float16:
        return 0
    return 0x7FC0 if in_tail else 0xFFFF


def table_of(chain: Chain, numel: int) -> CurveTable | None:
    """The table of a chain; None where it is not known which elements of a tensor of that size are in tails."""
    key = _key(chain), chain.call.spec.dtype, settings(chain.call.spec.device.type)
    known = _tables.get(key)
    if known is None:
        with no_torch_function():
            known = without_gradients(lambda: _make_table(chain))
        _tables[key] = known
        if len(_tables) > MOST_TABLES:
            _tables.popitem(last=False)
    else:
        _tables.move_to_end(key)
    whole, tail = known
    if tail is None:
        return CurveTable(whole, None, 0, 0)
    chunk, step = _chunk(numel, whole.element_size())
    return CurveTable(whole, tail, chunk, step) if step else None


def _make_table(chain: Chain) -> tuple[Tensor, Tensor | None]:
    dtype, device = chain.call.spec.dtype, chain.call.spec.device
    numbers = torch.arange(CODES, dtype=torch.int32, device=device).to(torch.int16).view(dtype)
    whole = bits_of(_values(chain, numbers, 1))
    if device.type != "cpu":
        return whole.clone(), None  # each element is computed alike
    tail = bits_of(_values(chain, numbers, 2).contiguous())
    return _kept(whole), None if torch.equal(whole, tail) else _kept(tail)


def _kept(table: Tensor) -> Tensor:
    """A copy in memory of NumPy's: it stays for good, and the step that asked for it first does not account for it."""
    return torch.from_numpy(table.numpy().copy())


def _values(chain: Chain, numbers: Tensor, distance: int) -> Tensor:
    """What a chain makes of numbers that lie so many elements apart, and so does what each call makes for the next."""
    call = chain.call
    inner = [numbers if each is None else _values(each, numbers, distance) for each in chain.inner]
    if distance > 1:
        inner = [each.new_empty(distance * each.numel())[::distance].copy_(each) for each in inner]
    return repeat(call, call.function, inner)


def chunk_of(x: Tensor) -> tuple[int, int]:
    """The elements of ``x`` that ATen gives to a thread, and that its loops take in a step; (0, 0) if not known."""
    return _chunk(x.numel(), x.element_size()) if x.is_cpu else (0, 0)


def _chunk(numel: int, itemsize: int) -> tuple[int, int]:
    nbytes = STEPS.get(torch.backends.cpu.get_cpu_capability(), 0)
    threads = torch.get_num_threads() if numel >= GRAIN else 1
    return -(-numel // min(threads, -(-numel // GRAIN) or 1)) if numel else 1, nbytes // itemsize


def _chain(recipe: Recipe) -> Chain:
    inner = [_chain(given[0]) if isinstance(given, tuple) else None for given in recipe.inputs]
    return Chain(recipe.call.without_inputs(), tuple(inner))


def _begins_from(recipe: Recipe) -> Leaf | None:
    """The only value that a chain of functions of one 16-bit number begins from; None if there is no such chain."""
    spec, found = recipe.call.spec, None
    if spec.dtype not in SHORT or math.prod(spec.shape) < TABLE_FROM:
        return None
    leaves = _leaves(recipe, spec)
    if not leaves:
        return None
    for leaf in leaves:
        if found is not None and (leaf.value is not found.value or leaf.offset != found.offset):
            return None
        found = leaf
    return found


def _leaves(recipe: Recipe, spec: TensorSpec) -> list[Leaf] | None:
    """The leaves of a chain whose calls all take and make what looks like ``spec``; None if one does not."""
    call = recipe.call
    if (call.name not in CURVES and call.name not in ARITHMETIC) or call.spec != spec or call.random_state is not None:
        return None
    if not call.is_cheap or call.group is not None or call.output is not None or not recipe.inputs:
        return None
    if not all(map(_is_constant, (*call.args, *call.kwargs.values()))):
        return None
    found: list[Leaf] = []
    for given in recipe.inputs:
        if isinstance(given, Leaf):
            inner: list[Leaf] | None = [given] if given.spec == spec else None
        elif isinstance(given, tuple) and _fills(given) and given[0].call.settings is call.settings:
            inner = _leaves(given[0], spec)
        else:
            inner = None
        if inner is None:
            return None
        found += inner
    return found


def _is_constant(arg: Any) -> bool:
    return arg is INPUT or arg is None or type(arg) in (bool, int, float, str)


def _is_worth_a_table(recipe: Recipe) -> bool:
    if recipe.call.name in CURVES:
        return True
    return any(isinstance(given, tuple) and _is_worth_a_table(given[0]) for given in recipe.inputs)


def _key(chain: Chain) -> Hashable:
    """What a chain's values depend on."""
    call = chain.call
    inner = tuple([None if each is None else _key(each) for each in chain.inner])
    args = tuple([repr(arg) for arg in call.args]), tuple([(name, repr(arg)) for name, arg in call.kwargs.items()])
    return call.function, args, call.autocast, inner


def _reader(recipe: Recipe, leaf: Leaf) -> PassInput:
    """A leaf of a chain as what the call reads that begins from it."""
    for place, given in enumerate(recipe.inputs):
        if isinstance(given, Leaf):
            return PassInput(leaf, recipe.call, place)
    return _reader(recipe.inputs[0][0], leaf)  # type: ignore[index]  # every input that is no leaf is a recipe here


# -- parts of recipes --------------------------------------------------------------------------------------------------


def _source(recipe: Recipe) -> Leaf | None:
    """The value that a norm reads, which is its first argument."""
    first = recipe.inputs[0] if recipe.inputs else None
    return first if isinstance(first, Leaf) else None


def _only_inner(recipe: Recipe, reshaped: bool = False) -> Recipe | None:
    """The recipe of the only input, where that is all of what this recipe makes, under the same settings."""
    given = recipe.inputs[0] if len(recipe.inputs) == 1 else None
    if not isinstance(given, tuple) or given[0].call.settings is not recipe.call.settings:
        return None
    inner, view = given
    is_reshaped = reshaped and view.offset == 0 and _has_numbers_of(view.spec, inner.call.spec)
    return inner if is_reshaped or _fills(given) else None


def _has_numbers_of(spec: TensorSpec, other: TensorSpec) -> bool:
    """Whether both lie in memory without gaps, and one is the other in another shape."""
    return _is_contiguous(spec) and _is_contiguous(other) and math.prod(spec.shape) == math.prod(other.shape)


def _fills(given: tuple[Recipe, Any]) -> bool:
    recipe, view = given
    return bool(view.offset == 0 and view.spec == recipe.call.spec)


def _argument(call: Call, name: str, position: int) -> Any:
    """An argument of a call, INPUT for a tensor, None where it is not given."""
    return call.args[position] if len(call.args) > position else call.kwargs.get(name)


def _held(call: Call, *wanted: tuple[str, int]) -> tuple[PassInput | None, PassInput | None] | None:
    """Arguments that are held, None for each that is not given; None if one is something else."""
    found: list[PassInput | None] = []
    for name, position in wanted:
        if _argument(call, name, position) is not INPUT:
            found.append(None)
            continue
        place = sum(arg is INPUT for arg in call.args[:position])
        if len(call.args) <= position:
            keys = list(call.kwargs)
            place += sum(call.kwargs[key] is INPUT for key in keys[: keys.index(name)])
        given = call.inputs[place]
        if not isinstance(given, Held):
            return None
        found.append(PassInput(given, call, place))
    return found[0], found[1]


def _takes_vectors(held: tuple[PassInput | None, ...], length: int, dtype: torch.dtype) -> bool:
    """Whether the kernels take what is held as vectors of so many numbers, of one dtype."""
    vectors = [each.given.tensor for each in held if each is not None]  # type: ignore[union-attr]
    dtypes = {vector.dtype for vector in vectors}
    if any(vector.numel() != length or not vector.is_contiguous() for vector in vectors):
        return False
    return len(dtypes) < 2 and dtypes <= {torch.float32, dtype}


def _is_contiguous(spec: TensorSpec) -> bool:
    expected = 1
    for size, stride in zip(reversed(spec.shape), reversed(spec.stride), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _fits(x: Tensor, spec: TensorSpec) -> bool:
    return x.dtype is spec.dtype and x.shape == spec.shape and x.stride() == spec.stride


def _listed(*operands: PassInput | None) -> tuple[tuple[PassInput, ...], tuple[bool, ...]]:
    """The operands that are there, and which are."""
    return tuple([each for each in operands if each is not None]), tuple([each is not None for each in operands])


def _spread(tensors: Sequence[Tensor], has: tuple[bool, ...]) -> list[Any]:
    """Tensors with None in the places of operands that are not there."""
    given = iter(tensors)
    return [next(given) if each else None for each in has]


FORMS: dict[str, Callable[[Recipe], OnePass | None]] = {
    "layer_norm": _layer_norm,
    "group_norm": _group_norm,
    "add": lambda recipe: _channel_norm(recipe) or _curve(recipe),
    "batch_norm": _channel_norm,
    **dict.fromkeys(fused.NUMBERS, _channel_norm),
    "mul": _product,
    **dict.fromkeys(CASTS, _rounded_norm),
    **dict.fromkeys(CURVES, _curve),
}
"""By the name of a recipe's last call: what finds out whether its value is made in one pass."""
