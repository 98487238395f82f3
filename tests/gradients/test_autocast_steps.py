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
from backstash.capture.forward import Forward
from backstash.remake.contents import Contents
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
@pytest.mark.parametrize("policy", ["lossless", "lossless_stored"])
def test_a_settled_step_under_autocast_goes_no_long_way(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for cast in ("none", "bf16"):
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
