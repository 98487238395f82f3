"""The compiled twins of what is called for every saved tensor do what their references in Python do."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gradient_checks import differences
from torch import Tensor, nn

from backstash import Session, saved
from backstash.capture import naming
from backstash.capture.names import Names
from backstash.capture.observer import Observer, _rare
from backstash.capture.side_effects import SideEffect
from backstash.numerics import settings
from backstash.saved import TensorSpec
from backstash.stash import compiled, encode, parameters, patterns, pending
from backstash.stash.accounts import Account
from backstash.stash.calls import INPUT, Call
from backstash.stash.live import Live
from backstash.stash.sample import Sample
from backstash.stash.value import Saved, Value

functions = compiled.functions

pytestmark = pytest.mark.skipif(functions is None, reason="nothing is compiled: run 'python setup.py build_native'")


@pytest.fixture(autouse=True, params=["torch's objects", "attributes"])
def _way_to_torch(request: pytest.FixtureRequest) -> Iterator[None]:
    """The functions read torch's own objects, or ask attributes, as where nothing was built against this torch."""
    if request.param == "attributes":
        functions.configure(access=None)
        yield
        if compiled.replay is not None:
            functions.configure(access=compiled.replay.table)
    elif compiled.replay is None:
        pytest.skip("nothing was built against this torch")
    else:
        yield


TENSORS: dict[str, Callable[[], Tensor]] = {
    "dense": lambda: torch.ones(2, 3),
    "other size": lambda: torch.ones(3, 2),
    "other strides": lambda: torch.ones(3, 2).t(),
    "other dtype": lambda: torch.ones(2, 3, dtype=torch.float64),
    "offset": lambda: torch.ones(3, 3)[1:],
    "parameter": lambda: nn.Parameter(torch.ones(2, 3)),
    "conjugated": lambda: torch.ones(2, 3, dtype=torch.complex64).conj(),
    "negated": lambda: torch.ones(2, 3, dtype=torch.complex64).conj().imag,
    "meta": lambda: torch.ones(2, 3, device="meta"),
    "zero": lambda: torch._efficientzerotensor((2, 3)),
    "inference": lambda: made_in_inference_mode(),
}


@torch.inference_mode()
def made_in_inference_mode() -> Tensor:
    return torch.ones(2, 3)


def description(x: Any) -> Any:
    return None if x is None else [id(each) for each in x]


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_looks_the_same_to_both(name: str) -> None:
    x = TENSORS[name]()
    assert functions.is_odd(x) == saved.is_odd(x)
    for other in TENSORS.values():
        spec = TensorSpec.of(other())
        assert functions.looks_like(x, spec) == compiled._looks_like(x, spec)


# -- patterns of calls -------------------------------------------------------------------------------------------------

CONSTANTS: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    0.0,
    -0.0,
    1.0,
    float("nan"),
    "gelu",
    torch.float32,
    (1, 2),
    [1, 2],
]


def arguments(numbers: random.Random, tensors: list[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def one() -> Any:
        choice = numbers.randrange(4)
        if choice == 0:
            return numbers.choice(CONSTANTS)
        return [numbers.choice(tensors), numbers.choice(tensors)] if choice == 1 else numbers.choice(tensors)

    args = tuple(one() for _ in range(numbers.randrange(3)))
    return args, {name: one() for name in numbers.sample(["alpha", "dim", "out_dtype"], numbers.randrange(3))}


def a_call(args: tuple[Any, ...], read: list[Tensor], result: Tensor, in_place: bool) -> Call:
    without = tuple(INPUT if isinstance(arg, Tensor) else arg for arg in args)
    return Call("add", torch.add, without, {}, (), TensorSpec.of(result), in_place, settings("cpu"))


def test_a_call_fits_into_a_pattern_for_both_or_for_neither() -> None:
    numbers = random.Random(0)
    plain = [TENSORS[name]() for name in ("dense", "other size", "other strides", "other dtype", "offset", "parameter")]
    all_tensors = [make() for make in TENSORS.values()]
    outcomes = set()
    for _ in range(3000):
        args, kwargs = arguments(numbers, plain)
        read = patterns.tensors_in(args, kwargs)
        result = numbers.choice(plain)
        in_place = bool(args) and args[0] is result and numbers.random() < 0.8
        pattern = patterns.pattern_of(args, kwargs, read, a_call(args, read, result, in_place))
        assert pattern is not None
        if numbers.random() < 0.6:  # the same call, or one that differs a little
            others = (args, dict(kwargs))
            if args and numbers.random() < 0.5:
                at = numbers.randrange(len(args))
                replaced = numbers.choice([*CONSTANTS, *all_tensors])
                others = (*args[:at], replaced, *args[at + 1 :]), dict(kwargs)
        else:
            others = arguments(numbers, all_tensors)
        made = numbers.choice([result, result, numbers.choice(plain)])
        given = pattern, others[0], others[1], made, made.untyped_storage()
        expected, found = patterns.fitting_reference(*given), functions.fitting(*given)
        assert description(found) == description(expected), given
        outcomes.add(found is None)
    assert outcomes == {True, False}


@pytest.mark.parametrize("other", [-0.0, 0, False, None])
def test_a_number_with_other_bits_is_another_call(other: Any) -> None:
    x = torch.ones(2, 3)
    y = x + 1
    pattern = patterns.pattern_of((x, 0.0), {}, [x], a_call((x, 0.0), [x], y, False))
    for fitting in (patterns.fitting_reference, functions.fitting):
        assert fitting(pattern, (x, 0.0), {}, y, y.untyped_storage()) == [x]
        assert fitting(pattern, (x, other), {}, y, y.untyped_storage()) is None
        assert fitting(pattern, (x, 0.0), {}, x, x.untyped_storage()) is None  # it aliases now what it did not


# -- saved tensors -----------------------------------------------------------------------------------------------------


def results() -> dict[str, Callable[[Tensor], Any]]:
    attention = nn.MultiheadAttention(8, 2)
    return {
        "product": lambda x: x * x.exp(),
        "several": lambda x: torch.stack([x.sin(), x.cos()]).unbind(),
        "softmax": lambda x: F.log_softmax(x, -1),
        "attention": lambda x: attention(x, x, x),
        "nested": lambda x: {"a": [x.tanh()], "b": (x.sigmoid(), None)},
        "nothing": lambda x: None,
    }


@pytest.mark.parametrize("name", results())
def test_the_same_nodes_are_found_for_the_same_tensors(name: str) -> None:
    live, packed = Live(), []

    def pack(x: Tensor) -> Saved:
        packed.append(Saved(x, live))
        return packed[-1]

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda each: each.dense):
        result = results()[name](torch.randn(3, 4, 8, requires_grad=True))
    packed.append(Saved(torch.ones(3), live))  # which no node has saved
    packed.append(Saved(torch.eye(3).to_sparse(), live))  # which is not looked for
    answer, rest = naming.find_saved(result, packed)
    wanted = {id(each): each for each in packed if each.is_plain}
    nodes = [x.grad_fn for x in naming.tensors_within(result)]
    assert naming.find_reference(nodes, wanted) == answer
    assert list(wanted.values()) == rest


def a_value(x: Tensor, members: list[Tensor]) -> tuple[Value, list[Saved]]:
    live = Live()
    value = Value(x.untyped_storage(), Account(None, 0, ""), live)  # type: ignore[arg-type]
    saved_of = [Saved(each, live) for each in members]
    for each in saved_of:
        each.value = value
        value.members.append(weakref.ref(each))
    return value, saved_of


@pytest.mark.parametrize("held", ["by nobody", "by the program", "by its storage", "by a view"])
@pytest.mark.parametrize("number", [1, 3])
def test_both_know_whether_somebody_else_holds_a_storage(held: str, number: int) -> None:
    x = torch.ones(4)
    value, saved_of = a_value(x, [x] * number)
    kept: Any = {"by the program": x, "by its storage": x.untyped_storage(), "by a view": x[1:]}.get(held)
    del x
    gc.collect()
    own = pending._OWN_REFERENCES
    assert pending.is_orphaned(value, own) == (kept is None) == (held == "by nobody")
    assert len(saved_of) == number


def test_both_see_which_members_have_changed() -> None:
    outcomes = []
    for unchanged in (encode._unchanged, functions.unchanged):
        x = torch.ones(4)
        value, saved_of = a_value(x, [x, x[1:], x[2:]])
        saved_of[1].dense = None
        saved_of[2].value = None
        x.add_(1.0)
        late = Saved(x, saved_of[0].live)
        late.value = value
        value.members.append(weakref.ref(late))
        followed: list[Saved] = []
        fresh = unchanged(value, followed.append)
        every = [*saved_of, late]
        outcomes.append(
            (
                [every.index(each) for each in fresh],
                [each.modified for each in every],
                [each.dense is None for each in every],
            )
        )
        assert {id(each) for each in followed} >= {id(every[0]), id(late)}  # whose original is still there
    assert outcomes[0] == outcomes[1] == ([3], [1, None, None, None], [True, True, False, False])


def test_the_state_of_a_module_is_the_same() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Sequential(nn.Linear(3, 3, bias=False)))
    model[2][0].weight = model[0].weight
    expected = {storage._cdata for storage in parameters._state_storages(model)}
    found = functions.state_of(model, {})
    assert set(found) == expected
    assert all(reference()._cdata == cdata for cdata, reference in found.items())
    again = functions.state_of(model, found)
    assert all(again[cdata] is reference for cdata, reference in found.items())
    model[0].register_buffer("odd", torch.eye(3).to_sparse())
    model[1].register_parameter("none", None)
    assert set(functions.state_of(model, {})) == {storage._cdata for storage in parameters._state_storages(model)}


@pytest.mark.parametrize("number", [0, 1, 63, 64, 65, 1000, 12345])
@pytest.mark.parametrize("step", [1, 2, 77])
def test_a_sample_has_the_bits_of_the_elements(number: int, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(number + 5)[5:]
    sample = Sample.of(x, step)
    with monkeypatch.context() as patch:
        patch.setattr(compiled, "functions", None)
        reference = Sample.of(x, step)
    assert isinstance(sample.bits, bytes) and isinstance(reference.bits, Tensor)
    assert sample.bits == reference.bits.numpy().tobytes()
    assert not sample.differs(x.clone())
    for index in range(0, number, 97):
        y = x.clone()
        y[index] = -y[index]
        with monkeypatch.context() as patch:
            patch.setattr(compiled, "functions", None)
            expected = reference.differs(y)
        assert sample.differs(y) == expected


# -- the observer ------------------------------------------------------------------------------------------------------


class Pending:
    clock = 0

    def __init__(self) -> None:
        self.due: dict[int, Any] = {3: []}


class Leaning:
    def __init__(self) -> None:
        self._values = {1: []}


class Listener:
    """Writes down what it is told."""

    recomputes, is_timing, remakes_anything = True, False, False
    recorder = replaying = None

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.depth = 0
        self.unnamed: list[Any] = []
        self._pending, self._leaning = Pending(), Leaning()
        self._names, self._call_place = Names(None, lambda op, role, spec: False), None

    def before_function(self) -> None:
        self._pending.clock += 1
        if self._pending.clock in self._pending.due:
            self.look_at_due()

    def look_at_due(self) -> None:
        self.told.append(("due", self._pending.clock))

    def before_side_effect(self, effect: SideEffect, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.told.append((effect, len(args), sorted(kwargs)))

    def assign_data(self, x: Tensor, assign: Callable[[], Any]) -> Any:
        self.told.append("data")
        return assign()

    def before_backward(self) -> None:
        self.told.append("backward")

    def after_function(self, result: Any) -> None:
        self.told.append(("after", type(result), self.depth))
        self.unnamed.clear()

    def counts(self, function: Any) -> bool:
        self._call_place = self._names.call_place(function)
        return self._call_place is not None

    def made(self, function: Any, args: Any, kwargs: Any, result: Any, state: Any) -> None:
        self.told.append(("made", function, len(args), sorted(kwargs), type(result), state is None))
        self.told.append(("place", [at[1:] for at, known in self.places.items() if known is self._call_place]))

    @property
    def places(self) -> dict[Any, Any]:
        return self._names.noting()._places


def a_program(listener: Listener) -> Any:
    def pack(x: Tensor) -> Tensor:
        listener.unnamed.append(1)
        return x.detach()

    x = torch.randn(4, 4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        y = F.relu(x + 1.0, inplace=True)
        y = F.dropout(y * y, 0.5, True) + y.shape[0]
        y = torch.cat([y, y.exp()]).view(-1)
        y.mul_(2.0)
        torch.add(y, y, out=torch.empty_like(y.detach())) if not y.requires_grad else None
        with pytest.raises(RuntimeError):
            y.exp() @ torch.ones(3)
        with torch.no_grad():
            z = y.tanh()
            F.threshold(z, 0.0, 1.0, True)
        y.data = y.data.clone()
        z.add_(1.0)
        total = y.sum() + z.sum()
    total.backward()
    return x.grad


def test_the_observer_tells_the_same() -> None:
    told = []
    for is_compiled in (True, True, False):  # the first time, kinds of functions are not known yet
        torch.manual_seed(0)
        listener = Listener()
        observer = Observer(listener)  # type: ignore[arg-type]
        if not is_compiled:
            observer._watch = _rare
        for number in range(4):
            listener._pending.clock = 0
            with observer:
                gradient = a_program(listener)
            listener._names.leave_all()
            listener._names.begin_step()
            listener._names.noting().end_pass()
            listener._names.noting()._has_used = True
            for index, place in listener.places.items():
                place.is_used = index[1] is not Tensor.add
            listener.told.append(number)
        assert listener.depth == 0
        told.append((listener.told, listener._pending.clock, gradient.tolist()))
    assert told[0] == told[1] == told[2]
    kinds = {each[0] if type(each) is tuple else each for each in told[0][0]}
    assert kinds >= {"due", "after", "place", "made", "data", "backward", SideEffect.CHANGES, SideEffect.CHANGES_SELF}


# -- whole steps -------------------------------------------------------------------------------------------------------

SCRIPT = """
import torch, backstash
from torch import nn
torch.manual_seed(0)
class Fails(nn.Module):
    def forward(self, x):
        raise ValueError
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.twice, self.fails = nn.Sequential(nn.Conv2d(8, 8, 1), nn.ReLU()), Fails()
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(True), nn.Conv2d(8, 8, 3), nn.GELU())
        self.head = nn.Linear(8, 4)
        self.scale = nn.Buffer(torch.ones(8))
    def forward(self, x):
        x = self.twice(self.twice(self.layers(x)))
        try:
            self.fails(x)
        except ValueError:
            x = nn.Softplus()(x)  # of which nobody knew before
        x = torch.cat([x, x.tanh()]).mean((2, 3)) * self.scale
        return torch.nn.functional.dropout(self.head(x), 0.3).logsumexp(-1).sum()
net, x = Net(), torch.randn(4, 3, 12, 12)
session = backstash.Session("lossless", min_nbytes=64)
for step in range(5):
    x = torch.randn(4 if step != 3 else 5, 3, 12, 12)
    with session:
        loss = net(x)
    loss.backward()
    report = session.report()
    for row in report.rows:
        print(row.key, row.need, row.spec, row.saved_nbytes, row.stash_nbytes, row.codec, row.reason, row.shared_by)
    print(report.named, report.recognised, report.peak_stash_nbytes, report.parameter_nbytes)
for parameter in net.parameters():
    print(parameter.grad.double().sum().item().hex())
"""


@pytest.mark.slow
def test_reports_and_gradients_are_those_of_the_references() -> None:
    printed = [
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "BACKSTASH_KERNELS": choice},
        ).stdout
        for choice in ("auto", "reference")
    ]
    assert printed[0] == printed[1]
    assert printed[0].count("\n") > 20


def test_a_function_that_raises_leaves_the_step_as_it_was() -> None:
    def model(x: Tensor) -> Tensor:
        y = x.exp()
        for _ in range(3):
            with pytest.raises(RuntimeError):
                y.tanh() @ torch.ones(7)
            y = F.relu(y * y.sigmoid())
        return y.sum()

    def step(session: Session | None) -> list[Tensor]:
        x = torch.linspace(-1.0, 1.0, 4096).view(64, 64).requires_grad_()
        if session is None:
            model(x).backward()
        else:
            with session:
                loss = model(x)
            loss.backward()
        assert x.grad is not None
        return [x.grad]

    session = Session("lossless", min_nbytes=0)
    for _ in range(4):
        assert not differences(step(session), step(None))
    assert session.report().recognised == session.report().named
