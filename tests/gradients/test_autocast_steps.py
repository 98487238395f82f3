"""Steps under autocast: they settle as others do, and one autocast is told from another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gradient_checks import differences
from torch import Tensor, nn

from backstash import Session, interpreter
from backstash import session as sessions
from backstash.capture.forward import Forward
from backstash.policies import Keep, Recompute, Rules, get
from backstash.remake.contents import Contents
from backstash.remake.tape import CallTape
from backstash.torch_internals import autocast_of, under_autocast

BF16, FP16 = torch.bfloat16, torch.float16
CASTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "none": nullcontext,
    "bf16": lambda: torch.autocast("cpu", BF16),
    "bf16, no cache": lambda: torch.autocast("cpu", BF16, cache_enabled=False),
    "fp16": lambda: torch.autocast("cpu", FP16),
    "off": lambda: torch.autocast("cpu", enabled=False),
}


class Net(nn.Module):
    """Functions that autocast casts down, casts up, and leaves alone; one weight is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.other = nn.BatchNorm2d(8), nn.LayerNorm(64)
        self.head = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        x = F.gelu(self.second(self.second(x)) + x)
        x = self.other(x.flatten(2))
        x = self.head(F.silu(self.head(x)))
        return F.softmax(x, -1).square().sum() + torch.exp(-x).tanh().mean()


def _train(session: Session | None, casts: list[str], model: nn.Module) -> list[Tensor]:
    found = []
    for cast in casts:
        model.zero_grad()
        x = torch.randn(2, 3, 8, 8)
        with session or nullcontext(), CASTS[cast]():
            loss = model(x)
        loss.backward()
        found += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return found


def _trained(policy: str | None, casts: list[str]) -> list[Tensor]:
    torch.manual_seed(0)
    model = Net()
    return _train(None if policy is None else Session(policy, model=model, min_nbytes=0), casts, model)


ORDERS = [
    ["bf16"] * 4,
    ["none", "none", "bf16", "bf16", "none", "fp16", "bf16"],
    ["bf16", "bf16", "off", "bf16, no cache"],
]


@pytest.mark.parametrize("casts", ORDERS, ids=str)
@pytest.mark.parametrize("policy", ["lossless", "lossless_stored", "offload"])
def test_a_step_under_another_autocast_is_told_from_the_steps_before(policy: str, casts: list[str]) -> None:
    assert not differences(_trained(None, casts), _trained(policy, casts))


def _long_ways(policy: str, cast: str, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Returns how often a settled step takes in tensors and calls on the long way."""
    torch.manual_seed(0)
    model, called = Net(), Counter[str]()
    session = Session(policy, model=model, min_nbytes=0)
    _train(session, [cast] * 6, model)

    def counted(owner: type, name: str) -> None:
        reference = getattr(owner, name)

        def count(*given: Any, **named: Any) -> Any:
            called[name] += 1
            return reference(*given, **named)

        monkeypatch.setattr(owner, name, count)

    counted(Forward, "_take_of_node")
    counted(Contents, "note_call")
    _train(session, [cast], model)
    monkeypatch.undo()
    report = session.report()
    assert report.recognised == report.named > 0
    return called


@pytest.mark.skipif(interpreter.module is None, reason="the interpreter is not built for this torch")
@pytest.mark.parametrize("has_compiled", [False, True])
@pytest.mark.parametrize("policy", ["lossless", "lossless_stored"])
def test_a_settled_step_under_autocast_goes_no_long_way(
    policy: str, has_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for cast in ("none", "bf16"):
        monkeypatch.setattr(sessions, "has_compiled", lambda: has_compiled)
        assert not _long_ways(policy, cast, monkeypatch)


def test_copies_of_weights_are_no_values() -> None:
    """They are counted as such in the first steps and in settled ones."""
    torch.manual_seed(0)
    model = Net()
    session = Session("lossless", model=model, min_nbytes=0)
    seen = []
    for _ in range(6):
        _train(session, ["bf16"], model)
        report = session.report()
        seen.append((report.named, len(session._forward.step.parameters)))
    assert len(set(seen)) == 1, seen


def test_autocast_is_put_back() -> None:
    with torch.autocast("cpu", BF16):
        before = autocast_of("cpu"), torch.is_autocast_cache_enabled()
        for dtype in (FP16, None):
            expected = None if dtype is None else ("cpu", dtype)
            assert under_autocast("cpu", dtype, lambda: autocast_of("cpu")) == expected
            with pytest.raises(ZeroDivisionError):
                under_autocast("cpu", dtype, lambda: 1 / 0)
            assert (autocast_of("cpu"), torch.is_autocast_cache_enabled()) == before
    assert autocast_of("cpu") is None
    assert under_autocast("cpu", BF16, lambda: autocast_of("cpu")) == ("cpu", BF16)
    assert autocast_of("cpu") is None and torch.is_autocast_cache_enabled()


class Attention(nn.Module):
    """A transformer's layer, with a projection for each of queries, keys and values."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width, elementwise_affine=False)
        self.queries, self.keys, self.values, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()  # a sum with float32 stays float32
        h = self.first(x)
        queries, keys, values = self.queries(h), self.keys(h), self.values(h)
        x = x + self.out(torch.softmax(queries @ keys.transpose(1, 2), -1) @ values)
        return x + self.down(F.gelu(self.up(self.second(x))))


class Changed(nn.Module):
    """What a layer has read is changed before others read it, and read again as it was cast."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(64), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x.float())
        y = self.first(h)
        h = h.mul_(2.0)
        return x + y + self.second(h) + (h @ h.transpose(1, 2)).softmax(-1) @ h


class Convolved(nn.Module):
    """Float32 results that convolutions read, in both layouts of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.exp(-x.view(2, 4, 64, 16).square())
        x = self.first(x) + self.second(x)
        return torch.exp(-x.float().contiguous(memory_format=torch.channels_last)).flatten(1).view(2, 64, 64)


def _layered(layer: type[nn.Module], session: Session | None, steps: int) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), layer(), layer())
    found: list[Tensor] = []
    for step in range(steps):
        model.zero_grad()
        x = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(step))
        with session or nullcontext(), torch.autocast("cpu", BF16):
            loss = model(x).float().square().mean()
        loss.backward()
        found += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return found


@pytest.mark.parametrize("policy", ["lossless", "gist_lossless", "everything"])
@pytest.mark.parametrize("layer", [Attention, Changed, Convolved])
@pytest.mark.cases(4)
def test_what_autocast_converts_inside_of_functions_is_made_again(layer: type[nn.Module], policy: str) -> None:
    recompute = Recompute(Keep(), any_producer=True)
    chosen = Rules((("*", recompute),), otherwise=get("lossless")) if policy == "everything" else get(policy)
    session = Session(chosen, min_nbytes=1024, stop_if_useless=False)
    assert not differences(_layered(layer, None, 9), _layered(layer, session, 9))
    if policy == "lossless" and layer is Attention:
        made = [row.key for row in session.report().rows if row.codec == "recompute" and "layer_norm" in row.reason]
        assert sum(key.endswith("Addmm#0:mat1") for key in made) == 8, made
        if interpreter.module is not None:
            assert session._is_replayed


def _conversions(session: Session) -> dict[str, dict[object, bool] | None]:
    """What was found out about conversions inside of functions, by the names of their places."""
    tape = session._tape
    assert isinstance(tape, CallTape)
    return {place.name: place.casts for place in tape.noting()._places.values() if " to in " in place.name}


def test_a_result_that_looks_like_a_conversion_is_none() -> None:
    """The softmax of equal shares is these shares: its float32 result has the bits of its input in float32."""
    shares = torch.full((64, 64), 1 / 64, dtype=BF16, requires_grad=True)
    session = Session("lossless", min_nbytes=1024, stop_if_useless=False)
    with session, torch.autocast("cpu", BF16):
        loss = F.softmax(shares * 1.0, -1, dtype=torch.float32).square().sum()
    loss.backward()
    assert _conversions(session) == {}


def test_what_is_known_of_conversions_does_not_grow_with_the_shapes_of_steps() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64))
    session = Session("lossless", model=model, min_nbytes=1024, stop_if_useless=False)
    for rows in range(32, 64, 4):
        with session, torch.autocast("cpu", BF16):
            loss = model(torch.randn(rows, 64)).float().sum()
        loss.backward()
    (casts,) = _conversions(session).values()
    assert casts is not None and list(casts.values()) == [True]
