"""Logits in chunks whose head or input is something else at the loss: as in plain PyTorch, the call counts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backstash.rewrites import chunked_loss, chunked_rows

WORDS = torch.arange(6)

Change = Callable[[nn.Module], object]
Outcome = list[Tensor | None]

CHANGES: dict[str, Change] = {
    "nothing": lambda model: None,
    "the head is frozen": lambda model: model.get_submodule("1").requires_grad_(False),
    "the head is thawed": lambda model: model.get_submodule("1").requires_grad_(True),
    "the weight is frozen": lambda model: model.get_parameter("1.weight").requires_grad_(False),
    "the bias is frozen": lambda model: model.get_parameter("1.bias").requires_grad_(False),
    "the bias is thawed": lambda model: model.get_parameter("1.bias").requires_grad_(True),
    "all is frozen": lambda model: model.requires_grad_(False),
    "all is thawed": lambda model: model.requires_grad_(True),
    "the weight has other memory": lambda model: setattr(model.get_parameter("1.weight"), "data", torch.ones(50, 8)),
}


def loss_of(logits: Tensor, reduction: str) -> Tensor:
    return F.cross_entropy(logits, WORDS, reduction=reduction).sum()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50))


def same(plain: Outcome, found: Outcome) -> bool:
    """Whether the same numbers are there, up to another order of sums."""
    return all(
        a is b if a is None or b is None else torch.allclose(a, b, rtol=1e-4, atol=1e-6)
        for a, b in zip(plain, found, strict=True)
    )


def outcome(before: Change, between: Change, after: Change, reduction: str, in_chunks: bool) -> Outcome:
    """Returns the loss and the gradients, with changes before the call, before the loss and before backward."""
    model = network()
    with chunked_loss(model, "1", evaluation=True) if in_chunks else nullcontext():
        before(model)
        logits = model(WORDS)
        between(model)
        asks = logits.requires_grad
        loss = loss_of(logits, reduction)
        after(model)
        assert loss.requires_grad == asks
        if asks:
            loss.backward()
    return [loss.detach(), *[parameter.grad for parameter in model.parameters()]]


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("between", list(CHANGES))
@pytest.mark.parametrize("before", [name for name in CHANGES if "thawed" not in name])
def test_the_call_decides(before: str, between: str, reduction: str) -> None:
    for after in ("nothing", "all is frozen", "all is thawed"):
        plain, found = (
            outcome(CHANGES[before], CHANGES[between], CHANGES[after], reduction, in_chunks)
            for in_chunks in (False, True)
        )
        assert same(plain, found), after


MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "as it is": nullcontext,
    "without gradients": torch.no_grad,
    "with gradients": torch.enable_grad,
    "inference": torch.inference_mode,
}


@pytest.mark.parametrize("at_loss", list(MODES))
@pytest.mark.parametrize("at_call", list(MODES))
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_modes_around_the_call_and_around_the_loss(at_call: str, at_loss: str, reduction: str) -> None:
    found: list[Outcome] = []
    for in_chunks in (False, True):
        model = network()
        with chunked_loss(model, "1", evaluation=True) if in_chunks else nullcontext():
            with MODES[at_call]():
                logits = model(WORDS)
            with MODES[at_loss]():
                loss = loss_of(logits, reduction)
        if loss.requires_grad:
            loss.backward()
        found.append([loss.detach().clone(), *[parameter.grad for parameter in model.parameters()]])
    assert same(*found)


@pytest.mark.parametrize("asks_at_call", [False, True])
@pytest.mark.parametrize("reads", ["loss", "rows"])
def test_the_input_of_a_head_may_ask_for_another_gradient_later(asks_at_call: bool, reads: str) -> None:
    found: list[Outcome] = []
    for in_chunks in (False, True):
        torch.manual_seed(0)
        head, hidden = nn.Linear(8, 50), torch.randn(6, 8, requires_grad=asks_at_call)
        with chunked_loss(head, "") if in_chunks else nullcontext():
            logits = head(hidden)
            hidden.requires_grad_(not asks_at_call)
            if reads == "rows" and in_chunks:
                log_probs = chunked_rows(logits, target=WORDS).log_probs
                assert log_probs is not None
                loss = -log_probs.mean()
            else:
                loss = loss_of(logits, "mean")
            hidden.requires_grad_(True)
        loss.backward()
        found.append([loss.detach(), hidden.grad, head.weight.grad, head.bias.grad])
    assert same(*found) and (found[1][1] is not None) == asks_at_call


def test_a_bias_that_is_added_is_taken_as_it_is_then() -> None:
    found: list[Outcome] = []
    for in_chunks in (False, True):
        torch.manual_seed(0)
        head, bias = nn.Linear(8, 50, bias=False), nn.Parameter(torch.randn(50))
        with chunked_loss(head, "") if in_chunks else nullcontext():
            logits = head(torch.randn(6, 8)) + bias
            bias.requires_grad_(False)
            loss = loss_of(logits, "mean")
            bias.requires_grad_(True)
        loss.backward()
        found.append([loss.detach(), head.weight.grad, bias.grad])
    assert same(*found) and found[1][2] is not None
