"""Values that settled passes make again are right, whenever a program changes what they are made from."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backstash import Session, policies
from backstash.capture import learned

STEPS = learned.EQUAL_PASSES + 4
MIN_NBYTES = 1024

Write = Callable[[Tensor], object]


def _into_one(x: Tensor) -> None:
    x.detach().numpy().reshape(-1)[333] += 3.0  # of which no sample is taken


def _into_all(x: Tensor) -> None:
    x.detach().numpy()[...] *= 0.5


class Program:
    """Layers after a tensor that the program holds, a forward pass of which ``write`` changes before it is read."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.norm, self.head = nn.BatchNorm2d(4), nn.Linear(16, 8)
        self.weight = nn.Parameter(torch.randn(32, 16))
        self.parameters = [*self.norm.parameters(), *self.head.parameters(), self.weight]
        self.x = torch.randn(8, 4, 16, 16, generator=torch.Generator().manual_seed(1))
        self.found: list[list[Tensor]] = []
        self.is_known: list[bool] = []
        self.session: Any = nullcontext()

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns what the program holds, and two losses; backward of the second reads what is made again from it."""
        held = self.x.clone()
        y = self.head(F.relu(self.norm(held)))
        return held, self.weight.sin().mean(), y.sum()

    def read_twice(self) -> tuple[Tensor, Tensor, Tensor]:
        """The same, and backward of the first loss reads it as well."""
        held = self.x.clone()
        y = self.head(F.relu(self.norm(held)))
        return held, y.square().mean(), y.sum()

    def of_parameter(self) -> tuple[Tensor, Tensor, Tensor]:
        """The same of what is made again from a parameter, which autograd has not saved."""
        y = F.linear(self.head(self.weight.relu()), torch.ones(4, 8))
        return self.weight, self.norm(self.x).square().mean(), y.square().mean()

    def note(self, losses: tuple[Tensor, ...]) -> None:
        """Notes the losses and gradients."""
        found = [each.detach().clone() for each in losses]
        found += [p.grad.clone() for p in self.parameters if p.grad is not None]
        self.found.append(found)
        replays = getattr(self.session, "_is_replayed", False)
        self.is_known.append(bool(replays))
        for p in self.parameters:
            p.grad = None


ANYTHING = policies.Rules((("*", policies.Recompute(any_producer=True)),), otherwise=policies.get("lossless"))
"""Makes values again whatever has made them, also from parameters, which are read where they are."""


def _alike(trains: Callable[[Program, Any], None], policy: Any = "lossless") -> Program:
    plain, other = Program(), Program()
    trains(plain, nullcontext())
    other.session = Session(policy, min_nbytes=MIN_NBYTES, stop_if_useless=False)
    trains(other, other.session)
    assert len(plain.found) == len(other.found)
    for number, (wanted, found) in enumerate(zip(plain.found, other.found, strict=True)):
        assert len(wanted) == len(found)
        assert all(x.equal(y) for x, y in zip(wanted, found, strict=True)), f"pass {number}"
    return other


def _between(
    write: Write,
    forward: Callable[[Program], tuple[Tensor, Tensor, Tensor]] = Program.forward,
    policy: Any = "lossless",
) -> None:
    """Settled steps of two backward passes, between which the program writes into what it holds."""

    def trains(program: Program, session: Any) -> None:
        with session:
            for _ in range(STEPS):
                held, first, second = forward(program)
                first.backward(retain_graph=True)
                write(held)
                second.backward()
                program.note((first, second))

    assert _alike(trains, policy).is_known[-1]


@pytest.mark.parametrize("write", [_into_one, _into_all])
@pytest.mark.parametrize("forward", [Program.forward, Program.read_twice, Program.of_parameter])
def test_between_two_backward_passes_of_a_step(
    write: Write, forward: Callable[[Program], tuple[Tensor, Tensor, Tensor]]
) -> None:
    _between(write, forward)


def _as_an_optimizer(x: Tensor) -> None:
    with torch.no_grad():
        x.sub_(0.25)


def _behind_another_call(write: Write, x: Tensor) -> None:
    """Writes while grad mode is off, and not in the first call behind a pass, which the long way hears in any case."""
    with torch.no_grad():
        x.sum()
        write(x)


@pytest.mark.parametrize("policy", ["lossless", ANYTHING], ids=["lossless", "anything"])
@pytest.mark.parametrize("wait", [lambda write: write, lambda write: partial(_behind_another_call, write)])
def test_a_parameter_that_is_changed_in_sight(wait: Callable[[Write], Write], policy: Any) -> None:
    _between(wait(_as_an_optimizer), Program.of_parameter, policy)


@pytest.mark.parametrize("write", [_into_one, _into_all])
def test_after_a_pass_that_was_given_back(write: Write) -> None:
    def trains(program: Program, session: Any) -> None:
        with session:
            for number in range(STEPS):
                held, first, second = program.forward()
                more = (program.weight.exp() * program.weight).sum() if number == STEPS - 1 else program.weight.sum()
                write(held)
                (first + second + more).backward()
                program.note((first, second))

    assert not _alike(trains).is_known[-1]


@pytest.mark.parametrize("write", [_into_one, _into_all])
@pytest.mark.parametrize("first_kept", [1, learned.EQUAL_PASSES + 1, STEPS - 2])
def test_of_an_earlier_pass_inside_a_later_one(write: Write, first_kept: int) -> None:
    """The graph of a pass that went the long way, was written down, or was settled is read in later passes."""

    def trains(program: Program, session: Any) -> None:
        kept: Any = None
        with session:
            for number in range(STEPS + 2):
                held, first, second = program.forward()
                if number == first_kept:
                    kept = held, second
                    first.backward(retain_graph=True)
                elif number == STEPS:
                    write(kept[0])
                    first.backward()
                    kept[1].backward()
                else:
                    (first + second).backward()
                program.note((first, second))

    _alike(trains)


@pytest.mark.parametrize("write", [_into_one, _into_all])
@pytest.mark.parametrize("reads_again", [False, True])
def test_after_the_session_was_left(write: Write, reads_again: bool) -> None:
    def trains(program: Program, session: Any) -> None:
        for _ in range(STEPS):
            with session:
                held, first, second = program.forward()
                first.backward(retain_graph=True)
                if reads_again:
                    program.forward()[1].backward()
            write(held)
            second.backward()
            program.note((first, second))

    _alike(trains)


class _Holder:
    """Something of the program that torch asks about its functions, and that holds a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(each.tensor if isinstance(each, cls) else each for each in args), **(kwargs or {}))


def _by_a_list(x: Tensor) -> None:
    with torch.no_grad():
        torch._foreach_add_([x.data], [torch.ones_like(x)])


def _by_a_holder(x: Tensor) -> None:
    F.relu(_Holder(x.data), inplace=True)  # type: ignore[arg-type]


def _after_a_transform(x: Tensor) -> None:
    torch.func.vmap(torch.sin)(x)
    _into_one(x)


def _by_dlpack(x: Tensor) -> None:
    torch.utils.dlpack.from_dlpack(x.detach()).view(-1)[333] += 3.0


def _by_its_storage(x: Tensor) -> None:
    x.untyped_storage().copy_(torch.ones_like(x).untyped_storage())


OTHERS = [_by_a_list, _by_a_holder, _after_a_transform, _by_dlpack, _by_its_storage]


@pytest.mark.parametrize("write", OTHERS)
def test_in_other_ways(write: Write) -> None:
    _between(write)


@pytest.mark.parametrize("write", [_into_one, _into_all, *OTHERS])
def test_while_grad_mode_is_off(write: Write) -> None:
    _between(partial(_behind_another_call, write))


def test_nothing_is_kept_of_passes_that_are_over() -> None:
    program = Program()
    program.session = Session("lossless", min_nbytes=MIN_NBYTES, stop_if_useless=False)
    with program.session:
        for _ in range(STEPS):
            held, first, second = program.forward()
            (first + second).backward()
            program.note((first, second))
        assert program.is_known[-1]
        assert program.session._replaying.alive == 0
        before = sum(type(each) is Tensor for each in gc.get_objects())
        for _ in range(20):
            held, first, second = program.forward()
            (first + second).backward()
        del held, first, second
        assert sum(type(each) is Tensor for each in gc.get_objects()) <= before
