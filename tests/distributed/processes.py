"""Processes that run one program together, and comparisons of their results, for the distributed tests."""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gradients.gradient_checks import bits
from torch import Tensor, nn

from backstash import Policy, Session
from backstash.stash.ledger import Report

WORLD = 2
LIMIT = 150.0
STEPS = 3
EXACT = ("lossless", "keep")
LOSSY = ("gist_fp8", "quantized")

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(  # else the first operation of a DTensor imports Dynamo in each process
    ["torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "backstash", __name__]
)

Make = Callable[[], tuple[nn.Module, Callable[[int], Tensor]]]
"""Builds a model and the forward pass of a step, which returns the loss."""


def run_together(folder: Path, program: Callable[..., Any], *args: Any, world: int = WORLD) -> list[Any]:
    """Runs ``program(*args)`` in ``world`` processes with a gloo group, and returns what each returned, by rank.

    Args:
        folder: an empty folder of the test, in which the processes find each other.
        program: a function of a module's top level; it fails by raising.
        args: its arguments.
        world: how many processes.
    """
    processes, ends = [], []
    for rank in range(world):
        end, child = _context.Pipe(duplex=False)
        process = _context.Process(target=_member, args=(child, str(folder / "rendezvous"), rank, world, program, args))
        process.start()
        child.close()
        processes.append(process)
        ends.append(end)
    deadline = time.monotonic() + LIMIT
    try:
        answers = [_answer(end, deadline) for end in ends]
    finally:
        for process in processes:
            process.kill()
            process.join()
    failed = [f"rank {rank}: {text}" for rank, (is_good, text) in enumerate(answers) if not is_good]
    if failed:
        pytest.fail("\n".join(failed), pytrace=False)
    return [value for _, value in answers]


def _answer(end: Connection, deadline: float) -> tuple[bool, Any]:
    try:
        if not end.poll(max(0.0, deadline - time.monotonic())):
            return False, f"no answer within {LIMIT:.0f} seconds"
        answer: tuple[bool, Any] = end.recv()
        return answer
    except EOFError:
        return False, "the process ended without an answer"


def _member(
    end: Connection, rendezvous: str, rank: int, world: int, program: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=LIMIT / 2),
        )
        answer = True, program(*args)
    except BaseException:
        answer = False, traceback.format_exc()
    end.send(answer)
    end.close()
    os._exit(0)  # without the group's teardown, which may wait for a process that has failed


# -- models ------------------------------------------------------------------------------------------------------------

WIDTH, INNER, CLASSES, ROWS = 48, 112, 20, 36


class Block(nn.Module):
    """A residual block, whose relu returns mostly zeros.

    No activation has the shape of a weight, so that shapes tell them apart.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)
        nn.init.constant_(self.up.bias, -0.5)  # most of what relu returns is zero

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.up(self.norm(x)))
        result: Tensor = x + self.down(hidden)
        return result


def network(blocks: int = 2) -> nn.Sequential:
    """Some blocks and a classifier, with the same weights on every rank and at every call."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(blocks)), nn.Linear(WIDTH, CLASSES))


def batch(step: int, seed: int = 0) -> Tensor:
    """A batch, [ROWS, WIDTH]."""
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(100 * seed + step))


def loss_of(output: Tensor) -> Tensor:
    """A loss that reads its input."""
    return output.float().square().mean()


# -- comparing ---------------------------------------------------------------------------------------------------------


def local(x: Any) -> Tensor:
    """The part of a tensor that this process holds."""
    found: Tensor = x.to_local() if hasattr(x, "to_local") else x
    return found.detach().clone()


def train(make: Make, session: Session | None, inside: bool = False) -> Iterator[Tensor]:
    """Losses and gradients of a few steps of training; with ``inside`` the backward pass runs in the Session too."""
    model, forward = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        with session or nullcontext():
            loss = forward(step)
            if inside and loss.requires_grad:
                loss.backward()
        if not inside:
            loss.backward()
        yield loss.detach().clone()
        del loss
        for parameter in model.parameters():
            if parameter.grad is not None:
                yield local(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()


def assert_same_bits(make: Make, policy: str | Policy, inside: bool = False, min_nbytes: int = 1024) -> Report:
    """Trains with and without a Session, and compares every bit; returns the report of the Session."""
    expected = list(train(make, None, inside))
    session = Session(policy, min_nbytes=min_nbytes)
    found = list(train(make, session, inside))
    assert len(expected) == len(found) > STEPS
    for index, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert one.dtype is other.dtype and one.shape == other.shape
        assert torch.equal(bits(one), bits(other)), f"tensor {index} of {len(found)} differs under {policy}"
    assert_holds_nothing(session)
    return session.report()


def assert_no_weight_encoded(make: Make, weights: Sequence[tuple[int, ...]], inside: bool = False) -> None:
    """Trains with lossy policies: no weight, of which ``weights`` are the shapes, may be among the stored values."""
    for policy in LOSSY:
        session = Session(policy, min_nbytes=0)
        assert all(torch.isfinite(found).all() for found in train(make, session, inside))
        assert_no_weight_stored(session.report(), weights)
        assert any(row.codec not in ("kept", "shape") for row in session.report().rows), "nothing was encoded"
        assert_holds_nothing(session)


def assert_no_weight_stored(report: Report, weights: Sequence[tuple[int, ...]]) -> None:
    """No stored value has the shape of a weight, or that of its transpose."""
    shapes = {str(list(shape)) for weight in weights for shape in (weight, weight[::-1])}
    stored = [row for row in report.rows if any(row.spec.endswith(f" {shape}") for shape in shapes)]
    assert not stored, f"weights are among the stored values: {[(row.key, row.spec, row.codec) for row in stored]}"
    assert report.parameter_nbytes > 0


def assert_holds_nothing(session: Session) -> None:
    """The last graph is gone, and everything that was stored for it."""
    gc.collect()
    assert (session._live.saved, session._live.nbytes, session._live.remade_nbytes) == (0, 0, 0)


def matrices(model: nn.Module) -> list[tuple[int, ...]]:
    """The shapes of all weights of two dimensions or more, as this process holds them, and as they are gathered."""
    found = [tuple(p.shape) for p in model.parameters() if p.dim() > 1]
    return found + [tuple(local(p).shape) for p in model.parameters() if p.dim() > 1]


def one_process_ratio(policy: str = "lossless", min_nbytes: int = 1024) -> float:
    """The ratio of the same network in a process of its own."""
    model = network()
    session = Session(policy, min_nbytes=min_nbytes)
    with session:
        loss = loss_of(model(batch(0)))
    loss.backward()
    return session.report().ratio


def forward_of(model: nn.Module, seed: int) -> Callable[[int], Tensor]:
    """The forward pass of a step."""
    return partial(_forward, model, seed)


def _forward(model: nn.Module, seed: int, step: int) -> Tensor:
    return loss_of(model(batch(step, seed)))
