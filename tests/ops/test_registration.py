"""Codecs call kernels past torch's dispatcher where nobody hears of operations, and through it where somebody does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from backstash.ops import registration, zvc_chunks
from backstash.ops.registration import Ops, ops

X = torch.tensor([0.0, 1.0, 0.0, -2.0])


class Heard(TorchDispatchMode):
    """Notes what is called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_nobody_hears_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []

    def behind(name: str) -> Any:
        return lambda *args: called.append((name, args))

    monkeypatch.setattr(registration, "behind", behind)
    Ops().zvc_encode(X)
    assert [name for name, _ in called] == ["zvc_encode"]


def test_the_same_planes_either_way() -> None:
    for own, torchs in zip(ops.zvc_encode(X), torch.ops.backstash.zvc_encode(X), strict=True):
        assert own.dtype is torchs.dtype
        assert torch.equal(own, torchs)


def test_a_mode_hears_of_it() -> None:
    with Heard() as heard:
        ops.zvc_encode(X)
    assert heard.names == ["backstash.zvc_encode.default"]


def test_a_profile_names_it() -> None:
    with torch.profiler.profile() as profile:
        ops.zvc_encode(X)
    assert "backstash::zvc_encode" in [event.name for event in profile.events()]


def test_a_fake_has_fake_planes() -> None:
    with FakeTensorMode(shape_env=torch.fx.experimental.symbolic_shapes.ShapeEnv()) as mode:
        fake = mode.from_tensor(X)
    mask, offsets, _ = ops.zvc_encode(fake)
    assert isinstance(mask, FakeTensor)
    assert (mask.numel(), offsets.numel()) == (1, zvc_chunks(4))


def test_without_data() -> None:
    out = torch.empty(4, device="meta")
    ops.bitmask_decode(torch.empty(1, dtype=torch.uint8, device="meta"), out, 1.0, 0.0)
    assert out.is_meta


def test_a_graph_that_is_traced_has_it() -> None:
    graph = make_fx(lambda x: ops.minifloat_encode(x, "fp8", False))(X)
    assert torch.ops.backstash.minifloat_encode.default in [node.target for node in graph.graph.nodes]


def test_a_compiled_function_has_it() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: ops.minifloat_encode(x, "fp8", False), backend=backend, fullgraph=True)
    assert torch.equal(compiled(X), ops.minifloat_encode(X, "fp8", False))
    assert "minifloat_encode" in graphs[0].code


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="backstash::zvc_encode asked for a flat contiguous tensor"):
        ops.zvc_encode(X.reshape(2, 2))


def test_no_kernel_of_that_name() -> None:
    with pytest.raises(AttributeError):
        ops.zvc_enchode(X)
