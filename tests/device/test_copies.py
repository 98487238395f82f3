"""Copies of norms' parameters on an accelerator: one operation for all of them, and never an old copy."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import backstash as bs
from backstash.torch_internals import no_torch_function
from tests.device import fake
from tests.device.networks import same_bits

NORMS = 6
STEPS = 6


class Norms(nn.Module):
    """Convolutions and batch norms, of which one is read twice in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(NORMS + 1))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(NORMS))
        for norm in self.norms:
            nn.init.uniform_(norm.bias, -1.0, 1.0)
        self.between: Callable[[], Any] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        for number, norm in enumerate([*self.norms, self.norms[1]]):
            if number == NORMS:
                self.between()
            x = F.relu(norm(self.convolutions[number](x)))
        return x


def _set(parameter: Tensor) -> None:
    other = parameter.detach() * 0.5
    with torch.no_grad():
        parameter.set_(other.untyped_storage(), 0, parameter.shape, parameter.stride())  # type: ignore[call-overload]


def _unseen(parameter: Tensor) -> None:
    """Only the version tells."""
    with torch.no_grad(), no_torch_function():
        parameter.mul_(0.5)


CHANGES: dict[str, Callable[[nn.Parameter], Any]] = {
    "nothing": lambda p: None,
    "in place": torch.no_grad()(lambda p: p.mul_(0.5)),
    "data": lambda p: p.data.mul_(0.5),
    "assigned data": lambda p: setattr(p, "data", p.data * 0.5),
    "foreach": torch.no_grad()(lambda p: torch._foreach_mul_([p], 0.5)),
    "set_": _set,
    "unseen": _unseen,
}
WHEN = ("before the step", "between two readers", "after the forward pass", "in backward")


def _gradients(change: str, when: str, session: Callable[[nn.Module], bs.Session] | None) -> list[Tensor] | str:
    """Trains some steps and returns all gradients. Later steps change the norms' biases, which no backward reads."""
    torch.manual_seed(0)
    model = Norms().to("fake")
    opened = None if session is None else session(model)
    parameters, found = [norm.bias for norm in model.norms], list[Tensor]()
    is_changing = False

    def change_all(chosen: list[nn.Parameter] = parameters) -> None:
        for parameter in chosen if is_changing else ():
            CHANGES[change](parameter)

    if when == "between two readers":
        model.between = change_all
    if when == "in backward":
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(lambda p: change_all([p]))  # type: ignore[list-item]
    for step in range(STEPS):
        is_changing = step >= STEPS // 2
        x = torch.randn(2, 8, 8, 8).to("fake")
        if when == "before the step":
            change_all()
        model.zero_grad()
        try:
            with opened or nullcontext():
                loss = model(x).square().sum()
            if when == "after the forward pass":
                change_all()
            loss.backward()
        except RuntimeError as error:
            return str(error).split(":")[0]
        found += [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]
    return found


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("min_nbytes", [0, 64])
def test_a_changed_parameter_is_seen(min_nbytes: int, change: str, when: str) -> None:
    expected = _gradients(change, when, None)
    got = _gradients(change, when, lambda model: bs.Session("lossless", model=model, min_nbytes=min_nbytes))
    if isinstance(expected, str) or isinstance(got, str):
        assert got == expected
    else:
        assert same_bits(got, expected)


@pytest.mark.parametrize("is_renewed", [False, True])
def test_parameters_are_copied_by_one_operation(is_renewed: bool) -> None:
    """Also where the program makes a Session for each step: what is copied is remembered with the model."""
    model = Norms().to("fake")

    def make() -> bs.Session:
        return bs.Session("lossless", model=model, min_nbytes=64)

    session = make()
    for _ in range(4):
        x = torch.randn(2, 8, 8, 8).to("fake")
        session = make() if is_renewed else session
        with fake.counting(("operations",)) as counts, session:
            loss = model(x).square().sum()
        loss.backward()
    forward = [line for line in counts.lines("operations") if "copy_" in line or "aten::cat" in line]
    samples = [line for line in forward if "sample.py" in line]
    assert sum(int(line.split()[0]) for line in set(forward) - set(samples)) == 1, forward
