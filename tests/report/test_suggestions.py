"""Suggestions at the top of a report: what would help most and what that costs, or why nothing helps."""

from __future__ import annotations

import dataclasses
import html
import json
import re

import pytest
import torch
from torch import nn

import backstash as bs
from backstash.errors import BudgetError
from backstash.stash.helping import WORTHWHILE, suggestions, what_now
from backstash.stash.ledger import Entry, Measured, Report

MIB = 1 << 20
DENSE = "zvc: 100% of a sample is not zero"
LOSSLESS = "Lossless(min_saving=0.02, recompute=True, dense=False)"


def entry(key: str, mib: float, reason: str = DENSE, **facts: object) -> Entry:
    nbytes = int(mib * MIB)
    given = {"need": "VALUE", "spec": "float32 [9]", "stash_nbytes": nbytes, "reason": reason, **facts}
    return Entry(key=key, saved_nbytes=nbytes, **given)  # type: ignore[arg-type]


def report_of(*rows: Entry, policy: str = LOSSLESS) -> Report:
    return Report(policy, 3, rows, 0, sum(row.stash_nbytes for row in rows))


BLOCKS = tuple(entry(f"b.{number}.m/Gelu#0:self", 2, remake_seconds=0.002) for number in range(14))
STORED = Entry("a/Relu#0:result", "SIGN", "float32 [9]", 32 * MIB, MIB, "bitmask")
IN_USE = entry("x/Mm#0:mat2", 3, "held by the program, kept by reference")
SMALL = Entry("(below min_nbytes)", "", "", 5 * MIB, 5 * MIB, reason="small")


def test_the_largest_group_and_its_price_come_first() -> None:
    first, second = what_now(report_of(*BLOCKS, STORED, IN_USE))
    assert first == "helps most: remake 14 values of b.*.m/Gelu:self: -28.0 MiB, +28.0 ms; try `--budget 75%`"
    assert second == "nothing else helps: 3.0 MiB in use by the program, 1.0 MiB stored small already"


def test_the_next_best_comes_second() -> None:
    single = entry("head/Addmm#0:mat1", 4, remake_seconds=0.5)
    found = suggestions(report_of(single, *BLOCKS, entry("c/Mm#0:self", 3), entry("d/Mm#0:self", 1)))
    assert [(one.kind, one.count, one.nbytes, one.seconds) for one in found] == [
        ("remake", 14, 28 * MIB, pytest.approx(0.028)),
        ("remake", 1, 4 * MIB, 0.5),
        ("move", 2, 4 * MIB, None),
    ]
    assert found[1].text.startswith("remake head/Addmm:mat1: -4.0 MiB, +500.0 ms")
    assert found[2].text == "move 2 values to the host: -4.0 MiB, which takes copies; try `--policy offload`"
    assert not any(one.is_most for one in found)


def test_dense_values_that_bear_an_error_are_stored_in_eight_bits() -> None:
    rows = [entry(f"b.{number}.m/Gelu#0:self", 4, effect="linear") for number in range(2)]
    (found,) = suggestions(report_of(*rows))
    assert (found.kind, found.count, found.option) == ("fewer bits", 2, "policies.quantized(8)")
    assert found.nbytes == round(8 * MIB * (1 - 8.25 / 32))
    assert found.text == (
        "store 2 values of b.*.m/Gelu:self in 8 bits: -5.9 MiB, gradients change a little; try `policies.quantized(8)`"
    )


def test_what_the_program_holds_helps_nobody() -> None:
    assert what_now(report_of(IN_USE)) == ("nothing would help: 3.0 MiB in use by the program",)


def test_nothing_is_held() -> None:
    shape = Entry("a/MaxPool2D#0:self", "SHAPE", "float32 [9]", MIB, 0, "shape")
    assert what_now(report_of(shape)) == ("nothing would help: nothing is held on the device",)
    assert what_now(report_of()) == ()
    assert what_now(report_of(*BLOCKS))[1] == "nothing else helps: nothing else is held"


def test_small_values_are_looked_at_where_they_are_many() -> None:
    (found,) = suggestions(report_of(SMALL, STORED))
    assert found.text == "look at small values too: up to -5.0 MiB, which takes time for each; try `--min-nbytes 1KiB`"
    assert found.is_most
    tiny = dataclasses.replace(SMALL, saved_nbytes=256, stash_nbytes=256)  # all that this step saves
    assert what_now(report_of(tiny)) == ("nothing would help: 256 bytes too little to matter",)
    assert "min_nbytes" not in report_of(tiny).summary(120).replace("(below min_nbytes)", "")
    few = dataclasses.replace(SMALL, saved_nbytes=1000, stash_nbytes=1000)
    assert suggestions(report_of(few, STORED)) == ()
    assert what_now(report_of(few, STORED))[0].endswith("1.0 MiB stored small already, 1000 bytes too little to matter")


def test_what_the_policy_keeps_may_be_stored_by_another() -> None:
    rows = [entry(f"{name}/Mm#0:self", 2, "the policy says so", remake_seconds=0.001) for name in "abc"]
    first, second = what_now(report_of(*rows, IN_USE, policy="KeepAll()"))
    assert first == ("helps most: store what the policy keeps: up to -6.0 MiB, no bit changes; try `--policy lossless`")
    assert second == "nothing else helps: 3.0 MiB in use by the program"
    assert what_now(report_of(*rows)) == ("nothing would help: 6.0 MiB no smaller form known",)  # lossless says so


def test_what_is_moved_already_is_not_to_be_moved() -> None:
    rows = (entry("a/Mm#0:self", 2), entry("b/Mm#0:self", 4, store="host", codec="raw", reason=""))
    (line,) = what_now(report_of(*rows, policy="Offload(codec=None, store='host')"))
    assert line == "nothing would help: 2.0 MiB no smaller form known"


def test_a_plan_is_answered_with_a_smaller_budget() -> None:
    rows = [dataclasses.replace(row, reason="the plan says so") for row in BLOCKS]
    for policy in ("Plan(88c59f390efcc985, budget 70.43 MiB: ...)", "Budgeted(...)"):
        (found,) = suggestions(report_of(*rows, policy=policy))
        assert found.option == "a smaller budget" and found.text.endswith("; try a smaller budget")


@pytest.mark.parametrize(
    ("now", "before", "percent"),
    [(57, 100, 50), (56, 100, 50), (58, 100, 55), (100, 100, 95), (12, 100, 5), (10, 1000, 5)],
)
def test_the_budget_is_between_what_a_step_takes_now_and_what_it_would_take(
    now: int, before: int, percent: int
) -> None:
    report = dataclasses.replace(report_of(*BLOCKS), measured=Measured(now * MIB, before * MIB))
    assert suggestions(report)[0].option == f"--budget {percent}%"


def test_what_a_step_takes_beside_its_values_is_guessed_where_nothing_was_measured() -> None:
    report = report_of(*BLOCKS, dataclasses.replace(STORED, saved_nbytes=28 * MIB))
    assert report.device_nbytes == 29 * MIB and report.saved_nbytes == 56 * MIB
    assert suggestions(report)[0].option == "--budget 70%"  # (29 + 2 * 28 - 7) / (56 + 2 * 28)


def test_a_gain_of_hardly_anything_is_not_suggested() -> None:
    large = dataclasses.replace(STORED, saved_nbytes=int(2 * MIB / WORTHWHILE), stash_nbytes=MIB)
    assert suggestions(report_of(large, entry("c/Mm#0:self", 1.9))) == ()
    assert len(suggestions(report_of(large, entry("c/Mm#0:self", 2.1)))) == 1


def test_text_page_notebook_and_json_say_the_same() -> None:
    report = report_of(*BLOCKS, IN_USE, entry("c<d>/Mm#0:self", 3))
    lines = what_now(report)
    assert report.summary(200).splitlines()[1:3] == list(lines)
    for page in (report.to_html(), report._repr_html_()):
        shown = re.findall(r"<p class=help>(.*?)</p>", page)
        assert shown == [re.sub(r"`(.*?)`", r"<code>\1</code>", html.escape(line)) for line in lines]
        assert "c<d>" not in page
    found = json.loads(report.to_json())
    assert found["suggestions"] == [dataclasses.asdict(one) for one in report.suggestions]
    most, following = (one["text"] for one in found["suggestions"])
    assert lines == (f"helps most: {most}", f"helps next: {following}")
    assert Report.from_json(found) == report


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_lines_fit_the_terminal(width: int) -> None:
    key = ".".join(["transformer", "encoder", "layers", "3", "attention", "output", "dense"]) + "/Addmm#0:mat1"
    report = report_of(entry(key, 3, remake_seconds=0.1), SMALL)
    assert max(map(len, report.summary(width).splitlines())) <= width
    assert "remake transformer..ers.3.attention.output.dense/Addmm:mat1:" not in report.suggestions[0].text
    assert all(len(one.text) <= 120 for one in report.suggestions)


def test_a_session_s_report_tells_what_a_budget_then_does() -> None:
    """The values that are suggested are those that a plan for a smaller budget makes again."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for _ in range(3)]
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    x = torch.randn(8, 3, 48, 48)

    def step() -> None:
        model(x).square().sum().backward()

    session = bs.Session("lossless", model=model, min_nbytes=0)
    for _ in range(3):
        with session:
            loss = model(x).square().sum()
        loss.backward()
    report = session.report()
    found = report.suggestions[0]
    assert found.kind == "remake" and found.seconds and "NativeBatchNorm:input" in found.name
    profile = bs.profile(step, model)
    try:
        plan = bs.plan(profile, found.option.split()[1])
    except BudgetError as error:  # the budget is a guess
        plan = bs.plan(profile, error.smallest_nbytes)
    followed = bs.Session(plan, model=model)
    with followed:
        loss = model(x).square().sum()
    loss.backward()
    assert followed.report().device_nbytes < report.device_nbytes
