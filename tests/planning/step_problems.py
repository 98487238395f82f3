"""Small steps to plan, drawn at random: with chains, shared parents, and parents that outlive their reads."""

from __future__ import annotations

import random
from contextlib import nullcontext

from torch import Tensor, nn

import backstash as bs
from backstash.planning.model.problem import Choice, PlannedValue, Position, StepProfile


def drawn_choices(
    draw: random.Random, nbytes: int, parents: list[int], reads: list[int], first: int
) -> tuple[Choice, ...]:
    """All four kinds. ``reads`` are ascending; nothing is fetched before the position ``first``."""
    choices = [Choice.keep(nbytes)]
    if draw.random() < 0.5:
        sizes = draw.randint(0, nbytes), draw.choice([0, nbytes]), draw.choice([0, nbytes])
        times = draw.random(), draw.random()
        choices.append(Choice("zvc", "encode", *sizes, *times, error=draw.choice([0.0, 0.1])))
    if draw.random() < 0.3:
        nbytes_back, error = draw.choice([nbytes // 2, nbytes]), draw.choice([0.0, 0.0, 0.05])
        fetches = tuple(draw.randint(first, read) for read in reads) if draw.random() < 0.7 else ()
        seconds = draw.random(), draw.random()
        choices.append(Choice("offload", "offload", 0, nbytes, nbytes_back, *seconds, error=error, fetches=fetches))
    for number in range(draw.choice([0, 1, 1, 2])):
        chosen = tuple(draw.sample(parents, draw.randint(0, len(parents))))
        workspace = draw.choice([0, draw.randint(0, 50)])
        made = {"parents": chosen, "workspace_nbytes": workspace, "seconds": 2 * draw.random()}
        choices.append(Choice(f"recompute{number or ''}", "recompute", 0, **made))  # type: ignore[arg-type]
    return tuple(choices)


def drawn_profile(seed: int, most_values: int = 6) -> StepProfile:
    """A step of at most 12 positions, the same for the same seed."""
    draw = random.Random(seed)
    forward, backward, count = draw.randint(2, 6), draw.randint(2, 6), draw.randint(1, most_values)
    positions = tuple(Position(f"op{n}", "block", n >= forward, 1.0) for n in range(forward + backward))
    rank = draw.sample(range(count), count)  # a value is remade from values of lower ranks
    values = []
    for number in range(count):
        nbytes = draw.randint(0, 100)
        parents = [other for other in range(count) if rank[other] < rank[number]]
        reads = draw.sample(range(forward, forward + backward), draw.randint(1, min(backward, 3)))
        choices = drawn_choices(draw, nbytes, parents, sorted(reads), forward)
        born = draw.randint(0, forward - 1)
        values.append(
            PlannedValue(f"v{number}", "block", "Relu", "float32", nbytes, born, tuple(sorted(reads)), choices)
        )
    base = tuple(draw.randint(0, 50) for _ in positions)
    profile = StepProfile(positions, base, tuple(values), 0)
    live = list(base)
    for value in values:
        for position in range(value.born, value.reads[-1] + 1):
            live[position] += value.nbytes
    return StepProfile(profile.positions, profile.base_nbytes, profile.values, max(live))


def gradients_of(model: nn.Module, x: Tensor, session: bs.Session | None = None) -> list[Tensor]:
    """The gradients of one real step."""
    model.zero_grad(set_to_none=True)
    with session or nullcontext():
        loss = model(x).square().sum()
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
