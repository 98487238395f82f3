"""Elementwise values that kernels compute for themselves, and convolutions' gradients by two calls: bits and memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compiled_steps import differences, gradients
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from backstash import compile_backend, compile_options
from backstash.compile.budget.joint import Joint
from backstash.compile.budget.lifetimes import Lifetimes
from backstash.compile.graph import image_calls
from backstash.compile.graph.image_calls import call_twice
from backstash.compile.graph.reading import operator_name
from backstash.compile.graph.repeated import repeat_for_readers
from backstash.compile.inductor import partitioner
from backstash.report.meter import CountedPeak
from backstash.torch_internals import format_of

pytestmark = pytest.mark.filterwarnings("ignore")


def graph_of(step: Any, *shapes: tuple[int, ...]) -> fx.GraphModule:
    """A step as a graph, whose last input is a gradient."""
    graph = make_fx(step, tracing_mode="fake")(*(torch.ones(shape) for shape in shapes))
    *_, last = graph.graph.find_nodes(op="placeholder")
    last.name = last.target = "tangents_1"
    return graph


def masked(x: Tensor, w: Tensor, gradient: Tensor) -> list[Tensor]:
    """A value that a product reads first, and a mask and a sum later."""
    value = (x - 1.0) * 2.0
    product = torch.mm(value.t(), gradient)
    passed = torch.where(value <= 0, 0.0, torch.mm(gradient, w))
    return [product, passed * x, passed.sum(0)]


def test_a_later_reader_computes_the_value_for_itself() -> None:
    graph = graph_of(masked, (64, 64), (64, 64), (64, 64))
    inputs = [torch.randn(64, 64) for _ in range(3)]
    expected = graph(*inputs)
    before = len(graph.graph.nodes)
    assert repeat_for_readers(graph.graph, 1) == 1
    assert repeat_for_readers(graph.graph, 1) == 0
    graph.graph.lint()
    graph.recompile()
    assert len(graph.graph.nodes) == before + 2  # the difference and its double
    (test,) = (node for node in graph.graph.nodes if operator_name(node) == "aten::le")
    (product,) = (node for node in graph.graph.nodes if operator_name(node) == "aten::t")
    assert test.args[0] is not product.args[0]
    assert all(torch.equal(one, other) for one, other in zip(graph(*inputs), expected, strict=True))


def lasting(x: Tensor, w: Tensor, gradient: Tensor) -> list[Tensor]:
    """As above, but nothing reads ``x`` after the mask."""
    value = (x - 1.0) * 2.0
    product = torch.mm(value.t(), gradient)
    return [product, torch.where(value <= 0, 0.0, torch.mm(gradient, w))]


def slow(x: Tensor, w: Tensor, gradient: Tensor) -> list[Tensor]:
    """As the first, but by a function that takes long."""
    value = torch.tanh(x)
    product = torch.mm(value.t(), gradient)
    return [product, torch.where(value <= 0, 0.0, torch.mm(gradient, w)) * x]


@pytest.mark.parametrize("step", [lasting, slow], ids=lambda step: str(step.__name__))
def test_what_is_not_there_anyway_or_takes_long_is_held(step: Any) -> None:
    assert repeat_for_readers(graph_of(step, (64, 64), (64, 64), (64, 64)).graph, 1) == 0


def test_small_values_are_held() -> None:
    assert repeat_for_readers(graph_of(masked, (64, 64), (64, 64), (64, 64)).graph) == 0


def test_an_estimate_ends_a_value_where_later_readers_compute_it() -> None:
    size = 256 * 256 * 4
    peaks = {}
    for step in (masked, slow):
        graph = graph_of(step, (256, 256), (256, 256), (256, 256)).graph
        joint = Joint(graph, 0, True)
        assert joint.repeats_light and not joint.counts_on_it  # there is no depthwise convolution
        joint.counts_on_it = True
        peaks[step] = Lifetimes(joint).estimate({}).peak
    # Of the first the two products, and small sums; of the second beside these what the mask is made of.
    assert peaks[slow] - peaks[masked] >= size - 256 * 4


def test_all_results_of_a_call_are_there_when_it_returns() -> None:
    def step(x: Tensor, gradient: Tensor) -> list[Tensor]:
        value = torch.mm(x, gradient)
        low, high = torch.ops.aten.aminmax.default(value, dim=0)
        left, right = torch.ops.aten.sort.default(torch.mm(value, gradient))
        return [low, high, left, right]

    joint = Joint(graph_of(step, (64, 64), (64, 64)).graph, 0, False)
    least = Lifetimes(joint).estimate({}).peak
    assert least >= 64 * 64 * (4 + 4 + 8)  # what is sorted, in order, and its places


def depthwise() -> tuple[nn.Module, Tensor]:
    """Few channels are made many, of which each is convolved by itself with a step of two."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU6()]
    layers += [nn.Conv2d(16, 64, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU6()]
    layers += [nn.Conv2d(64, 64, 3, 2, 1, groups=64, bias=False), nn.BatchNorm2d(64), nn.ReLU6()]
    return nn.Sequential(*layers, nn.Conv2d(64, 16, 1, bias=False), nn.BatchNorm2d(16)), torch.randn(8, 3, 32, 32)


@pytest.mark.slow
def test_inductors_bits_and_peak_of_depthwise_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = depthwise()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    found, peaks = [], []

    def once(graph: fx.Graph) -> int:
        return 0

    for options, calls in (({}, once), ("lossless", once), ("lossless", call_twice)):
        monkeypatch.setattr(partitioner, "call_twice", calls)
        torch._dynamo.reset()
        model.load_state_dict(state)
        options = compile_options(options, budget="1%", min_nbytes=0) if options else {}
        net = torch.compile(model, options=options, fullgraph=True)
        with (
            torch._functorch.config.patch(enable_autograd_cache=False),
            torch._inductor.config.patch(fx_graph_cache=False),
        ):
            found.append(gradients(model, lambda _, net=net: net(x).square().mean()))
        with CountedPeak() as counted:
            net(x).square().mean().backward()
        peaks.append(counted.peak_nbytes)
    for other in found[1:]:
        assert differences(model, found[0], other) == []
    images = x.nbytes // 3 * 64
    assert peaks[2] + images <= peaks[1] < peaks[0]


@pytest.mark.slow
def test_calls_are_marked_in_graphs_of_exact_budgets_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = depthwise()
    counts: list[int] = []
    monkeypatch.setattr(partitioner, "call_twice", lambda graph: counts.append(call_twice(graph)))
    for budget in (None, "50%"):
        torch._dynamo.reset()
        ours = compile_backend("lossless", budget=budget, min_nbytes=0)
        ours.treatment.fuses = True
        torch.compile(model, backend=ours, fullgraph=True)(x).sum().backward()
    assert counts == [3 if image_calls.can_call_twice() else 0]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1), (0, 2, 1, 3)])
def test_the_format_that_kernels_see(order: tuple[int, ...]) -> None:
    whole = torch.empty([(2, 3, 4, 5)[dim] for dim in order])
    x = whole.permute([order.index(dim) for dim in range(4)])
    is_last = order == (0, 2, 3, 1)
    assert format_of(x.shape, x.stride()) == (torch.channels_last if is_last else torch.contiguous_format)
