"""The hooks of an idle Session in C++ do what those in Python do."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from gradient_checks import differences
from torch import Tensor, nn

from backstash import Session, interpreter
from backstash.errors import SavedTensorModifiedError
from backstash.redeem import accumulation
from backstash.stash.held import Holding, Reading
from tests.modes import Seeing

Hold = Callable[[Holding, Tensor], Any]
Read = Callable[[Reading, Any], Tensor]
Hooks = tuple[Hold, Read]

WAYS: dict[str, Hooks] = {"reference": (Holding.hold, Reading.read)}
if interpreter.module is not None:
    WAYS["compiled"] = interpreter.module.hold, interpreter.module.read


@pytest.fixture(params=["reference", "compiled"])
def ways(request: pytest.FixtureRequest) -> Hooks:
    """The two functions, written in Python or compiled."""
    if request.param not in WAYS:
        pytest.skip("the interpreter is not built for this torch: run 'python setup.py build_native'")
    return WAYS[request.param]


def nothing() -> None:
    """What is called before a tensor is held, here."""


def refused(packed: Any) -> Tensor:
    raise AssertionError("nothing but the simple way is asked for")


def simple(of_matrix: Callable[[Tensor], Tensor] = lambda x: x, of_nodes: tuple[str, ...] = ()) -> Reading:
    reading = Reading(refused, of_matrix, of_nodes)
    reading.is_simple = True
    return reading


class Named(Tensor):
    """A subclass."""


TENSORS: dict[str, Callable[[], Tensor]] = {
    "result": lambda: torch.ones(2, 3, requires_grad=True) * 2,
    "leaf": lambda: torch.ones(2, 3, requires_grad=True),
    "no gradient": lambda: torch.ones(4),
    "view": lambda: (torch.ones(4, 4, requires_grad=True) * 2)[1:, 2],
    "empty": lambda: torch.ones(0, requires_grad=True) * 2,
    "parameter": lambda: nn.Parameter(torch.ones(3)),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "subclass": lambda: torch.ones(3).as_subclass(Named),
    "meta": lambda: torch.ones(3, device="meta"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_is_held_with_its_version_and_read_again(ways: Hooks, name: str) -> None:
    hold, read = ways
    x, counted = TENSORS[name](), [3, 100]
    packed = hold(Holding(counted, nothing), x)
    assert type(packed) is tuple and packed[1] == x._version
    is_leaf = x.requires_grad and x.is_leaf
    assert (packed[0] is x) == is_leaf and (packed[2] is None) == is_leaf
    assert is_leaf or packed[2]() is x
    assert counted == [4, 100 + (x.nbytes if x.layout is torch.strided else 0)]
    assert read(simple(), packed) is packed[0]


def test_what_a_step_begins_with_comes_first(ways: Hooks) -> None:
    counted = [7, 70]

    def begin() -> None:
        counted[:] = 0, 0

    ways[0](Holding(counted, begin), torch.ones(2))
    assert counted == [1, 8]

    def fail() -> None:
        raise KeyError("no step")

    with pytest.raises(KeyError, match="no step"):
        ways[0](Holding(counted, fail), torch.ones(2))


def test_a_changed_tensor_is_an_error(ways: Hooks) -> None:
    hold, read = ways
    for x in (torch.ones(3), nn.Parameter(torch.ones(3))):
        packed = hold(Holding([0, 0], nothing), x)
        with torch.no_grad():
            x.add_(1)
        with pytest.raises(SavedTensorModifiedError, match="is at version 1; expected version 0"):
            read(simple(), packed)


def test_a_tensor_whose_data_was_assigned_is_followed(ways: Hooks) -> None:
    hold, read = ways
    x = torch.ones(3, requires_grad=True) * 2
    packed = hold(Holding([0, 0], nothing), x)
    x.data = torch.full((3,), 5.0)
    assert torch.equal(read(simple(), packed), torch.full((3,), 5.0))
    del x
    assert torch.equal(read(simple(), packed), torch.full((3,), 2.0))


def test_freed_memory_is_read_as_it_is_outside_of_backward(ways: Hooks) -> None:
    hold, read = ways
    x = torch.ones(3)
    packed = hold(Holding([0, 0], nothing), x)
    x.untyped_storage().resize_(0)
    assert read(simple(), packed) is packed[0]


def test_what_is_not_simple_goes_the_other_way(ways: Hooks) -> None:
    read = ways[1]
    packed = ways[0](Holding([0, 0], nothing), torch.ones(3))
    asked = []

    def otherwise(packed: Any) -> Tensor:
        asked.append(packed)
        return torch.zeros(1)

    reading = Reading(otherwise, lambda x: x, ())
    read(reading, packed)
    reading.is_simple = True
    other: Any = object()
    read(reading, other)
    assert asked == [packed, other]


def test_torch_function_modes_see_nothing(ways: Hooks) -> None:
    x = torch.ones(2, 2, requires_grad=True) * 2
    with Seeing() as mode:
        ways[1](simple(), ways[0](Holding([0, 0], nothing), x))
        assert not mode.seen
        x.detach()
        assert mode.seen == [Tensor.detach]  # and it sees everything again


def test_a_matrix_is_asked_about_for_the_named_nodes_alone(ways: Hooks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accumulation, "LARGE", 0)  # else the interpreter asks about large weights alone
    hold, read = ways
    asked: list[tuple[int, ...]] = []

    def of_matrix(x: Tensor) -> Tensor:
        asked.append(tuple(x.shape))
        return x

    reading = simple(of_matrix, ("MmBackward0",))
    read(reading, hold(Holding([0, 0], nothing), torch.ones(2, 2)))
    assert not asked  # no node runs
    x, weight = torch.ones(2, 3, requires_grad=True), torch.ones(3, 4, requires_grad=True)
    hooks = partial(hold, Holding([0, 0], nothing)), partial(read, reading)
    with torch.autograd.graph.saved_tensors_hooks(*hooks):
        loss = ((x @ weight).exp() * torch.ones(5, 2, 4)).sum()
    loss.backward()
    assert sorted(asked) == [(2, 3), (3, 4)]


def test_no_reference_is_left_behind(ways: Hooks) -> None:
    hold, read = ways
    x, holding, reading = torch.ones(2, 2, requires_grad=True) * 2, Holding([0, 0], nothing), simple()
    objects = (x, holding, reading, holding.counted, reading.of_matrix, torch.strided, Tensor)

    def repeat() -> None:
        for _ in range(100):
            read(reading, hold(holding, x))

    repeat()
    before = [sys.getrefcount(each) for each in objects]
    repeat()
    assert [sys.getrefcount(each) for each in objects] == before


def test_an_idle_session_has_the_same_gradients(ways: Hooks) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 2)), torch.randn(4, 6)
    session = Session("keep")
    session._hold, session._read = partial(ways[0], session._holding), partial(ways[1], session._reading)
    model(x).square().sum().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    for _ in range(6):
        model.zero_grad()
        with session:
            loss = model(x).square().sum()
        loss.backward()
        assert not differences([parameter.grad for parameter in model.parameters()], expected)
    assert session._forward.is_idle


@pytest.mark.parametrize("policy", ["keep", "lossless"])
@pytest.mark.parametrize("size", [4, 4096])
def test_a_result_keeps_its_numbers_when_its_data_is_assigned_and_an_argument_does_not(policy: str, size: int) -> None:
    """The exponential has saved its own result, and the sine and the square have saved the same tensor as arguments."""

    def gradients(session: Any) -> list[Tensor]:
        x, found = torch.linspace(-1, 1, size).requires_grad_(), []
        for _ in range(4):
            with session:
                y = x.exp()
                loss = (y.sin() + y.square() + torch.tanh(y)).sum()
            y.data = y.data * 0.5
            (gradient,) = torch.autograd.grad(loss, x)
            found.append(gradient)
        return found

    expected = gradients(contextlib.nullcontext())
    assert not differences(expected, gradients(Session(policy)))
