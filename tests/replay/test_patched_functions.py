"""Programs that put wrappers around functions of torch, as profilers and quantizers do: each runs once a call."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backstash import Session
from backstash.capture import observer
from backstash.policies import Keep, Recompute, Rules, get

STEPS = 14
TORCH = os.path.dirname(torch.__file__)


def twice(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: 2 * original(*args, **kwargs)


class Twice:
    """A wrapper that is no function."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return 2 * self.original(*args, **kwargs)


class TwiceUnhashable(Twice):
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return self is other


def pieces(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: [2 * piece for piece in original(*args, **kwargs)]


def first_of_two(original: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result, weights = original(*args, **kwargs)
        return 2 * result, weights

    return wrapper


attention = nn.MultiheadAttention(8, 2)


def by_another_library(original: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper in a folder whose name begins with torch's."""
    code = compile("lambda *args, **kwargs: 2 * original(*args, **kwargs)", f"{TORCH}_other/patches.py", "eval")
    wrapper: Callable[..., Any] = eval(code, {"original": original})
    return wrapper


CASES: dict[str, tuple[Any, str, Callable[[Any], Any], Callable[[Tensor], Tensor]]] = {
    "relu": (F, "relu", twice, nn.ReLU()),
    "relu by another library": (F, "relu", by_another_library, nn.ReLU()),
    "relu by an object": (F, "relu", Twice, nn.ReLU()),
    "relu by an object without a hash": (F, "relu", TwiceUnhashable, nn.ReLU()),
    "dropout": (F, "dropout", twice, lambda x: F.dropout(x, 0.3)),
    "layer_norm": (F, "layer_norm", twice, lambda x: F.layer_norm(x, (8,))),
    "softmax": (F, "softmax", twice, lambda x: F.softmax(x, -1)),
    "linear": (F, "linear", twice, lambda x: x.sigmoid()),
    "attention": (F, "multi_head_attention_forward", first_of_two, lambda x: attention(x, x, x)[0]),
    "a method of C": (Tensor, "relu", twice, lambda x: x.relu()),
    "a method of Python": (Tensor, "norm", twice, lambda x: x / x.norm()),
    "a method with several results": (Tensor, "split", pieces, lambda x: torch.cat([*x.split(4, 1)]).view(4, 8)),
    "torch.norm": (torch, "norm", twice, lambda x: x / torch.norm(x)),
    "torch.unique, which asks in another's name": (torch, "unique", twice, lambda x: x * x.unique().numel()),
}


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    before = {(owner, name): getattr(owner, name) for owner, name, *_ in CASES.values()}
    yield
    for (owner, name), original in before.items():
        setattr(owner, name, original)


def trained(case: str, context: Any, patched_at: int, inside: bool = False) -> list[Tensor]:
    """All losses and gradients."""
    owner, name, wrap, function = CASES[case]
    original = getattr(owner, name)
    torch.manual_seed(0)
    first, last = nn.Linear(8, 8), nn.Linear(8, 1)
    found = []
    try:
        for step in range(STEPS):
            if step == patched_at:
                setattr(owner, name, wrap(original))
            x = torch.randn(4, 8)
            with context:
                loss = last(function(first(x))).square().mean()
                if inside:
                    loss.backward()
            if not inside:
                loss.backward()
            found += [loss.detach(), first.weight.grad.clone()]  # type: ignore[union-attr]
            first.weight.grad = None
    finally:
        setattr(owner, name, original)
    return found


@pytest.mark.parametrize("patched_at", [0, STEPS - 2])
@pytest.mark.parametrize("case", CASES)
def test_a_wrapper_runs_once_a_call(case: str, patched_at: int) -> None:
    expected = trained(case, nullcontext(), patched_at)
    found = trained(case, Session("lossless", min_nbytes=0), patched_at)
    assert all(torch.equal(own, plain) for own, plain in zip(found, expected, strict=True))


@pytest.mark.parametrize("patched_at", [0, STEPS])
def test_attention_is_made_again_behind_a_wrapper(patched_at: int) -> None:
    """Whether there is a wrapper when it is met for the first time, in this process, or was one."""
    observer._kinds.pop(F.multi_head_attention_forward, None)
    remade = Recompute(Keep(), any_producer=True)
    for at in (patched_at, STEPS):
        session = Session(Rules((("*", remade),), get("lossless")), min_nbytes=0, stop_if_useless=False)
        trained("attention", session, at)
        assert sum("  recompute  " in line and "Bmm" in line for line in session.report().table().splitlines()) >= 2


def test_a_wrapper_around_backward_runs_once() -> None:
    original = Tensor.backward

    def backward(self: Tensor, *args: Any, **kwargs: Any) -> None:
        original(2 * self, *args, **kwargs)

    Tensor.backward = backward  # type: ignore[method-assign]
    try:
        expected = trained("relu", nullcontext(), STEPS, inside=True)
        found = trained("relu", Session("lossless", min_nbytes=0), STEPS, inside=True)
    finally:
        Tensor.backward = original  # type: ignore[method-assign]
    assert all(torch.equal(own, plain) for own, plain in zip(found, expected, strict=True))


def test_a_function_of_the_program_that_offers_itself_is_called_itself() -> None:
    """It is no wrapper of a function of torch: a mode may well call it."""
    calls = []

    def scaled(x: Tensor) -> Tensor:
        calls.append(torch.overrides.has_torch_function((x,)))
        if calls[-1]:
            result: Tensor = torch.overrides.handle_torch_function(scaled, (x,), x)
            return result
        return 3 * x

    x = torch.ones(3, requires_grad=True)
    with Session("lossless", min_nbytes=0):
        y = scaled(x).sum()
    y.backward()
    assert calls == [True, False]
    assert x.grad is not None and x.grad.tolist() == [3.0, 3.0, 3.0]


def test_nothing_is_kept_of_wrappers() -> None:
    known = dict(observer._by_code)
    for case in ("relu", "relu by an object", "a method of C"):
        trained(case, Session("lossless", min_nbytes=0), 0)
    assert not any(getattr(each, "__module__", "") == __name__ for each in observer._of_torch)
    assert observer._by_code == known


BEFORE = """
import torch, torch.nn.functional as F
from torch import nn

def wrapped(original):
    return lambda *args, **kwargs: 2 * original(*args, **kwargs)

F.relu, F.max_pool2d, F.layer_norm = wrapped(F.relu), wrapped(F.max_pool2d), wrapped(F.layer_norm)
from backstash import Session

def trained(context):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.LayerNorm(8), nn.Unflatten(1, (1, 2, 4)), nn.MaxPool2d(2))
    found = []
    for _ in range(14):
        with context:
            loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        found.append(loss.item())
    return found

from contextlib import nullcontext
print(trained(nullcontext()) == trained(Session("lossless", min_nbytes=0)))
"""


def test_a_function_that_was_wrapped_before_the_import() -> None:
    run = subprocess.run([sys.executable, "-c", BEFORE], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "True", run.stderr
