"""Passes that begin alike and differ later settle where a loop goes through them again and again."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import backstash as bs
from backstash import Session
from backstash.capture.learned import EQUAL_PASSES, MOST_LOST, MOST_SCRIPTS, MOST_VARIANTS, Counted, Kind, Passes
from backstash.policies import get
from tests.replay.twins import costly

ROWS = 64
"""Of each batch."""

Loop = Callable[["Networks", int, Callable[[], AbstractContextManager[object]]], Tensor]


class Networks(nn.Module):
    """A generator and a critic with two heads of equal shape."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh())
        self.critic = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(64, 64), nn.ReLU())
        self.norm, self.heads = nn.BatchNorm1d(64), nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])

    def judge(self, x: Tensor, head: int = 0) -> Tensor:
        """Rows [64, 64] to a number."""
        return F.softplus(self.heads[head](self.norm(self.critic(x)))).mean()


def _begin_alike(critics: int) -> Loop:
    def loop(networks: Networks, step: int, within: Callable[[], AbstractContextManager[object]]) -> Tensor:
        z, real = torch.randn(ROWS, 16), torch.randn(ROWS, 64)
        with within():
            fake = networks.generator(z)
            if step % (critics + 1) < critics:
                return networks.judge(fake.detach()) - networks.judge(real)
            return -networks.judge(fake)

    return loop


def _in_turn(change: Callable[[Networks, bool], object]) -> Loop:
    def loop(networks: Networks, step: int, within: Callable[[], AbstractContextManager[object]]) -> Tensor:
        change(networks, step % 2 == 0)
        with within():
            return networks.judge(torch.randn(ROWS, 64))

    return loop


def _penalty(is_due: Callable[[int], bool]) -> Loop:
    def loop(networks: Networks, step: int, within: Callable[[], AbstractContextManager[object]]) -> Tensor:
        x = torch.randn(ROWS, 64)
        with within():
            loss = networks.judge(x)
            return loss + networks.critic(2 * x).square().mean() if is_due(step) else loss

    return loop


def _heads(networks: Networks, step: int, within: Callable[[], AbstractContextManager[object]]) -> Tensor:
    with within():
        return networks.judge(torch.randn(ROWS, 64), step % 2)


def _functions(networks: Networks, step: int, within: Callable[[], AbstractContextManager[object]]) -> Tensor:
    with within():
        function = (F.relu, F.silu, F.elu)[step % 3]
        return networks.judge(function(networks.critic(torch.randn(64, 64))))


LOOPS: dict[str, tuple[Loop, int]] = {
    "critic and generator in turn": (_begin_alike(1), 45),
    "five passes of the critic for one of the generator": (_begin_alike(5), 45),
    "frozen in turn": (_in_turn(lambda networks, is_even: networks.critic.requires_grad_(is_even)), 45),
    "evaluated in turn": (_in_turn(lambda networks, is_even: networks.train(is_even)), 45),
    "a penalty every fourth time": (_penalty(lambda step: step % 4 == 0), 45),
    "a penalty every tenth time": (_penalty(lambda step: step % 10 == 9), 45),
    "a penalty at times": (_penalty(lambda step: random.Random(step).random() < 0.1), 30),
    "heads in turn": (_heads, 45),
    "functions in turn": (_functions, 45),
    "frozen for good": (_in_turn(lambda networks, _: None), 48),
}
"""Loops, and how many of the last 50 of 150 passes run a script at least."""


class _Entered:
    """How a program enters a Session: once for each pass, or once for all; or each pass has a Session of its own."""

    def __init__(self, way: str, policy: Callable[[], Any], networks: Networks) -> None:
        self.way = way
        self._policy, self._networks = policy(), networks
        self.session = self._fresh()
        self.whole = self.session if way == "once" else nullcontext()

    def _fresh(self) -> Session:
        return Session(self._policy, model=self._networks, min_nbytes=1024, stop_if_useless=False)

    def __call__(self) -> AbstractContextManager[object]:
        if self.way == "anew":
            self.session = self._fresh()
        return nullcontext() if self.way == "once" else self.session


@pytest.mark.parametrize("policy", [lambda: get("lossless"), costly], ids=["lossless", "costly"])
@pytest.mark.parametrize("way", ["each", "once", "anew"])
@pytest.mark.parametrize("name", LOOPS)
def test_passes_that_begin_alike(name: str, way: str, policy: Callable[[], Any]) -> None:
    loop, least = LOOPS[name]
    torch.manual_seed(0)
    plain = Networks()
    other = copy.deepcopy(plain)
    entered, settled = _Entered(way, policy, other), 0
    with entered.whole:
        for step in range(150):
            found = []
            for networks, within in ((plain, nullcontext), (other, entered)):
                networks.zero_grad()
                torch.manual_seed(step)
                loss = loop(networks, step, within)
                loss.backward()
                gradients = [p.grad for p in networks.parameters() if p.grad is not None]
                found.append([loss.detach(), *gradients, *networks.buffers()])
                with torch.no_grad():
                    for parameter in networks.parameters():
                        if parameter.grad is not None:
                            parameter -= 0.01 * parameter.grad
            assert len(found[0]) == len(found[1])
            assert all(x.equal(y) for x, y in zip(*found, strict=True)), step
            settled += step >= 100 and entered.session._is_replayed
    assert settled >= least
    if name == "a penalty at times":  # what others follow is not forgotten
        kinds = entered.session._names.learned._kinds.values()
        assert all(each.needed == EQUAL_PASSES for kind in kinds for each in kind.variants.values())


def test_weights_in_new_memory_are_no_other_passes() -> None:
    torch.manual_seed(0)
    networks = Networks()
    entered, settled = _Entered("each", lambda: get("lossless"), networks), 0
    for step in range(50):
        networks.zero_grad()
        _heads(networks, step, entered).backward()
        settled += step >= 30 and entered.session._is_replayed
        for parameter in networks.parameters():
            if parameter.grad is not None:
                parameter.data = parameter.data - 0.01 * parameter.grad
    assert settled == 20


@pytest.mark.parametrize(
    "name", ["critic and generator in turn", "frozen in turn", "a penalty every fourth time", "heads in turn"]
)
def test_passes_of_one_step_settle_under_its_plan(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan tells the passes of a step apart, and so do their scripts."""
    monkeypatch.setattr(f"{__name__}.ROWS", 1024)
    torch.manual_seed(0)
    plain, (loop, _) = Networks(), LOOPS[name]
    other = copy.deepcopy(plain)
    session = bs.Budgeted("78%", min_nbytes=1024)
    session.is_hurried = True
    expected = _trained(plain, loop, nullcontext, lambda: None)
    settled: list[bool] = []
    found = _trained(other, loop, lambda: session, lambda: settled.append(session._session._is_replayed))
    for step, (wanted, got) in enumerate(zip(expected, found, strict=True)):
        assert len(wanted) == len(got)
        assert all(x.equal(y) for x, y in zip(wanted, got, strict=True)), step
    assert session.found.plan is not None and not session.found.plan.is_empty
    assert 0 < session.found.reached_nbytes <= session.found.budget_nbytes
    assert sum(settled[-40:]) >= 36
    session.close()


@pytest.mark.parametrize("cycles", [0, MOST_SCRIPTS + 1])
def test_passes_of_longer_steps_have_no_scripts(cycles: int) -> None:
    """There is room for so many, and each would have gone when its pass comes again."""
    policy: Any = get("lossless")
    object.__setattr__(policy, "cycles", cycles)
    entered = _Entered("each", lambda: policy, Networks())
    _heads(entered._networks, 0, entered).backward()
    told = entered.session.report().programs()
    assert (
        told
        == f"nothing is replayed: a step has {cycles or 'any number of'} passes, which the policy tells from each other"
    )


def _trained(
    networks: Networks, loop: Loop, within: Callable[[], AbstractContextManager[object]], tell: Callable[[], object]
) -> list[list[Tensor]]:
    found = []
    for step in range(160):
        networks.zero_grad()
        torch.manual_seed(step)
        loss = loop(networks, step, within)
        loss.backward()
        gradients = [p.grad.clone() for p in networks.parameters() if p.grad is not None]
        found.append([loss.detach(), *gradients, *(buffer.clone() for buffer in networks.buffers())])
        with torch.no_grad():
            for parameter in networks.parameters():
                if parameter.grad is not None:
                    parameter -= 0.01 * parameter.grad
        tell()
        del loss
    return found


@pytest.mark.parametrize("is_due", [lambda step: step % 7 == 0, lambda step: random.Random(step).random() < 0.1])
@pytest.mark.parametrize(
    "evaluate",
    [lambda critic, x: critic(x).square().mean(), lambda critic, x: critic(x), lambda critic, x: critic[:2](x)],
    ids=["as the step", "without a loss", "in part"],
)
def test_a_pass_that_is_dropped_costs_no_script(
    is_due: Callable[[int], bool], evaluate: Callable[[nn.Module, Tensor], Tensor]
) -> None:
    """As an evaluation without no_grad is, in the same Session as the step."""
    torch.manual_seed(0)
    networks = Networks()
    entered, settled = _Entered("each", lambda: get("lossless"), networks), 0
    for step in range(150):
        networks.zero_grad()
        with entered():
            if is_due(step):
                evaluate(networks.critic, torch.randn(64, 64))
            loss = networks.critic(torch.randn(64, 64)).square().mean()
        loss.backward()
        settled += step >= 100 and entered.session._is_replayed
    assert settled >= 48
    kinds = [kind for kind in entered.session._names.learned._kinds.values() if kind.variants]
    assert all(each.needed == EQUAL_PASSES for kind in kinds for each in kind.variants.values())


@pytest.mark.parametrize("policy", [lambda: get("lossless"), costly], ids=["lossless", "costly"])
@pytest.mark.parametrize("make", [lambda p: p.detach().clone().requires_grad_(), lambda p: 1.0 * p])
def test_weights_of_one_pass_alone(make: Callable[[Tensor], Tensor], policy: Callable[[], Any]) -> None:
    """As those of an inner loop are that learns fast."""
    torch.manual_seed(0)
    networks = Networks()
    entered, settled = _Entered("each", policy, networks), 0
    for step in range(60):
        found = []
        for within in (nullcontext, entered):
            torch.manual_seed(step)
            weights = {name: make(p) for name, p in networks.critic.named_parameters()}
            with within():
                out = torch.func.functional_call(networks.critic, weights, (torch.randn(64, 64),))
                loss = F.softplus(out).mean()
            found.append([loss.detach(), *torch.autograd.grad(loss, list(weights.values()))])
        assert all(x.equal(y) for x, y in zip(*found, strict=True)), step
        settled += step >= 40 and entered.session._is_replayed
    assert settled >= 19


def test_passes_that_were_given_back_count_weights_as_others_do() -> None:
    """Weights that are no parameters, which are known by the module's call, are no values on the rest of the way."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    session = Session("lossless", model=model, min_nbytes=1024, stop_if_useless=False)
    for step in range(100):
        model[1] = (nn.ReLU(), nn.SiLU(), nn.ELU())[random.Random(step).randrange(3)]
        weights = {name: 1.0 * p for name, p in model.named_parameters()}
        with session:
            loss = torch.func.functional_call(model, weights, (torch.randn(64, 64),)).square().mean()
        loss.backward()
    (kind,) = [each for each in session._names.learned._kinds.values() if each.variants]
    assert len(kind.variants) == 3
    assert sum(each.misses for each in kind.variants.values()) > 3


def test_a_script_that_no_pass_follows_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    networks = Networks()
    entered = _Entered("each", lambda: get("lossless"), networks)
    for step in range(20):
        _heads(networks, 2 * step, entered).backward()
    assert entered.session._is_replayed
    known, replays = entered.session._names.learned.passes, []
    monkeypatch.setattr(Kind, "next_passes", lambda kind: known)  # whatever comes
    for _ in range(12):
        _functions(networks, 1, entered).backward()
        replays.append(known.script is not None)
    assert replays == [True] * (MOST_LOST - 1) + [False] * (13 - MOST_LOST)
    assert known.misses == MOST_LOST and known.needed == 8


def test_one_error_is_not_learned_from() -> None:
    torch.manual_seed(0)
    networks = Networks()
    entered = _Entered("each", lambda: get("lossless"), networks)

    def train(step: int) -> bool:
        networks.zero_grad()
        _heads(networks, step, entered).backward()
        return entered.session._is_replayed

    assert all([train(step) for step in range(40)][30:])
    known = entered.session._names.learned
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), entered.session:
            networks.critic(torch.randn(64, 64))
            raise ZeroDivisionError
    assert all(train(step) for step in range(40, 60))
    assert all(len(kind.variants) <= 2 for kind in known._kinds.values())


def _passes_of(kind: Kind, outcomes: list[int]) -> list[bool]:
    """Whether each of some passes, told apart by a number, was foretold."""
    foretold = []
    for each in outcomes:
        expected = kind.next_passes()
        foretold.append(expected is not None and expected.counted[0] == each)
        kind.add((each, 0, 0), 4)
    return foretold


@pytest.mark.parametrize(
    "cycle", [[1], [1, 2], [1, 1, 2], [1, 1, 1, 1, 1, 2], [1, 2, 1, 3], [1] * 15 + [2], [1, 1, 2, 2]]
)
def test_cycles_are_foretold(cycle: list[int]) -> None:
    foretold = _passes_of(Kind(), cycle * 20)
    assert all(foretold[4 * 16 :])
    assert sum(not each for each in foretold) <= 1 + 2 * len(cycle) * (len(cycle) > 1)


def test_a_change_for_good_is_foretold_soon() -> None:
    kind = Kind()
    assert sum(not each for each in _passes_of(kind, [1] * 500)) == 1
    assert sum(not each for each in _passes_of(kind, [2] * 500)) <= 2


def test_what_is_mostly_the_same_is_foretold() -> None:
    drawn = random.Random(0)
    outcomes = [2 if drawn.random() < 0.1 else 1 for _ in range(400)]
    foretold = _passes_of(Kind(), outcomes)
    assert sum(foretold[50:]) >= 0.8 * 350


def test_nothing_is_foretold_of_what_comes_in_no_order() -> None:
    drawn = random.Random(0)
    kind, wrong = Kind(), 0
    for _ in range(2000):
        expected, each = kind.next_passes(), drawn.randrange(2)
        wrong += expected is not None and expected.counted[0] != each
        kind.add((each, 0, 0), 4)
    assert wrong < 800, wrong


def test_little_is_remembered() -> None:
    drawn, kind = random.Random(0), Kind()
    for _ in range(3000):
        kind.add((drawn.randrange(10_000), 0, 0), 4)
        assert len(kind.variants) <= MOST_VARIANTS
    assert len(kind._expected) < 300
    first: Counted = (1, 0, 0)
    known: Passes = kind.add(first, 4)
    for number in range(MOST_VARIANTS):
        assert known in kind.variants.values()
        kind.add((20_000 + number, 0, 0), 4)
    assert known not in kind.variants.values()
    assert all(expected.passes is not known for expected in kind._expected.values())
