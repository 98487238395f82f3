from __future__ import annotations

import base64
import json
import pickle
import pickletools
import re
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.cuda import _memory_viz

from backstash.planning.measure.record import record
from backstash.planning.model.trace import ROLES, Buffer, Op, Trace
from backstash.report.snapshot import snapshot

WEIGHT = Buffer("0.weight", "parameter", 40, 0, 10)
Y = Buffer("conv2d", "stashed", 100, 0, 7)
NOTHING = Buffer("empty", "immediate", 0, 1, 3)
MASK = Buffer("relu", "encoded", 4, 2, 8)
AGAIN = Buffer("ReluBackward0", "decoded", 50, 7, 9)
OPS = (Op("conv2d", 0), Op("relu", 2), Op("ReluBackward0", 5), Op("ConvolutionBackward0", 7))
TRACE = Trace("Lossless()", (WEIGHT, AGAIN, Y, NOTHING, MASK), OPS, backward=4, end=10)

READ_BY_THE_VIEWER = {
    *("APPEND", "APPENDS", "BINFLOAT", "BINGET", "BININT", "BININT1", "BININT2", "BINPUT", "BINUNICODE", "DICT"),
    *("EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "FRAME", "LIST", "LONG1", "LONG_BINGET", "LONG_BINPUT", "MARK"),
    *("MEMOIZE", "NEWFALSE", "NEWTRUE", "NONE", "PROTO", "SETITEM", "SETITEMS", "SHORT_BINUNICODE", "STOP"),
    *("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
}
"""The opcodes of pickle that the viewer's script knows."""


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    end = draw(st.integers(1, 20))
    lives = st.tuples(st.integers(0, end - 1), st.integers(1, end)).filter(lambda life: life[0] < life[1])
    facts = draw(st.lists(st.tuples(st.sampled_from(ROLES), st.integers(0, 99), lives), max_size=12))
    found = tuple(Buffer(str(number), role, nbytes, *life) for number, (role, nbytes, life) in enumerate(facts))
    return Trace("plain", found, (), draw(st.integers(0, end)), end)


def load(trace: Trace) -> Any:
    return pickle.loads(snapshot(trace))


def replayed(found: Any) -> int:
    """Returns the most bytes alive, having checked that nothing overlaps and that the blocks are what is left."""
    (events,), alive, most = found["device_traces"], {}, 0
    for event in events:
        if event["action"] == "alloc":
            begin, end = event["addr"], event["addr"] + event["size"]
            assert all(end <= other or begin >= other + size for other, size in alive.items())
            alive[event["addr"]] = event["size"]
            most = max(most, sum(alive.values()))
        elif event["action"] == "free_completed":
            assert alive.pop(event["addr"]) == event["size"]
    blocks = [block for segment in found["segments"] for block in segment["blocks"]]
    assert alive == {b["address"]: b["size"] for b in blocks if b["state"] == "active_allocated"}
    return most


def test_events_in_their_order() -> None:
    (events,) = load(TRACE)["device_traces"]
    allocated = [(e["size"], e["category"]) for e in events if e["action"] == "alloc"]
    assert allocated == [(40, "parameter"), (100, "stashed"), (4, "encoded"), (50, "decoded")]
    released = [e["size"] for e in events if e["action"] == "free_completed"]
    assert released == [100, 4, 50]
    assert replayed(load(TRACE)) == TRACE.peak_nbytes == 144


def test_frames_name_the_operation_and_the_role() -> None:
    (events,) = load(TRACE)["device_traces"]
    frames = {e["size"]: [(f["filename"], f["line"], f["name"]) for f in e["frames"]] for e in events[1:]}
    assert frames[4] == [("forward", 2, "relu"), ("role", 0, "encoded")]
    assert frames[50] == [("backward", 2, "ReluBackward0"), ("role", 0, "decoded")]


@given(traces())
def test_any_trace(trace: Trace) -> None:
    found = load(trace)
    assert replayed(found) == trace.peak_nbytes
    for segment in found["segments"]:
        ends = list(accumulate((block["size"] for block in segment["blocks"]), initial=segment["address"]))
        assert [block["address"] for block in segment["blocks"]] == ends[:-1]
        assert ends[-1] == segment["address"] + segment["total_size"]


@given(traces())
def test_the_viewer_can_read_it(trace: Trace) -> None:
    opcodes = {opcode.name: argument for opcode, argument, _ in pickletools.genops(snapshot(trace))}
    assert set(opcodes) <= READ_BY_THE_VIEWER
    assert 2 <= opcodes["PROTO"] <= 4
    categories = {event.get("category") for event in load(trace)["device_traces"][0]}
    assert "unknown" in categories or not categories


def test_torch_reports_on_it() -> None:
    text = _memory_viz.segsum(load(TRACE))
    assert "segments: 1" in text and "total_allocated: 40.0B" in text
    text = _memory_viz.trace(load(TRACE))
    assert "a = cudaMalloc(1048576, 144.0B)" in text and "a[0:100.0B]" in text and "MEM[" not in text


@pytest.mark.parametrize("plot", [_memory_viz.trace_plot, _memory_viz.segment_plot])
def test_torch_makes_its_page_of_it(plot: Any) -> None:
    page = plot(load(TRACE))
    (text,) = re.findall(r"const local_files = (.*)", page)
    inside = pickle.loads(base64.b64decode(json.loads(text)[0]["base64"]))
    assert inside == load(TRACE)


def test_a_step_on_this_machine() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    x = torch.ones(512, 64)
    trace = record(lambda: model(x).sum().backward(), "lossless", model=model, min_nbytes=0)
    found = load(trace)
    assert replayed(found) == trace.peak_nbytes
    categories = {event.get("category") for event in found["device_traces"][0]}
    assert {"parameter", "gradient", "encoded", "unknown"} <= categories
    assert "total_allocated" in _memory_viz.segsum(found)


def test_nothing_at_all() -> None:
    found = load(Trace("plain", (), (), 0, 0))
    assert found == {"segments": [], "device_traces": [[]]}
