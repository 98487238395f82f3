"""Codecs as the compiled functions know them, which encode and decode small values without the interpreter.

They know the exact codecs that policies name most often: a bit per element, two values, and what is not zero. A value
of which the action names another codec is encoded by the codec's own methods, and so is every value where the kernels
in C++ do not serve.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from backstash.codecs import base
from backstash.codecs.base import Codec, Encoded
from backstash.codecs.direct import MaskBits
from backstash.codecs.masks.codec import Binary, Bitmask
from backstash.codecs.zvc.codec import Zvc
from backstash.ops import backends
from backstash.ops.cpu.planes import FLOATS, rounded
from backstash.saved import Mask, Need, SavedTensor, TensorSpec
from backstash.stash import compiled
from backstash.stash.compiled import laid_out
from backstash.stores import DeviceStore, Ticket
from backstash.stores.base import Holdings

if TYPE_CHECKING:
    from backstash.policies.base import Stash

REFUSES, BITMASK, BINARY, ZVC = range(4)


@laid_out
class Coder:
    """One codec of an action, for values of one spec and need.

    Attributes:
        codec: the codec.
        kind: which one it is: BITMASK, BINARY or ZVC; REFUSES where it does not take tensors of that spec.
        label: what reports call it.
        reason: why it refuses them.
        mask: the mask whose outcome is stored; None where values are.
        element: the code of the element type in C++.
        test, lo, hi: of a BITMASK, its test's code in C++ and its bounds, rounded to the element type.
        min_saving: of a ZVC, the smallest share of the bytes that makes it worthwhile.
    """

    __slots__ = ("codec", "element", "hi", "kind", "label", "lo", "mask", "min_saving", "reason", "test")

    def __init__(self, codec: Codec, spec: TensorSpec, mask: Mask | None) -> None:
        self.codec, self.label, self.mask = codec, base.label(codec), mask
        self.reason = codec.accepts(spec) or ""
        self.kind = REFUSES if self.reason else _KINDS[type(codec)]
        self.element, self.test, self.lo, self.hi, self.min_saving = FLOATS.get(spec.dtype, 0), 0, 0.0, 0.0, 0.0
        if isinstance(codec, Bitmask):
            test = codec.mask
            self.test, self.lo, self.hi = test.test.code, rounded(test.lo, spec.dtype), rounded(test.hi, spec.dtype)
        elif isinstance(codec, Zvc):
            self.min_saving = codec.min_saving


_KINDS: dict[type, int] = {Bitmask: BITMASK, Binary: BINARY, Zvc: ZVC}


def coders(action: Stash, facts: SavedTensor) -> tuple[Coder, ...] | None:
    """The codecs of an action in their order; None where the compiled functions do not know one of them."""
    if any(type(codec) not in _KINDS for codec in action.codecs):  # others may not be hashable
        return None
    return _coders(action.codecs, action.store, facts.need, facts.mask, facts.spec)


@lru_cache(maxsize=1024)
def _coders(
    codecs: tuple[Codec, ...], store: str, need: Need, mask: Mask | None, spec: TensorSpec
) -> tuple[Coder, ...] | None:
    if store != "device" or spec.device.type != "cpu" or spec.numel == 0 or backends.name("cpu") != "native":
        return None
    if not codecs or not all(_is_known(codec, need, mask) for codec in codecs):
        return None
    return tuple(Coder(codec, spec, mask if need is Need.SIGN else None) for codec in codecs)


def _is_known(codec: Codec, need: Need, mask: Mask | None) -> bool:
    if need not in codec.preserves:
        return False
    if need is Need.SIGN and base.mask_of(codec) not in (None, mask):
        return False
    if isinstance(codec, Bitmask):
        return not (codec.mask.ternary or codec.mask.nan)
    return not isinstance(codec, Zvc) or codec.values is None


for _kind in (Encoded, Ticket, Holdings, DeviceStore):
    laid_out(_kind)

if compiled.functions is not None:
    compiled.functions.configure(
        bitmask_type=Bitmask,
        binary_type=Binary,
        zvc_type=Zvc,
        mask_bits_type=MaskBits,
        uint8=torch.uint8,
        int64=torch.int64,
        float64=torch.float64,
        bitmask_id=Bitmask.id,
        binary_id=Binary.id,
        zvc_id=Zvc.id,
    )
