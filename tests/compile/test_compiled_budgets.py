"""Budgets of compiled graphs: what is saved, recomputed and rounded, the same bits, and the peak that was estimated."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from backstash import compile_backend, policies
from backstash.compile.budget.joint import Joint
from backstash.report.meter import CountedPeak
from tests import networks
from tests.compile.compiled_steps import Bottleneck, Forward, differences, gradients


def step(model: nn.Module, forward: Forward, budget: Any, policy: Any = "lossless", **settings: Any) -> Any:
    """The gradients under a budget, the backend, and the counted peak of a second step."""
    torch._dynamo.reset()
    ours = compile_backend(policy, budget=budget, min_nbytes=0)
    compiled = torch.compile(model, backend=ours, **settings)
    found = gradients(model, forward, compiled)
    with CountedPeak() as counted:
        forward(compiled).backward()  # type: ignore[no-untyped-call]
    return found, ours, counted.peak_nbytes


def plain(model: nn.Module, forward: Forward, **settings: Any) -> Any:
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", **settings)
    found = gradients(model, forward, compiled)
    with CountedPeak() as counted:
        forward(compiled).backward()  # type: ignore[no-untyped-call]
    return found, counted.peak_nbytes


def estimated(ours: Any) -> float:
    """In MiB."""
    ((number, unit),) = re.findall(r"a peak of ([\d.]+) ([KM]iB)", ours.report().notes[0])
    return float(number) / {"KiB": 1024, "MiB": 1}[unit]


class Loss(nn.Module):
    """Blocks and a loss, so that nothing of a step lies outside the graph."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.blocks(x).square().mean()
        return found


def bottlenecks() -> tuple[nn.Module, Forward]:
    torch.manual_seed(0)
    model = Loss(*(Bottleneck(64) for _ in range(3)))
    x = torch.randn(8, 64, 24, 24)
    return model, lambda net: net(x)


@pytest.mark.parametrize("share", [0.75, pytest.param(0.65, marks=pytest.mark.slow)])
def test_a_budget_below_what_torch_reaches_is_met_within_four_percent_with_the_same_bits(share: float) -> None:
    model, forward = bottlenecks()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    expected, peak = plain(model, forward, fullgraph=True)
    model.load_state_dict(state)
    budget = int(share * peak)
    found, ours, counted = step(model, forward, budget, fullgraph=True)
    assert differences(model, expected, found) == []
    assert counted <= 1.04 * budget, ours.report().notes
    assert abs(estimated(ours) - counted / 2**20) < 1.0


@pytest.mark.slow
def test_what_is_dropped_is_what_is_cheap_to_compute_again() -> None:
    model, forward = bottlenecks()
    _, ours, peak = step(model, forward, "1GiB")
    whole = {row.key for row in ours.report().rows}
    _, ours, _ = step(model, forward, int(0.7 * peak))
    left = {row.key for row in ours.report().rows}
    assert left < whole
    # What feeds the widening convolutions stays: a quarter of the bytes from which the rest is computed.
    assert {key for key in left if ":relu" in key}


class Dropped(nn.Module):
    """Dropout behind a function that widens, whose mask ATen copies as numbers in forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(64, 512), nn.Linear(512, 64)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.narrow(functional.dropout(functional.gelu(self.wide(x)), 0.1))
        return found


def test_copies_of_masks_are_counted() -> None:
    torch.manual_seed(0)
    model, x = Loss(*(Dropped() for _ in range(3))), torch.randn(512, 64)
    _, ours, counted = step(model, lambda net: net(x), "80%")
    assert abs(estimated(ours) - counted / 2**20) < 0.03 * estimated(ours)


class Normed(nn.Module):
    """A residual block whose sums may be rounded, and are read otherwise once more is made from them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.narrow(functional.gelu(self.wide(self.norm(x))))
        return found


def test_a_policy_that_may_round_keeps_what_one_that_may_not_keeps() -> None:
    torch.manual_seed(0)
    blocks = nn.Linear(32, 64), nn.GELU(), *(Normed() for _ in range(4)), nn.Linear(64, 10)
    model, x = Loss(*blocks), torch.randn(2048, 32)
    exact, rounding = (step(model, lambda net: net(x), "40%", policy)[2] for policy in ("lossless", "quantized"))
    assert rounding <= 1.02 * exact


def test_random_numbers_are_not_drawn_again() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.4), nn.Tanh()) for _ in range(4)))
    x = torch.randn(128, 64)
    expected, _ = plain(model, lambda net: net(x).sum())
    found, ours, _ = step(model, lambda net: net(x).sum(), 1000)
    assert differences(model, expected, found) == []
    assert sum("native_dropout" in row.key for row in ours.report().rows) >= 4


def _products_are_saved(context: Any, op: Any, *args: Any, **settings: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE


class PartlyCheckpointed(nn.Module):
    """Blocks of which every second one runs in a checkpoint, with random numbers inside."""

    def __init__(self, selective: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 96), nn.GELU(), nn.Dropout(0.3), nn.Linear(96, 32))
            for _ in range(4)
        )
        self.settings: dict[str, Any] = {}
        if selective:
            self.settings["context_fn"] = partial(create_selective_checkpoint_contexts, _products_are_saved)

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            done: Any = checkpoint(block, x, use_reentrant=False, **self.settings) if number % 2 else block(x)
            x = x + done
        return torch.tanh(x).square().sum()


@pytest.mark.slow
@pytest.mark.parametrize("selective", [False, True])
def test_what_a_checkpoint_inside_drops_stays_dropped_and_the_rest_follows_the_budget(selective: bool) -> None:
    torch.manual_seed(0)
    model, x = PartlyCheckpointed(selective), torch.randn(512, 32)
    expected, peak = plain(model, lambda net: net(x))
    # Blocks 1 and 3 are checkpoints. Of the selective ones the products that are read are saved at any budget.
    inside = {"blocks.1.1", "blocks.3.1"} if selective else set()
    peaks = []
    for budget in ("1GiB", int(0.5 * peak)):
        found, ours, counted = step(model, lambda net: net(x), budget)
        assert differences(model, expected, found) == []
        keys = {row.key.split("/")[1] for row in ours.report().rows}
        assert {key for key in keys if key.startswith(("blocks.1", "blocks.3"))} - {"blocks.1.4"} == inside
        peaks.append(counted)
    assert peaks[1] < peaks[0]


class Counting(nn.Module):
    """Writes to a buffer that its result is computed from."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.register_buffer("scale", torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.linear(x) * self.scale.clone())
        self.scale.add_(1.0)
        return torch.sigmoid(hidden * self.scale.clone()).sum()


def test_a_buffer_that_is_written_to_is_not_read_again() -> None:
    torch.manual_seed(0)
    model, x = Counting(), torch.randn(64, 32)
    expected = gradients(model, lambda net: net(x))  # of eager: compiled plain copies the buffer when it has changed
    model.scale.fill_(1.0)
    found, _, _ = step(model, lambda net: net(x), 1000)
    assert differences(model, expected, found) == []


@pytest.mark.parametrize("name", ["vgg_small", "resnet_cifar20"])
@pytest.mark.slow
def test_networks_of_the_benchmarks_at_their_lowest(name: str) -> None:
    torch.manual_seed(0)
    model = networks.build(name)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    x, y = torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,))

    def forward(net: nn.Module) -> Tensor:
        return functional.cross_entropy(net(x), y)

    expected, peak = plain(model, forward)
    model.load_state_dict(state)
    found, _, counted = step(model, forward, 1000)
    assert differences(model, expected, found) == []
    assert counted < peak


@pytest.mark.slow
def test_sizes_that_are_symbols() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)) for _ in range(3)))
    inputs = [torch.randn(rows, 64) for rows in (96, 40, 7)]

    def forward(net: nn.Module) -> Tensor:
        return torch.stack([net(x).square().mean() for x in inputs]).sum()

    expected, _ = plain(model, forward, dynamic=True)
    found, ours, _ = step(model, forward, 20_000, dynamic=True)
    assert differences(model, expected, found) == []
    assert len(ours.report().notes) == 1


@pytest.mark.slow
def test_autocast_and_channels_last_under_a_budget() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Bottleneck(32) for _ in range(2))).to(memory_format=torch.channels_last)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.randn(4, 32, 12, 12).to(memory_format=torch.channels_last)

    def forward(net: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return net(x).float().square().mean()

    expected, _ = plain(model, forward)
    model.load_state_dict(state)
    found, _, _ = step(model, forward, 1000)
    assert differences(model, expected, found) == []


@pytest.mark.slow
def test_a_rounded_value_is_no_source_of_another() -> None:
    model, forward = bottlenecks()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    expected, peak = plain(model, forward)
    for share in (0.5, 0.1):
        model.load_state_dict(state)
        found, _, _ = step(model, forward, int(share * peak), policies.quantized(8))
        for exact, rounded in zip(expected, found, strict=True):
            assert exact is not None
            assert rounded is not None
            assert float((exact - rounded).norm()) <= 0.05 * float(exact.norm()) + 1e-6


def test_a_product_that_inductor_adds_in_one_call_is_computed_with_the_sum() -> None:
    def step(left: Tensor, right: Tensor, other: Tensor) -> list[Tensor]:
        return [torch.mm(left, right) + other]

    graph = make_fx(step, tracing_mode="fake")(torch.ones(4, 3), torch.ones(3, 5), torch.ones(4, 5)).graph
    for fuses, of_sum, of_product in ((True, {0, 1, 2}, 0), (False, {2, 3}, 4 * 5 * 4)):
        joint = Joint(graph, 1, fuses)
        assert set(joint.reads[4]) == of_sum
        assert joint.nbytes[3:] == [of_product, 4 * 5 * 4]


@pytest.mark.slow
def test_a_policy_that_may_round_gets_as_low_as_one_that_may_not() -> None:
    model, forward = bottlenecks()
    _, _, exact = step(model, forward, 1000)
    _, _, rounded = step(model, forward, 1000, policies.quantized(4))
    assert rounded <= exact


@pytest.mark.parametrize("share", [0.7, pytest.param(0.001, marks=pytest.mark.slow)])
def test_the_report_counts_what_a_graph_holds_between_its_passes(share: float) -> None:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(64, 128), nn.Dropout(0.3), nn.Tanh(), nn.Linear(128, 64))
    model, x = Loss(block), torch.randn(256, 64)
    _, peak = plain(model, lambda net: net(x), fullgraph=True)
    torch._dynamo.reset()
    ours = compile_backend("lossless", budget=int(share * peak), min_nbytes=0)
    compiled = torch.compile(model, backend=ours, fullgraph=True)
    compiled(x).backward()
    with CountedPeak() as counted:
        loss = compiled(x)
    held = counted.timeline[-1][1] - loss.nbytes
    loss.backward()
    assert held == sum(row.stash_nbytes for row in ours.report().rows)
