"""What is made again runs the operators that ran first, although autograd follows nothing then (Note: [as it was called])."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gradient_checks import Remake, differences
from test_any_producer import UNSTEADY
from test_op_db import (
    EXCEPTIONS,
    MODULES,
    OPS,
    QUICK_SAMPLES,
    SAMPLES,
    Forward,
    by_part,
    module_forwards,
    op_forwards,
    outcome,
    part,
)
from torch import Tensor, nn
from torch._C._profiler import _ExperimentalConfig
from torch.autograd import ProfilerConfig, ProfilerState

from backstash import Session
from backstash.stash import repeating
from backstash.stash.calls import Call

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def operators(function: Callable[[], Any]) -> list[str]:
    """The names of all operators that a function runs, in order, down to the kernels of a backend."""
    config = ProfilerConfig(ProfilerState.CPU, False, False, False, False, False, _ExperimentalConfig())
    torch.autograd._enable_profiler_legacy(config)
    try:
        function()
    finally:
        threads = torch.autograd._disable_profiler_legacy()
    names = [event.name() for thread in threads for event in thread if event.kind() == "push"]
    return [name for name in names if name.startswith("aten::")]


BACKWARD: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "backward": torch.no_grad,
    "backward with create_graph": torch.enable_grad,
    "a claim's dispatch": lambda: torch._C._AutoDispatchBelowAutograd(),
    "backward in inference mode": torch.inference_mode,
    "backward under autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}
"""States of the program in which a value may be made again."""


@contextmanager
def dropping() -> Iterator[None]:
    with torch.autograd.graph.saved_tensors_hooks(lambda x: None, lambda x: x):
        yield


@pytest.fixture
def different(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[list[str], list[str]]]:
    """Of each call of a Session that runs other operators when it is repeated: these, by function and state."""
    found: dict[str, tuple[list[str], list[str]]] = {}

    def look(call: Call, tensors: list[Tensor]) -> None:
        if call.in_place:
            return
        args, kwargs = repeating._arguments(call, tensors)
        with torch.random.fork_rng(devices=[]), dropping():
            first = operators(lambda: call.function(*args, **kwargs))
        detached = [x.detach() for x in tensors]
        for state, context in BACKWARD.items():
            again: list[str] = []

            def noted(*args: Any, again: list[str] = again, **kwargs: Any) -> Any:
                results: list[Any] = []
                again += operators(lambda: results.append(call.function(*args, **kwargs)))
                return results[0]

            with context():
                repeating.repeat(call, noted, detached, *([lambda number, x: None] if call.group else []))
            if again != first:
                found[f"{call.name}, {state}"] = first, again

    for name in ("is_repeated", "repeats_inside"):

        def proves(call: Call, tensors: list[Tensor], *others: Any, original: Any = getattr(repeating, name)) -> Any:
            answer = original(call, tensors, *others)
            if answer:
                look(call, tensors)
            return answer

        monkeypatch.setattr(repeating, name, proves)
    return found


def watch(forward: Forward, autocast: bool) -> None:
    """Runs a forward pass whose values can all be made again."""

    def take(x: Tensor) -> Tensor:
        return x.detach().requires_grad_(x.requires_grad)

    with Session(Remake(), min_nbytes=0), torch.autocast("cpu", torch.bfloat16, cache_enabled=False) if autocast else nullcontext():
        outcome(lambda: [forward(take)])


by_autocast = pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])


@by_part
@by_autocast
@pytest.mark.parametrize("op", OPS, ids=[op.formatted_name for op in OPS])
def test_op(op: Any, autocast: bool, which: str, different: dict[str, Any]) -> None:
    if op.formatted_name in EXCEPTIONS | UNSTEADY:
        pytest.skip((EXCEPTIONS | UNSTEADY)[op.formatted_name])
    for forward in part(op_forwards(op, SAMPLES), which, QUICK_SAMPLES):
        watch(forward, autocast)
    assert not different


@by_part
@by_autocast
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("info", MODULES, ids=[info.name for info in MODULES])
def test_module(info: Any, training: bool, autocast: bool, which: str, different: dict[str, Any]) -> None:
    for forward in part(list(module_forwards(info, training)), which, QUICK_SAMPLES):
        watch(forward, autocast)
    assert not different
