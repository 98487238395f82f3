"""Elements as numbers of a small floating-point format: as they are, or scaled in groups."""

from __future__ import annotations

import torch
from torch import Tensor

from backstash.codecs.minifloat.formats import FORMATS, LEAST_SCALE, Format, scale_ceiling
from backstash.ops import IN_GRAPHS, bits_of, check_plane, groups, kernel


def _codes(x: Tensor, format: str, nonzero: bool = False) -> Tensor:
    form = FORMATS[format]
    return x.new_empty(form.words(x.numel()), dtype=form.dtype)


def _codes_and_scales(x: Tensor, format: str, group_size: int) -> tuple[Tensor, Tensor]:
    return _codes(x, format), x.new_empty(groups(x.numel(), group_size), dtype=torch.float32)


def _minifloat_codes(x: Tensor, form: Format, nonzero: bool, negative: Tensor) -> Tensor:
    """Returns the code of each element, int64 [n]; see :func:`minifloat_encode`."""
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
    code = torch.where(x.isinf(), form.infinity, code)
    code = torch.where(x.isnan(), form.nan, code)
    return code | (negative.long() << (form.bits - 1))


def _minifloat_words(codes: Tensor, form: Format) -> Tensor:
    """Packs codes int64 [n] into a plane."""
    padded = codes.new_zeros(form.words(codes.numel()) * form.fields)
    padded[: codes.numel()] = codes
    shifts = form.bits * torch.arange(form.fields, device=codes.device)
    return (padded.view(-1, form.fields) << shifts).sum(1).to(form.dtype)


def _minifloat_magnitudes(words: Tensor, form: Format, numel: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns, each [numel]: magnitudes float64 (0 for NaN), which codes are NaN, and which have a sign."""
    shifts = form.bits * torch.arange(form.fields, device=words.device)
    codes = ((words.long()[:, None] >> shifts) & ((1 << form.bits) - 1)).view(-1)[:numel]
    magnitude = codes & form.nan
    exponent, fraction = magnitude >> form.mantissa, magnitude & ((1 << form.mantissa) - 1)
    normal = torch.ldexp(fraction.double() + 2**form.mantissa, exponent - form.bias - form.mantissa)
    small = fraction.double() * 2.0 ** (1 - form.bias - form.mantissa) if form.subnormals else torch.zeros_like(normal)
    number = torch.where(exponent > 0, normal, small).masked_fill(magnitude == form.infinity, float("inf"))
    nan = magnitude > form.infinity
    return number.masked_fill(nan, 0.0), nan, codes != magnitude


def _fill(out: Tensor, magnitudes: Tensor, nan: Tensor, negative: Tensor) -> None:
    """Fills ``out``. A NaN becomes the quiet NaN without a payload."""
    out.copy_(torch.where(negative, -magnitudes, magnitudes))
    quiet = torch.tensor(float("nan"), dtype=out.dtype, device=out.device).abs()
    bits = bits_of(out)
    bits.copy_(torch.where(nan, bits | bits_of(quiet), bits))


@kernel("(Tensor x, str format, bool nonzero) -> Tensor", _codes)
def minifloat_encode(x: Tensor, format: str, nonzero: bool) -> Tensor:
    """Rounds each element to a number of a small format (see :mod:`backstash.codecs.minifloat.formats`).

    The sign is kept. The magnitude is rounded to the format's mantissa bits, ties to even, as if exponents had no
    end. Then a finite magnitude above the format's largest one becomes that, and one below its smallest normal number
    becomes zero, or a subnormal if the format has these. An infinity stays one. A NaN keeps its sign and loses its
    payload.

    Args:
        x: float32, bfloat16 or float16 [n].
        format: a name in FORMATS.
        nonzero: whether an element that is not zero becomes at least the smallest magnitude above zero.

    Returns:
        [ceil(n / fields)] of the format's dtype: ``fields`` codes in each, the first one lowest, above them zeros.
    """
    form = FORMATS[format]
    # The sign is taken from the bits: torch may lose that of a NaN on the way to float32.
    return _minifloat_words(_minifloat_codes(x, form, nonzero, bits_of(x) < 0), form)


@kernel("(Tensor codes, str format, Tensor(a!) out) -> ()")
def minifloat_decode(codes: Tensor, format: str, out: Tensor) -> None:
    """Fills ``out`` [n] from the plane of :func:`minifloat_encode`. Its dtype must have every number of the format.

    Raises:
        DamagedPlanesError: the plane is not of the size that ``out`` needs.
    """
    form = FORMATS[format]
    check_plane("minifloat_decode", "codes", codes, form.words(out.numel()))
    _fill(out, *_minifloat_magnitudes(codes, form, out.numel()))


@kernel("(Tensor x, str format, int group_size) -> (Tensor, Tensor)", _codes_and_scales)
def minifloat_scaled_encode(x: Tensor, format: str, group_size: int) -> tuple[Tensor, Tensor]:
    """Encodes ``x / scale`` with :func:`minifloat_encode`, where ``group_size`` neighbours share a scale.

    The scale is the smallest power of two, but at least LEAST_SCALE, with which the group's largest magnitude fits the
    format. So the division is exact. Finite magnitudes above ``scale_ceiling`` count as that; infinities and NaN do not
    count.

    Returns:
        The codes, and the scales float32 [ceil(n / group_size)].
    """
    form, numel = FORMATS[format], x.numel()
    ceiling = scale_ceiling(form, x.dtype)
    clamped = x.double().clamp(-ceiling, ceiling)
    padded = clamped.new_zeros(groups(numel, group_size) * group_size)
    padded[:numel] = clamped.masked_fill(~x.isfinite(), 0.0).abs()
    fraction, exponent = torch.frexp(padded.view(-1, group_size).amax(1) / form.largest)  # fraction in [0.5, 1)
    scales = torch.ldexp((fraction > 0).double(), exponent - (fraction == 0.5).int()).clamp(min=LEAST_SCALE)
    scaled = torch.where(x.isinf(), x.double(), clamped / scales.repeat_interleave(group_size)[:numel])
    return _minifloat_words(_minifloat_codes(scaled, form, False, bits_of(x) < 0), form), scales.float()


@kernel("(Tensor codes, Tensor scales, str format, int group_size, Tensor(a!) out) -> ()")
def minifloat_scaled_decode(codes: Tensor, scales: Tensor, format: str, group_size: int, out: Tensor) -> None:
    """Fills ``out`` [n] from the planes of :func:`minifloat_scaled_encode`.

    Raises:
        DamagedPlanesError: a plane is not of the size that ``out`` needs.
    """
    form, numel = FORMATS[format], out.numel()
    check_plane("minifloat_scaled_decode", "codes", codes, form.words(numel))
    check_plane("minifloat_scaled_decode", "scales", scales, groups(numel, group_size))
    magnitudes, nan, negative = _minifloat_magnitudes(codes, form, numel)
    _fill(out, magnitudes * scales.double().repeat_interleave(group_size)[:numel], nan, negative)


def _planes_of_images(x: Tensor, format: str, group_size: int, channels: int, area: int) -> tuple[Tensor, Tensor]:
    return _codes_and_scales(x, format, group_size)


@kernel(
    "(Tensor x, str format, int group_size, int channels, int area) -> (Tensor, Tensor)",
    _planes_of_images,
    without=IN_GRAPHS,
)
def minifloat_images_encode(x: Tensor, format: str, group_size: int, channels: int, area: int) -> tuple[Tensor, Tensor]:
    """As :func:`minifloat_scaled_encode`, of images that lie in ``x`` [n] by image, position and channel.

    Their elements are encoded by image, channel and position. An image has ``channels`` and ``area`` positions.
    """
    turned = x.view(-1, area, channels).transpose(1, 2).reshape(-1) if x.numel() else x
    return minifloat_scaled_encode(turned, format, group_size)


@kernel(
    "(Tensor codes, Tensor scales, str format, int group_size, int channels, int area, Tensor(a!) out) -> ()",
    without=IN_GRAPHS,
)
def minifloat_images_decode(
    codes: Tensor, scales: Tensor, format: str, group_size: int, channels: int, area: int, out: Tensor
) -> None:
    """Fills ``out`` [n] from the planes of :func:`minifloat_images_encode`.

    Raises:
        DamagedPlanesError: a plane is not of the size that ``out`` needs.
    """
    turned = torch.empty_like(out)
    minifloat_scaled_decode(codes, scales, format, group_size, turned)
    if out.numel():
        out.copy_(turned.view(-1, channels, area).transpose(1, 2).reshape(-1))
