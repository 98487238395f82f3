"""Repeated calls run the operators that ran first, though autograd follows nothing then (Note: [as called])."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
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
    SAMPLES,
    Forward,
    module_forwards,
    op_forwards,
    outcome,
    spread,
)
from torch import Tensor, nn
from torch._C._profiler import _ExperimentalConfig
from torch.autograd import ProfilerConfig, ProfilerState
from torch.overrides import handle_torch_function, has_torch_function

import backstash as bs
from backstash import Session, repeatable
from backstash.capture import observer
from backstash.proofs import proofs
from backstash.remake import repeating
from backstash.remake.calls import Call

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


Different = dict[str, tuple[list[str], list[str]]]
"""The operators that a call has run first and again, by its function's name and the state in which it is repeated."""


@pytest.fixture
def different(monkeypatch: pytest.MonkeyPatch) -> Different:
    """The calls under a Session that run other operators when they are repeated."""
    found: Different = {}

    def look(call: Call, tensors: list[Tensor]) -> None:
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

            take = [lambda number, x: None] if call.group else []
            with context():
                repeating.repeat(call, noted, detached, *take)
            if again != first:
                found[f"{call.name}, {state}"] = first, again

    def looking(proves: Callable[..., Any]) -> Callable[..., Any]:
        def proves_and_looks(call: Call, tensors: list[Tensor], *others: Any) -> Any:
            answer = proves(call, tensors, *others)
            if answer and not call.in_place:
                look(call, tensors)
            return answer

        return proves_and_looks

    for name in ("is_repeated", "repeats_inside"):
        monkeypatch.setattr(repeating, name, looking(getattr(repeating, name)))
    return found


def autocast(is_on: bool) -> AbstractContextManager[Any]:
    """Without the cache of weights, because a copy that is made once is an operator that runs once."""
    return torch.autocast("cpu", torch.bfloat16, cache_enabled=False) if is_on else nullcontext()


def watch(forward: Forward, is_cast: bool) -> None:
    """Runs a forward pass whose values can all be made again."""

    def take(x: Tensor) -> Tensor:
        return x.detach().requires_grad_(x.requires_grad)

    with Session(Remake(), min_nbytes=0), autocast(is_cast):
        outcome(lambda: [forward(take)])


QUICK = (
    "matmul", "__rmatmul__", "einsum", "tensordot", "bmm", "addmm", "nn_functional_linear", "nn_functional_bilinear",
    "nn_functional_scaled", "nn_functional_multi_head", "nn_functional_max_pool1d", "nn_functional_conv2d",
    "nn_functional_embedding", "nn_functional_rms_norm", "nn_functional_layer_norm", "nn_functional_batch_norm",
    "nn_functional_cosine", "quantile", "softmax", "cat", "linalg_multi_dot",
)  # fmt: skip
QUICK_MODULES = ("nn.Linear", "nn.LSTM", "nn.GRU", "nn.RNN", "nn.MultiheadAttention", "nn.TransformerEncoderLayer")
QUICK_SAMPLES = 4


def cases(names: list[str], quick: tuple[str, ...]) -> list[Any]:
    found = []
    for number, name in enumerate(names):
        for is_cast in (False, True):
            label = f"{name}-autocast" if is_cast else name
            if name.startswith(quick):
                found.append(pytest.param(number, is_cast, QUICK_SAMPLES, id=f"{label}-quick"))
            found.append(pytest.param(number, is_cast, SAMPLES, id=label, marks=pytest.mark.slow))
    return found


@pytest.mark.cases(10)
@pytest.mark.parametrize(("number", "is_cast", "samples"), cases([op.formatted_name for op in OPS], QUICK))
def test_op(number: int, is_cast: bool, samples: int, different: Different) -> None:
    op = OPS[number]
    if op.formatted_name in EXCEPTIONS | UNSTEADY:
        pytest.skip((EXCEPTIONS | UNSTEADY)[op.formatted_name])
    for forward in op_forwards(op, samples):
        watch(forward, is_cast)
    assert not different


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(("number", "is_cast", "samples"), cases([info.name for info in MODULES], QUICK_MODULES))
def test_module(number: int, is_cast: bool, samples: int, training: bool, different: Different) -> None:
    for forward in spread(list(module_forwards(MODULES[number], training)), samples):
        watch(forward, is_cast)
    assert not different


# -- products of every shape, with every choice of what autograd follows -----------------------------------------------

SHAPES = ((5,), (5, 5), (1, 5, 5), (3, 5, 5), (5, 5, 1), (2, 3, 5, 5), (2, 1, 5, 5))
PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matmul": torch.matmul,
    "transposed": lambda a, b: a.mT @ b.mT if min(a.dim(), b.dim()) > 1 else a @ b,
    "einsum": lambda a, b: torch.einsum("...ij,...jk->...ik", torch.atleast_2d(a), torch.atleast_2d(b)),
    "tensordot": lambda a, b: torch.tensordot(a, b, dims=([-1], [0])) if a.shape[-1] == b.shape[0] else a @ b,
    "linear": lambda a, b: F.linear(a.transpose(0, -1) if a.dim() > 1 else a, torch.atleast_2d(b.squeeze())),
}


@pytest.mark.parametrize("is_cast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("followed", [(True, False), (False, True), (True, True)], ids=["first", "second", "both"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name: str, followed: tuple[bool, bool], is_cast: bool, different: Different) -> None:
    for first in SHAPES:
        for second in SHAPES:
            operands = [torch.randn(first), torch.randn(second)]
            for operand, is_followed in zip(operands, followed, strict=True):
                operand.requires_grad_(is_followed)

            def forward(take: Callable[[Tensor], Tensor], operands: list[Tensor] = operands) -> Any:
                return PRODUCTS[name](*map(take, operands)).square()

            watch(forward, is_cast)
    assert not different


@pytest.mark.parametrize("followed", [(True, False), (False, True), (True, True)], ids=["first", "second", "both"])
@pytest.mark.parametrize("shapes", [((2, 3, 128), (1, 128, 256)), ((17, 2, 31), (31,)), ((5, 5, 5), (1, 5, 5))])
def test_products_that_round_in_another_way_if_they_are_folded(shapes: Any, followed: tuple[bool, bool]) -> None:
    """The first two on AMD, the last one on Intel."""
    operands = [torch.randn(shape) for shape in shapes]
    for operand, is_followed in zip(operands, followed, strict=True):
        operand.requires_grad_(is_followed)

    def gradients(context: AbstractContextManager[Any]) -> list[Tensor]:
        found = []
        for _ in range(3):
            with context:
                first, second = (operand.sin() for operand in operands)
                loss = (first.transpose(0, 1) @ second).sin().square().sum() + (first @ second).cos().square().sum()
            found += torch.autograd.grad(loss, [operand for operand in operands if operand.requires_grad])
        return found

    assert not differences(gradients(nullcontext()), gradients(Session(Remake(), min_nbytes=0)))


@pytest.mark.parametrize("learned", ["q", "k", "v", "mask", "qkv", "qkv and mask"])
def test_attention(learned: str, different: Different) -> None:
    """Torch's fused kernels take no mask that autograd follows."""
    given = {name: torch.randn(2, 3, 8, 16) for name in "qkv"} | {"mask": torch.randn(8, 8)}
    for name in given:
        given[name].requires_grad_(name in learned)

    def forward(take: Callable[[Tensor], Tensor]) -> Any:
        q, k, v, mask = map(take, given.values())
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).square()

    for is_cast in (False, True):
        watch(forward, is_cast)
    assert not different


# -- a function whose bits tell in which state it ran ----------------------------------------------------------------


def tells(x: Tensor, weight: Tensor) -> Tensor:
    """A product of which everything that decides about a kernel changes the result."""
    if has_torch_function((x, weight)):
        return handle_torch_function(tells, (x, weight), x, weight)  # type: ignore[no-any-return]
    facts = (
        x.requires_grad,
        weight.requires_grad,
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        weight.t().requires_grad,  # not below autograd
        x.is_inference(),
    )
    return (x @ weight) * (1.0 + sum(2.0**-number for number, fact in enumerate(facts, 3) if fact))


class Telling(nn.Module):
    """A chain, of which some layers are frozen and some run under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(16, 16) / 4 for _ in range(6))
        for number in (1, 2):
            self.weights[number].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for number, weight in enumerate(self.weights):
            with torch.autocast("cpu", torch.bfloat16) if number in (2, 5) else nullcontext():
                x = torch.tanh(tells(x, weight).float())  # a cheap function, and one that is not
            x = x * x.sin()
        return x


@pytest.fixture
def _tells_is_repeatable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    functions = repeatable._overridable() | {tells}
    monkeypatch.setattr(repeatable, "_overridable", lambda: functions)
    monkeypatch.setattr(observer, "_kinds", {})
    repeatable.is_repeatable.cache_clear()
    yield
    repeatable.is_repeatable.cache_clear()


def trained(
    context: AbstractContextManager[Any] | None, around: Callable[[], AbstractContextManager[Any]], steps: int = 3
) -> list[Tensor | None]:
    """The gradients of some steps, by the parameters and by the gradients of the first one's."""
    torch.manual_seed(0)
    model, found = Telling(), list[Tensor | None]()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for number in range(steps):
        torch.manual_seed(number)
        with context or nullcontext():
            loss = model(torch.randn(256, 16)).square().sum()
            if around is torch.enable_grad:
                loss = loss + sum(g.square().sum() for g in torch.autograd.grad(loss, parameters, create_graph=True))
        model.zero_grad()
        with around():
            loss.backward()
        found += [None if parameter.grad is None else parameter.grad.clone() for parameter in parameters]
    return found


AROUND: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "backward": nullcontext,
    "inference mode": torch.inference_mode,
    "autocast": BACKWARD["backward under autocast"],
    "second derivatives": torch.enable_grad,
    "no hooks": lambda: torch.autograd.graph.disable_saved_tensors_hooks("there are no hooks in this pass"),
}


@pytest.mark.usefixtures("_tells_is_repeatable")
@pytest.mark.parametrize("around", AROUND)
def test_a_function_that_tells_its_state(around: str) -> None:
    session = Session(Remake(), min_nbytes=0)
    assert not differences(trained(None, AROUND[around]), trained(session, AROUND[around]))
    remade = [row.reason for row in session.report().rows if row.codec == "recompute"]
    assert any("tells" in reason for reason in remade), remade


@pytest.mark.slow
@pytest.mark.usefixtures("_tells_is_repeatable")
def test_a_function_that_tells_its_state_within_a_budget(tmp_path: Path) -> None:
    """Also where its proof comes from a file."""
    expected = trained(None, nullcontext, steps=8)
    for _ in range(2):
        proofs.forget()
        budgeted = bs.Budgeted("75%", min_nbytes=0, folder=tmp_path, allow="recompute")
        assert not differences(expected, trained(budgeted, nullcontext, steps=8))
        assert any(row.codec == "recompute" for row in budgeted.report().rows)
