"""Moving a value of a graph to the host: the calls that are made for an accelerator, and the refusal on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from backstash.compile.forms.offload import Offloaded, offloaded
from backstash.compile.graph.emit import GraphEmitter
from backstash.torch_internals import offload_operators


def test_a_cpu_has_nowhere_to_move_to() -> None:
    reason = offloaded("host", torch.device("cpu"))
    assert "in the host's memory already" in str(reason)
    assert "cannot reach the store 'disk'" in str(offloaded("disk", torch.device("cuda")))


@pytest.mark.skipif(offload_operators() is None, reason="this torch has no ao::offload")
def test_an_accelerator_gets_torchs_own_calls() -> None:
    form = offloaded("host", torch.device("cuda"))
    assert isinstance(form, Offloaded)
    graph, mode = fx.Graph(), FakeTensorMode()
    x = graph.placeholder("x")
    with mode:
        x.meta["val"] = torch.empty(4, 6, device="cuda")
    emit = GraphEmitter(graph, graph.output(x), mode)
    (plane,) = form.encode(emit, x)
    decoded = form.decode(emit, (plane,), x.meta["val"])
    operators: Any = offload_operators()
    called = [node.target for node in graph.nodes if node.op == "call_function"]
    assert called == [
        operators.offload.default,
        operators.wait_tensor.default,
        operators.reload.default,
        operators.wait_tensor.default,
    ]
    assert plane.args[1] is x, "the source is freed when the copy is complete"
    assert plane.meta["val"].device.type == "cpu"
    found, like = decoded.meta["val"], x.meta["val"]
    assert (found.device, found.shape, found.stride()) == (like.device, like.shape, like.stride())
