"""The contract of a policy: its defaults, and that every policy in front of another policy forwards every member.

The tests find the members and the wrappers by introspection, so that none can be forgotten.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from policy_cases import Asked, saved
from torch import nn

import backstash as bs
from backstash import policies
from backstash.planning.run.buckets import Alike
from backstash.planning.run.guard import Guard
from backstash.policies import Keep, KeepAll, Lossless, Offload, Policy, Rules, Stash, Wrapper
from backstash.policies.adapted import Adapted, adapt

SOURCE = Path(bs.__file__).parent

MEMBERS = {name: member for name, member in vars(Policy).items() if not name.startswith("_")}
METHODS = sorted(name for name, member in MEMBERS.items() if callable(member))
VALUES: dict[str, tuple[Any, ...]] = {
    "is_fixed": (False, True),
    "revision": (None, object()),
    "observes_changes": (False, True),
    "watches_again": (True, False),
    "notes": ((), ("a note",)),
    "recomputes": (True, False),
    "remakes_anything": (False, True),
    "min_nbytes": (0, 1 << 16),
    "ahead": (1, 5, None),
    "cycles": (None, 2, 0),
    "repeated_calls": (None, frozenset({"features.0 conv2d 0"})),
    "fetches": (None, {"a": ("b",)}),
    "stays": (None, {"a": frozenset({0})}),
    "move_timer": (None, object()),
    "stores": (None, {"disk": object}),
    "rewriting": (None, nullcontext),
}
"""For each member that is no method, values that a policy may have."""

ARGUMENTS: dict[str, Any] = {
    "saved": saved(),
    "readers": (saved(), saved(key="features.1/Convolution#0:input")),
    "outcome": policies.Outcome(saved(), None, 24, "asked"),
    "node": object(),
    "x": torch.zeros(2),
    "sources": lambda: None,
    "key": "features.0/Relu#0:result",
}
"""For each parameter of a method of the contract, an argument."""

WRAPPERS: dict[type[Policy], Callable[[Any], Policy]] = {
    Rules: lambda inner: Rules((("never", Stash("zvc")),), inner),
    Offload: lambda inner: Offload(lossless=inner),
    Adapted: Adapted,
}
OWN = {(Offload, "ahead")}
"""Members that a wrapper has as an argument of its own, instead of forwarding them."""


class Spy:
    """Has every member of the contract; notes each call, and returns Keep with the method's name.

    It notes the arguments' ids, because a policy must not hold a tensor that it watches.
    """

    def __init__(self, **values: Any) -> None:
        self.asked: list[tuple[str, tuple[int, ...]]] = []
        vars(self).update({name: choices[0] for name, choices in VALUES.items()} | values)


def noted(name: str) -> Callable[..., Keep]:
    def method(self: Any, *arguments: Any) -> Keep:
        self.asked.append((name, tuple(map(id, arguments))))
        return Keep(name)

    return method


for _name in METHODS:
    setattr(Spy, _name, noted(_name))


class PolicySpy(Spy, Policy):
    """A Spy that inherits from Policy."""


PolicySpy.__abstractmethods__ = frozenset()  # Spy has them, but only since its class body


def spy_for(wrapper: type[Policy], **values: Any) -> Any:
    return Spy(**values) if wrapper is Adapted else PolicySpy(**values)


def arguments_of(method: str) -> tuple[Any, ...]:
    return tuple(ARGUMENTS[name] for name in list(inspect.signature(MEMBERS[method]).parameters)[1:])


def built_in(base: type[Policy] = Policy) -> Iterator[type[Policy]]:
    for policy in base.__subclasses__():
        if policy.__module__.startswith("backstash."):
            yield policy
        yield from built_in(policy)


def holds_a_policy(policy: type[Policy]) -> bool:
    hints = get_type_hints(policy.__init__).values()
    return issubclass(policy, Wrapper) or any(isinstance(hint, type) and issubclass(hint, Policy) for hint in hints)


def test_the_tests_below_know_every_member_and_every_wrapper() -> None:
    assert set(VALUES) == set(MEMBERS) - set(METHODS)
    before_a_plan = {Alike, Guard}  # and never before any other policy
    assert {policy for policy in built_in() if holds_a_policy(policy)} - {Wrapper} - before_a_plan <= set(WRAPPERS)
    assert all(issubclass(policy, Wrapper) for policy in WRAPPERS if policy is not Adapted)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_forwards_every_method(wrapper: type[Policy], name: str) -> None:
    spy = spy_for(wrapper)
    arguments = arguments_of(name)
    result = getattr(WRAPPERS[wrapper](spy), name)(*arguments)
    assert spy.asked == [(name, tuple(map(id, arguments)))]
    if name in ("decide", "decide_together") and wrapper is not Offload:  # which moves the tensor
        assert result == Keep(name)


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_forwards_every_value(wrapper: type[Policy], name: str) -> None:
    if (wrapper, name) not in OWN:
        for value in VALUES[name]:
            assert getattr(WRAPPERS[wrapper](spy_for(wrapper, **{name: value})), name) == value


def test_a_wrapper_over_a_wrapper_forwards_as_well() -> None:
    spy = Spy(ahead=3)
    rules = Rules((), Rules((), spy))  # type: ignore[arg-type]
    for name in METHODS:
        getattr(rules, name)(*arguments_of(name))
    assert ([called for called, _ in spy.asked], rules.ahead) == (METHODS, 3)


def test_the_defaults() -> None:
    class Minimal(Policy):
        def decide(self, saved: Any) -> Keep:
            return Keep("minimal")

    for policy in (Minimal(), adapt(Asked())):
        assert (policy.is_fixed, policy.recomputes, policy.ahead) == (False, True, None)
        for name in set(METHODS) - {"decide", "decide_together", "has_room_for", "may_bound"}:
            assert getattr(policy, name)(*arguments_of(name)) is None
        assert policy.decide_together(saved(), (saved(),)) == policy.decide(saved())
        assert policy.has_room_for("features.0/Relu#0:result") is False
        assert policy.may_bound((saved(),)) is False


def test_a_policy_without_decide_is_refused() -> None:
    class Undecided(Policy):
        pass

    with pytest.raises(TypeError, match="abstract method '?decide"):
        Undecided()  # type: ignore[abstract]


def test_a_policy_may_have_its_values_as_attributes_or_properties() -> None:
    class Mine(KeepAll):
        def __init__(self) -> None:
            object.__setattr__(self, "ahead", 2)

    assert (Mine().recomputes, Mine().ahead) == (False, 2)
    assert bs.Session(Lossless(recompute=False)).recomputes is False


def test_a_subclass_that_overrides_a_method_is_not_fixed() -> None:
    class Renamed(Lossless):
        pass

    class Learning(Lossless):
        def observe(self, outcome: Any) -> None:
            pass

    class Fixed(Lossless):
        is_fixed = True

        def decide(self, saved: Any) -> Keep:
            return Keep()

    assert [policy.is_fixed for policy in (Lossless, Renamed, Learning, Fixed)] == [True, True, False, True]
    assert (Offload().is_fixed, Offload(lossless=Learning()).is_fixed) == (True, False)
    assert (Rules((), Offload()).is_fixed, Rules((), policies.quantized()).is_fixed) == (True, False)


def test_a_fixed_policy_defines_what_depends_on_the_facts_alone() -> None:
    fixed = {policy for policy in built_in() if vars(policy).get("is_fixed") is True}
    assert {policies.Cdma, KeepAll, Lossless, policies.Vdnn} <= fixed
    assert policies.gist_lossless().is_fixed and not policies.gist("fp16").is_fixed
    for policy in fixed:
        own = {name for name in METHODS if getattr(policy, name) is not MEMBERS[name]}
        assert own - {"has_room_for", "in_flight_for", "begin_step"} == {"decide"}


def test_an_object_with_decide_and_observe_serves() -> None:
    own = Asked()
    policy = policies.get(own)  # type: ignore[arg-type]
    assert policy.decide(saved()) == Keep("asked")
    policy.observe(ARGUMENTS["outcome"])
    assert (own.asked, own.told) == ([saved()], [ARGUMENTS["outcome"]])
    assert repr(policy) == repr(own)
    assert policies.get(policy) is policy


def test_a_member_that_is_none_has_the_default() -> None:
    own: Any = Asked()
    own.begin_step = own.watch = own.trace = own.decide_together = None
    policy = adapt(own)
    policy.begin_step()
    policy.watch(saved(), object(), torch.zeros(2))
    policy.trace(saved(), (saved(),), lambda: None)
    assert policy.decide_together(saved(), (saved(),)) == Keep("asked")


@pytest.mark.parametrize("wrong", [None, "lossless", Lossless, Keep()], ids=["None", "str", "class", "Keep"])
def test_rules_refuse_an_object_that_is_no_policy(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"a policy was asked for, got .*, which has no decide\(\) and observe\(\)"):
        Rules((), wrong)


@pytest.mark.parametrize("policy", [Spy, PolicySpy, lambda: Rules((), Spy())], ids=["adapted", "inherits", "rules"])  # type: ignore[arg-type]
def test_a_session_asks_for_every_member(policy: Callable[[], Any]) -> None:
    asking = policy()
    spy = asking.otherwise.policy if isinstance(asking, Rules) else asking
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    with bs.Session(asking, model=model, min_nbytes=0):
        loss = model(torch.randn(8, 64)).sum()
    loss.backward()
    of_others = {"decide", "may_bound", "in_flight_for"}  # the last ones: of compiled graphs, and of accelerators
    assert {name for name, _ in spy.asked} >= set(METHODS) - of_others
    assert spy.asked[0][0] == "begin_step"


def test_members_are_read_in_the_ordinary_way() -> None:
    """A member that is read with getattr is not part of the contract, and a wrapper would not forward it."""
    outside = [path for path in SOURCE.rglob("*.py") if path.relative_to(SOURCE).parts[0] != "policies"]
    source = "\n".join(path.read_text() for path in outside)
    assert not re.findall(r"(?:getattr|hasattr)\(\s*(?:self\.)?_?policy\b", source)
    assert set(MEMBERS) <= set(re.findall(r"\b_?policy\.(\w+)", source))
