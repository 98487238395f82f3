from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
from torch import nn

import backstash as bs
from backstash.saved import Need, SavedTensor, TensorSpec
from backstash.stash.accounts import Step
from backstash.stash.ledger import CodecTotal, Entry, Report, mib

ROWS = (
    Entry("a/Relu#0:result", "SIGN", "float32 [2, 3]", 4000, 125, "bitmask", "", ["b/Relu#1:self"], 0.5, 0.25, 2),
    Entry("c/Relu#0:result", "SIGN", "float32 [2, 3]", 8000, 250, "bitmask", "", [], 0.5, 0.0, 0),
    Entry("d/MaxPool2D#0:self", "SHAPE", "float32 [4]", 1000, 0, "shape"),
    Entry("e/Addmm#0:mat1", "VALUE", "float32 [9]", 600, 600, "kept", "held by the program"),
)
REPORT = Report("Lossless(min_saving=0.02)", 3, ROWS, 5000, 2000)


def test_totals() -> None:
    assert REPORT.saved_nbytes == 13_600
    assert REPORT.stash_nbytes == 975
    assert REPORT.ratio == 13_600 / 975
    assert REPORT.encode_seconds == 1.0
    assert REPORT.decode_seconds == 0.25


def test_nothing_saved_is_a_ratio_of_one() -> None:
    empty = Report("keep", 0, (), 0, 0)
    assert (empty.saved_nbytes, empty.stash_nbytes, empty.ratio) == (0, 0, 1.0)
    assert empty.by_codec() == ()
    assert "ratio 1.00" in str(empty)


def test_saved_in_no_bytes_at_all_is_not_a_ratio_of_one() -> None:
    shapes = Report("lossless", 1, (ROWS[2],), 0, 0)
    assert shapes.ratio == math.inf
    found = json.loads(shapes.to_json(), parse_constant=pytest.fail)  # Infinity is not JSON
    assert found["ratio"] is None


def test_by_codec() -> None:
    assert REPORT.by_codec() == (
        CodecTotal("bitmask", 2, 12_000, 375, 1.0, 0.25, 12_000 / 1e9, 8000 / 0.25 / 1e9),
        CodecTotal("shape", 1, 1000, 0, 0.0, 0.0, None, None),
        CodecTotal("kept", 1, 600, 600, 0.0, 0.0, None, None),
    )


def test_json_holds_everything() -> None:
    found = json.loads(REPORT.to_json())
    rows = tuple(Entry(**row) for row in found["rows"])
    rest = (found[name] for name in ("parameter_nbytes", "peak_stash_nbytes"))
    assert Report(found["policy"], found["steps"], rows, *rest) == REPORT
    assert tuple(CodecTotal(**total) for total in found["by_codec"]) == REPORT.by_codec()
    for name in ("saved_nbytes", "stash_nbytes", "ratio", "encode_seconds", "decode_seconds"):
        assert found[name] == getattr(REPORT, name)


def test_table() -> None:
    lines = str(REPORT).splitlines()
    assert lines[0].startswith("policy Lossless(min_saving=0.02): saved 0.01 MiB, stashed as 0.00 MiB, ratio 13.95")
    assert "(step 3; 0.00 MiB of parameters by reference)" in lines[0]
    assert [line.split()[0] for line in lines[4:7]] == ["bitmask", "shape", "kept"]
    assert any("also b/Relu#1:self" in line for line in lines)
    assert any(line.endswith("held by the program") for line in lines)
    assert not [line for line in lines if line != line.rstrip()]
    assert mib(1_572_864) == "1.50 MiB"


def test_a_report_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        REPORT.steps = 4  # type: ignore[misc]


def test_rows_are_copies() -> None:
    step = Step()
    facts = SavedTensor("a", "Relu", "result", "", TensorSpec.of(torch.zeros(10)), Need.SIGN)
    account = step.open(facts, 40, "kept")
    rows = step.rows()
    account.stash_nbytes = 1
    account.share(dataclasses.replace(facts, key="b"))
    assert rows == (Entry("a", "SIGN", "float32 [10]", 40),)
    assert step.rows() == (Entry("a", "SIGN", "float32 [10]", 40, 1, shared_by=["b"]),)


def test_small_tensors_have_one_row_if_any() -> None:
    step = Step()
    assert step.rows() == ()
    step.small[1], step.small[2] = 24, 40
    (row,) = step.rows()
    assert "below min_nbytes" in row.key
    assert (row.reason, row.saved_nbytes, row.stash_nbytes) == ("small", 64, 64)


def test_a_report_does_not_change_with_the_session() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    with bs.Session("lossless", min_nbytes=0) as session:
        loss = model(torch.randn(32, 64)).sum()
    report = session.report()
    text = report.to_json()
    loss.backward()
    assert report.to_json() == text
    later = session.report()
    assert later.decode_seconds > 0
    assert sum(total.count for total in later.by_codec()) == len(later.rows)
    assert report.policy == repr(session.policy)
    assert report.parameter_nbytes >= 64 * 4
    assert report.peak_stash_nbytes >= report.stash_nbytes
