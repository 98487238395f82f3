"""Values that no policy may round, and what is saved in their place: an attention's weights instead of its scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiled_steps import gradients
from torch import Tensor, nn

from backstash import compile_backend, policies

pytestmark = pytest.mark.filterwarnings("ignore")


class Attention(nn.Module):
    """Attention in full, masked, in several operators."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.view(4, 48, 2, 16).transpose(1, 2) for part in self.project(x).chunk(3, -1))
        later = torch.ones(48, 48, dtype=torch.bool).triu(1)
        scores = (q @ k.transpose(-1, -2) / 4).masked_fill(later, torch.finfo(q.dtype).min)
        weights = torch.dropout(scores.softmax(-1), 0.2, self.training)
        return self.out((weights @ v).transpose(1, 2).reshape(4, 48, 32))  # type: ignore[no-any-return]


class Classes(nn.Module):
    """A cross entropy of many classes, sure of some of them."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.hidden, self.out, self.scale = nn.Linear(32, 32), nn.Linear(32, 512), scale

    def forward(self, x: Tensor) -> Tensor:
        classes = (torch.arange(192) * 7) % 512
        return F.cross_entropy(self.out(torch.relu(self.hidden(x))).flatten(0, 1) * self.scale, classes)


def loss_of(model: Any) -> Tensor:
    x = torch.randn(4, 48, 32, generator=torch.Generator().manual_seed(1))
    return model(x).square().sum()  # type: ignore[no-any-return]


def step(policy: Any, make: Callable[[], nn.Module] = Attention) -> tuple[list[Any], Any]:
    """The gradients from graphs that are decomposed as Inductor's are, run as they are; and the report."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._inductor.decomposition import select_decomp_table

    torch._dynamo.reset()
    torch.manual_seed(0)
    model = make()
    ours = compile_backend(policy, "inductor", min_nbytes=0)
    backend = aot_autograd(
        fw_compiler=boxed_nop,
        bw_compiler=boxed_nop,
        decompositions=select_decomp_table(),
        partition_fn=ours.treatment.split,
    )
    return gradients(model, loss_of, torch.compile(model, backend=backend, fullgraph=True)), ours.report()


def off(found: list[Any], exact: list[Any]) -> float:
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True))


@pytest.mark.slow
def test_weights_are_rounded_and_scores_are_not_saved() -> None:
    exact, plain = step("keep")
    found, report = step(policies.quantized(8))
    assert off(found, exact) < 0.05
    weights = 4 * 2 * 48 * 48 * 4
    large = {row.key: row.codec for row in report.rows if row.saved_nbytes >= weights}
    assert large
    assert all(codec.startswith("blockquant") for codec in large.values()), large
    _, four = step(policies.quantized(4))
    assert plain.stash_nbytes > 4 * four.stash_nbytes


@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_of_a_cross_entropy_probabilities_are_rounded_and_logits_are_not_saved(scale: float) -> None:
    exact, plain = step("keep", lambda: Classes(scale))
    found, report = step(policies.quantized(4), lambda: Classes(scale))
    assert off(found, exact) < 0.1
    assert plain.saved_nbytes > 3.5 * report.stash_nbytes
    (row,) = (row for row in report.rows if row.saved_nbytes == 192 * 512 * 4)
    assert row.codec == "blockquant8", "more bits: one is subtracted from the probability of the right class"
    _, kept = step("lossless", lambda: Classes(scale))
    assert [row.key for row in kept.rows] == [row.key for row in plain.rows]


def test_an_exact_policy_saves_what_torch_saves() -> None:
    exact, plain = step("keep")
    found, report = step("lossless")
    assert all(map(torch.equal, found, exact))
    assert [row.key for row in report.rows] == [row.key for row in plain.rows]
