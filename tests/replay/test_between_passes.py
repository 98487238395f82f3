"""Between settled passes, calls in which nothing is saved take the interpreter's way.

That what they change is seen is checked in test_touched_later.py.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backstash import Session
from backstash.capture import learned
from backstash.capture.forward import Forward

STEPS = learned.EQUAL_PASSES + 4
MIN_NBYTES = 1024

Update = Callable[[nn.Module, torch.optim.Optimizer], object]


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)]
    return nn.Sequential(*layers, nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 64, 10))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def _clip_and_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    _step(model, optimizer)


def _average_weights(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    _step(model, optimizer)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.lerp_(torch.zeros_like(parameter), 0.125)


def _evaluate(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    _step(model, optimizer)
    with torch.no_grad():
        x = torch.ones(2, 3, 8, 8)
        for layer in model:  # the model itself would be another pass
            x = layer(x)


UPDATES = [_step, _clip_and_step, _average_weights, _evaluate]
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.001),
    "lists": lambda parameters: torch.optim.AdamW(parameters, lr=0.001, foreach=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.001, fused=True),
}


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, update: Update, session: Any) -> list[Tensor]:
    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    losses = []
    with session:
        for _ in range(STEPS):
            loss = F.cross_entropy(model(x), torch.arange(4))
            loss.backward()
            losses.append(loss.detach())
            update(model, optimizer)
    return [*losses, *model.state_dict().values()]


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_update_concerns_nobody(optimizer: str, update: Update, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = [0]
    before_function = Forward.before_function

    def listen(forward: Forward) -> None:
        heard[0] += 1
        before_function(forward)

    monkeypatch.setattr(Forward, "before_function", listen)
    of_updates = []

    def counted(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        heard[0] = 0
        update(model, optimizer)
        of_updates.append(heard[0])

    plain, other = _model(), _model()
    wanted = _train(plain, OPTIMIZERS[optimizer](plain.parameters()), update, nullcontext())
    session = Session("lossless", model=other, min_nbytes=MIN_NBYTES, stop_if_useless=False)
    found = _train(other, OPTIMIZERS[optimizer](other.parameters()), counted, session)
    assert all(x.equal(y) for x, y in zip(wanted, found, strict=True))
    # What is left opens and closes ranges of the profiler, switches grad mode, or writes without a new version.
    assert of_updates[0] > 90
    assert of_updates[-1] < 10


@pytest.mark.parametrize("steps", [1, STEPS, 3 * STEPS])
def test_an_evaluation_with_grad_mode_leaves_accounts(steps: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU())
    x, session = torch.randn(64, 64), Session(model=model, min_nbytes=1024, stop_if_useless=False)
    with session:
        for _ in range(steps):
            model(x).square().mean().backward()
        model(x)  # a pass that a script knows, but for its loss
    assert "nothing was saved" not in str(session.report()) and "relu" in session.report().table().lower()
