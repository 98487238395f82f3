"""Small floating-point formats, on CUDA."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from backstash.errors import DamagedPlanesError
from backstash.ops.formats import FORMATS, Format, groups, scale_ceiling
from backstash.ops.layout import ZVC_CHUNK, bytes_for, zvc_chunks
from backstash.ops.reference.bits import bits_of
from backstash.ops.triton.elements import block_offsets, element_bits, row_tile, single_bits, to_flags
from backstash.ops.triton.launching import BLOCK, ZVC_WARPS, blocks_of, check_plane, launch, number_bits
from backstash.ops.triton.sparse import zvc_masked


@triton.jit
def minifloat_code(
    word,
    NONZERO_STAYS: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    BITS: tl.constexpr,
    TOP: tl.constexpr,
    SUBNORMALS: tl.constexpr,
):
    """Rounds bits of float32 to a code, int32; see ``reference.minifloat_encode``."""
    DROP: tl.constexpr = 23 - MANTISSA
    LEAST: tl.constexpr = 1 if SUBNORMALS else 1 << MANTISSA
    magnitude = word & 0x7FFFFFFF
    rest = tl.minimum(magnitude, 0x7F800000)  # what is added next does not make it negative
    code = ((rest + ((1 << (DROP - 1)) - 1) + ((rest >> DROP) & 1)) >> DROP) - ((127 - BIAS) << MANTISSA)
    if SUBNORMALS and BIAS != 127:
        # The processor rounds, where a float32's last bit is as much as the smallest subnormal.
        AT: tl.constexpr = (151 - BIAS - MANTISSA) << 23
        at = tl.full(rest.shape, AT, tl.int32).to(tl.float32, bitcast=True)
        small = (rest.to(tl.float32, bitcast=True) + at).to(tl.int32, bitcast=True) - AT
        code = tl.where(rest < ((128 - BIAS) << 23), small, code)
    if NONZERO_STAYS:
        code = tl.where(code < LEAST, tl.where(rest != 0, LEAST, 0), code)
    else:
        code = tl.where(code < LEAST, 0, code)
    code = tl.where(magnitude >= 0x7F800000, TOP + 1, tl.minimum(code, TOP))
    code = tl.where(magnitude > 0x7F800000, (1 << (BITS - 1)) - 1, code)
    return code | (((word >> 31) & 1) << (BITS - 1))


@triton.jit
def minifloat_magnitude(
    code,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    BITS: tl.constexpr,
    SUBNORMALS: tl.constexpr,
):
    """Returns the magnitude of a code as bits of float32, int32. Of no finite number it is an arbitrary one."""
    rest = code & ((1 << (BITS - 1)) - 1)
    word = (rest << (23 - MANTISSA)) + ((127 - BIAS) << 23)
    if BIAS != 127:
        if SUBNORMALS:
            STEP: tl.constexpr = (128 - BIAS - MANTISSA) << 23
            step = tl.full(rest.shape, STEP, tl.int32).to(tl.float32, bitcast=True)
            small = (rest.to(tl.float32) * step).to(tl.int32, bitcast=True)
        else:
            small = tl.zeros_like(rest)
        word = tl.where(rest < (1 << MANTISSA), small, word)
    return word


@triton.jit
def minifloat_finish(code, word, BITS: tl.constexpr, TOP: tl.constexpr):
    """Adds the sign to a magnitude, and makes it infinite or NaN where the code is."""
    rest = code & ((1 << (BITS - 1)) - 1)
    word = tl.where(rest > TOP, 0x7F800000, word)
    return tl.where(rest > TOP + 1, 0x7FC00000, word) | (((code >> (BITS - 1)) & 1) << 31)


@triton.jit
def load_code(codes_ptr, offs, mask, BITS: tl.constexpr, FIELDS: tl.constexpr):
    """Loads the codes of elements ``offs``, int32."""
    word = tl.load(codes_ptr + offs // FIELDS, mask=mask, other=0).to(tl.int32)
    return (word >> (offs % FIELDS * BITS).to(tl.int32)) & ((1 << BITS) - 1)


@triton.jit
def minifloat_encode_kernel(
    x_ptr,
    codes_ptr,
    numel,
    words,
    HALF: tl.constexpr,
    NONZERO_STAYS: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    BITS: tl.constexpr,
    TOP: tl.constexpr,
    SUBNORMALS: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Stores codes, ``FIELDS`` in an element of the plane. ``x_ptr`` points to integers."""
    offs_words = block_offsets(BLOCK)
    packed = tl.zeros([BLOCK], tl.int32)
    for i in tl.static_range(FIELDS):
        offs_x = offs_words * FIELDS + i
        word = single_bits(tl.load(x_ptr + offs_x, mask=offs_x < numel, other=0), HALF)
        packed |= minifloat_code(word, NONZERO_STAYS, MANTISSA, BIAS, BITS, TOP, SUBNORMALS) << (BITS * i)
    tl.store(codes_ptr + offs_words, packed.to(codes_ptr.dtype.element_ty), mask=offs_words < words)


@triton.jit
def minifloat_decode_kernel(
    codes_ptr,
    out_ptr,
    numel,
    HALF: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    BITS: tl.constexpr,
    TOP: tl.constexpr,
    SUBNORMALS: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Inverts :func:`minifloat_encode_kernel`. ``out_ptr`` points to integers."""
    offs_out = block_offsets(BLOCK)
    code = load_code(codes_ptr, offs_out, offs_out < numel, BITS, FIELDS)
    word = minifloat_finish(code, minifloat_magnitude(code, MANTISSA, BIAS, BITS, SUBNORMALS), BITS, TOP)
    tl.store(out_ptr + offs_out, element_bits(word, out_ptr.dtype.element_ty == tl.int32, HALF), mask=offs_out < numel)


@triton.jit
def minifloat_scaled_encode_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    numel,
    HALF: tl.constexpr,
    CEILING: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    BITS: tl.constexpr,
    TOP: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Stores scales of groups, and codes of scaled elements. ``x_ptr`` and ``scales_ptr`` point to integers."""
    offs_groups, offs_x = row_tile(ROWS, GROUP)
    mask = offs_x < numel
    word = single_bits(tl.load(x_ptr + offs_x, mask=mask, other=0), HALF)
    magnitude = word & 0x7FFFFFFF
    odd = magnitude >= 0x7F800000
    rest = magnitude
    magnitude = tl.minimum(tl.where(odd, 0, magnitude), CEILING)
    # The exponent, one more where the fraction is above that of the format's largest number.
    FRACTION: tl.constexpr = (TOP & ((1 << MANTISSA) - 1)) << (23 - MANTISSA)
    exponent = ((tl.max(magnitude, axis=1) + (0x7FFFFF - FRACTION)) >> 23) - ((TOP >> MANTISSA) - BIAS)
    exponent = tl.maximum(exponent, 1)
    reciprocal = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    scaled = (magnitude.to(tl.float32, bitcast=True) * reciprocal[:, None]).to(tl.int32, bitcast=True)
    scaled = tl.where(odd, rest, scaled) | (word & -(2**31))
    codes = minifloat_code(scaled, False, MANTISSA, BIAS, BITS, TOP, True)
    tl.store(codes_ptr + offs_x, codes.to(codes_ptr.dtype.element_ty), mask=mask)
    tl.store(scales_ptr + offs_groups, exponent << 23, mask=offs_groups * GROUP < numel)


@triton.jit
def minifloat_scaled_decode_kernel(
    codes_ptr,
    scales_ptr,
    out_ptr,
    numel,
    HALF: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    BITS: tl.constexpr,
    TOP: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Inverts :func:`minifloat_scaled_encode_kernel`. ``out_ptr`` points to integers."""
    offs_groups, offs_out = row_tile(ROWS, GROUP)
    mask = offs_out < numel
    code = load_code(codes_ptr, offs_out, mask, BITS, 1)
    scale = tl.load(scales_ptr + offs_groups, mask=offs_groups * GROUP < numel, other=0)
    scale = scale.to(tl.float32, bitcast=True)
    word = tl.where((code & ((1 << (BITS - 1)) - 1)) > TOP, 0, minifloat_magnitude(code, MANTISSA, BIAS, BITS, True))
    word = (word.to(tl.float32, bitcast=True) * scale[:, None]).to(tl.int32, bitcast=True)
    word = minifloat_finish(code, word, BITS, TOP)
    tl.store(out_ptr + offs_out, element_bits(word, out_ptr.dtype.element_ty == tl.int32, HALF), mask=mask)


@triton.jit
def zvc_minifloat_compact_kernel(
    x_ptr,
    offsets_ptr,
    values_ptr,
    numel,
    room,
    HALF: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    BITS: tl.constexpr,
    TOP: tl.constexpr,
    SUBNORMALS: tl.constexpr,
    FIELDS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """As ``zvc_compact_kernel``, but stores codes. Codes that share a word are stored over zeros."""
    offs_x = block_offsets(CHUNK)
    x = tl.load(x_ptr + offs_x, mask=offs_x < numel, other=0)
    flags = (x != 0).to(tl.int32)
    offs_values = tl.load(offsets_ptr + tl.program_id(0)) + tl.cumsum(flags, axis=0) - flags
    code = minifloat_code(single_bits(x, HALF), True, MANTISSA, BIAS, BITS, TOP, SUBNORMALS)
    mask = (flags != 0) & (offs_values < room)
    if FIELDS == 1:
        tl.store(values_ptr + offs_values, code.to(values_ptr.dtype.element_ty), mask=mask)
    else:
        # Two programs may have codes of one word; whichever comes first, the bits are the same.
        field = code << (offs_values % FIELDS * BITS).to(tl.int32)
        tl.atomic_or(values_ptr + offs_values // FIELDS, field, mask=mask, sem="relaxed")


@triton.jit
def zvc_minifloat_decode_kernel(
    mask_ptr,
    offsets_ptr,
    values_ptr,
    out_ptr,
    numel,
    words,
    HALF: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    BITS: tl.constexpr,
    TOP: tl.constexpr,
    SUBNORMALS: tl.constexpr,
    FIELDS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """As ``zvc_decode_kernel``, but reads codes."""
    offs_bytes = block_offsets(CHUNK // 8)
    mask_bytes = tl.load(mask_ptr + offs_bytes, mask=offs_bytes * 8 < numel, other=0)
    flags = tl.reshape(to_flags(mask_bytes).to(tl.int32), [CHUNK])
    offs_values = tl.load(offsets_ptr + tl.program_id(0)) + tl.cumsum(flags, axis=0) - flags
    there = (flags != 0) & (offs_values >= 0) & (offs_values // FIELDS < words)
    code = load_code(values_ptr, offs_values, there, BITS, FIELDS)
    word = minifloat_finish(code, minifloat_magnitude(code, MANTISSA, BIAS, BITS, SUBNORMALS), BITS, TOP)
    offs_out = block_offsets(CHUNK)
    values = element_bits(tl.where(there, word, 0), out_ptr.dtype.element_ty == tl.int32, HALF)
    tl.store(out_ptr + offs_out, values, mask=offs_out < numel)


def _format_constants(form: Format, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "HALF": dtype == torch.float16,
        "MANTISSA": form.mantissa,
        "BIAS": form.bias,
        "BITS": form.bits,
        "TOP": form.top,
        "SUBNORMALS": form.subnormals,
        "FIELDS": form.fields,
    }


def _scaled_constants(form: Format, dtype: torch.dtype, group_size: int) -> dict[str, Any]:
    constants = _format_constants(form, dtype)
    del constants["SUBNORMALS"], constants["FIELDS"]
    return {**constants, "ROWS": max(1, ZVC_CHUNK // group_size), "GROUP": group_size, "num_warps": ZVC_WARPS}


def minifloat_encode(x: Tensor, format: str, nonzero: bool) -> Tensor:
    """See :func:`backstash.ops.reference.minifloat.minifloat_encode`.

    Args:
        x: float32, bfloat16 or float16 [n].
        format: a name in ``ops/formats.FORMATS``.
        nonzero: whether what is not zero gets the smallest magnitude that is not zero instead of zero.
    """
    form = FORMATS[format]
    codes = x.new_empty(form.words(x.numel()), dtype=form.dtype)
    arguments, constants = (bits_of(x), codes, x.numel(), codes.numel()), _format_constants(form, x.dtype)
    programs = blocks_of(codes.numel(), BLOCK)
    launch(minifloat_encode_kernel, programs, *arguments, NONZERO_STAYS=nonzero, BLOCK=BLOCK, **constants)
    return codes


def minifloat_decode(codes: Tensor, format: str, out: Tensor) -> None:
    """See :func:`backstash.ops.reference.minifloat.minifloat_decode`.

    Raises:
        DamagedPlanesError: the plane has not the format's words for n codes.
    """
    form = FORMATS[format]
    check_plane("minifloat_decode", "codes", codes, form.words(out.numel()), out)
    arguments, constants = (codes, bits_of(out), out.numel()), _format_constants(form, out.dtype)
    launch(minifloat_decode_kernel, blocks_of(out.numel(), BLOCK), *arguments, BLOCK=BLOCK, **constants)


def minifloat_scaled_encode(x: Tensor, format: str, group_size: int) -> tuple[Tensor, Tensor]:
    """See :func:`backstash.ops.reference.minifloat.minifloat_scaled_encode`."""
    form = FORMATS[format]
    codes = x.new_empty(x.numel(), dtype=form.dtype)
    scales = x.new_empty(groups(x.numel(), group_size), dtype=torch.float32)
    constants = _scaled_constants(form, x.dtype, group_size)
    launch(
        minifloat_scaled_encode_kernel,
        blocks_of(scales.numel(), constants["ROWS"]),
        bits_of(x),
        codes,
        bits_of(scales),
        x.numel(),
        CEILING=number_bits(scale_ceiling(form, x.dtype), torch.float32),
        **constants,
    )
    return codes, scales


def minifloat_scaled_decode(codes: Tensor, scales: Tensor, format: str, group_size: int, out: Tensor) -> None:
    """See :func:`backstash.ops.reference.minifloat.minifloat_scaled_decode`.

    Raises:
        DamagedPlanesError: a plane is not of the size that ``out`` needs.
    """
    form = FORMATS[format]
    check_plane("minifloat_scaled_decode", "codes", codes, out.numel(), out)
    check_plane("minifloat_scaled_decode", "scales", scales, groups(out.numel(), group_size), out)
    constants = _scaled_constants(form, out.dtype, group_size)
    arguments = codes, bits_of(scales), bits_of(out), out.numel()
    launch(minifloat_scaled_decode_kernel, blocks_of(scales.numel(), constants["ROWS"]), *arguments, **constants)


def zvc_minifloat_compact(x: Tensor, format: str, offsets: Tensor, values: Tensor, room: int) -> None:
    """Fills ``values`` with codes of the first ``room`` elements that have any bit set. It has zeros if FIELDS > 1."""
    launch(
        zvc_minifloat_compact_kernel,
        offsets.numel(),
        bits_of(x),
        offsets,
        values,
        x.numel(),
        room,
        CHUNK=ZVC_CHUNK,
        num_warps=ZVC_WARPS,
        **_format_constants(FORMATS[format], x.dtype),
    )


def zvc_minifloat_encode(x: Tensor, format: str) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`backstash.ops.reference.minifloat.zvc_minifloat_encode`.

    **Waits for the device**, once, as :func:`zvc_encode` does.
    """
    form = FORMATS[format]
    mask, offsets, count = zvc_masked(x)
    stored = int(count.item())
    values = x.new_zeros(form.words(stored), dtype=form.dtype)
    zvc_minifloat_compact(x, format, offsets, values, stored)
    return mask, offsets, values


def zvc_minifloat_encode_within(x: Tensor, format: str, room: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See :func:`backstash.ops.reference.minifloat.zvc_minifloat_encode_within`. Never waits for the device."""
    mask, offsets, count = zvc_masked(x)
    values = x.new_zeros(FORMATS[format].words(room), dtype=FORMATS[format].dtype)
    zvc_minifloat_compact(x, format, offsets, values, room)
    return mask, offsets, values, count


def zvc_minifloat_decode(mask: Tensor, offsets: Tensor, values: Tensor, format: str, out: Tensor) -> None:
    """See :func:`backstash.ops.reference.minifloat.zvc_minifloat_decode`.

    Raises:
        DamagedPlanesError: a plane has the wrong size, or there are more values than elements; see
            :func:`zvc_decode` for what is not checked.
    """
    form = FORMATS[format]
    check_plane("zvc_minifloat_decode", "mask", mask, bytes_for(out.numel(), 1), out)
    check_plane("zvc_minifloat_decode", "offsets", offsets, zvc_chunks(out.numel()), out)
    if values.numel() > form.words(out.numel()):
        raise DamagedPlanesError(
            f"zvc_minifloat_decode asked for at most {out.numel()} values in {form.words(out.numel())} words, got "
            f"{values.numel()} words. The stash was overwritten or belongs to another tensor; compute the step again."
        )
    launch(
        zvc_minifloat_decode_kernel,
        offsets.numel(),
        mask,
        offsets,
        values,
        bits_of(out),
        out.numel(),
        values.numel(),
        CHUNK=ZVC_CHUNK,
        num_warps=ZVC_WARPS,
        **_format_constants(form, out.dtype),
    )
