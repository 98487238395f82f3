"""Small floating-point formats, on CUDA."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from backstash.codecs.minifloat.formats import FORMATS, Format, scale_ceiling
from backstash.ops import ZVC_CHUNK, bits_of, groups
from backstash.ops.triton.elements import block_offsets, element_bits, row_tile, single_bits
from backstash.ops.triton.launching import ZVC_WARPS, blocks_of, check_plane, launch, launch_elements, number_bits


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


def format_constants(form: Format, dtype: torch.dtype) -> dict[str, Any]:
    """Returns the constants of kernels that code or decode numbers of a format."""
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
    constants = format_constants(form, dtype)
    del constants["SUBNORMALS"], constants["FIELDS"]
    return {**constants, "ROWS": max(1, ZVC_CHUNK // group_size), "GROUP": group_size, "num_warps": ZVC_WARPS}


def minifloat_encode(x: Tensor, format: str, nonzero: bool) -> Tensor:
    form = FORMATS[format]
    codes = x.new_empty(form.words(x.numel()), dtype=form.dtype)
    arguments, constants = (bits_of(x), codes, x.numel(), codes.numel()), format_constants(form, x.dtype)
    launch_elements(minifloat_encode_kernel, codes.numel(), *arguments, NONZERO_STAYS=nonzero, **constants)
    return codes


def minifloat_decode(codes: Tensor, format: str, out: Tensor) -> None:
    form = FORMATS[format]
    check_plane("minifloat_decode", "codes", codes, form.words(out.numel()), out)
    arguments, constants = (codes, bits_of(out), out.numel()), format_constants(form, out.dtype)
    launch_elements(minifloat_decode_kernel, out.numel(), *arguments, **constants)


def minifloat_scaled_encode(x: Tensor, format: str, group_size: int) -> tuple[Tensor, Tensor]:
    form = FORMATS[format]
    codes = x.new_empty(x.numel(), dtype=form.dtype)
    scales = x.new_empty(groups(x.numel(), group_size), dtype=torch.float32)
    constants = _scaled_constants(form, x.dtype, group_size)
    constants["CEILING"] = number_bits(scale_ceiling(form, x.dtype), torch.float32)
    arguments = bits_of(x), codes, bits_of(scales), x.numel()
    launch(minifloat_scaled_encode_kernel, blocks_of(scales.numel(), constants["ROWS"]), *arguments, **constants)
    return codes, scales


def minifloat_scaled_decode(codes: Tensor, scales: Tensor, format: str, group_size: int, out: Tensor) -> None:
    form = FORMATS[format]
    check_plane("minifloat_scaled_decode", "codes", codes, out.numel(), out)
    check_plane("minifloat_scaled_decode", "scales", scales, groups(out.numel(), group_size), out)
    constants = _scaled_constants(form, out.dtype, group_size)
    arguments = codes, bits_of(scales), bits_of(out), out.numel()
    launch(minifloat_scaled_decode_kernel, blocks_of(scales.numel(), constants["ROWS"]), *arguments, **constants)
