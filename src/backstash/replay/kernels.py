"""Kernels of codecs whose planes the interpreter makes by itself: their addresses, and what they are told."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from backstash.codecs import base
from backstash.codecs.base import Encoded
from backstash.codecs.masks.codec import Binary, Bitmask
from backstash.codecs.narrow.codec import Narrow
from backstash.codecs.narrow.windows.reference import in_three_dimensions, window_bits
from backstash.codecs.sample import runs_within
from backstash.codecs.zvc.codec import Zvc
from backstash.ops import backends
from backstash.ops.cpu import library
from backstash.ops.cpu.planes import FLOATS, rounded, scalar_bits
from backstash.ops.layout import bytes_for, zvc_chunks
from backstash.replay.program import PlaneKernel, ZvcPlanes
from backstash.saved import TensorSpec


def kernel_of(codec: base.Codec, spec: TensorSpec, dtype: torch.dtype) -> PlaneKernel | None:
    """By which kernels tensors like ``spec`` are encoded, and decoded as ``dtype``; None where Python does it."""
    find = _KERNELS.get(type(codec))
    return None if find is None or not _is_native(spec) else find(codec, spec, dtype)


def zvc_planes(codec: base.Codec, spec: TensorSpec) -> ZvcPlanes | None:
    """How the interpreter makes planes of zvc; None where it does not."""
    if type(codec) is not Zvc or codec.values is not None or spec.dtype not in FLOATS or not _is_native(spec):
        return None
    runs, run, step = runs_within(spec.numel)
    return ZvcPlanes(runs, run, step, codec.most_nonzeros(runs * run, spec.dtype), zvc_chunks(spec.numel))


def _is_native(spec: TensorSpec) -> bool:
    return spec.device.type == "cpu" and backends.name("cpu") == "native"


def _kernel(name: str, how: bytes, nbytes: int, encoded: Callable[[Tensor], Encoded]) -> PlaneKernel:
    encode, decode = (library.address_of(f"bs_{name}_{does}_planes") for does in ("encode", "decode"))
    assert encode is not None and decode is not None  # the library is there
    return PlaneKernel(encode, decode, how, nbytes, encoded)


def _one_plane(codec: base.Codec, spec: TensorSpec, name: str, **meta: int) -> Callable[[Tensor], Encoded]:
    return lambda planes: Encoded(codec.id, spec, {name: planes}, meta)


def _bitmask(codec: Bitmask, spec: TensorSpec, dtype: torch.dtype) -> PlaneKernel | None:
    mask = codec.mask
    if mask.ternary:
        return None
    values = (True, False) if dtype is torch.bool else (mask.if_set, mask.if_clear)
    if_set, if_clear = (scalar_bits(value, math.copysign(1.0, value), dtype) for value in values)
    lo, hi = rounded(mask.lo, spec.dtype), rounded(mask.hi, spec.dtype)
    numbers = lo, hi, dtype.itemsize, if_set, if_clear, mask.nan
    how = struct.pack("@iiddqQQq", FLOATS[spec.dtype], mask.test.code, *numbers)
    return _kernel("bitmask", how, bytes_for(spec.numel, 1), _one_plane(codec, spec, "mask"))


def _binary(codec: Binary, spec: TensorSpec, dtype: torch.dtype) -> PlaneKernel | None:
    before = 2 * spec.dtype.itemsize

    def encoded(planes: Tensor) -> Encoded:
        return Encoded(codec.id, spec, {"mask": planes[before:], "pair": planes[:before].view(spec.dtype)})

    return _kernel("binary", struct.pack("@q", spec.dtype.itemsize), codec.nbytes_bound(spec), encoded)


def _narrow(codec: Narrow, spec: TensorSpec, dtype: torch.dtype) -> PlaneKernel | None:
    nbytes = codec.nbytes_bound(spec)
    if codec.window is None:
        if spec.dtype is not torch.bool:
            return None
        return _kernel("bools", b"", nbytes, _one_plane(codec, spec, "packed", bits=1, base=0))
    if len(codec.window.kernel) > 3:
        return None
    inner, *sizes = codec.geometry(spec)
    bits = window_bits(codec.window.kernel)
    how = struct.pack("@20q", inner, bits, *in_three_dimensions(*sizes))
    return _kernel("window", how, nbytes, _one_plane(codec, spec, "packed", bits=bits))


_KERNELS: dict[type, Callable[[Any, TensorSpec, torch.dtype], PlaneKernel | None]] = {
    Bitmask: _bitmask,
    Binary: _binary,
    Narrow: _narrow,
}
