"""The benchmark of the frontier, on a small network; the ways of torch that it compares plans with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bench.cases import Case
from bench.results import plain
from bench.rounds import Deadline, Effort
from studies import frontier, frontier_ways
from tests.networks import build
from tests.networks.unet import UNet


@pytest.mark.slow
def test_plans_keep_their_budgets_and_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = frontier.measure(Case("vgg_small", "vgg_small", 4, 32), Effort(1, Deadline.after(60)), budgets=3)
    by_name = {row.candidate: row for row in found.rows}
    assert {"plain", "checkpoint", "checkpoint, nested", "save_on_cpu", "plan, smallest budget"} <= set(by_name)
    for row in found.rows:
        if row.budget_nbytes is not None:
            assert row.peak_nbytes <= row.budget_nbytes
    network = plain(found)
    assert "plan, smallest budget" in frontier.show([network])
    frontier.draw(network, "some machine", tmp_path / "frontier-cpu-2026-01-01.json")
    assert (tmp_path / "frontier-cpu-2026-01-01-vgg_small.png").stat().st_size > 10_000


def test_the_blocks_of_a_network_are_its_repeated_modules() -> None:
    assert len(frontier_ways.blocks_of(build("resnet18", num_classes=10))) == 8
    assert len(frontier_ways.blocks_of(UNet(width=4))) == 9


class Stage(nn.Module):
    """Blocks that are called one after the other, behind a layer of the stage's own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def test_of_stages_of_blocks_the_blocks_are_recomputed_also_when_backward_runs_outside() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Stage() for _ in range(4))), torch.randn(2, 4, 8)
    assert [len(chain) for chain in frontier_ways.chains_of(model)] == [2, 2, 2, 2]
    for way in frontier_ways.ways(model).values():
        with way():
            loss = model(x).square().mean()
        loss.backward()


def gradients(model: nn.Module, images: Tensor) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(0)
    model(images).square().mean().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("make", [lambda: UNet(width=4), lambda: build("resnet_cifar20"), lambda: build("vgg_small")])
def test_each_kind_of_checkpoint_computes_the_same_and_leaves_the_network_as_it_was(make: object) -> None:
    assert callable(make)
    torch.manual_seed(0)
    model, images = make(), torch.randn(2, 3, 32, 32)
    expected = gradients(model, images)
    ways = frontier_ways.ways(model)
    assert len(ways) >= 3
    for way in ways.values():
        with way():
            found = gradients(model, images)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not any("forward" in vars(module) for module in model.modules())


def test_chains_share_checkpoints() -> None:
    ways = frontier_ways.ways(build("resnet_cifar20"))
    assert {"checkpoint, sqrt(n) blocks", "checkpoint, nested"} <= set(ways)
    assert "checkpoint, nested" not in frontier_ways.ways(UNet(width=4))
