"""Inputs of convolutions: which ones Inductor copies, and that under a budget the inputs themselves are saved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._functorch import config as functorch
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import make_fx

from backstash import compile_backend
from backstash.compile.forms.saved_inputs import copied_inputs
from backstash.compile.graph import convolutions
from backstash.compile.graph.reading import operator_name
from backstash.compile.graph.values import Split
from backstash.compile.inductor import partitioner
from tests.compile.compiled_steps import Forward, differences, gradients


def network(channels_last: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 3))
    return model.to(memory_format=torch.channels_last) if channels_last else model


def treated(model: nn.Module, budget: int, backend: str = "aot_eager", **settings: Any) -> Any:
    """The model as Inductor's graphs are treated, on any backend."""
    torch._dynamo.reset()
    ours = compile_backend("lossless", backend, budget=budget, min_nbytes=0)
    ours.treatment.fuses = True
    return torch.compile(model, backend=ours, **settings)


def saved(compiled: Any, forward: Forward) -> list[Tensor]:
    """What one forward pass saves."""
    found: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        found.append(x)
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        forward(compiled)
    return found


def test_what_inductor_copies() -> None:
    def step(x: Tensor, whole: Tensor, point: Tensor, last: Tensor, other: Tensor) -> Tensor:
        hidden = torch.conv2d(x * 2, whole * other)
        return torch.conv2d(torch.conv2d(hidden, point), last)

    last = torch.randn(2, 2, 3, 3).contiguous(memory_format=torch.channels_last)
    inputs = torch.randn(1, 3, 8, 8), torch.randn(4, 3, 3, 3), torch.randn(2, 4, 1, 1), last, torch.randn(())
    graph = make_fx(step, tracing_mode="fake")(*inputs).graph
    names = [node.name for node in graph.find_nodes(op="placeholder")]
    # A weight of one pixel has the same memory in both layouts.
    assert {node.name for node in copied_inputs(graph)} == {names[0], names[1]}


def test_a_budget_that_copies_would_pass_saves_the_weights_themselves() -> None:
    model, x = network(), torch.randn(2, 3, 12, 12)
    torch._dynamo.reset()
    expected = gradients(model, lambda net: net(x).sum(), torch.compile(model, backend="aot_eager"))
    for budget, matrices in ((1 << 30, 0), (1000, 3)):
        compiled = treated(model, budget)
        # Not its bits: this backend copies nothing to channels last in the forward pass.
        torch.testing.assert_close(gradients(model, lambda net: net(x).sum(), compiled), expected)
        memories = {each.untyped_storage().data_ptr() for each in (x, *model.parameters())}
        found = [each for each in saved(compiled, lambda net: net(x).sum()) if each.dim() == 2]
        assert len(found) == matrices  # of the image, and of the two weights that have more than one pixel
        assert all(each.untyped_storage().data_ptr() in memories for each in found)


def test_a_weight_that_is_written_to_between_the_passes_is_an_error_as_in_eager_mode() -> None:
    model, x = network(), torch.randn(2, 3, 12, 12)
    loss = treated(model, 1000)(x).sum()
    with torch.no_grad():
        model[0].weight.add_(1.0)  # type: ignore[operator,union-attr]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"dynamic": True}, {"dynamic": False}])
def test_other_layouts_and_symbolic_sizes(settings: dict[str, Any]) -> None:
    model = network(channels_last=True)
    inputs = [torch.randn(batch, 3, 10, 10).contiguous(memory_format=torch.channels_last) for batch in (2, 5)]

    def forward(net: Any) -> Tensor:
        return torch.stack([net(x).square().sum() for x in inputs]).sum()

    torch._dynamo.reset()
    expected = gradients(model, forward, torch.compile(model, backend="aot_eager", **settings))
    assert differences(model, expected, gradients(model, forward, treated(model, 1000, **settings))) == []


@pytest.mark.slow
def test_inductors_bits_with_weights_saved_themselves() -> None:
    model, x = network(), torch.randn(4, 3, 24, 24)
    torch._dynamo.reset()
    expected = gradients(model, lambda net: net(x).sum(), torch.compile(model))
    compiled = treated(model, 1000, "inductor")
    found = gradients(model, lambda net: net(x).sum(), compiled)
    assert differences(model, expected, found) == []
    strides = [[None if each is None else each.stride() for each in every] for every in (expected, found)]
    assert strides[0] == strides[1]
    assert len([each for each in saved(compiled, lambda net: net(x).sum()) if each.dim() == 2]) == 3


@pytest.mark.slow
@pytest.mark.parametrize("groups", [2, 16])
def test_inductors_bits_of_convolutions_with_groups(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their gradients have other bits in other memory formats, which a convolution that is computed again must keep."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        *(nn.Conv2d(16, 32, 3, padding=1, groups=groups), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 32, 3, padding=1, groups=groups), nn.BatchNorm2d(32), nn.ReLU()),
        nn.Conv2d(32, 4, 3, padding=2, dilation=2, groups=2),
        nn.ReLU(),
    )
    x = torch.randn(4, 3, 16, 16)
    torch._dynamo.reset()
    expected = gradients(model, lambda net: net(x).sum(), torch.compile(model))
    called: list[str] = []

    def keep_formats(split: Split) -> None:
        convolutions.keep_formats(split)
        called.extend(map(operator_name, split.backward.graph.nodes))

    monkeypatch.setattr(partitioner, "keep_formats", keep_formats)
    with functorch.patch(enable_autograd_cache=False):  # a graph from the cache is not split again
        found = gradients(model, lambda net: net(x).sum(), treated(model, 1, "inductor"))
    assert "backstash_graph::convolution_in_channels_last" in called
    assert "aten::convolution" not in called
    assert differences(model, expected, found) == []
