from __future__ import annotations

import pytest
import torch

from backstash.codecs import Encoded, Raw
from backstash.errors import CodecRefusedError, DamagedPlanesError


def strided() -> torch.Tensor:
    return torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)


def test_encode_copies_and_adopt_does_not() -> None:
    x = strided()
    assert Raw().encode(x).planes["values"].data_ptr() != x.data_ptr()
    adopted = Raw().adopt(x)
    assert adopted.planes["values"].data_ptr() == x.data_ptr()
    assert torch.equal(adopted.planes["values"], Raw().encode(x).planes["values"])
    with pytest.raises(CodecRefusedError):
        Raw().adopt(x[:, ::2])


def test_a_view_is_the_original_in_its_layout() -> None:
    x = strided()
    encoded = Raw().encode(x)
    seen = Raw().view(encoded)
    assert torch.equal(seen, x) and seen.stride() == x.stride()
    assert seen.data_ptr() == encoded.planes["values"].data_ptr()


def test_damaged_planes_are_no_view() -> None:
    encoded = Raw().encode(strided())
    for values in (encoded.planes["values"][:-1], encoded.planes["values"].double()):
        with pytest.raises(DamagedPlanesError, match="was asked to decode"):
            Raw().view(Encoded(encoded.codec, encoded.spec, {"values": values}))
