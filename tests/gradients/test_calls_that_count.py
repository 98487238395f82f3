"""Under a policy that may repeat any function, only the calls are noted by which values are made again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from gradient_checks import differences
from torch import Tensor, nn

from backstash import Keep, Policy, Recompute, Session
from backstash.policies import Action
from backstash.remake.contents import Contents
from backstash.saved import SavedTensor

Branch = Callable[[int], bool]


class RemakeIn(Policy):
    """Makes the values again that certain modules have saved."""

    is_fixed = True
    remakes_anything = True

    def __init__(self, *paths: str) -> None:
        self.paths = paths

    def __repr__(self) -> str:
        return f"RemakeIn{self.paths}"

    def decide(self, saved: SavedTensor) -> Action:
        return Recompute(any_producer=True) if saved.fqn in self.paths else Keep()


class Net(nn.Module):
    """Five layers, one of which is called in some steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Sigmoid()) for _ in range(4))
        self.sometimes = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Sigmoid())

    def forward(self, x: Tensor, more: bool) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        if more:
            x = self.sometimes(x).sin()
        return x


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the functions whose calls are noted."""
    names: list[str] = []
    original = Contents.note_call

    def note_call(self: Contents, function: Callable[..., object], *args: object, **kwargs: object) -> None:
        names.append(getattr(function, "__name__", ""))
        original(self, function, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Contents, "note_call", note_call)
    return names


def train(
    noted: list[str], policy: Policy | None, steps: int, branch: Branch, new_sessions: bool = False
) -> tuple[list[Tensor], list[int], list[int]]:
    """Returns the gradients of some steps, and for each step how many calls were noted and how many values remade."""
    torch.manual_seed(0)
    model, x = Net(), torch.randn(64, 16)
    session = None if policy is None else Session(policy, model=model, min_nbytes=64)
    gradients, calls, remade = [], [], []
    for step in range(steps):
        noted.clear()
        model.zero_grad()
        if session is None or policy is None:
            loss = model(x, branch(step)).square().sum()
        else:
            session = Session(policy, model=model, min_nbytes=64) if new_sessions else session
            with session:
                loss = model(x, branch(step)).square().sum()
            remade.append(sum(row.codec == "recompute" for row in session.report().rows))
        loss.backward()
        calls.append(len(noted))
        gradients += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return gradients, calls, remade


@pytest.mark.parametrize("new_sessions", [False, True], ids=["one session", "a session in each step"])
def test_calls_that_make_nothing_are_noted_in_two_steps(noted: list[str], new_sessions: bool) -> None:
    policy = RemakeIn("layers.2.1")  # the tanh, which the linear layer before it is read for
    plain = train(noted, None, 5, lambda _: False)[0]
    gradients, calls, remade = train(noted, policy, 5, lambda _: False, new_sessions)
    assert not differences(plain, gradients)
    assert calls[0] == calls[1] >= 12
    assert calls[2:] == [2, 2, 2]
    assert set(remade) == {1}


def test_a_step_that_takes_another_branch_is_right_and_is_learned(noted: list[str]) -> None:
    def branch(step: int) -> bool:
        return step > 3

    policy = RemakeIn("layers.2.1", "sometimes.1")
    plain = train(noted, None, 8, branch)[0]
    gradients, calls, remade = train(noted, policy, 8, branch)
    assert not differences(plain, gradients)
    assert calls[3] == 2 and calls[-1] == 4
    assert remade == [1] * 4 + [2] * 4  # what is new is always noted


def test_a_value_that_lacks_a_call_is_kept_once_and_everything_is_noted_anew(noted: list[str]) -> None:
    class Later(RemakeIn):
        """From some step on, more is made again than before."""

        is_fixed = False
        asked = 0

        def decide(self, saved: SavedTensor) -> Action:
            self.asked += saved.fqn == "layers.0.1"
            if saved.fqn == "layers.3.1" and self.asked > 4:
                return Recompute(any_producer=True)
            return super().decide(saved)

    plain = train(noted, None, 9, lambda _: False)[0]
    gradients, calls, remade = train(noted, Later("layers.2.1"), 9, lambda _: False)
    assert not differences(plain, gradients)
    assert calls[3] == 2
    assert remade[3:7] == [1, 1, 2, 2]
    assert calls[5] == calls[0]
    assert calls[-1] == 4


def test_a_program_whose_steps_differ_without_end_has_all_its_calls_noted(noted: list[str]) -> None:
    class Fickle(RemakeIn):
        is_fixed = False
        number = 0

        def begin_step(self) -> None:
            self.number += 1

        def decide(self, saved: SavedTensor) -> Action:
            wanted = f"layers.{self.number // 4 % 4}.1"
            return Recompute(any_producer=True) if saved.fqn == wanted else Keep()

    plain = train(noted, None, 60, lambda _: False)[0]
    gradients, calls, remade = train(noted, Fickle(), 60, lambda _: False)
    assert not differences(plain, gradients)
    assert min(remade[-8:]) >= 0 and sum(remade) > 40
    assert max(calls) == calls[0]
