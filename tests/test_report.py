from __future__ import annotations

import dataclasses
import json
import math
import re

import pytest
import torch
from torch import nn

import backstash as bs
from backstash.saved import Need, SavedTensor, TensorSpec
from backstash.stash.accounts import Step
from backstash.stash.ledger import CodecTotal, Entry, Measured, Report
from backstash.stash.summary import holdings
from backstash.stash.tables import mib

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
    assert "ratio 1.00" in empty.table()


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
    lines = REPORT.table().splitlines()
    assert lines[0].startswith("policy Lossless(min_saving=0.02): saved 0.01 MiB, stashed as 0.00 MiB, ratio 13.95")
    assert "(step 3; 0.00 MiB of parameters by reference)" in lines[0]
    assert [line.split()[0] for line in lines[4:7]] == ["bitmask", "shape", "kept"]
    assert any("also b/Relu#1:self" in line for line in lines)
    assert any(line.endswith("held by the program") for line in lines)
    assert not [line for line in lines if line != line.rstrip()]
    assert mib(1_572_864) == "1.50 MiB"


MIB = 1 << 20
BLOCKS = tuple(
    Entry(
        f"model.layers.{number}.mlp.act/Gelu#0:self",
        "VALUE",
        "float32 [8, 128, 512]",
        2 * MIB,
        2 * MIB,
        reason="zvc: 100% of a sample is not zero; not recomputed: what made it is not known",
        effect="linear",
    )
    for number in range(3)
)
LARGE = Report(
    "Lossless()",
    2,
    (
        *BLOCKS,
        Entry("model.layers.0.mlp.drop/Mul#0:other", "VALUE", "float32 [9]", 3 * MIB, MIB, "zvc"),
        Entry("x/Mm#0:mat2", "VALUE", "float32 [9]", MIB, MIB, reason="held by the program, kept by reference"),
        Entry("y/Mm#1:self", "VALUE", "float32 [9]", MIB, MIB, reason="zvc: 99% of a sample is not zero"),
        Entry("moved/Mm#0:self", "VALUE", "float32 [9]", 4 * MIB, 4 * MIB, "raw", store="host"),
        Entry("(below min_nbytes)", "", "", 20_000, 20_000, reason="small"),
        *(Entry(f"other/Mm#{n}:self", "VALUE", "int8 [9]", 9, 9, reason=f"reason {n}") for n in range(1, 9)),
    ),
    0,
    9 * MIB,
)


def test_a_headline_tells_the_device_s_bytes_and_names_those_that_were_moved() -> None:
    assert LARGE.device_nbytes == LARGE.stash_nbytes - 4 * MIB == LARGE.stash_nbytes - LARGE.moved_nbytes
    assert LARGE.headline() == "activations 15.0 -> 9.0 MiB on the device; 4.0 MiB moved to host"


def test_a_headline_tells_peaks_and_times_where_they_were_measured() -> None:
    measured = Measured(17 * MIB, 31 * MIB, 1.02, 1.0)
    line = dataclasses.replace(LARGE, measured=measured).headline()
    assert line.endswith("; peak 31.0 -> 17.0 MiB; step +2 %")
    alone = dataclasses.replace(LARGE, measured=Measured(17 * MIB)).headline()
    assert alone.endswith("; peak 17.0 MiB") and "step" not in alone


def test_a_summary_shows_the_largest_values_with_repeated_blocks_as_one() -> None:
    lines = LARGE.summary(100).splitlines()
    (block,) = [line for line in lines if line.startswith("model.layers.*.mlp.act/Gelu:self")]
    assert block.split()[1:] == ["6.0", "MiB", "3", "unknown", "origin", "8", "bits:", "-4.5", "MiB"]
    (single,) = [line for line in lines if "mlp.drop" in line]
    assert single.startswith("model.layers.0.mlp.drop/Mul:other") and single.split()[1:5] == ["1.0", "MiB", "1", "zvc"]
    why = {one.name: (one.why, one.advice) for one in holdings(LARGE)}
    assert why["x/Mm:mat2"] == ("in use", "")
    assert why["y/Mm#1:self"] == ("dense", "offload")
    assert why["(below min_nbytes)"] == ("too small", "a smaller min_nbytes")
    assert not any("moved" in name for name in why)
    assert len(why) == 13 and lines[-1] == "and 27 bytes in 3 more kinds of values"
    assert any(line.startswith("raw in host") for line in lines)


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("report", [LARGE, REPORT])
def test_a_summary_fits_the_terminal(report: Report, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    long = dataclasses.replace(report, policy="Policy(" + "argument, " * 30 + ")", notes=("word " * 60,))
    assert max(map(len, long.summary(width).splitlines())) <= width
    monkeypatch.setenv("COLUMNS", str(width))
    assert str(long) == long.summary(width)


def test_a_report_of_nothing_is_its_reason() -> None:
    empty = Report("keep", 0, (), 0, 0, notes=("nothing was saved: no forward pass",))
    assert empty.summary(80).splitlines() == ["nothing was saved", "note: nothing was saved: no forward pass"]


def test_a_page_fetches_nothing_and_escapes_names() -> None:
    rows = (*LARGE.rows, Entry("a/<script>&#0:self", "VALUE", "float32 [9]", 5, 5, reason="<b>"))
    page = dataclasses.replace(LARGE, rows=rows).to_html()
    assert page.startswith("<!doctype html>") and not re.search("https?:", page)
    assert page.count("<script>") == 1 and "a/&lt;script&gt;&amp;#0:self" in page and "&lt;b&gt;" in page
    assert len(re.findall(r'<td class=n data-l="\w+" data-v="2097152">', page)) == 6  # three blocks, dense and stored
    short = LARGE._repr_html_()
    assert "<script" not in short and "model.layers.*.mlp.act/Gelu:self" in short


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


def test_a_summary_tells_how_long_it_takes_to_make_held_values_again() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.Softplus(), nn.Linear(64, 1))
    session = bs.Session("keep", model=model, min_nbytes=0)
    for _ in range(3):
        with session:
            loss = model(torch.randn(256, 64)).square().mean()
        loss.backward()
    advice = {row.key: row.remake_seconds for row in session.report().rows}
    assert advice["1/Gelu#0:self"] > 0 and advice["3/Softplus#0:self"] > 0
    assert advice["0/Addmm#0:mat1"] == 0.0  # the batch, which a function made that draws random numbers
    held = Entry("y/Mm#1:self", "VALUE", "float32 [9]", MIB, MIB, reason="zvc: 99% of a sample is not zero")
    alike = [dataclasses.replace(held, remake_seconds=seconds) for seconds in (0.004, 0.008)]
    (one,) = holdings(dataclasses.replace(LARGE, rows=tuple(alike)))
    assert one.advice == "recompute: 12.0 ms"
