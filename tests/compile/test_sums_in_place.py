"""Sums of a product and another value in the other value's memory: where, with which bits, and at which peak."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_steps import differences, gradients
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from backstash import compile_options
from backstash.compile.budget.joint import Joint
from backstash.compile.budget.lifetimes import Lifetimes
from backstash.compile.graph.sums import add_products_in_place, added_product, early_products, take_apart
from backstash.report.meter import CountedPeak

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))


LEFT, RIGHT, OTHER = torch.ones(4, 3), torch.ones(3, 5), torch.ones(4, 5)


def traced(function: Callable[..., Any], *arguments: Tensor) -> Any:
    return make_fx(function, tracing_mode="fake")(*(arguments or (LEFT, RIGHT, OTHER))).graph


@pytest.mark.parametrize(
    "function",
    [
        lambda left, right, other: torch.mm(left, right) + other.exp(),
        lambda left, right, other: other.exp() + torch.mm(left, right),
        lambda left, right, other: torch.mm(left * 2, right) + torch.mm(left, right),
    ],
    ids=["product first", "product second", "two products"],
)
def test_a_sum_is_computed_in_the_memory_of_a_value_that_nobody_else_reads(function: Callable[..., Any]) -> None:
    graph = traced(function)
    before = [name for node in graph.nodes if (name := str(node.target)).startswith("aten.mm")]
    assert add_products_in_place(graph, min_nbytes=0) == 1
    graph.lint()
    after = [name for node in graph.nodes if (name := str(node.target)).startswith("aten.mm")]
    assert len(after) == len(before) - 1
    module = torch.fx.GraphModule(nn.Module(), graph)
    values = [torch.randn(x.shape, generator=torch.Generator().manual_seed(0)) for x in (LEFT, RIGHT, OTHER)]
    torch.testing.assert_close(module(*values), function(*values))


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda left, right, other: torch.mm(left, right) + other, "it is an input"),
        (lambda left, right, other: (x := other.exp(), torch.mm(left, right) + x), "it is a result too"),
        (lambda left, right, other: torch.mm(left, right) + other.exp().view(-1).view(4, 5), "it is a view"),
        (lambda left, right, other: torch.mm(left, right) + other.exp()[:1], "it is broadcast"),
        (lambda left, right, other: torch.mm(left, right) + other.double().exp(), "it has another dtype"),
        (lambda left, right, other: torch.mm(left, right) + torch.full((4, 5), 2.0), "it is a constant"),
        (lambda left, right, other: torch.mm(left, right) + other.t().contiguous().exp().t(), "it is transposed"),
        (lambda left, right, other: torch.mm(left, right) - other.exp(), "it is a difference"),
        (lambda left, right, other: torch.add(torch.mm(left, right), other.exp(), alpha=2), "it has a factor"),
        (lambda left, right, other: (x := torch.mm(left, right), x + other.exp()), "the product is a result too"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_another_sum_is_left_as_it_is(function: Callable[..., Any], why: str) -> None:
    graph = traced(function)
    text = str(graph)
    assert add_products_in_place(graph, min_nbytes=0) == 0, why
    assert str(graph) == text


def test_nothing_is_done_where_inductor_chooses_among_kernels_or_a_copy_costs_nothing() -> None:
    from torch._inductor import config

    graph = traced(lambda left, right, other: torch.mm(left, right) + other.exp())
    assert add_products_in_place(graph) == 0, "80 bytes"
    for settings in ({"max_autotune": True}, {"max_autotune_gemm": True}, {"pattern_matcher": False}):
        with config.patch(settings):
            assert add_products_in_place(graph, min_nbytes=0) == 0, settings
    assert add_products_in_place(graph, min_nbytes=0) == 1


@pytest.mark.slow
def test_inductor_fuses_the_sums_that_we_say_it_does() -> None:
    from torch._inductor.fx_passes.post_grad import post_grad_passes
    from torch._inductor.virtualized import V

    functions = [
        lambda left, right, other: torch.mm(left, right) + other.exp(),
        lambda left, right, other: other.exp() + torch.mm(left, right),
        lambda left, right, other: torch.mm(left * 2, right) + torch.mm(left, right),
        lambda left, right, other: (x := torch.mm(left, right), x + other.exp()),
        lambda left, right, other: torch.mm(left, right) + other.double().exp(),
        lambda left, right, other: torch.mm(left, right) - other.exp(),
    ]
    for number, function in enumerate(functions):
        module = make_fx(function, tracing_mode="fake")(LEFT, RIGHT, OTHER)
        ours = {str(pair[1].target) for node in module.graph.nodes if (pair := added_product(node)) is not None}
        with V.set_fake_mode(next(iter(module.graph.nodes)).meta["val"].fake_mode):
            post_grad_passes(module, is_inference=False)
        theirs = {str(node.args[0].target) for node in module.graph.nodes if "addmm" in str(node.target)}
        assert ours == theirs, number


def test_the_estimate_counts_one_memory_for_the_summand_and_the_sum() -> None:
    def step(left: Tensor, right: Tensor, other: Tensor, tangent: Tensor) -> list[Tensor]:
        return [left.sum(), torch.mm(left, right) + torch.cumsum(other * tangent, 0)]

    inputs = [torch.ones(256, 8), torch.ones(8, 256), torch.ones(256, 256), torch.ones(())]
    graph = traced_backward(step, inputs)
    sums = 256 * 256 * 4
    joint = Joint(graph, 1, True)
    assert len(joint.takes_over) == 1
    assert Lifetimes(joint).estimate({}).backward[-1] == sums
    joint.takes_over.clear()
    assert Lifetimes(joint).estimate({}).backward[-1] == 2 * sums


def wide(left: Tensor, right: Tensor, other: Tensor, tangent: Tensor) -> list[Tensor]:
    """A product of which one operand takes four times the memory of the product."""
    return [left.sum(), torch.mm(left * tangent, right) + torch.cumsum(other * tangent, 0)]


def traced_backward(function: Callable[..., Any], inputs: list[Tensor]) -> Any:
    graph = traced(function, *inputs)
    last = list(graph.find_nodes(op="placeholder"))[-1]
    last.target = last.name = "tangents_1"
    return graph


def test_a_product_is_computed_early_where_it_takes_less_memory_and_bits_need_not_be_kept() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(sizes, generator=generator) for sizes in ((256, 512), (512, 128), (256, 128), ())]
    graph = traced_backward(wide, inputs)
    assert len(early_products(graph)) == 1
    fused, apart = (Joint(graph, 1, True, is_apart=is_apart) for is_apart in (False, True))
    (number,) = fused.takes_over
    product = next(number for number, node in enumerate(fused.nodes) if "mm" in str(node.target))
    assert product in apart.reads[number]
    assert not apart.takes_over
    ends = [Lifetimes(joint).estimate({}).backward[-1] for joint in (fused, apart)]
    assert ends == [256 * (512 + 128) * 4, 2 * 256 * 128 * 4], "the operand, or no more than the product"
    take_apart(graph)
    graph.lint()
    assert not early_products(graph)
    assert add_products_in_place(graph, min_nbytes=0) == 0
    module = torch.fx.GraphModule(nn.Module(), graph)
    torch.testing.assert_close(module(*inputs), wide(*inputs))
    assert not early_products(traced_backward(wide, [torch.ones(256, 64), torch.ones(64, 128), *inputs[2:]]))


class Tied(nn.Module):
    """Words whose embedding is the last layer too."""

    def __init__(self, words: int = 3000, width: int = 48) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.block = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        x = x + self.block(x)
        logits = functional.linear(x, self.words.weight)
        return functional.cross_entropy(logits.flatten(0, -2), tokens.flatten())


def tokens(rows: int = 2, columns: int = 48) -> Tensor:
    return torch.randint(0, 3000, (rows, columns), generator=torch.Generator().manual_seed(rows * columns))


def stepped(model: nn.Module, forward: Any, options: Any, **settings: Any) -> tuple[list[Any], int]:
    torch._dynamo.reset()
    compiled = torch.compile(model, options=options, **settings)
    found = gradients(model, forward, compiled)
    with CountedPeak() as counted:
        forward(compiled).backward()
    return found, counted.peak_nbytes


def under_autocast(net: Any) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return net(tokens())


CASES: dict[str, tuple[Callable[[], nn.Module], Any, dict[str, Any]]] = {
    "tied words": (Tied, lambda net: net(tokens()), {}),
    "two calls with symbolic sizes": (Tied, lambda net: net(tokens()) + net(tokens(3, 20)), {"dynamic": True}),
    "autocast": (Tied, under_autocast, {}),
    "bfloat16": (lambda: Tied().bfloat16(), lambda net: net(tokens()), {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_bits_are_those_of_compiled_plain_and_the_peak_is_no_higher(case: str) -> None:
    torch.manual_seed(0)
    make, forward, settings = CASES[case]
    model = make()
    expected, peak = stepped(model, forward, {}, **settings)
    found, ours = stepped(model, forward, compile_options("lossless"), **settings)
    assert differences(model, expected, found) == []
    assert ours <= peak
    if case == "tied words":
        words = model.words.weight.nbytes  # type: ignore[union-attr, operator]
        assert ours <= peak - 0.8 * words, "a third memory of the words' size was at the peak"


@pytest.mark.slow
def test_a_graph_from_the_cache_on_disk_has_the_same_bits_and_peak() -> None:
    from torch._dynamo.utils import counters

    torch.manual_seed(0)
    model = Tied()
    first, peak = stepped(model, lambda net: net(tokens()), compile_options("lossless", budget="1MiB"))
    counters.clear()
    options = compile_options("lossless", budget="1MiB")
    again, same = stepped(model, lambda net: net(tokens()), options)
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1
    assert differences(model, first, again) == []
    assert same == peak
