"""Searches for what a graph saves under a budget: how many sets they look at, and what they see of rounded values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from backstash import compile_backend, compile_options, policies
from backstash.compile.budget import splitting
from backstash.compile.budget.joint import Joint
from backstash.compile.budget.lifetimes import Lifetimes
from backstash.compile.budget.search import GraphSearch
from backstash.compile.graph.reading import operator_name
from backstash.report.meter import CountedPeak
from tests.compile.compiled_steps import Bottleneck, differences, gradients

pytestmark = pytest.mark.filterwarnings("ignore")


class Twice(nn.Module):
    """A value that two layers read, one at the start and one at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)
        self.between = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x @ self.first.weight)
        return (self.between(self.first(x)) * self.last(x)).square().mean()


def compiled(model: nn.Module, policy: Any, nbytes: int | None, fuses: bool = True) -> tuple[Any, Any]:
    """A model whose graphs are treated as for Inductor and run as they are."""
    torch._dynamo.reset()
    ours = compile_backend(policy, budget=nbytes, min_nbytes=0)
    ours.treatment.fuses = fuses
    return ours, torch.compile(model, backend=ours, fullgraph=True)


def blocks(count: int) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(*(Bottleneck(64) for _ in range(count))), torch.randn(4, 64, 16, 16)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lossless", policies.quantized(4)], ids=repr)
def test_a_search_looks_at_a_few_sets_for_each_value(policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    estimate = Lifetimes.estimate

    def counted(self: Lifetimes, saved: Any) -> Any:
        looked.append(len(saved))
        return estimate(self, saved)

    monkeypatch.setattr(Lifetimes, "estimate", counted)
    model, x = blocks(6)
    _, net = compiled(model, policy, 1 << 20)
    net(x).square().mean().backward()
    assert len(looked) <= 30 * max(looked)


def searched(model: nn.Module, x: Tensor, policy: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a search for the lowest peak is given: the graph, the options, and what torch would save."""
    found: list[Any] = []
    search = splitting._searched

    def noted(joint: Joint, starts: Any, options: Any, nbytes: int) -> Any:
        names = starts[0].names
        numbers = {joint.number(node) for node in joint.graph.nodes if node.name in names}
        found.append((joint, options, [number for number in options.held if number in numbers]))
        return search(joint, starts, options, nbytes)

    monkeypatch.setattr(splitting, "_searched", noted)
    _, net = compiled(model, policy, 1000)
    net(x).square().mean().backward()
    return found[0]


@pytest.mark.slow
def test_everything_rounded_is_where_a_search_may_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    joint, options, start = searched(*blocks(6), policies.quantized(4), monkeypatch)
    first = GraphSearch(joint, options, 1000, start, is_rounded=True)
    assert first._current.rounded == set(options.rounded) & set(start)
    found = first.run()
    assert found.estimate.peak <= first._current.estimate.peak
    assert found.estimate.peak <= GraphSearch(joint, options, 1000, start).run().estimate.peak
    # As little is rounded as the budget needs.
    assert not GraphSearch(joint, options, 1 << 40, start, is_rounded=True).run().rounded


@pytest.mark.slow
def test_nothing_is_computed_again_from_what_a_search_has_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    joint, options, start = searched(*blocks(6), policies.quantized(4), monkeypatch)
    always = Lifetimes(joint).estimate({number: options.held[number] for number in start}).again
    for share in (1000, 1 << 20, 2 << 20, 3 << 20):
        for is_rounded in (False, True):
            found = GraphSearch(joint, options, share, start, is_rounded).run()
            waiting, seen = list(found.estimate.again - always), set()
            while waiting:
                for source in joint.reads[waiting.pop()]:
                    assert source not in found.rounded
                    if source not in found.estimate.saved and source not in seen:
                        seen.add(source)
                        waiting.append(source)


def test_under_a_budget_a_value_is_decoded_for_each_product_that_reads_it() -> None:
    torch.manual_seed(0)
    model, x = Twice(), torch.randn(512, 64)
    counts = []
    for nbytes in (None, 1000):
        ours, net = compiled(model, policies.quantized(4), nbytes)
        graphs: list[fx.GraphModule] = []
        carried_out = ours.treatment.carry_out

        def noted(name: str, chosen: Any, *arguments: Any, run: Any = carried_out, found: Any = graphs) -> Any:
            found.append(chosen.split.backward)
            return run(name, chosen, *arguments)

        ours.treatment.carry_out = noted
        net(x).backward()
        nodes = graphs[0].graph.nodes
        decodings = [node for node in nodes if operator_name(node) == "backstash_graph::values_of_groups"]
        assert all(len(node.users) == 1 for node in decodings)
        counts.append(len(decodings))
    assert counts[0] == 0
    assert counts[1] > 1


def test_decodings_apart_give_gradients_as_near() -> None:
    torch.manual_seed(0)
    model, x = Twice(), torch.randn(512, 64)
    exact = gradients(model, lambda net: net(x))
    for fuses in (True, False):
        _, net = compiled(model, policies.quantized(8), 1000, fuses)
        for one, plain in zip(gradients(model, lambda _, net=net: net(x)), exact, strict=True):
            assert one is not None
            assert plain is not None
            assert float((one - plain).norm()) <= 0.02 * float(plain.norm())


def graph_of_a_comparison() -> fx.Graph:
    """A value that a product's gradient and a comparison read in backward."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def both(x: Tensor, w: Tensor, tangents: Tensor) -> list[Tensor]:
        value = torch.mm(x, w)
        result = torch.mm(value, w)
        masked = torch.where(value <= 0, torch.zeros(()), torch.mm(tangents, w.t()))
        return [result, torch.mm(x.t(), masked), torch.mm(value.t(), tangents)]

    square = [torch.ones(16, 16) for _ in range(3)]
    graph = make_fx(both, tracing_mode="fake")(*square).graph
    *_, tangents = graph.find_nodes(op="placeholder")
    tangents.name = tangents.target = "tangents_1"
    return graph


def test_a_comparison_beside_a_rounded_value_reads_its_bits_alone() -> None:
    joint = Joint(graph_of_a_comparison(), 1, True)
    value = next(number for number, node in enumerate(joint.nodes) if operator_name(node) == "aten::mm")
    test = next(number for number, node in enumerate(joint.nodes) if operator_name(node) == "aten::le")
    saved = {value: 200}
    apart = Lifetimes(joint, saved).estimate(saved)
    together = Lifetimes(joint, saved, {test: value}).estimate(saved)
    assert together.peak <= apart.peak
    assert together.saved[value] == apart.saved[value] == 200
    # If the value is not rounded, its bits are nowhere.
    exact = {value: joint.nbytes[value]}
    assert Lifetimes(joint, saved, {test: value}).estimate(exact).peak == Lifetimes(joint).estimate(exact).peak


@pytest.mark.slow
def test_a_sum_of_gradients_that_several_read_is_stored_where_values_may_be_rounded() -> None:
    model, x = blocks(4)
    rounding = policies.quantized(4)
    for policy, nbytes, expected in ((rounding, None, 0), (rounding, 1 << 20, 2), ("lossless", 1 << 20, 0)):
        ours, net = compiled(model, policy, nbytes)
        graphs: list[fx.GraphModule] = []
        carried_out = ours.treatment.carry_out

        def noted(name: str, chosen: Any, *arguments: Any, run: Any = carried_out, found: Any = graphs) -> Any:
            account = run(name, chosen, *arguments)
            found.append(chosen.split.backward)
            return account

        ours.treatment.carry_out = noted
        net(x).square().mean().backward()
        stored = [node for node in graphs[0].graph.nodes if operator_name(node) == "backstash_graph::stored"]
        assert len(stored) == expected
        for node in stored:
            assert list(node.args[0].users) == [node]


@pytest.mark.slow
def test_inductor_keeps_the_bits_below_a_budget() -> None:
    model, x = blocks(4)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    found, peaks = [], []
    for options in ({}, compile_options("lossless", budget=1 << 20, min_nbytes=0)):
        torch._dynamo.reset()
        model.load_state_dict(state)
        net = torch.compile(model, options=options, fullgraph=True)
        found.append(gradients(model, lambda _, net=net: net(x).square().mean()))
        with CountedPeak() as counted:
            net(x).square().mean().backward()
        peaks.append(counted.peak_nbytes)
    assert differences(model, *found) == []
    assert peaks[1] < peaks[0]
