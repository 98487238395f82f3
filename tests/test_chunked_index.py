"""Logits in chunks that a program indexes before its loss: the loss and the gradients of plain PyTorch."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backstash.rewrites import chunked_loss

CLASSES = 11

SHAPES = ((6,), (3, 4), (2, 3, 4))
"""Those of the words. Logits have one dimension more."""


class Words(nn.Module):
    """A head whose logits the program indexes."""

    def __init__(self, has_bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(CLASSES, 5)
        self.lm_head = nn.Linear(5, CLASSES, bias=has_bias)

    def forward(self, words: Tensor) -> Tensor:
        return self.lm_head(self.embedding(words))  # type: ignore[no-any-return]


def words(shape: tuple[int, ...]) -> Tensor:
    return torch.randint(0, CLASSES, shape, generator=torch.Generator().manual_seed(1))


def outcome(model: Words, ids: Tensor, take: Callable[[Tensor], Tensor]) -> list[Tensor | None] | type[Exception]:
    """Returns the loss of the logits that are taken, and the gradients; or the kind of error."""
    model.zero_grad()
    try:
        taken = take(model(ids))
        count = taken.shape[-1]
        rows = taken.reshape(-1, count)
        loss = F.cross_entropy(rows, torch.arange(rows.shape[0]) % count, reduction="sum")
    except Exception as error:
        return type(error)
    loss.backward()
    return [loss.detach(), *[parameter.grad for parameter in model.parameters()]]


def check(take: Callable[[Tensor], Tensor], shape: tuple[int, ...], has_bias: bool = False) -> tuple[int, bool]:
    """Checks that the outcome is that of plain PyTorch. Returns how many losses were in chunks, and whether one is."""
    model, ids = Words(has_bias), words(shape)
    expected = outcome(model, ids, take)
    with chunked_loss(model, chunk_nbytes=2 * CLASSES * 4) as rewrite:
        found = outcome(model, ids, take)
    if isinstance(expected, type) or isinstance(found, type):
        assert expected is found
        return 0, False
    for a, b in zip(expected, found, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(b, a)
    return rewrite.losses, True


@pytest.mark.parametrize(
    ("index", "shape"),
    [
        ((slice(None), slice(None, 7), ...), (6,)),
        ((slice(None), slice(None), slice(None, 7), ...), (3, 4)),
        ((..., slice(None), slice(None), slice(None, 7)), (3, 4)),
        ((slice(None), ..., slice(None, 7)), (6,)),
        ((slice(None), ..., slice(None), slice(None, 7)), (3, 4)),
        ((1, slice(None), slice(None, 7), ...), (3, 4)),
        ((slice(None), slice(None, -1), ...), (3, 4)),
        ((..., slice(None, -1), slice(None)), (3, 4)),
        ((-1, ...), (3, 4)),
        ((...,), (6,)),
        ((), (6,)),
    ],
)
def test_an_ellipsis_stands_for_the_dimensions_that_are_left(index: Any, shape: tuple[int, ...]) -> None:
    assert check(lambda logits: logits[index], shape) == (1, True)


@pytest.mark.parametrize(
    "index",
    [
        (True, slice(None), slice(None, 3)),
        (slice(None), False),
        (slice(None), slice(1, 5), ...),
        (slice(None), slice(None, -2), ...),
        (slice(None), slice(None, None, 2)),
        (slice(None), None, slice(None, 4)),
        (None, ..., slice(None, 4)),
        (..., None),
        (slice(None), slice(None, 4), None),
        (slice(None), [0, 2, 5]),
        ([0, 2, 5], slice(None, 4)),
        (torch.tensor([True, False] * 3), slice(None, 4)),
        (..., ..., slice(None, 4)),
        (slice(None),) * 3,
    ],
)
def test_other_indices_get_whole_logits(index: Any) -> None:
    assert check(lambda logits: logits[index], (6,))[0] == 0


def part(draw: random.Random, size: int) -> Any:
    """Returns what an index may have for one dimension."""
    ends = [None, 0, 1, size - 1, size, size + 2, -1, -2]
    return draw.choice(
        [
            slice(None),
            slice(None),
            slice(None, draw.choice(ends)),
            slice(draw.choice(ends), draw.choice(ends), draw.choice([None, None, 1, 2])),
            draw.randrange(-size, size),
            [draw.randrange(size) for _ in range(draw.randrange(3))],
            torch.tensor([draw.randrange(size) for _ in range(2)]),
            torch.tensor([draw.random() < 0.5 for _ in range(size)]),
            torch.tensor(draw.randrange(size)),
        ]
    )


def drawn_index(draw: random.Random, shape: tuple[int, ...]) -> Any:
    """Returns an index of logits, most of which are allowed."""
    parts = [part(draw, size) for size in shape[: draw.randrange(len(shape) + 1)]]
    if draw.random() < 0.6:  # with an Ellipsis, parts behind it count from the last dimension
        split = draw.randrange(len(parts) + 1)
        behind = len(parts) - split
        parts = [*parts[:split], ..., *(part(draw, size) for size in shape[len(shape) - behind :])]
    for extra in (None, True, ...):
        if draw.random() < 0.1:
            parts.insert(draw.randrange(len(parts) + 1), extra)
    return parts[0] if len(parts) == 1 and draw.random() < 0.5 else tuple(parts)


@pytest.mark.parametrize("group", range(6))
def test_drawn_indices(group: int) -> None:
    served = 0
    for seed in range(150 * group, 150 * (group + 1)):
        draw = random.Random(seed)
        shape = draw.choice(SHAPES)
        indices = [drawn_index(draw, (*shape, CLASSES))]
        if draw.random() < 0.3:
            indices.append(drawn_index(draw, (*shape, CLASSES)))
        scales = draw.random() < 0.3

        def take(logits: Tensor, indices: list[Any] = indices, scales: bool = scales) -> Tensor:
            for index in indices:
                logits = logits[index]
            return 0.5 * logits if scales else logits

        try:
            served += check(take, shape, has_bias=draw.random() < 0.5)[0]
        except AssertionError as error:
            raise AssertionError(f"the case {seed}, which takes {indices} of {shape}: {error}") from None
    assert served > 10
