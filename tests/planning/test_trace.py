from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstash.planning.model.trace import ROLES, Buffer, Decode, Op, Trace

Y = Buffer("conv2d", "stashed", 100, 0, 7)
X = Buffer("conv2d", "immediate", 30, 0, 2)
Z = Buffer("relu", "encoded", 4, 2, 8)
POOL = Buffer("ReluBackward0", "decoded", 50, 5, 10)
TRACE = Trace(
    "Lossless()",
    (POOL, Y, X, Z),
    (Op("conv2d", 0), Op("relu", 2), Op("ReluBackward0", 5), Op("ConvolutionBackward0", 7)),
    backward=4,
    end=10,
    decodes=(Decode("ReluBackward0", 40, 5, 7, (3,)), Decode("ConvolutionBackward0", 45, 8, 9, ())),
)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    end = draw(st.integers(1, 20))
    lives = st.tuples(st.integers(0, end - 1), st.integers(1, end)).filter(lambda life: life[0] < life[1])
    facts = draw(st.lists(st.tuples(st.sampled_from(ROLES), st.integers(0, 99), lives), max_size=12))
    ops = sorted(draw(st.lists(st.integers(0, end), max_size=6)))
    found = tuple(Buffer(str(number), role, nbytes, *life) for number, (role, nbytes, life) in enumerate(facts))
    return Trace("plain", found, tuple(Op(str(start), start) for start in ops), draw(st.integers(0, end)), end)


def test_what_is_live() -> None:
    assert TRACE.live() == [130, 130, 104, 104, 104, 154, 154, 54, 50, 50]
    assert TRACE.live(("encoded",)) == [0, 0, 4, 4, 4, 4, 4, 4, 0, 0]
    assert TRACE.peak_nbytes == 154
    assert Trace("plain", (), (), 0, 0).peak_nbytes == 0


def test_json_holds_everything() -> None:
    assert Trace.from_json(TRACE.to_json()) == TRACE
    assert set(json.loads(TRACE.to_json())) == {"policy", "buffers", "ops", "backward", "end", "decodes"}


@given(traces())
def test_json_holds_any(trace: Trace) -> None:
    assert Trace.from_json(trace.to_json()) == trace


def test_operations_as_the_unit_of_time() -> None:
    found = TRACE.by_op()
    lives = [(buffer.start, buffer.end) for buffer in found.buffers]
    assert lives == [(3, 5), (1, 5), (1, 3), (2, 5)]  # released in an operation: alive in all of it
    assert [op.start for op in found.ops] == [1, 2, 3, 4]
    assert (found.backward, found.end) == (2, 5)
    assert [(decode.start, decode.end) for decode in found.decodes] == [(3, 5), (4, 5)]


@given(traces())
def test_operations_never_shorten_a_life(trace: Trace) -> None:
    found = trace.by_op()
    assert found.end == len(trace.ops) + 1
    assert found.peak_nbytes >= trace.peak_nbytes
    for number, a in enumerate(trace.buffers):
        for b, coarse in zip(trace.buffers[:number], found.buffers[:number], strict=True):
            assert found.buffers[number].overlaps(coarse) or not a.overlaps(b)


def test_lifetimes_by_definition() -> None:
    found = TRACE.by_definition()
    assert found.buffers == (
        Y,
        X,
        Buffer("relu", "encoded", 4, 2, 6),
        Buffer("ReluBackward0", "decoded", 40, 5, 7),
        Buffer("ConvolutionBackward0", "recomputed", 45, 8, 9),
    )
    assert [decode.planes for decode in found.decodes] == [(2,), ()]
    assert found.by_definition() == found  # and not without what is decoded


@pytest.mark.parametrize(
    "facts",
    [("stashed", -1, 0, 1), ("stashed", 1, 1, 1), ("stashed", 1, 2, 1), ("stashed", 1, -1, 1), ("kept", 1, 0, 1)],
)
def test_buffers_that_make_no_sense(facts: tuple[str, int, int, int]) -> None:
    role, *numbers = facts
    with pytest.raises(ValueError, match=r"^Buffer was asked for .* but it needs a role of stashed, .*start < end"):
        Buffer("x", role, *numbers)  # type: ignore[arg-type]


def test_overlap_is_symmetric_and_ends_are_exclusive() -> None:
    assert X.overlaps(Y) and Y.overlaps(X)
    assert not X.overlaps(Z) and not Z.overlaps(X)
