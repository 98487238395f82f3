"""A custom Function whose backward writes into what it has saved: an error for other readers, as in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gradient_checks import Everything, Remake
from torch import Tensor

from backstash import Session
from backstash.capture import learned


class Writes(torch.autograd.Function):
    """Twice its input; its backward writes into that, if it is told to."""

    is_on = True

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        if Writes.is_on:
            x.mul_(3.0)
        return grads[0].clone()


READERS: dict[str, Callable[[Tensor], Tensor]] = {
    "shape": lambda x: F.avg_pool2d(x, 2),
    "sign": torch.abs,
    "value": torch.square,
    "none": lambda x: x.sum(),
}
MAKERS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda w: w + 1,
    "batch norm": lambda w: F.batch_norm(w, None, None, training=True),
    "dropout": lambda w: F.dropout(w, 0.5),
}
POLICIES: dict[str, Callable[[], Session]] = {
    "lossless": lambda: Session("lossless", min_nbytes=0),
    "checked": lambda: Session("lossless", min_nbytes=0, check=1),
    "everything": lambda: Session(Everything(), min_nbytes=0),
    "remake": lambda: Session(Remake(), min_nbytes=0),
    "offload": lambda: Session("offload", min_nbytes=0),
}


def outcomes(opened: AbstractContextManager[object], maker: str, reader: str, writes_first: bool) -> list[object]:
    """Of three backward passes through one graph: the gradient, or None where they raise the error of a version."""
    torch.manual_seed(0)
    w = torch.randn(2, 2, 8, 8, requires_grad=True)
    with opened:
        x = MAKERS[maker](w)
        results = []
        for is_reader in (True, False) if writes_first else (False, True):
            results.append((READERS[reader](x) if is_reader else Writes.apply(x)).sum())
        loss = torch.stack(results).sum()
        del x, results
    found: list[object] = []
    for _ in range(3):
        w.grad = None
        try:
            loss.backward(retain_graph=True)
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            found.append(None)
        else:
            assert w.grad is not None
            found.append(w.grad.tolist())
    return found


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("writes_first", [True, False], ids=["writes first", "reads first"])
def test_a_session_raises_where_plain_torch_does(policy: str, maker: str, reader: str, writes_first: bool) -> None:
    expected = outcomes(nullcontext(), maker, reader, writes_first)
    assert expected[1:] == [None, None], "the writer's own version has changed"
    assert (expected[0] is None) == (writes_first and reader != "none")
    assert outcomes(POLICIES[policy](), maker, reader, writes_first) == expected


def test_a_reader_of_the_shape_alone_raises_in_steps_that_repeat_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session("lossless_stored", min_nbytes=0)
    w = torch.randn(2, 2, 8, 8, requires_grad=True)
    steps = learned.EQUAL_PASSES + 4
    for number in range(steps):
        monkeypatch.setattr(Writes, "is_on", number == steps - 1)
        with session:
            x = F.dropout(w.relu(), 0.5)
            loss = F.avg_pool2d(x, 2).sum() + Writes.apply(x).sum()
            del x
        if number < steps - 1:
            loss.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
