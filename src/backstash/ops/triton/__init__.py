"""Triton kernels for CUDA tensors: the launchers. ``kernels`` beside this file has the device code.

Signatures and planes are those of ``ops/reference``, byte for byte. Importing this module imports neither Triton nor
CUDA's runtime; the first launch does. Under ``TRITON_INTERPRET=1`` the same launchers run on CPU tensors, for tests.

Nothing here waits for the device, except :func:`zvc_encode` and the other encoders whose results have a size that only
the device knows (:func:`zvc_encode_staged` does without), and :func:`sz_decode`. For the same reason decoding cannot
raise for planes of the right size and wrong contents, but for that one: their sizes are checked here, on the host; the
kernels keep every access inside its plane.
"""

from __future__ import annotations

import math
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from backstash.errors import DamagedPlanesError
from backstash.ops.formats import FORMATS, Format, groups, scale_ceiling
from backstash.ops.reference import dct_decode as dct_decode  # a baseline: the reference serves
from backstash.ops.reference import dct_encode as dct_encode
from backstash.ops.reference.rle import rle_decode, rle_encode  # noqa: F401  no kernels of their own: plain torch serves
from backstash.ops.schema import CSR_ROW, ZVC_CHUNK, bytes_for, csr_rows, window_bits, zvc_chunks
from backstash.ops.triton.blockquant import blockquant_decode as blockquant_decode
from backstash.ops.triton.blockquant import blockquant_encode as blockquant_encode
from backstash.ops.triton.sz import sz_collect as sz_collect
from backstash.ops.triton.sz import sz_decode as sz_decode
from backstash.ops.triton.sz import sz_decode_flagged as sz_decode_flagged
from backstash.ops.triton.sz import sz_encode as sz_encode
from backstash.ops.triton.sz import sz_encode_staged as sz_encode_staged
from backstash.ops.triton.sz import sz_range as sz_range
from backstash.ops.triton.sz import sz_survey as sz_survey
from backstash.ops.triton.szp import szp_compact as szp_compact
from backstash.ops.triton.szp import szp_decode as szp_decode
from backstash.ops.triton.szp import szp_encode as szp_encode
from backstash.ops.triton.szp import szp_encode_staged as szp_encode_staged
from backstash.ops.triton.szp import szp_range as szp_range
from backstash.saved import Test

BLOCK_BYTES = 256
"""Bytes of a bit plane that one program makes or reads: 2048 mask bits, 16 elements for each of its 128 threads."""

BLOCK = 1024
"""Elements that one program decodes from fields wider than a bit."""

ZVC_WARPS = 8
"""Warps for a chunk of ZVC_CHUNK elements: 16 elements per thread, as in the other kernels (Triton's default is 4)."""

CSR_ROWS = 16
"""Rows of CSR that one program makes or reads: 4096 elements, as many as a chunk of ZVC."""

_BITS_DTYPE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def available() -> bool:
    """Whether Triton is installed. Does not import it."""
    return find_spec("triton") is not None


@cache
def _kernels() -> ModuleType:
    from backstash.ops.triton import kernels

    return kernels


def _launch(kernel: Any, programs: int, *args: Any, **constants: Any) -> None:
    """Run ``programs`` programs on the device of the first argument. CUDA refuses a grid of none, so none is asked."""
    if programs:
        with torch.cuda.device_of(args[0]):  # Triton launches on the current device, whatever its arguments say
            # No kernel here multiplies floats. Saying so keeps Triton 3.9 from warning that its default will change.
            kernel[(programs,)](*args, enable_fp_fusion=False, **constants)


def _bits_of(x: Tensor) -> Tensor:
    return x.view(_BITS_DTYPE[x.element_size()])


def _bits_of_number(value: float, dtype: torch.dtype, wide: torch.dtype | None = None) -> int:
    """The bit pattern of ``value`` rounded to ``dtype``, and then widened to ``wide`` if that is given.

    Made on the CPU, whatever the default device is: nothing is copied to or from a GPU.
    """
    return int(_bits_of(torch.tensor([value], dtype=dtype, device="cpu").to(wide or dtype)).item())


def _blocks(n: int, block: int) -> int:
    return (n + block - 1) // block


def _fields_per_byte(bits: int) -> int:
    """How many fields of ``bits`` bits may have bits in one byte: 2 for 4 bits, 4 for 3 bits."""
    return _blocks(bits - math.gcd(bits, 8) + 8, bits)


def _bytes_per_field(bits: int) -> int:
    """How many bytes one field of ``bits`` bits may have bits in: 1 for 4 bits, 2 for 3 bits."""
    return _blocks(8 - math.gcd(bits, 8) + bits, 8)


def _check_plane(op: str, name: str, plane: Tensor, expected: int, out: Tensor) -> None:
    if plane.numel() != expected:
        raise DamagedPlanesError(
            f"{op} asked for the {expected} elements of plane '{name}' that {out.numel()} values of "
            f"{str(out.dtype).removeprefix('torch.')} take, got {plane.numel()}. The stash was overwritten or cut "
            f"short; compute the step again."
        )


def bitmask_encode(x: Tensor, test: int, lo: float, hi: float) -> Tensor:
    """One bit per element: [n] floating to uint8 [ceil(n / 8)]. See ``reference.bitmask_encode``."""
    mask = x.new_empty(bytes_for(x.numel(), 1), dtype=torch.uint8)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    nonzero = test == Test.NONZERO.code
    _launch(
        _kernels().bitmask_encode_kernel,
        _blocks(mask.numel(), BLOCK_BYTES),
        _bits_of(x) if nonzero else x,
        mask,
        x.numel(),
        0 if nonzero else _bits_of_number(lo, x.dtype, wide),
        0 if nonzero else _bits_of_number(hi, x.dtype, wide),
        TEST=test,
        BLOCK_BYTES=BLOCK_BYTES,
    )
    return mask


def bitmask_decode(mask: Tensor, out: Tensor, if_set: float, if_clear: float) -> None:
    """Fill ``out`` [n] (any floating dtype, bool or uint8) with one of two values per bit.

    Raises:
        DamagedPlanesError: the mask has not ceil(n / 8) bytes.
    """
    _check_plane("bitmask_decode", "mask", mask, bytes_for(out.numel(), 1), out)
    _launch(
        _kernels().bitmask_decode_kernel,
        _blocks(mask.numel(), BLOCK_BYTES),
        mask,
        _bits_of(out),
        out.numel(),
        _bits_of_number(if_set, out.dtype),
        _bits_of_number(if_clear, out.dtype),
        BLOCK_BYTES=BLOCK_BYTES,
    )


def binary_encode(x: Tensor, pair: Tensor) -> tuple[Tensor, Tensor]:
    """One bit per element of a tensor whose elements are all ``pair[0]`` or ``pair[1]``, bitwise.

    Args:
        x: [n], 2, 4 or 8 bytes per element.
        pair: [2] of the same dtype, on the same device.

    Returns:
        The mask, uint8 [ceil(n / 8)], and int64 [1] on the device: how many elements are neither.
    """
    mask = x.new_empty(bytes_for(x.numel(), 1), dtype=torch.uint8)
    strangers = x.new_zeros(1, dtype=torch.int64)
    _launch(
        _kernels().binary_encode_kernel,
        _blocks(mask.numel(), BLOCK_BYTES),
        _bits_of(x),
        _bits_of(pair),
        mask,
        strangers,
        x.numel(),
        BLOCK_BYTES=BLOCK_BYTES,
    )
    return mask, strangers


def binary_decode(mask: Tensor, pair: Tensor, out: Tensor) -> None:
    """Fill ``out`` [n] with ``pair[bit]``, bit for bit.

    Raises:
        DamagedPlanesError: the mask has not ceil(n / 8) bytes, or the pair not 2 elements.
    """
    _check_plane("binary_decode", "mask", mask, bytes_for(out.numel(), 1), out)
    _check_plane("binary_decode", "pair", pair, 2, out)
    _launch(
        _kernels().binary_decode_kernel,
        _blocks(mask.numel(), BLOCK_BYTES),
        mask,
        _bits_of(pair),
        _bits_of(out),
        out.numel(),
        BLOCK_BYTES=BLOCK_BYTES,
    )


def _zvc_masked(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """First pass of ZVC: the mask, the offsets, and int64 [1], the number of values, all on the device."""
    chunks = zvc_chunks(x.numel())
    mask = x.new_empty(bytes_for(x.numel(), 1), dtype=torch.uint8)
    counts = x.new_empty(chunks, dtype=torch.int64)
    kernel = _kernels().zvc_mask_kernel
    _launch(kernel, chunks, _bits_of(x), mask, counts, x.numel(), CHUNK_BYTES=ZVC_CHUNK // 8, num_warps=ZVC_WARPS)
    ends = counts.cumsum(0)
    return mask, ends - counts, ends[-1:] if chunks else x.new_zeros(1, dtype=torch.int64)


def _zvc_compact(x: Tensor, offsets: Tensor, values: Tensor) -> None:
    """Second pass of ZVC: fill ``values``, which has room for them, with the elements that have any bit set."""
    kernel = _kernels().zvc_compact_kernel
    _launch(
        kernel,
        offsets.numel(),
        _bits_of(x),
        offsets,
        _bits_of(values),
        x.numel(),
        CHUNK=ZVC_CHUNK,
        num_warps=ZVC_WARPS,
    )


def zvc_encode(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Zero-value compression: a bit per element and the elements that have any bit set, in order.

    **Waits for the device**, once, after the first of two passes: the size of the values plane depends on the data and
    the host allocates it. In return nothing but the planes themselves is allocated (and 8 bytes per chunk, twice).
    :func:`zvc_encode_staged` does not wait, and takes room for all of ``x`` instead.

    Args:
        x: [n], 2, 4 or 8 bytes per element.

    Returns:
        mask uint8 [ceil(n / 8)]; offsets int64 [ceil(n / ZVC_CHUNK)], where each chunk's first value stands in the
        values plane; values [number of set bits] of ``x``'s dtype.
    """
    mask, offsets, count = _zvc_masked(x)
    values = x.new_empty(int(count.item()))
    _zvc_compact(x, offsets, values)
    return mask, offsets, values


def zvc_encode_staged(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """:func:`zvc_encode` that never waits for the device: the values go to the front of a buffer as large as ``x``.

    Once the count has reached the host, ``staging[:count].clone()`` is the values plane.

    Args:
        x: [n], 2, 4 or 8 bytes per element.

    Returns:
        mask and offsets as :func:`zvc_encode` has them; staging [n] of ``x``'s dtype, written up to the count only;
        the count of values, int64 [1] on the device.
    """
    mask, offsets, count = _zvc_masked(x)
    staging = torch.empty_like(x)
    _zvc_compact(x, offsets, staging)
    return mask, offsets, staging, count


def zvc_decode(mask: Tensor, offsets: Tensor, values: Tensor, out: Tensor) -> None:
    """Fill ``out`` [n] from the planes of :func:`zvc_encode`.

    Raises:
        DamagedPlanesError: a plane has the wrong size, or there are more values than elements. That the mask's bits,
            the offsets and the values agree is not checked, which would wait for the device: an element whose value
            the planes do not have becomes zero.
    """
    _check_plane("zvc_decode", "mask", mask, bytes_for(out.numel(), 1), out)
    _check_plane("zvc_decode", "offsets", offsets, zvc_chunks(out.numel()), out)
    if values.numel() > out.numel():
        raise DamagedPlanesError(
            f"zvc_decode asked for at most {out.numel()} values, got {values.numel()}. The stash was overwritten or "
            f"belongs to another tensor; compute the step again."
        )
    _launch(
        _kernels().zvc_decode_kernel,
        offsets.numel(),
        mask,
        offsets,
        _bits_of(values),
        _bits_of(out),
        out.numel(),
        values.numel(),
        CHUNK=ZVC_CHUNK,
        num_warps=ZVC_WARPS,
    )


def csr_counted(x: Tensor) -> Tensor:
    """First pass of CSR: the rows plane, whose last entry is the number of values, on the device."""
    programs = csr_rows(x.numel())
    counts = x.new_empty(programs, dtype=torch.int32)
    kernel = _kernels().csr_count_kernel
    _launch(kernel, _blocks(programs, CSR_ROWS), _bits_of(x), counts, x.numel(), ROWS=CSR_ROWS, ROW=CSR_ROW)
    rows = x.new_zeros(programs + 1, dtype=torch.int32)
    torch.cumsum(counts, 0, dtype=torch.int32, out=rows[1:])
    return rows


def csr_compact(x: Tensor, rows: Tensor, columns: Tensor, values: Tensor) -> None:
    """Second pass of CSR: fill ``columns`` and ``values``, which have room for what ``rows`` announces."""
    _launch(
        _kernels().csr_compact_kernel,
        _blocks(csr_rows(x.numel()), CSR_ROWS),
        _bits_of(x),
        rows,
        columns,
        _bits_of(values),
        x.numel(),
        ROWS=CSR_ROWS,
        ROW=CSR_ROW,
        num_warps=ZVC_WARPS,
    )


def csr_encode(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compressed sparse rows. See ``reference.csr_encode``.

    **Waits for the device**, once, after the first of two passes, as :func:`zvc_encode` does.

    Args:
        x: [n], 2, 4 or 8 bytes per element, n < 2**31.

    Returns:
        columns uint8 [number of elements that have any bit set]; rows int32 [ceil(n / CSR_ROW) + 1]; values [as many
        as columns] of ``x``'s dtype.
    """
    rows = csr_counted(x)
    stored = int(rows[-1].item())
    columns, values = x.new_empty(stored, dtype=torch.uint8), x.new_empty(stored)
    csr_compact(x, rows, columns, values)
    return columns, rows, values


def csr_decode(columns: Tensor, rows: Tensor, values: Tensor, out: Tensor) -> None:
    """Fill ``out`` [n] from the planes of :func:`csr_encode`.

    Raises:
        DamagedPlanesError: a plane has the wrong size, or there are more values than elements. That the rows, the
            columns and the values agree is not checked, which would wait for the device: no access leaves its plane.
    """
    _check_plane("csr_decode", "rows", rows, csr_rows(out.numel()) + 1, out)
    _check_plane("csr_decode", "columns", columns, values.numel(), out)
    if values.numel() > out.numel():
        raise DamagedPlanesError(
            f"csr_decode asked for at most {out.numel()} values, got {values.numel()}. The stash was overwritten or "
            f"belongs to another tensor; compute the step again."
        )
    _launch(
        _kernels().csr_decode_kernel,
        _blocks(csr_rows(out.numel()), CSR_ROWS),
        columns,
        rows,
        _bits_of(values),
        _bits_of(out),
        out.numel(),
        values.numel(),
        ROWS=CSR_ROWS,
        ROW=CSR_ROW,
        num_warps=ZVC_WARPS,
    )


def fewbit_encode(x: Tensor, thresholds: list[float], bits: int) -> tuple[Tensor, Tensor]:
    """How many thresholds each element exceeds, in ``bits`` bits. See ``reference.fewbit_encode``.

    Returns:
        uint8 [ceil(n * bits / 8)]; and int64 [1] on the device: how many elements are not finite.
    """
    packed = x.new_empty(bytes_for(x.numel(), bits), dtype=torch.uint8)
    nonfinite = x.new_zeros(1, dtype=torch.int64)
    _launch(
        _kernels().fewbit_encode_kernel,
        _blocks(packed.numel(), BLOCK_BYTES),
        x,
        packed,
        nonfinite,
        x.numel(),
        packed.numel(),
        tuple(float(threshold) for threshold in thresholds),
        COUNT=len(thresholds),
        BITS=bits,
        FIELDS_PER_BYTE=_fields_per_byte(bits),
        BLOCK_BYTES=BLOCK_BYTES,
    )
    return packed, nonfinite


def fewbit_decode(packed: Tensor, values: list[float], bits: int, out: Tensor) -> None:
    """Fill ``out`` [n] with ``values[field]``, rounded to its dtype.

    Raises:
        DamagedPlanesError: the packed plane has not ceil(n * bits / 8) bytes.
    """
    _check_plane("fewbit_decode", "packed", packed, bytes_for(out.numel(), bits), out)
    _launch(
        _kernels().fewbit_decode_kernel,
        _blocks(out.numel(), BLOCK),
        packed,
        _bits_of(out),
        out.numel(),
        packed.numel(),
        tuple(_bits_of_number(value, out.dtype) for value in values),
        BITS=bits,
        BYTES_PER_FIELD=_bytes_per_field(bits),
        BLOCK=BLOCK,
    )


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
    """Each element as a number of a small format. See ``reference.minifloat_encode``.

    Args:
        x: float32, bfloat16 or float16 [n].
        format: a name in ``ops/formats.FORMATS``.
        nonzero: whether what is not zero gets the smallest magnitude that is not zero instead of zero.
    """
    form = FORMATS[format]
    codes = x.new_empty(form.words(x.numel()), dtype=form.dtype)
    _launch(
        _kernels().minifloat_encode_kernel,
        _blocks(codes.numel(), BLOCK),
        _bits_of(x),
        codes,
        x.numel(),
        codes.numel(),
        NONZERO_STAYS=nonzero,
        BLOCK=BLOCK,
        **_format_constants(form, x.dtype),
    )
    return codes


def minifloat_decode(codes: Tensor, format: str, out: Tensor) -> None:
    """Fill ``out`` [n] from the plane of :func:`minifloat_encode`.

    Raises:
        DamagedPlanesError: the plane has not the format's words for n codes.
    """
    form = FORMATS[format]
    _check_plane("minifloat_decode", "codes", codes, form.words(out.numel()), out)
    _launch(
        _kernels().minifloat_decode_kernel,
        _blocks(out.numel(), BLOCK),
        codes,
        _bits_of(out),
        out.numel(),
        BLOCK=BLOCK,
        **_format_constants(form, out.dtype),
    )


def minifloat_scaled_encode(x: Tensor, format: str, group_size: int) -> tuple[Tensor, Tensor]:
    """Codes of what is divided by its group's scale, and the scales. See ``reference.minifloat_scaled_encode``."""
    form = FORMATS[format]
    codes = x.new_empty(x.numel(), dtype=form.dtype)
    scales = x.new_empty(groups(x.numel(), group_size), dtype=torch.float32)
    constants = _scaled_constants(form, x.dtype, group_size)
    _launch(
        _kernels().minifloat_scaled_encode_kernel,
        _blocks(scales.numel(), constants["ROWS"]),
        _bits_of(x),
        codes,
        _bits_of(scales),
        x.numel(),
        CEILING=_bits_of_number(scale_ceiling(form, x.dtype), torch.float32),
        **constants,
    )
    return codes, scales


def minifloat_scaled_decode(codes: Tensor, scales: Tensor, format: str, group_size: int, out: Tensor) -> None:
    """Fill ``out`` [n] from the planes of :func:`minifloat_scaled_encode`.

    Raises:
        DamagedPlanesError: a plane is not of the size that ``out`` needs.
    """
    form = FORMATS[format]
    _check_plane("minifloat_scaled_decode", "codes", codes, out.numel(), out)
    _check_plane("minifloat_scaled_decode", "scales", scales, groups(out.numel(), group_size), out)
    constants = _scaled_constants(form, out.dtype, group_size)
    _launch(
        _kernels().minifloat_scaled_decode_kernel,
        _blocks(scales.numel(), constants["ROWS"]),
        codes,
        _bits_of(scales),
        _bits_of(out),
        out.numel(),
        **constants,
    )


def zvc_minifloat_compact(x: Tensor, format: str, offsets: Tensor, values: Tensor) -> None:
    """Fill ``values`` with the codes of the elements that have any bit set; it has room, and zeros if FIELDS > 1."""
    _launch(
        _kernels().zvc_minifloat_compact_kernel,
        offsets.numel(),
        _bits_of(x),
        offsets,
        values,
        x.numel(),
        CHUNK=ZVC_CHUNK,
        num_warps=ZVC_WARPS,
        **_format_constants(FORMATS[format], x.dtype),
    )


def zvc_minifloat_encode(x: Tensor, format: str) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`zvc_encode` with codes in place of the values, none of which becomes zero.

    **Waits for the device**, once, as :func:`zvc_encode` does.
    """
    form = FORMATS[format]
    mask, offsets, count = _zvc_masked(x)
    values = x.new_zeros(form.words(int(count.item())), dtype=form.dtype)
    zvc_minifloat_compact(x, format, offsets, values)
    return mask, offsets, values


def zvc_minifloat_decode(mask: Tensor, offsets: Tensor, values: Tensor, format: str, out: Tensor) -> None:
    """Fill ``out`` [n] from the planes of :func:`zvc_minifloat_encode`.

    Raises:
        DamagedPlanesError: a plane has the wrong size, or there are more values than elements; see
            :func:`zvc_decode` for what is not checked.
    """
    form = FORMATS[format]
    _check_plane("zvc_minifloat_decode", "mask", mask, bytes_for(out.numel(), 1), out)
    _check_plane("zvc_minifloat_decode", "offsets", offsets, zvc_chunks(out.numel()), out)
    if values.numel() > form.words(out.numel()):
        raise DamagedPlanesError(
            f"zvc_minifloat_decode asked for at most {out.numel()} values in {form.words(out.numel())} words, got "
            f"{values.numel()} words. The stash was overwritten or belongs to another tensor; compute the step again."
        )
    _launch(
        _kernels().zvc_minifloat_decode_kernel,
        offsets.numel(),
        mask,
        offsets,
        values,
        _bits_of(out),
        out.numel(),
        values.numel(),
        CHUNK=ZVC_CHUNK,
        num_warps=ZVC_WARPS,
        **_format_constants(form, out.dtype),
    )


def narrow_encode(x: Tensor, bits: int, base: int) -> Tensor:
    """Integers (or bool) [n] as ``x - base`` in ``bits`` bits each, 1 to 32. ``x - base`` must fit.

    Returns:
        uint8 [ceil(n * bits / 8)]. See ``reference.pack``.
    """
    packed = x.new_empty(bytes_for(x.numel(), bits), dtype=torch.uint8)
    _launch(
        _kernels().narrow_encode_kernel,
        _blocks(packed.numel(), BLOCK_BYTES),
        x,
        packed,
        x.numel(),
        packed.numel(),
        base,
        BITS=bits,
        FIELDS_PER_BYTE=_fields_per_byte(bits),
        BLOCK_BYTES=BLOCK_BYTES,
    )
    return packed


def narrow_decode(packed: Tensor, bits: int, base: int, out: Tensor) -> None:
    """Fill ``out`` [n] of an integer dtype or bool with ``field + base``.

    Raises:
        DamagedPlanesError: the packed plane has not ceil(n * bits / 8) bytes.
    """
    _check_plane("narrow_decode", "packed", packed, bytes_for(out.numel(), bits), out)
    _launch(
        _kernels().narrow_decode_kernel,
        _blocks(out.numel(), BLOCK),
        packed,
        out,
        out.numel(),
        packed.numel(),
        base,
        BITS=bits,
        BYTES_PER_FIELD=_bytes_per_field(bits),
        BLOCK=BLOCK,
    )


def _window_constants(
    numel: int, input_size: list[int], kernel: list[int], stride: list[int], padding: list[int], dilation: list[int]
) -> dict[str, Any]:
    return {
        "KERNEL": tuple(kernel),
        "STRIDE": tuple(stride),
        "PADDING": tuple(padding),
        "DILATION": tuple(dilation),
        "DIMS": len(kernel),
        # Half of int32's range, so that padding and the last, partial block fit as well.
        "WIDE": max(numel, math.prod(input_size)) >= 2**30,
        "BITS": window_bits(kernel),
    }


def window_encode(
    indices: Tensor,
    inner: int,
    input_size: list[int],
    output_size: list[int],
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
) -> tuple[Tensor, Tensor]:
    """Max-pool indices as positions inside their windows.

    Args:
        indices: int64 [n] in memory order, each an index into the flattened spatial input, as max_pool returns them.
        inner: elements between spatial neighbours in memory: 1 for contiguous, the channels for channels_last.
        input_size, output_size, kernel, stride, padding, dilation: of the pooling, one entry per spatial dimension.

    Returns:
        uint8 [ceil(n * window_bits(kernel) / 8)], and int64 [1] on the device: how many indices are in no position
        of their window.
    """
    bits = window_bits(kernel)
    packed = indices.new_empty(bytes_for(indices.numel(), bits), dtype=torch.uint8)
    strays = indices.new_zeros(1, dtype=torch.int64)
    _launch(
        _kernels().window_encode_kernel,
        _blocks(packed.numel(), BLOCK_BYTES),
        indices,
        packed,
        strays,
        indices.numel(),
        packed.numel(),
        inner,
        math.prod(input_size),
        tuple(input_size),
        tuple(output_size),
        **_window_constants(indices.numel(), input_size, kernel, stride, padding, dilation),
        FIELDS_PER_BYTE=_fields_per_byte(bits),
        BLOCK_BYTES=BLOCK_BYTES,
    )
    return packed, strays


def window_decode(
    packed: Tensor,
    inner: int,
    input_size: list[int],
    output_size: list[int],
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    out: Tensor,
) -> None:
    """Fill ``out`` int64 [n] with the indices that :func:`window_encode` was given.

    Raises:
        DamagedPlanesError: the packed plane has not ceil(n * window_bits(kernel) / 8) bytes.
    """
    bits = window_bits(kernel)
    _check_plane("window_decode", "packed", packed, bytes_for(out.numel(), bits), out)
    _launch(
        _kernels().window_decode_kernel,
        _blocks(out.numel(), BLOCK),
        packed,
        out,
        out.numel(),
        packed.numel(),
        inner,
        tuple(input_size),
        tuple(output_size),
        **_window_constants(out.numel(), input_size, kernel, stride, padding, dilation),
        BYTES_PER_FIELD=_bytes_per_field(bits),
        BLOCK=BLOCK,
    )
