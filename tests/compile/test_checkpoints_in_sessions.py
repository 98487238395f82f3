"""Checkpoints around compiled modules inside a Session: the recomputation runs the graphs of the forward pass."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import checkpoint as checkpoints

from backstash import Session, compile_backend, policies
from backstash.torch_internals import compile_counters, has_compiled

pytestmark = pytest.mark.filterwarnings("ignore")

HOOKS = nn.modules.module._global_forward_pre_hooks, nn.modules.module._global_forward_hooks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)  # type: ignore[no-any-return]


def trained(session: Any, backend: Any, is_inside: bool = False, steps: int = 3) -> tuple[list[Tensor], int]:
    """The gradients of a few steps, and how many graphs were compiled for them."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block() for _ in range(3))
    for block in blocks:
        block.compile(backend=backend)
    before = compile_counters()["stats"]["unique_graphs"]
    for _ in range(steps):
        y = torch.randn(64, 32)
        with session() if session is not None else nullcontext():
            for block in blocks:
                y = checkpoints.checkpoint(block, y, use_reentrant=False)
            loss = y.square().mean()
            if is_inside:
                loss.backward()
        if not is_inside:
            loss.backward()
    found = [parameter.grad for parameter in blocks.parameters() if parameter.grad is not None]
    return found, compile_counters()["stats"]["unique_graphs"] - before


@pytest.mark.parametrize("backend", ["aot_eager", "ours"])
@pytest.mark.parametrize("policy", ["lossless", "lossless_stored"])
@pytest.mark.parametrize("is_inside", [False, True])
def test_the_recomputation_takes_the_graphs_of_the_forward_pass(backend: str, policy: str, is_inside: bool) -> None:
    def made() -> Any:
        return compile_backend("lossless", "aot_eager", budget="60%", min_nbytes=0) if backend == "ours" else backend

    plain, graphs = trained(None, made())
    found, graphs_in_session = trained(lambda: Session(policy, min_nbytes=0), made(), is_inside)
    assert graphs_in_session == graphs == 2  # one for an input that needs no gradient, one for the others
    assert all(map(torch.equal, found, plain))
    assert not any(HOOKS)


def test_a_session_for_all_steps_and_one_that_has_nothing_to_do() -> None:
    plain, graphs = trained(None, "aot_eager", steps=6)
    session = Session("lossless", min_nbytes=0)
    found, graphs_in_session = trained(lambda: session, "aot_eager", steps=6)
    assert graphs_in_session == graphs
    assert all(map(torch.equal, found, plain))
    assert not any(HOOKS)


class Keeping(policies.Policy):
    def decide(self, saved: Any) -> policies.Action:
        return policies.Keep()


def test_under_a_policy_that_keeps_everything_nothing_is_compiled_again() -> None:
    plain, graphs = trained(None, "aot_eager", steps=6)
    session = Session(Keeping(), min_nbytes=0)
    found, graphs_in_session = trained(lambda: session, "aot_eager", steps=6)
    assert graphs_in_session == graphs
    assert all(map(torch.equal, found, plain))
    assert not any(HOOKS)


def test_programs_that_compile_nothing_recompute_without_hooks() -> None:
    seen = []

    def function(x: Tensor) -> Tensor:
        seen.append(tuple(map(len, HOOKS)))
        return block(x)  # type: ignore[no-any-return]

    block = Block()
    assert not has_compiled()
    with Session(min_nbytes=0):
        loss = checkpoints.checkpoint(function, torch.randn(64, 32), use_reentrant=False).sum()
    loss.backward()
    assert seen == [(1, 1), (0, 0)]


class Checkpointing(nn.Module):
    """A few layers, and a block in a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32), nn.Tanh())
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoints.checkpoint(self.block, self.layers(x), use_reentrant=False)


@pytest.mark.parametrize("is_inside", [False, True])
def test_what_is_compiled_first_in_a_settled_pass_is_recomputed_by_the_same_graph(is_inside: bool) -> None:
    assert not has_compiled()
    gradients = []
    for session in (Session("lossless", min_nbytes=0, stop_if_useless=False), None):
        torch.manual_seed(0)
        model = Checkpointing()
        for step in range(9):
            if step == 7:
                model.block.compile(backend="aot_eager")
            before = compile_counters()["stats"]["unique_graphs"]
            with session or nullcontext():
                loss = model(torch.randn(64, 32)).square().mean()
                assert session is None or step != 6 or session._is_replayed
                if is_inside:
                    loss.backward()
            if not is_inside:
                loss.backward()
            if step == 7 and session is not None:
                assert compile_counters()["stats"]["unique_graphs"] == before + 1
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    assert all(map(torch.equal, *gradients))
    assert not any(HOOKS)


def test_torchs_own_hooks_are_back_after_the_session() -> None:
    before = checkpoints._checkpoint_hook  # type: ignore[attr-defined]
    with Session(), pytest.raises(RuntimeError, match="on purpose"):
        checkpoints.checkpoint(_fail, torch.ones(3, requires_grad=True), use_reentrant=False)
    assert checkpoints._checkpoint_hook is before  # type: ignore[attr-defined]


def _fail(x: Tensor) -> Tensor:
    raise RuntimeError("on purpose")
