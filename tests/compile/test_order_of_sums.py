"""Under Inductor a sum's order is that of its loop: where treating values may change it, the report says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiled_steps import differences, gradients
from torch import Tensor, nn

from backstash import compile_options
from backstash.compile.inductor.partitioner import FUSED_SUMS

pytestmark = pytest.mark.filterwarnings("ignore")

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]

LOSSES: dict[str, Loss] = {
    "smoothed and huber": lambda o, t, y: F.cross_entropy(o, t, label_smoothing=0.1) + F.huber_loss(F.softmax(o, 1), y),
    "smooth l1": lambda o, t, y: F.smooth_l1_loss(F.softmax(o, 1), y) + F.cross_entropy(o, t),
    "kl": lambda o, t, y: F.kl_div(F.log_softmax(o, 1), y, reduction="batchmean") + F.softmax(o, 1).square().mean(),
    "focal": lambda o, t, y: ((1 - F.softmax(o, 1)).square() * F.log_softmax(o, 1) * y).mean(),
    "layer norm": lambda o, t, y: (F.layer_norm(o, o.shape[1:]).tanh() * y).mean() + F.cross_entropy(o, t),
    "logsumexp": lambda o, t, y: torch.logsumexp(o, 1).square().mean() + (F.gelu(o) * y).mean(),
    "norms": lambda o, t, y: (o / o.norm(dim=1, keepdim=True) * y).exp().mean() + o.var(1).log1p().mean(),
}
CASES = [
    pytest.param(loss, shape, budget, id=f"{name}-{shape[0]}x{shape[1]}-{budget}", marks=marks)
    for name, loss in LOSSES.items()
    for shape, budget in (((512, 10), "70%"), ((128, 50), "40%"))
    for marks in [() if name == "smoothed and huber" and budget == "70%" else (pytest.mark.slow,)]
]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))


def step(
    loss: Loss, shape: tuple[int, int], options: Any, backend: str = "inductor"
) -> tuple[Any, list[Tensor | None]]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Linear(64, shape[1])
    x, target, other = torch.randn(shape[0], 64), torch.randint(0, shape[1], shape[:1]), torch.rand(shape)

    def forward(model: Any) -> Tensor:
        return loss(model(x) * 2, target, other)

    return model, gradients(model, torch.compile(forward, options=options, backend=backend))


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "shape", "budget"), CASES)
def test_other_bits_are_announced(loss: Loss, shape: tuple[int, int], budget: str) -> None:
    model, expected = step(loss, shape, {})
    options = compile_options("lossless", budget=budget, min_nbytes=0)
    _, got = step(loss, shape, options)
    for one, other in zip(expected, got, strict=True):
        assert one is not None and other is not None
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    if differences(model, expected, got):
        assert any(FUSED_SUMS in note for note in options.report().notes)


@pytest.mark.slow
def test_a_sum_of_what_was_stored_is_not_named() -> None:
    """A product's gradient is a call of a library, and its result is read from memory."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    options = compile_options("lossless", budget="90%", min_nbytes=0)
    model = nn.Linear(64, 32, bias=False)
    x = torch.randn(256, 64, requires_grad=True)
    torch.compile(lambda x: model(x.sin()), options=options)(x).backward(torch.ones(256, 32))
    assert not any(FUSED_SUMS in note for note in options.report().notes)
