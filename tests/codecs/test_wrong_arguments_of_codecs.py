"""Wrong arguments of codecs: refused when the codec is made, by an error that says what was asked."""

from __future__ import annotations

import math
from typing import Any

import pytest
from torch import nn

from backstash import codecs

WRONG: tuple[Any, ...] = (None, "x", [], {}, object(), nn.ReLU(), math.nan, True)
NUMBERS = {
    "min_saving": ("Sz", "Rle", "Zvc", "Csr", "Exponents", "Deflate", "Zstd", "Lz4"),
    "level": ("Deflate", "Zstd", "Lz4"),
    "error": ("Sz", "Szp"),
    "seed": ("BlockQuant",),
    "values": ("Zvc", "Csr"),
}
WORDS = {"format": ("Minifloat",), "function": ("FewBit",)}
ARGUMENTS = [(codec, name) for each in (NUMBERS, WORDS) for name, of in each.items() for codec in of]
GIVEN = {"Sz": {"error": 0.1}, "Szp": {"error": 0.1}, "FewBit": {"function": "gelu"}}


@pytest.mark.cases(200)
@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: type(wrong).__name__)
@pytest.mark.parametrize(("codec", "name"), ARGUMENTS, ids=lambda each: str(each))
def test_a_codec_refuses_an_argument_of_another_kind(codec: str, name: str, wrong: Any) -> None:
    if (name, wrong) in (("values", None), ("seed", True)):  # for none of its own, and 1
        return
    with pytest.raises((TypeError, ValueError), match=rf"{codec} (was )?asked for "):
        getattr(codecs, codec)(**GIVEN.get(codec, {}) | {name: wrong})
