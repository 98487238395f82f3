"""Norms' backward kernels: ATen's bits in every layout, for every number, and whose memory they write to."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gradient_checks import differences
from torch import Tensor, nn

from backstash import Session
from backstash.ops import cpu
from backstash.proofs import Proofs
from backstash.redeem import norms, table

pytestmark = pytest.mark.skipif(not cpu.available(), reason="the native kernels are not built")

Norm = Callable[[Tensor, Tensor | None, Tensor | None], Tensor]

NORMS: dict[str, Norm] = {
    "batch_norm": lambda x, weight, bias: F.batch_norm(x, None, None, weight, bias, training=True),
    "instance_norm": lambda x, weight, bias: F.instance_norm(x, None, None, weight, bias),
    "layer_norm": lambda x, weight, bias: F.layer_norm(
        x.contiguous().view(2, -1, x.shape[1]) if x.shape[0] % 2 == 0 else x.contiguous().view(-1, x.shape[1]),
        x.shape[1:2],
        weight,
        bias,
    ),
    "group_norm": lambda x, weight, bias: F.group_norm(x, 2 - x.shape[1] % 2, weight, bias),
}
LAYOUTS = {"contiguous": torch.contiguous_format, "channels last": torch.channels_last}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of small tensors too."""
    monkeypatch.setattr(norms, "_LARGE", 0)
    monkeypatch.setattr(norms, "_CHUNK", 256)
    monkeypatch.setattr(table, "LARGE", 0)
    monkeypatch.setattr(table, "CHEAP_CLAIM", 0)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """Which kernel made gradients, and whether the input's is in the memory of the output's."""
    seen: list[tuple[str, bool]] = []
    for name in ("batch_norm", "layer_norm", "group_norm"):
        original = getattr(norms, name)

        def watched(aten: Any, over: bool, grad: Tensor, *rest: Any, name: str = name, original: Any = original) -> Any:
            made = original(aten, over, grad, *rest)
            if made is not None:
                seen.append((name, made[0].data_ptr() == grad.data_ptr()))
            return made

        monkeypatch.setattr(norms, name, watched)
    return seen


def step(
    name: str, shape: tuple[int, ...], layout: str, session: Any, spoil: Callable[[Tensor], Any], affine: bool = True
) -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    x = (torch.randn(*shape, generator=random) * 3 + 1).requires_grad_()
    weight, bias = (torch.rand(shape[1], generator=random).requires_grad_() for _ in range(2))
    factor = torch.randn(*shape, generator=random)
    spoil(factor)
    given = (weight, bias) if affine else (None, None)
    memory_format = LAYOUTS[layout] if len(shape) == 4 else torch.contiguous_format
    with session:
        y = NORMS[name]((x * 2.0).contiguous(memory_format=memory_format), *given)
        (y * factor.contiguous(memory_format=memory_format).reshape(y.shape)).sum().backward()
    return [one.grad for one in (x, *given) if one is not None and one.grad is not None]


SHAPES = [(5, 8, 3), (3, 7, 8), (4, 6, 9, 5), (2, 16, 16, 16), (3, 40, 7, 7), (1, 4, 1, 2), (33, 5, 1, 1)]
SHAPES += [(9, 4, 130), (4, 24, 5, 3), (33, 16, 1, 1), (7, 2048, 1, 1), (4, 1, 9, 5), (5, 8, 7, 1)]


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NORMS)
def test_bits(name: str, shape: tuple[int, ...], layout: str, affine: bool) -> None:
    def nothing(factor: Tensor) -> None:
        pass

    if name == "instance_norm" and math.prod(shape[2:]) == 1:
        pytest.skip("torch refuses it")
    expected = step(name, shape, layout, torch.enable_grad(), nothing, affine)
    assert not differences(expected, step(name, shape, layout, Session(min_nbytes=0), nothing, affine))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 3e38, 1e-45])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NORMS)
def test_bits_of_extremes(name: str, layout: str, value: float) -> None:
    def spoil(factor: Tensor) -> None:
        factor[0, 1, 2, 3] = factor[1, 3, 0, 0] = factor[1, 3, 1, 1] = value

    shape = (4, 6, 9, 5)
    expected = step(name, shape, layout, torch.enable_grad(), spoil)
    assert not differences(expected, step(name, shape, layout, Session(min_nbytes=0), spoil))


IN_PLACE = [("batch_norm", "contiguous"), ("batch_norm", "channels last")]
IN_PLACE += [("layer_norm", "contiguous"), ("group_norm", "contiguous")]


@pytest.mark.parametrize(("name", "layout"), IN_PLACE)
def test_written_over_the_gradient(name: str, layout: str, written: list[tuple[str, bool]]) -> None:
    expected = step(name, (4, 8, 16, 16), layout, torch.enable_grad(), Tensor.abs)
    written.clear()  # of a Session that waits for its graphs elsewhere
    assert not differences(expected, step(name, (4, 8, 16, 16), layout, Session(min_nbytes=0), Tensor.abs))
    assert written == [(name, True)]


def test_a_gradient_that_goes_two_ways_is_left(written: list[tuple[str, bool]]) -> None:
    def run(session: Any) -> list[Tensor]:
        x = torch.randn(4, 6, 8, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with session:
            other = x.tanh()
            y = F.batch_norm(x * 2.0, None, None, training=True) + other
            (y * y.detach()).sum().backward()
        return [x.grad]  # type: ignore[list-item]

    expected = run(torch.enable_grad())
    written.clear()
    assert not differences(expected, run(Session(min_nbytes=0)))
    assert written == [("batch_norm", False)]


@pytest.mark.parametrize("wanted", ["evaluation", "float64", "bfloat16", "frozen", "no input", "penalty"])
def test_other_ways(wanted: str) -> None:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.GroupNorm(2, 8), nn.LayerNorm([8, 6, 6])
    )
    dtype = {"float64": torch.float64, "bfloat16": torch.bfloat16}.get(wanted, torch.float32)
    model = model.to(dtype).train(wanted != "evaluation")
    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    x.requires_grad_(wanted != "no input")
    if wanted == "frozen":
        for module in model[1:]:
            module.requires_grad_(False)

    def run(session: Any) -> list[Tensor]:
        model.zero_grad()
        x.grad = None
        with session:
            loss = model(x).pow(3).sum()
            if wanted == "penalty":
                (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
                loss = gradient.square().sum()
            loss.backward()
        return [one.grad.clone() for one in (*model.parameters(), x) if one.grad is not None]

    assert not differences(run(torch.enable_grad()), run(Session(min_nbytes=0)))


def test_unproven_kernels_are_not_used(monkeypatch: pytest.MonkeyPatch, written: list[tuple[str, bool]]) -> None:
    monkeypatch.setattr(norms, "proofs", unproven := Proofs())
    monkeypatch.setattr(norms, "_are_equal", lambda expected, got: False)
    expected = step("batch_norm", (4, 6, 8, 8), "contiguous", torch.enable_grad(), Tensor.abs)
    assert not differences(expected, step("batch_norm", (4, 6, 8, 8), "contiguous", Session(min_nbytes=0), Tensor.abs))
    assert not written
    assert unproven.counts.proven > 0
