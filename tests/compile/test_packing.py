"""Small integers and bools as bytes: where a compiler fuses, sums of floats give the bytes that shifts give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode

from backstash.compile.graph.emit import GraphEmitter, run_now
from backstash.compile.graph.layout import pack, pack_bools

SHAPES = [(8, 3, 5), (7, 37), (1000,), (3, 16, 6, 6), (9, 8), (1,), (1, 1, 24)]


def fused(call: Callable[[Any, Any], Any], x: Tensor) -> Tensor:
    """What the nodes compute that are emitted for a compiler that fuses."""
    graph, mode = fx.Graph(), FakeTensorMode()
    node = graph.placeholder("x")
    node.meta["val"] = mode.from_tensor(x)
    output = graph.output(None)
    output.args = (call(GraphEmitter(graph, output, mode, fuses=True), node),)
    graph.lint()
    assert not any("shift" in str(each.target) for each in graph.nodes)
    found: Tensor = fx.GraphModule({}, graph)(x)
    return found


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_codes_of_every_width(bits: int, shape: tuple[int, ...]) -> None:
    codes = torch.randint(0, 1 << bits, shape, dtype=torch.uint8)
    expected = pack(run_now, codes, bits)
    found = fused(lambda emit, x: pack(emit, x, bits), codes)
    assert found.dtype == torch.uint8
    assert torch.equal(found, expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bools(shape: tuple[int, ...]) -> None:
    x = torch.rand(shape) < 0.5
    assert torch.equal(fused(pack_bools, x), pack_bools(run_now, x))


def test_all_bits_set() -> None:
    assert fused(pack_bools, torch.ones(64, dtype=torch.bool)).tolist() == [255] * 8
    assert fused(lambda emit, x: pack(emit, x, 4), torch.full((6,), 15, dtype=torch.uint8)).tolist() == [255] * 3
