from __future__ import annotations

from pathlib import Path

import pytest

from backstash.errors import MeasureError
from backstash.planning.model.trace import Buffer, Op, Trace

pytest.importorskip("matplotlib")

from backstash.report import plot

MIB = 2**20
OPS = (Op("zero_", 0), Op("conv2d", 0), Op("relu", 2), Op("ReluBackward0", 4), Op("ConvolutionBackward0", 6))
PLAIN = Trace(
    "plain",
    (
        Buffer("weight", "parameter", 10 * MIB, 0, 8),
        Buffer("conv2d", "stashed", 40 * MIB, 0, 7),
        Buffer("ReluBackward0", "immediate", 50 * MIB, 4, 6),
    ),
    OPS,
    backward=4,
    end=8,
)
ENCODED = Trace(
    "Lossless()",
    (
        Buffer("weight", "parameter", 10 * MIB, 0, 10),
        Buffer("conv2d", "immediate", 40 * MIB, 0, 3),
        Buffer("zvc after relu", "encoded", 20 * MIB, 2, 9),
        Buffer("ReluBackward0", "decoded", 40 * MIB, 6, 8),
    ),
    (Op("zero_", 0), Op("conv2d", 0), Op("relu", 2), Op("ReluBackward0", 5), Op("ConvolutionBackward0", 8)),
    backward=5,
    end=10,
)


def test_operations_are_as_wide_as_each_other() -> None:
    assert plot._places(PLAIN) == [0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0]
    places = plot._places(ENCODED)
    assert places[:3] == [0.0, 0.25, 0.5]
    assert (places[5], places[8], places[-1]) == (1.0, 1.5, 2.0)
    assert places == sorted(places)


def test_what_a_panel_shows() -> None:
    figure = plot.timeline_chart({"plain": PLAIN, "lossless": ENCODED})
    plain, lossless = figure.axes
    assert [plain.get_title("left"), lossless.get_title("left")] == ["plain", "lossless"]
    assert {"peak 100 MiB", "forward", "backward"} <= {text.get_text() for text in plain.texts}
    assert "peak 70 MiB (0.70x)" in {text.get_text() for text in lossless.texts}
    assert plain.get_ylim() == lossless.get_ylim() == (0, 120)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "parameters", "stashed, dense", "stashed, encoded", "decoded", "immediately consumed",
    ]  # fmt: skip
    assert len(plain.collections) == 3 and len(lossless.collections) == 4


def test_every_role_has_a_colour_of_its_own() -> None:
    from backstash.planning.model.trace import ROLES

    assert {role for role, _, _ in plot._ROLES} == set(ROLES)
    assert len({colour for _, _, colour in plot._ROLES}) == len(ROLES)


def test_a_pass_without_operations_is_drawn() -> None:
    trace = Trace("plain", (Buffer("x", "stashed", 1, 0, 2),), (Op("SumBackward0", 1),), backward=1, end=2)
    assert plot._places(trace) == [0.0, 1.0, 2.0]
    plot.timeline_chart({"plain": trace}).draw_without_rendering()


@pytest.mark.parametrize("ending", ["svg", "png", "pdf"])
def test_equal_traces_give_equal_files(tmp_path: Path, ending: str) -> None:
    for name in ("a", "b"):
        plot.timeline({"plain": PLAIN, "lossless": ENCODED}, tmp_path / f"{name}.{ending}")
    assert (tmp_path / f"a.{ending}").read_bytes() == (tmp_path / f"b.{ending}").read_bytes()


def test_nothing_to_draw() -> None:
    with pytest.raises(MeasureError, match=r"asked for of 0 traces, but it needs one or more"):
        plot.timeline_chart({})
    with pytest.raises(MeasureError, match=r"each with operations\. Make them with planning\.record\.record"):
        plot.timeline_chart({"plain": Trace("plain", (), (), 0, 0)})
