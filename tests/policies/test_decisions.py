"""Decisions of each built-in policy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from policy_cases import MASK, WINDOW, saved

from backstash import policies
from backstash.codecs import Binary, Bitmask, BlockQuant, FewBit, Narrow, Shape, Zvc
from backstash.policies import Keep, KeepAll, Lossless, Recompute, Stash
from backstash.saved import Effect, Need, SavedTensor


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (saved(Need.SHAPE), (Shape(),)),
        (saved(Need.SHAPE, torch.int64), (Shape(),)),
        (saved(Need.SHAPE, torch.complex64), (Shape(),)),
        (saved(Need.SIGN, mask=MASK), (Bitmask(MASK),)),
        (saved(Need.SIGN, torch.bfloat16, mask=MASK), (Bitmask(MASK),)),
        (saved(Need.SIGN), (Binary(), Zvc(0.02))),
        (saved(Need.INDEX, torch.int64, window=WINDOW), (Narrow(WINDOW), Narrow())),
        (saved(Need.INDEX, torch.int64), (Narrow(),)),
        *[(saved(dtype=dtype), (Narrow(),)) for dtype in (torch.int32, torch.int8, torch.uint8, torch.bool)],
        *[
            (saved(dtype=dtype), (Binary(), Zvc(0.02)))
            for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16)
        ],
    ],
)
def test_lossless_takes_the_smallest_exact_form(tensor: SavedTensor, expected: tuple[object, ...]) -> None:
    action = Lossless(recompute=False).decide(tensor)
    assert action == Stash(expected)
    assert all(tensor.need in codec.preserves for codec in action.codecs)
    recomputed = Binary() in action.codecs
    assert Lossless().decide(tensor) == (Recompute(action) if recomputed else action)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn, torch.uint16])
def test_lossless_keeps_types_that_no_codec_takes(dtype: torch.dtype) -> None:
    assert Lossless().decide(saved(dtype=dtype)) == Keep(f"no exact codec takes {dtype}")


def test_lossless_passes_its_saving_on() -> None:
    action = policies.lossless(min_saving=0.3).decide(saved())
    assert isinstance(action, Recompute)
    assert isinstance(action.otherwise, Stash)
    assert Zvc(0.3) in action.otherwise.codecs


def test_keep_keeps() -> None:
    assert all(KeepAll().decide(saved(need)) == Keep() for need in Need)


def test_gist_binarises_and_stores_sparse_values() -> None:
    for policy in (policies.gist("fp8", recompute=False), policies.gist_lossless(recompute=False)):
        assert policy.decide(saved(Need.SHAPE)) == Stash(Shape())
        assert policy.decide(saved(Need.SIGN, mask=MASK)) == Stash(Bitmask(MASK))
        assert policy.decide(saved(Need.INDEX, torch.int64, window=WINDOW)) == Stash((Narrow(WINDOW), Narrow()))
    exact = policies.gist_lossless(recompute=False).decide(saved())
    assert isinstance(exact, Stash)
    assert [codec.id for codec in exact.codecs] == ["binary", "csr", "zvc"]
    assert all(codec.bound is None for codec in exact.codecs)


@pytest.mark.parametrize("format", ["fp16", "fp10", "fp8", "float8_e4m3fn"])
def test_gist_reduces_sparse_and_dense_values(format: str) -> None:
    action = policies.gist(format, recompute=False).decide(replace(saved(), effect=Effect.LINEAR))
    assert isinstance(action, Stash)
    labels = [getattr(codec, "label", codec.id) for codec in action.codecs]
    assert labels == ["binary", f"csr+{format}", f"zvc+{format}", format, f"zvc+{format}", "csr", "zvc"]


def test_gist_leaves_losses_and_narrow_numbers_exact() -> None:
    loss = SavedTensor("/LogSoftmax#0:result", "LogSoftmax", "result", "", saved().spec, Need.VALUE)
    for exact in (
        policies.gist("fp8", recompute=False).decide(loss),
        policies.gist("fp16", recompute=False).decide(saved(dtype=torch.float16)),
    ):
        assert isinstance(exact, Stash)
        assert all(codec.bound is None for codec in exact.codecs)


@pytest.mark.parametrize("arguments", [("fp7",), ("fp8", 5)])
def test_gist_of_an_unknown_format_lists_the_formats(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match=r"there are fp8, fp10, fp16|the choices are 1, 2, 3 and 4"):
        policies.gist(*arguments)


def rounded(effect: Effect = Effect.LINEAR, row: int = 256, **facts: Any) -> SavedTensor:
    return replace(saved(**facts), effect=effect, row=row)


@pytest.mark.parametrize(
    ("readers", "expected"),
    [
        ([rounded()], "blockquant2 of 256"),
        ([rounded(row=96)], "blockquant2 of 256"),
        ([rounded(row=192)], "blockquant2 of 64"),
        ([rounded(row=192), rounded(Effect.NORMALISED, row=128)], "blockquant2 of 128"),
        ([rounded(Effect.NORMALISED, row=49)], "blockquant8 of 256"),
        ([rounded(Effect.SENSITIVE)], "blockquant8 of 256"),
        ([rounded(), rounded(Effect.SENSITIVE, row=64)], "blockquant8 of 64"),
        ([replace(rounded(Effect.SENSITIVE), function="silu")], "silu3"),
        ([replace(rounded(Effect.SENSITIVE), function="silu"), rounded()], "blockquant8 of 256"),
        ([rounded(), rounded(Effect.UNKNOWN)], "exact"),
    ],
)
def test_quantized_rounds_as_much_as_every_reader_allows(readers: list[SavedTensor], expected: str) -> None:
    action = policies.quantized(2).decide_together(readers[0], readers)
    assert isinstance(action, Recompute) and isinstance(action.otherwise, Stash)
    codec = next((codec for codec in action.otherwise.codecs if codec.bound is not None), None)
    group = f" of {codec.group_size}" if isinstance(codec, BlockQuant) else ""
    assert (f"{codec.label}{group}" if isinstance(codec, BlockQuant | FewBit) else "exact") == expected


def test_quantized_rounds_values_and_nothing_else() -> None:
    action = policies.quantized(4).decide(rounded())
    assert isinstance(action, Recompute) and isinstance(action.otherwise, Stash)
    assert [getattr(codec, "label", codec.id) for codec in action.otherwise.codecs] == [
        "binary",
        "blockquant4",
        "signed blockquant4",
        "zvc",
    ]
    loss = SavedTensor("/LogSoftmax#0:result", "LogSoftmax", "result", "", saved().spec, Need.VALUE)
    for exact in (saved(Need.SIGN, mask=MASK), saved(Need.SHAPE), rounded(dtype=torch.float64), loss, saved()):
        assert policies.quantized(4).decide(exact) == Lossless().decide(exact)
    with pytest.raises(ValueError, match=r"bits=3, but the choices are 1, 2, 4, 8"):
        policies.quantized(3)
