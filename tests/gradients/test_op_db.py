"""Gradients of every differentiable op in torch's own database, and of every module, are bit-equal under a Session."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from gradient_checks import Everything, differences, encoded_and_kept
from torch import Tensor
from torch.nn.modules.lazy import LazyModuleMixin
from torch.testing._internal import common_utils
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.utils._pytree import tree_flatten, tree_map

from backstash import Policy, Session, policies

# The database holds deprecated and experimental ops too.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

SAMPLES = 16
"""How many samples of each op are tested. Most ops have fewer; others have far more (max_pool2d has 1,440)."""

SECOND_ORDER_SAMPLES = 3
"""Likewise, for gradients of gradients."""

QUICK_SAMPLES, QUICK_SECOND_ORDER_SAMPLES = 4, 1
"""How many of these samples ``make test`` runs; ``make test-all`` runs all."""

EXCEPTIONS: dict[str, str] = {}
"""Ops that are left out, with the reason."""

POLICIES: dict[str, Callable[[], Policy]] = {"lossless": policies.lossless, "everything": Everything}


@pytest.fixture(autouse=True, scope="module")
def _samples_do_not_search_the_stack() -> Iterator[None]:
    """Spares the database a search for torch's own test class in the call stack, which took more time than the ops."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common_utils, "extract_test_fn", lambda: None)
        yield


@dataclass
class Tally:
    """How many saved tensors were encoded and kept, under each policy, and how many samples had a gradient."""

    samples: Counter[str] = field(default_factory=Counter)
    encoded: Counter[str] = field(default_factory=Counter)
    kept: Counter[str] = field(default_factory=Counter)

    def add(self, policy: str, session: Session) -> None:
        encoded, kept = encoded_and_kept([session.report()])
        self.encoded[policy] += encoded
        self.kept[policy] += kept


Forward = Callable[[Callable[[Tensor], Tensor]], Any]
"""A forward pass. It is given what to call on each tensor that it takes in, and returns its outputs."""


def gradients(forward: Forward, session: Session | None, drop: bool, times: int = 1) -> list[Tensor | None]:
    """Gradients with respect to all inputs that require one.

    Args:
        forward: the forward pass.
        session: where it runs; None for plain torch.
        drop: inputs and outputs are copies that only autograd holds when backward begins, so that they are encoded.
        times: how often backward runs.
    """
    leaves: list[Tensor] = []
    with session or nullcontext():
        outputs = _differentiable(forward(_taking(leaves, drop)), drop)
    if not outputs or not leaves:
        return []
    cotangents = _cotangents(outputs)
    found: list[Tensor | None] = []
    for time in range(times):
        retain = time + 1 < times
        found += torch.autograd.grad(outputs, leaves, cotangents, retain_graph=retain, allow_unused=True)
    return found


def gradients_of_gradients(forward: Forward, session: Session | None) -> list[Tensor | None]:
    """Gradients, and their gradients with respect to inputs and cotangents."""
    leaves: list[Tensor] = []
    with session or nullcontext():
        outputs = _differentiable(forward(_taking(leaves, drop=True)), drop=True)
        if not outputs or not leaves:
            return []
        cotangents = [cotangent.requires_grad_() for cotangent in _cotangents(outputs)]
        first = torch.autograd.grad(outputs, leaves, cotangents, create_graph=True, allow_unused=True)
        found = [None if gradient is None else gradient.detach().clone() for gradient in first]
        first_differentiable = _differentiable(first, drop=True)
        del outputs, first
    if not first_differentiable:
        return found
    second = torch.autograd.grad(
        first_differentiable, [*leaves, *cotangents], _cotangents(first_differentiable), allow_unused=True
    )
    return [*found, *second]


def _taking(leaves: list[Tensor], drop: bool) -> Callable[[Tensor], Tensor]:
    def take(x: Tensor) -> Tensor:
        leaf = x.detach()
        if x.requires_grad:
            leaves.append(leaf.requires_grad_())
        return leaf.clone() if drop else leaf

    return take


def _differentiable(outputs: Any, drop: bool) -> list[Tensor]:
    tensors = [x for x in tree_flatten(outputs)[0] if isinstance(x, Tensor) and x.requires_grad]
    return [x.clone() if drop and x.layout is torch.strided else x for x in tensors]


def _cotangents(outputs: list[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(x.shape, dtype=x.dtype, generator=generator).to(x.device)
        if x.layout is torch.strided
        else x.detach().clone()
        for x in outputs
    ]


def outcome(compute: Callable[[], list[Tensor | None]]) -> tuple[list[Tensor | None], str]:
    """Returns the gradients, and the text of the error if torch raises one: some samples have no derivative."""
    try:
        return compute(), ""
    except RuntimeError as error:
        return [], f"{type(error).__name__}: {error}"


def check_first_order(name: str, forwards: Iterable[Forward], tally: Tally | None = None) -> None:
    """Compares gradients, with inputs that the program holds and with inputs that only autograd holds."""
    tally = tally or Tally()
    for number, forward in enumerate(forwards):
        for drop in (False, True):
            expected, error = outcome(lambda: gradients(forward, None, drop))  # noqa: B023
            for policy, make in POLICIES.items():
                where = f"{name}, sample {number}, {policy}, inputs {'dropped' if drop else 'held'}"
                session = Session(make(), min_nbytes=0)
                got, got_error = outcome(lambda: gradients(forward, session, drop, times=2))  # noqa: B023
                assert got_error == error, where
                assert not differences([*expected, *expected], got), where
                if drop:
                    tally.add(policy, session)
        tally.samples["first order"] += bool(expected)


def check_second_order(name: str, forwards: Iterable[Forward], tally: Tally | None = None) -> None:
    tally = tally or Tally()
    for number, forward in enumerate(forwards):
        expected, error = outcome(lambda: gradients_of_gradients(forward, None))  # noqa: B023
        for policy, make in POLICIES.items():
            session = Session(make(), min_nbytes=0)
            got, got_error = outcome(lambda: gradients_of_gradients(forward, session))  # noqa: B023
            assert got_error == error, f"{name}, sample {number}, {policy}"
            assert not differences(expected, got), f"{name}, sample {number}, {policy}"
            tally.add(f"{policy}, second order", session)
        tally.samples["second order"] += bool(expected)


def spread(items: list[Any], count: int) -> list[Any]:
    """Returns at most ``count`` items, evenly spread from the first to the last; only the last if ``count`` is 1."""
    if len(items) <= count:
        return items
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)] if count > 1 else items[-1:]


def part(items: list[Any], which: str, quick: int) -> list[Any]:
    """Returns the ``quick`` items for ``make test``, or all others; skips the test if there are none."""
    chosen = spread(list(range(len(items))), quick)
    found = [item for i, item in enumerate(items) if (i in chosen) == (which == "quick")]
    if not found:
        pytest.skip(f"none of {len(items)} samples is left")
    return found


by_part = pytest.mark.parametrize("which", ["quick", pytest.param("rest", marks=pytest.mark.slow)])


# -- ops -------------------------------------------------------------------------------------------------------------

OPS = [op for op in op_db if op.supports_autograd and torch.float32 in op.supported_backward_dtypes("cpu")]
by_op = pytest.mark.parametrize("op", OPS, ids=[op.formatted_name for op in OPS])


def op_forwards(op: Any, count: int, device: str = "cpu") -> list[Forward]:
    return list(_op_forwards(op, count, device))


def _op_forwards(op: Any, count: int, device: str) -> Iterator[Forward]:
    for sample in spread(list(op.sample_inputs(device, torch.float32, requires_grad=True)), count):

        def forward(take: Callable[[Tensor], Tensor], sample: Any = sample) -> Any:
            torch.manual_seed(2)
            inputs = (sample.input, sample.args, sample.kwargs)
            x, args, kwargs = tree_map(lambda item: take(item) if isinstance(item, Tensor) else item, inputs)
            return sample.output_process_fn_grad(op(x, *args, **kwargs))

        yield forward


@pytest.mark.cases(40)
@by_part
@by_op
def test_op(op: Any, which: str) -> None:
    if op.formatted_name in EXCEPTIONS:
        pytest.skip(EXCEPTIONS[op.formatted_name])
    check_first_order(op.formatted_name, part(op_forwards(op, SAMPLES), which, QUICK_SAMPLES))


@pytest.mark.cases(20)
@by_part
@by_op
def test_op_second_order(op: Any, which: str) -> None:
    if not op.supports_gradgrad:
        pytest.skip("torch has no second derivative of it")
    if op.formatted_name in EXCEPTIONS:
        pytest.skip(EXCEPTIONS[op.formatted_name])
    forwards = op_forwards(op, SECOND_ORDER_SAMPLES)
    check_second_order(op.formatted_name, part(forwards, which, QUICK_SECOND_ORDER_SAMPLES))


# -- modules ---------------------------------------------------------------------------------------------------------

MODULES = [info for info in module_db if torch.float32 in info.dtypes]


def module_forwards(info: Any, training: bool, device: str = "cpu") -> Iterator[Forward]:
    inputs = info.module_inputs_func(info, device, torch.float32, True, training)
    for sample in inputs:
        if sample.forward_input is None:
            continue

        def forward(take: Callable[[Tensor], Tensor], sample: Any = sample) -> Any:
            torch.manual_seed(2)
            with torch.device(device):
                module = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs)
            module.train(training)
            if isinstance(module, LazyModuleMixin):
                with torch.no_grad():
                    module(*sample.forward_input.args, **sample.forward_input.kwargs)
            given = (sample.forward_input.args, sample.forward_input.kwargs)
            args, kwargs = tree_map(lambda item: take(item) if isinstance(item, Tensor) else item, given)
            parameters = {name: take(parameter) for name, parameter in module.named_parameters()}
            return torch.func.functional_call(module, parameters, args, kwargs)

        yield forward


@pytest.mark.cases(20)
@by_part
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("info", MODULES, ids=[info.name for info in MODULES])
def test_module(info: Any, training: bool, which: str) -> None:
    check_first_order(info.name, part(list(module_forwards(info, training)), which, QUICK_SAMPLES))


# -- the tests above compare values that were really stored in another form ------------------------------------------


def test_exceptions_name_ops_of_the_database() -> None:
    assert EXCEPTIONS.keys() <= {op.formatted_name for op in OPS}


@pytest.mark.slow
def test_most_samples_are_really_encoded() -> None:
    """Counts the saved tensors of one sample of every eighth op."""
    tally = Tally()
    for op in OPS[::8]:
        forwards = op_forwards(op, 1)
        check_first_order(op.formatted_name, forwards, tally)
        if op.supports_gradgrad:
            check_second_order(op.formatted_name, forwards, tally)
    assert tally.samples["first order"] > 60
    assert tally.samples["second order"] > 50
    encoded = {policy: count / (count + tally.kept[policy]) for policy, count in tally.encoded.items()}
    assert encoded["everything"] > 0.95, encoded
    assert encoded["everything, second order"] > 0.75, encoded
    assert encoded["lossless"] > 0.2, encoded
