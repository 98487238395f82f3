"""Knowledge of a model outlives a Session: which sizes matter, and whether there is anything to do at all."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from gradient_checks import differences
from session_checks import gradients_of, hooks_installed
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from backstash import Session, policies
from backstash import session as sessions
from backstash.capture import learned
from backstash.capture.learned import LARGEST, LITTLE, LOOK_AGAIN, SMALLEST_OF_LITTLE, Learned, Limit
from backstash.capture.names import Names
from backstash.errors import SavedTensorFreedError
from backstash.remake import noting
from backstash.report.meter import CountedPeak
from backstash.saved import MIN_NBYTES

MIB = 1 << 20
NOTHING = {"does_nothing": True, "saved_nbytes": MIB, "freed_nbytes": 0}


@pytest.fixture(autouse=True)
def _has_compiled_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "has_compiled", lambda: False)  # whatever ran before in this process


def chosen(*sizes: int) -> tuple[int | None, bool]:
    known = Learned()
    known.choose_min_nbytes(sizes, sum(sizes))
    return known.min_nbytes, known.saves_little


def test_tensors_that_hold_a_fiftieth_are_kept() -> None:
    large = [MIB] * 100
    assert chosen(*large, *[MIN_NBYTES] * 100) == (LARGEST, False)
    assert chosen(*large, *[MIN_NBYTES] * 1000) == (MIN_NBYTES, False)
    assert chosen(*large, *[100 << 10] * 1000) == (64 << 10, False)


def test_a_step_that_saves_little_keeps_up_to_half() -> None:
    assert chosen(*[MIB] * 10) == (LARGEST, True)
    assert chosen(*[128 << 10] * 100) == (128 << 10, True)
    assert chosen(*[MIN_NBYTES] * 100) == (SMALLEST_OF_LITTLE, True)
    assert chosen(LITTLE) == (LARGEST, False)


def test_the_choice_is_made_anew_when_steps_save_much_more_or_less() -> None:
    for factor, anew in ((1, False), (2, False), (5, True), (0.2, True)):
        known = Learned()
        known.choose_min_nbytes([MIB], MIB)
        known.end_step((1, 1), False, int(factor * MIB), 0)
        assert (known.min_nbytes is None) == anew == (not known.saves_little)


@pytest.mark.parametrize("kinds", [2, 3, 5])
def test_steps_that_come_in_turn_without_anything_to_do_make_it_idle(kinds: int) -> None:
    known = Learned()
    for turn in range(2):
        for kind in range(kinds):
            assert known.is_idle == (turn > 0 and kind >= 1)
            (known.end_idle_step if known.is_idle else partial(known.end_step, **NOTHING))((kind + 1, MIB))
    for kind in (*range(kinds), *reversed(range(kinds))):
        known.end_idle_step((kind + 1, MIB))
        assert known.is_idle
    known.end_idle_step((99, MIB))  # one that is not known
    assert not known.is_idle


def test_one_of_several_kinds_with_something_to_do_keeps_it_awake() -> None:
    known = Learned()
    for _ in range(20):
        for kind, does_nothing in ((1, True), (2, False)):
            assert not known.is_idle
            known.end_step((kind, MIB), does_nothing, MIB, 0 if does_nothing else MIB // 2)


def test_a_step_that_once_had_nothing_to_do_is_looked_at_again() -> None:
    known = Learned()
    for _ in range(3):
        known.end_step((1, MIB), saved_nbytes=MIB, does_nothing=True, freed_nbytes=0)
        known.end_step((2, MIB), saved_nbytes=MIB, does_nothing=True, freed_nbytes=0)
    known.end_step((2, MIB), saved_nbytes=MIB, does_nothing=False, freed_nbytes=MIB // 2)
    known.end_step((2, MIB), saved_nbytes=MIB, does_nothing=True, freed_nbytes=0)
    assert not known.is_idle


def test_a_critic_and_a_generator_make_it_idle() -> None:
    torch.manual_seed(0)
    critic, generator = nn.Linear(64, 64), nn.Linear(64, 64)
    session = Session("lossless", stop_if_useless=False)
    with session:
        for step in range(20):
            critic(torch.randn(512, 64)).sin().mean().backward()
            critic(generator(torch.randn(512, 64))).sin().mean().backward()
            if step > 2:
                assert session._forward.is_idle


def test_two_equal_steps_without_anything_to_do_make_it_idle() -> None:
    known = Learned()
    for counted, idle in (((3, 30), False), ((3, 30), True)):
        known.end_step(counted, True, 30, 0)
        assert known.is_idle == idle
    known.end_idle_step((0, 0))  # an evaluation
    assert known.is_idle
    known.end_idle_step((3, 31))
    assert not known.is_idle
    for _ in range(3):  # longer than before
        assert not known.is_idle
        known.end_step((3, 31), True, 31, 0)
    known.end_step((3, 31), True, 31, 0)
    assert known.is_idle


@pytest.mark.parametrize("only_keep", [False, True])
def test_an_idle_session_looks_again_now_and_then(only_keep: bool) -> None:
    known = Learned()
    known.choose_min_nbytes([MIB], MIB)
    for _ in range(2):
        known.end_step((1, MIB), only_keep, MIB, 0)
    for _ in range(LOOK_AGAIN - 1):
        known.end_idle_step((1, MIB))
        assert known.is_idle
    known.end_idle_step((1, MIB))
    assert not known.is_idle
    known.end_step((1, MIB), only_keep, MIB, 0)
    assert known.is_idle


def test_nothing_is_learned_of_a_step_that_has_failed() -> None:
    model, session = network(), Session("lossless")
    with pytest.raises(ZeroDivisionError), session:
        model(torch.ones(8192, 64)).sum()
        raise ZeroDivisionError
    with session:
        loss = model(torch.ones(8, 64)).sum()
    loss.backward()
    known = learned.learned_of(model, session._settings)
    assert known.min_nbytes is None and known.counted[1] < MIB


def test_what_the_program_holds_no_longer_is_stored_some_steps_later() -> None:
    """Steps in which the program holds everything leave nothing to decide, and look like steps to keep."""
    model, session = network(), Session("lossless", min_nbytes=0)
    codecs = []
    for step in range(LOOK_AGAIN + 8):
        with session:
            hidden = [torch.ones(64, 64)]
            for layer in model:
                hidden.append(torch.relu(layer(hidden[-1])))
            loss = hidden[-1].sum()
            if step > 3:
                del hidden
        loss.backward()
        codecs.append({row.codec for row in session.report().rows})
    assert codecs[-1] - {"kept"}


@pytest.mark.slow
@pytest.mark.parametrize("min_nbytes", [None, 0])
def test_a_large_step_of_which_the_program_holds_everything_makes_it_idle(min_nbytes: int | None) -> None:
    model, session = network(), Session("lossless", min_nbytes=min_nbytes)
    hidden: list[Tensor] = []
    for _ in range(4):
        hidden.clear()
        with session:
            hidden.append(torch.ones(2 * LITTLE // 256, 64, requires_grad=True))
            for layer in model:
                hidden.append(layer(hidden[-1]))
        hidden[-1].sum().backward()
    report = session.report()
    assert any("nothing to do" in note for note in report.notes)
    assert report.device_nbytes == report.saved_nbytes > LITTLE


def test_a_pass_that_is_longer_than_the_limit_is_remembered() -> None:
    limit = Limit(many=4, most=32)
    known: set[int] = set()
    forgotten = []
    for passes in range(6):
        for call in range(20):
            if call not in known:
                if limit.is_reached(len(known), passes):
                    forgotten.append(passes)
                    known.clear()
                known.add(call)
    assert not forgotten and len(known) == 20


def test_passes_that_do_not_come_again_are_forgotten() -> None:
    limit, known = Limit(many=4, most=32), 0
    largest = 0
    for passes in range(1000):
        for _ in range(3):
            known = 1 if limit.is_reached(known, passes) else known + 1
            largest = max(largest, known)
    assert largest <= 8


def test_no_pass_is_remembered_beyond_the_most() -> None:
    limit, known = Limit(many=4, most=32), 0
    largest = 0
    for _ in range(1000):
        known = 1 if limit.is_reached(known, 0) else known + 1
        largest = max(largest, known)
    assert largest == 32


@pytest.mark.parametrize("calls", [5, 50])
def test_a_step_with_more_calls_than_the_limits_is_recognised(calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learned, "MANY_NODES", 8)
    monkeypatch.setattr(noting, "MANY_PLACES", 8)
    x, weight = torch.randn(64, 64, requires_grad=True), torch.ones(64)

    class Chain(nn.Module):
        def forward(self) -> Tensor:
            y = x
            for _ in range(calls):
                y = (y * weight).relu()
            return y.sum()

    model, session = Chain(), Session("lossless", min_nbytes=1)
    for _ in range(4):
        with session:
            loss = model()
        loss.backward()
    report = session.report()
    assert report.recognised == report.named >= 2 * calls


def test_what_was_learned_goes_with_the_model() -> None:
    model = nn.Linear(2, 2)
    known = weakref.ref(learned.learned_of(model, "keep"))
    assert learned.learned_of(model, "keep") is known() is not learned.learned_of(model, "lossless")
    del model
    gc.collect()
    assert known() is None


# -- a Session that is idle --------------------------------------------------------------------------------------------


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))


def steps(sessions: Callable[[], Session | None], sizes: list[int]) -> tuple[list[Tensor | None], list[bool]]:
    """The gradients of each step, and whether its Session had nothing to do."""
    model = network()
    gradients, idle = [], []
    for size in sizes:
        session = sessions()
        x = torch.randn(size, 64, generator=torch.Generator().manual_seed(size))
        if session is None:
            model(x).square().sum().backward()
        else:
            with session:
                loss = model(x).square().sum()
            loss.backward()
            idle.append(any("nothing to do" in note for note in session.report().notes))
        gradients += gradients_of(model)
    return gradients, idle


@pytest.mark.parametrize("policy", ["keep", "lossless"])
@pytest.mark.parametrize("each", [False, True], ids=["one Session", "a Session for each step"])
def test_an_idle_session_changes_no_bit_and_learns_anew_when_steps_change(policy: str, each: bool) -> None:
    sizes = [8, 8, 8, 8, 300, 300, 8, 8, 8, 8, 8, 8]
    one = Session(policy)
    got, idle = steps(lambda: Session(policy) if each else one, sizes)
    expected, _ = steps(lambda: None, sizes)
    assert not differences(expected, got)
    assert idle[:4] == [False, False, True, True] and not idle[5] and idle[-1]


def test_an_idle_session_that_is_entered_again_installs_two_hooks_and_nothing_else() -> None:
    model, session = network(), Session("keep")
    for _ in range(3):
        with session:
            loss = model(torch.ones(8, 64)).sum()
        loss.backward()
    before = hooks_installed()
    with session:
        inside = hooks_installed()
    assert len(inside) == len(before) + 1  # the saved-tensor hooks


def test_a_new_session_with_nothing_to_do_does_not_look_at_the_models_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    def train(model: nn.Module) -> Session:
        model.zero_grad()
        with Session("keep") as session:
            loss = model(torch.ones(8, 64)).sum()
        loss.backward()
        return session

    def fail(names: Names, module: nn.Module, prefix: str = "") -> None:
        raise AssertionError(f"the paths of {module} were looked for")

    model = network()
    for _ in range(2):
        train(model)
    expected = gradients_of(model)
    monkeypatch.setattr(Names, "_learn_paths", fail)
    assert train(model)._forward.is_idle
    assert not differences(expected, gradients_of(model))


def test_an_idle_session_inside_a_long_with_looks_again_when_the_steps_change() -> None:
    model, session = network(), Session("keep")
    idle = []
    with session:
        for size in (8, 8, 8, 9, 9, 9, 9, 9, 9):
            model(torch.ones(size, 64)).sum().backward()
            idle.append(session._forward.is_idle)
    assert idle[2] and not idle[4] and idle[-1]


def test_changes_in_place_are_errors_in_an_idle_session_too() -> None:
    model, session = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), Session("keep")
    for step in range(4):
        with session:
            h = model[0](torch.ones(2, 4))
            loss = model[1](h).sum()
        if step == 3:
            h.data.add_(0)
            h.add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
        else:
            loss.backward()


def test_freed_memory_is_an_error_in_an_idle_session_too() -> None:
    model, session = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), Session("keep")
    for step in range(4):
        with session:
            h = model[0](torch.ones(2, 4))
            loss = model[1](h).sum()
        if step == 3:
            h.untyped_storage().resize_(0)
            with pytest.raises(SavedTensorFreedError):
                loss.backward()
        else:
            loss.backward()


@pytest.mark.parametrize("reentrant", [False, True], ids=["hooks", "reentrant"])
@pytest.mark.parametrize("opened", ["each step", "each forward pass", "once"])
def test_what_is_called_again_in_backward_does_not_begin_or_end_the_idleness(opened: str, reentrant: bool) -> None:
    """A node of the backward pass undoes what is pushed or popped in it, so that the observer was lost or stayed."""

    def steps(opens: Callable[[], AbstractContextManager[object]]) -> list[Tensor | None]:
        torch.manual_seed(0)
        inner, outer = nn.Linear(8, 8), nn.Linear(8, 8)
        found = []
        for number in range(24):
            x = torch.randn(2 + 9 * (number % 8 == 7), 8, requires_grad=True)
            inside, around = (opens(), nullcontext()) if opened == "each forward pass" else (nullcontext(), opens())
            with around:
                with inside:
                    y = checkpoint(lambda x: F.gelu(inner(x)), x, use_reentrant=reentrant)
                    loss = (outer(y) if number % 3 == 0 else y).square().mean()
                loss.backward()
            found += [*gradients_of(inner), *gradients_of(outer)]
        return found

    expected, one = steps(nullcontext), Session("lossless")
    if opened == "once":
        with one:
            got = steps(nullcontext)
    else:
        got = steps(lambda: Session("lossless"))
    assert not differences(expected, got)
    assert hooks_installed() == []


class _Nameless(policies.Lossless):
    """Prints as its address."""

    __repr__ = object.__repr__


def test_policies_without_a_name_learn_for_themselves_and_are_forgotten() -> None:
    model, x = nn.Linear(64, 64), torch.randn(8, 64)
    known = set()
    for _ in range(3 * learned.MOST_SETTINGS):
        session = Session(_Nameless(), min_nbytes=0)
        assert session._settings not in known  # though its address may be that of one before
        known.add(session._settings)
        with session:
            loss = model(x).square().sum()
        loss.backward()
    assert len(learned._by_module[model]) <= learned.MOST_SETTINGS
    one, other = _Nameless(), _Nameless()  # which are equal, and may decide otherwise
    assert Session(one)._settings != Session(other)._settings
    assert learned.name_of(one).split()[-1] != learned.name_of(other).split()[-1]
    del other
    assert Session(one)._settings == Session(one)._settings
    assert Session("lossless")._settings == Session("lossless")._settings
    gc.collect()  # a Session and its hooks refer to each other
    left = [policy for policy, _ in learned._numbers.values() if policy() is None or isinstance(policy(), _Nameless)]
    assert len(left) <= 2  # of policies that are gone nothing is left


def test_a_pass_in_which_a_session_becomes_idle_holds_no_graph_that_the_program_drops() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 64), nn.ELU(), nn.Linear(64, 64), nn.ELU(), nn.Linear(64, 4))
    directions = torch.eye(4).expand(64, 4, 4).movedim(-1, 0)

    def peaks(context: AbstractContextManager[object]) -> list[int]:
        found = []
        for _ in range(10):
            with CountedPeak() as counted:
                with context:
                    for _ in range(6):
                        x = torch.randn(64, 4, requires_grad=True)
                        torch.autograd.grad(model(x), x, directions, create_graph=True, is_grads_batched=True)
                    del x
                    loss = model(torch.randn(64, 4)).square().mean()
                loss.backward()
                del loss
            found.append(counted.peak_nbytes)
        return found

    peaks(nullcontext())
    assert max(peaks(Session("lossless"))) <= 1.02 * max(peaks(nullcontext()))
