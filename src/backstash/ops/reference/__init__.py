"""Plain torch, dull on purpose: the definition of every plane's layout. Runs on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from backstash.errors import DamagedPlanesError
from backstash.ops.formats import FORMATS, LEAST_SCALE, Format, groups, scale_ceiling
from backstash.ops.reference.blockquant import blockquant_decode as blockquant_decode
from backstash.ops.reference.blockquant import blockquant_encode as blockquant_encode
from backstash.ops.reference.dct import dct_decode as dct_decode
from backstash.ops.reference.dct import dct_encode as dct_encode
from backstash.ops.reference.sz import sz_decode as sz_decode
from backstash.ops.reference.sz import sz_encode as sz_encode
from backstash.ops.reference.sz import sz_range as sz_range
from backstash.ops.reference.sz import sz_survey as sz_survey
from backstash.ops.reference.szp import szp_decode as szp_decode
from backstash.ops.reference.szp import szp_encode as szp_encode
from backstash.ops.reference.szp import szp_range as szp_range
from backstash.ops.schema import CSR_ROW, ZVC_CHUNK, bytes_for, csr_rows, window_bits, zvc_chunks
from backstash.saved import Test

_BITS_DTYPE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(x: Tensor) -> Tensor:
    """``x`` seen as integers of the same width, so that -0.0 and NaN payloads compare as they are stored."""
    return x.view(_BITS_DTYPE[x.element_size()])


def pack(fields: Tensor, bits: int) -> Tensor:
    """Pack integers into a little-endian bit stream: field ``i`` occupies bits ``[i * bits, (i + 1) * bits)``.

    Args:
        fields: int64 [n], each in ``[0, 2**bits)``.
        bits: width of a field, 1 to 32.

    Returns:
        uint8 [ceil(n * bits / 8)]; bits past the last field are zero.
    """
    shifts = torch.arange(bits, device=fields.device)
    stream = ((fields[:, None] >> shifts) & 1).reshape(-1)
    padded = stream.new_zeros(bytes_for(fields.numel(), bits) * 8)
    padded[: stream.numel()] = stream
    weights = 1 << torch.arange(8, device=fields.device)
    return (padded.view(-1, 8) * weights).sum(1).to(torch.uint8)


def unpack(packed: Tensor, bits: int, numel: int) -> Tensor:
    """The inverse of :func:`pack`: uint8 [ceil(numel * bits / 8)] to int64 [numel]."""
    shifts = torch.arange(8, device=packed.device)
    stream = ((packed.long()[:, None] >> shifts) & 1).reshape(-1)[: numel * bits]
    weights = 1 << torch.arange(bits, device=packed.device)
    return (stream.view(-1, bits) * weights).sum(1)


def per_chunk(flags: Tensor) -> Tensor:
    """How many of a bool [n] are set in each chunk of ZVC_CHUNK: int64 [ceil(n / ZVC_CHUNK)]."""
    counts = torch.zeros(zvc_chunks(flags.numel()) * ZVC_CHUNK, dtype=torch.int64, device=flags.device)
    counts[: flags.numel()] = flags
    return counts.view(-1, ZVC_CHUNK).sum(1)


def look(x: Tensor, runs: int, run: int, step: int) -> tuple[int, int]:
    """How many elements of a sample are not zero, and how many bit patterns it has: 1, 2, or 3 for more.

    Args:
        x: [n].
        runs, run, step: the sample: so many runs of so many neighbours, each beginning ``step`` after the last one.
    """
    bits = bits_of(x.as_strided((runs, run), (step, 1)).reshape(-1))
    return int(torch.count_nonzero(bits)), min(3, bits.unique().numel())


def passes(x: Tensor, test: int, lo: float, hi: float) -> Tensor:
    """Outcome of a :class:`~backstash.saved.Test` for every element, bool [n]; bounds rounded to ``x.dtype``."""
    kind = list(Test)[test]
    if kind is Test.NONZERO:
        return bits_of(x) != 0
    low = torch.tensor(lo, dtype=x.dtype, device=x.device)
    high = torch.tensor(hi, dtype=x.dtype, device=x.device)
    if kind is Test.NOT_LE:
        return ~(x <= low)
    if kind is Test.GT:
        return x > low
    if kind is Test.INSIDE:
        return (low < x) & (x < high)
    if kind is Test.NOT_OUTSIDE:
        return ~((x <= low) | (x >= high))
    return (low <= x) & (x <= high)


def bitmask_encode(x: Tensor, test: int, lo: float, hi: float) -> Tensor:
    """One bit per element: [n] floating to uint8 [ceil(n / 8)], element ``i`` in bit ``i % 8`` of byte ``i // 8``."""
    return pack(passes(x, test, lo, hi).long(), 1)


def bitmask_decode(mask: Tensor, out: Tensor, if_set: float, if_clear: float) -> None:
    """Fill ``out`` [n] (any floating dtype, bool or uint8) with one of two values per bit."""
    flags = unpack(mask, 1, out.numel()).bool()
    out.copy_(torch.where(flags, torch.tensor(if_set, dtype=out.dtype), torch.tensor(if_clear, dtype=out.dtype)))


def binary_encode(x: Tensor, pair: Tensor) -> tuple[Tensor, Tensor]:
    """One bit per element of a tensor whose elements are all ``pair[0]`` (bit 0) or ``pair[1]`` (bit 1), bitwise.

    Args:
        x: [n], 2, 4 or 8 bytes per element.
        pair: [2] of the same dtype.

    Returns:
        The mask, uint8 [ceil(n / 8)], and int64 [1]: how many elements are neither. Not zero: the mask is useless.
    """
    bits, two = bits_of(x), bits_of(pair)
    other = bits != two[0]
    return pack(other.long(), 1), (other & (bits != two[1])).sum().view(1)


def binary_decode(mask: Tensor, pair: Tensor, out: Tensor) -> None:
    """Fill ``out`` [n] with ``pair[bit]``, bit for bit."""
    bits_of(out).copy_(bits_of(pair)[unpack(mask, 1, out.numel())])


def zvc_encode(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Zero-value compression: a bit per element and the elements that have any bit set, in order.

    Args:
        x: [n], 2, 4 or 8 bytes per element.

    Returns:
        mask uint8 [ceil(n / 8)]; offsets int64 [ceil(n / ZVC_CHUNK)], where each chunk's first value stands in the
        values plane; values [number of set bits] of ``x``'s dtype.
    """
    flags = bits_of(x) != 0
    counts = per_chunk(flags)
    return pack(flags.long(), 1), counts.cumsum(0) - counts, x[flags]


def zvc_decode(mask: Tensor, offsets: Tensor, values: Tensor, out: Tensor) -> None:
    """Fill ``out`` [n] from the planes of :func:`zvc_encode`.

    Raises:
        DamagedPlanesError: the mask's bits, the offsets and the number of values do not agree.
    """
    flags = unpack(mask, 1, out.numel()).bool()
    counts = per_chunk(flags)
    if int(counts.sum()) != values.numel() or not torch.equal(counts.cumsum(0) - counts, offsets):
        raise DamagedPlanesError(zvc_damage(values.numel()))
    bits_of(out).zero_()
    bits_of(out)[flags] = bits_of(values)


def zvc_damage(stored: int) -> str:
    """The message of a ZVC stash whose planes disagree."""
    return (
        f"zvc_decode asked for the values that the mask and the offsets announce, got planes that disagree "
        f"({stored} values stored). The stash was overwritten or cut short; compute the step again."
    )


def csr_encode(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compressed sparse rows: the elements that have any bit set and, of each, its place in a row of CSR_ROW elements.

    Args:
        x: [n], 2, 4 or 8 bytes per element, n < 2**31.

    Returns:
        columns uint8 [number of elements that have any bit set]; rows int32 [ceil(n / CSR_ROW) + 1], where row ``r``
        has the columns and values ``rows[r]`` to ``rows[r + 1]``; values [as many] of ``x``'s dtype.
    """
    where = bits_of(x).nonzero().view(-1)
    rows = torch.zeros(csr_rows(x.numel()) + 1, dtype=torch.int32, device=x.device)
    rows[1:] = torch.bincount(where // CSR_ROW, minlength=csr_rows(x.numel())).cumsum(0)
    return (where % CSR_ROW).to(torch.uint8), rows, x[where]


def csr_decode(columns: Tensor, rows: Tensor, values: Tensor, out: Tensor) -> None:
    """Fill ``out`` [n] from the planes of :func:`csr_encode`.

    Raises:
        DamagedPlanesError: the rows do not add up to the columns and values, or columns do not rise within a row, or
            one is past the end of ``out``.
    """
    if rows.numel() != csr_rows(out.numel()) + 1 or columns.numel() != values.numel():
        raise DamagedPlanesError(csr_damage(values.numel()))
    counts = rows.long().diff()
    if int(rows[0]) != 0 or int(rows[-1]) != values.numel() or bool(((counts < 0) | (counts > CSR_ROW)).any()):
        raise DamagedPlanesError(csr_damage(values.numel()))
    starts = torch.arange(csr_rows(out.numel()), device=out.device) * CSR_ROW
    where = starts.repeat_interleave(counts) + columns
    if bool((where.diff() <= 0).any()) or bool((where[-1:] >= out.numel()).any()):
        raise DamagedPlanesError(csr_damage(values.numel()))
    bits_of(out).zero_()
    bits_of(out)[where] = bits_of(values)


def csr_damage(stored: int) -> str:
    """The message of a CSR stash whose planes disagree."""
    return (
        f"csr_decode asked for the columns and values that the rows announce, got planes that disagree "
        f"({stored} values stored). The stash was overwritten or cut short; compute the step again."
    )


def fewbit_encode(x: Tensor, thresholds: list[float], bits: int) -> tuple[Tensor, Tensor]:
    """How many thresholds each element exceeds, in ``bits`` bits: see :func:`pack`.

    -0.0 is 0.0; infinities and NaN exceed none.

    Args:
        x: float32, bfloat16 or float16 [n], compared as float32.
        thresholds: fewer than 2**bits numbers of float32, rising.
        bits: width of a field, 1 to 4.

    Returns:
        uint8 [ceil(n * bits / 8)]; and int64 [1]: how many elements are not finite.
    """
    edges = torch.tensor(thresholds, dtype=torch.float32, device=x.device)
    nonfinite = ~x.isfinite()
    codes = torch.bucketize(x.float(), edges).masked_fill(nonfinite, 0)
    return pack(codes, bits), nonfinite.sum().view(1)


def fewbit_decode(packed: Tensor, values: list[float], bits: int, out: Tensor) -> None:
    """Fill ``out`` [n] with ``values[field]``, rounded to its dtype; there are 2**bits values."""
    table = torch.tensor(values, dtype=out.dtype, device=out.device)
    out.copy_(table[unpack(packed, bits, out.numel())])


def scale_by_codes(x: Tensor, packed: Tensor, table: Tensor) -> Tensor:
    """``x`` [n] times ``table[field]``; there are 2, 4, 8 or 16 values, none of which is NaN.

    Which of two NaN stays is up to the compiler.
    """
    return x * table[unpack(packed, table.numel().bit_length() - 1, x.numel())]


def _minifloat_codes(x: Tensor, form: Format, nonzero: bool, negative: Tensor) -> Tensor:
    """Codes int64 [n], one each; see :func:`minifloat_encode`."""
    single = x.float()
    magnitude, drop = single.view(torch.int32).long() & 0x7FFFFFFF, 23 - form.mantissa
    # Rounded as an integer, by adding half of what is dropped, less one unless what is kept is odd.
    code = (magnitude + (1 << drop - 1) - 1 + ((magnitude >> drop) & 1)) >> drop
    code -= (127 - form.bias) << form.mantissa
    if form.subnormals:
        steps = single.abs().double() * 2.0 ** (form.bias + form.mantissa - 1)
        code = torch.where(steps < 2**form.mantissa, steps.round().long(), code)
    small = torch.where(magnitude != 0, form.least, 0) if nonzero else 0
    code = torch.where(code < form.least, small, code).clamp(max=form.top)
    code = torch.where(x.isnan(), form.nan, code)
    return code | (negative.long() << (form.bits - 1))


def _minifloat_words(codes: Tensor, form: Format) -> Tensor:
    """Codes int64 [n] as a plane."""
    padded = codes.new_zeros(form.words(codes.numel()) * form.fields)
    padded[: codes.numel()] = codes
    shifts = form.bits * torch.arange(form.fields, device=codes.device)
    return (padded.view(-1, form.fields) << shifts).sum(1).to(form.dtype)


def _minifloat_magnitudes(words: Tensor, form: Format, numel: int) -> tuple[Tensor, Tensor, Tensor]:
    """What a plane holds, [numel] each: magnitudes float64, 0 for NaN; which are NaN; which have a sign."""
    shifts = form.bits * torch.arange(form.fields, device=words.device)
    codes = ((words.long()[:, None] >> shifts) & ((1 << form.bits) - 1)).view(-1)[:numel]
    magnitude = codes & form.nan
    exponent, fraction = magnitude >> form.mantissa, magnitude & ((1 << form.mantissa) - 1)
    normal = torch.ldexp(fraction.double() + 2**form.mantissa, exponent - form.bias - form.mantissa)
    small = fraction.double() * 2.0 ** (1 - form.bias - form.mantissa) if form.subnormals else torch.zeros_like(normal)
    nan = magnitude > form.top
    return torch.where(exponent > 0, normal, small).masked_fill(nan, 0.0), nan, codes != magnitude


def _fill(out: Tensor, magnitudes: Tensor, nan: Tensor, negative: Tensor) -> None:
    """Fill ``out``. A NaN is the quiet one without a payload."""
    out.copy_(torch.where(negative, -magnitudes, magnitudes))
    quiet = torch.tensor(float("nan"), dtype=out.dtype, device=out.device).abs()
    bits = bits_of(out)
    bits.copy_(torch.where(nan, bits | bits_of(quiet), bits))


def minifloat_encode(x: Tensor, format: str, nonzero: bool) -> Tensor:
    """Each element as a number of a small format (see :mod:`backstash.ops.formats`): its sign and a magnitude.

    The magnitude is rounded to the format's mantissa bits, ties to even, as if exponents had no end; then, what is
    above the format's largest one, infinities too, becomes that; what is below its smallest normal one becomes zero, or
    in a format with subnormals is rounded to one of these. A NaN stays a NaN with its sign; its payload gets lost.

    Args:
        x: float32, bfloat16 or float16 [n].
        format: a name in FORMATS.
        nonzero: whether what is not zero gets the smallest magnitude that is not zero instead of zero.

    Returns:
        [ceil(n / fields)] of the format's dtype: ``fields`` codes in each, the first one lowest, above them zeros.
    """
    form = FORMATS[format]
    # The sign is taken from the bits: torch may lose that of a NaN on the way to float32.
    return _minifloat_words(_minifloat_codes(x, form, nonzero, bits_of(x) < 0), form)


def minifloat_decode(codes: Tensor, format: str, out: Tensor) -> None:
    """Fill ``out`` [n] from the plane of :func:`minifloat_encode`; every number of the format must be one of its dtype.

    Raises:
        DamagedPlanesError: the plane is not of the size that ``out`` needs.
    """
    form = FORMATS[format]
    _check_words("minifloat_decode", "codes", codes, form.words(out.numel()))
    _fill(out, *_minifloat_magnitudes(codes, form, out.numel()))


def minifloat_scaled_encode(x: Tensor, format: str, group_size: int) -> tuple[Tensor, Tensor]:
    """:func:`minifloat_encode` of ``x / scale``, where ``group_size`` neighbours share a scale.

    The scale is the smallest power of two, but at least LEAST_SCALE, that lets the group's largest magnitude fit the
    format, and so the division is exact. Magnitudes above ``scale_ceiling``, infinities too, count as that; NaN does
    not count.

    Returns:
        The codes, and the scales float32 [ceil(n / group_size)].
    """
    form, numel = FORMATS[format], x.numel()
    ceiling = scale_ceiling(form, x.dtype)
    clamped = x.double().clamp(-ceiling, ceiling)
    padded = clamped.new_zeros(groups(numel, group_size) * group_size)
    padded[:numel] = clamped.nan_to_num(nan=0.0).abs()
    fraction, exponent = torch.frexp(padded.view(-1, group_size).amax(1) / form.largest)  # fraction in [0.5, 1)
    scales = torch.ldexp((fraction > 0).double(), exponent - (fraction == 0.5).int()).clamp(min=LEAST_SCALE)
    scaled = clamped / scales.repeat_interleave(group_size)[:numel]
    return _minifloat_words(_minifloat_codes(scaled, form, False, bits_of(x) < 0), form), scales.float()


def minifloat_scaled_decode(codes: Tensor, scales: Tensor, format: str, group_size: int, out: Tensor) -> None:
    """Fill ``out`` [n] from the planes of :func:`minifloat_scaled_encode`.

    Raises:
        DamagedPlanesError: a plane is not of the size that ``out`` needs.
    """
    form, numel = FORMATS[format], out.numel()
    _check_words("minifloat_scaled_decode", "codes", codes, form.words(numel))
    _check_words("minifloat_scaled_decode", "scales", scales, groups(numel, group_size))
    magnitudes, nan, negative = _minifloat_magnitudes(codes, form, numel)
    _fill(out, magnitudes * scales.double().repeat_interleave(group_size)[:numel], nan, negative)


def _check_words(op: str, name: str, plane: Tensor, expected: int) -> None:
    if plane.numel() != expected:
        raise DamagedPlanesError(
            f"{op} asked for {expected} elements of plane {name!r}, got {plane.numel()}. The stash was overwritten or "
            f"cut short; compute the step again."
        )


def zvc_minifloat_encode(x: Tensor, format: str) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`zvc_encode` with :func:`minifloat_encode` of the values, none of which becomes zero."""
    mask, offsets, values = zvc_encode(x)
    return mask, offsets, minifloat_encode(values, format, True)


def zvc_minifloat_decode(mask: Tensor, offsets: Tensor, values: Tensor, format: str, out: Tensor) -> None:
    """Fill ``out`` [n] from the planes of :func:`zvc_minifloat_encode`.

    Raises:
        DamagedPlanesError: the mask's bits, the offsets and the number of values do not agree.
    """
    stored = int(unpack(mask, 1, out.numel()).sum())
    if values.numel() != FORMATS[format].words(stored):
        raise DamagedPlanesError(zvc_damage(values.numel()))
    dense = torch.empty(stored, dtype=out.dtype, device=out.device)
    minifloat_decode(values, format, dense)
    zvc_decode(mask, offsets, dense, out)


def narrow_encode(x: Tensor, bits: int, base: int) -> Tensor:
    """Integers (or bool) [n] as ``x - base`` in ``bits`` bits each: see :func:`pack`. ``x - base`` must fit."""
    return pack(x.long() - base, bits)


def narrow_decode(packed: Tensor, bits: int, base: int, out: Tensor) -> None:
    """Fill ``out`` [n] of an integer dtype or bool with ``field + base``."""
    out.copy_(unpack(packed, bits, out.numel()) + base)


def _origins(
    numel: int, inner: int, output_size: list[int], stride: list[int], padding: list[int], device: torch.device
) -> list[Tensor]:
    """Per spatial dimension, where the window of every output element starts in the (padded) input, int64 [n]."""
    position = torch.arange(numel, device=device) // inner
    origins = []
    for size, step, pad in reversed(list(zip(output_size, stride, padding, strict=True))):
        origins.append((position % size) * step - pad)
        position = position // size
    return origins[::-1]


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
        uint8 [ceil(n * window_bits(kernel) / 8)], fields as in :func:`pack`, each the row-major position in the
        window; and int64 [1]: how many indices are in no position of their window. Not zero: the plane is useless.
    """
    origins = _origins(indices.numel(), inner, output_size, stride, padding, indices.device)
    rest = indices.long()
    coordinates: list[Tensor] = []
    for size in reversed(input_size):
        coordinates.append(rest % size)
        rest = rest // size
    code = torch.zeros_like(indices)
    bad = rest != 0
    for where, origin, size, step in zip(coordinates[::-1], origins, kernel, dilation, strict=True):
        distance = where - origin
        offset = distance // step
        bad |= (distance % step != 0) | (offset < 0) | (offset >= size)
        code = code * size + offset
    return pack(torch.where(bad, 0, code), window_bits(kernel)), bad.sum().view(1)


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
    """Fill ``out`` int64 [n] with the indices that :func:`window_encode` was given."""
    origins = _origins(out.numel(), inner, output_size, stride, padding, out.device)
    code = unpack(packed, window_bits(kernel), out.numel())
    offsets: list[Tensor] = []
    for size in reversed(kernel):
        offsets.append(code % size)
        code = code // size
    index = torch.zeros_like(out)
    for offset, origin, size, step in zip(offsets[::-1], origins, input_size, dilation, strict=True):
        index = index * size + origin + offset * step
    out.copy_(index)


from backstash.ops.reference.rle import rle_damage, rle_decode, rle_encode  # noqa: E402, F401
