"""Facts of the ground that design decisions stand on: ``python -m studies.ground [--json FILE]``, CPU only.

* relu's backward, given what it saved as floats and as bools.
* The first touch of fresh memory, with and without huge pages, beside memory that was touched before.
* A language model's head, its cross entropy and their backward: plain, `chunked_loss`, and torch's own function in
  chunks, where this torch has one. A fifth as many rounds.
"""

from __future__ import annotations

import argparse
import mmap
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backstash.ops.backends import advise_huge
from backstash.rewrites import chunked_loss
from bench.results import Results
from bench.rounds import Effort, interleave, spread, summarise, table

SHAPE = (8, 64, 224, 224)
"""VGG16's first activation at batch 8, [N, C, H, W]."""

HEAD = (1024, 768, 50257)
"""GPT-2's head: tokens of a batch, width, words."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints a table, writes the JSON."""
    parser = argparse.ArgumentParser(prog="python -m studies.ground", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15, help="rounds (default: 15)")
    parser.add_argument("--json", type=Path, help="file to write")
    asked = parser.parse_args(arguments)
    results = Results("studies.ground", asked.json, arguments, shape=SHAPE, head=HEAD)
    seconds = interleave(tasks(SHAPE), Effort(asked.rounds))
    seconds |= interleave(head_tasks(*HEAD), Effort(max(1, asked.rounds // 5)))
    rows = {name: summarise(times) for name, times in seconds.items()}
    print(table(("what", "ms"), [(name, spread(row, 1e3, 1)) for name, row in rows.items()]))
    results.write(rows=rows)
    return 0


def tasks(shape: tuple[int, ...]) -> dict[str, Callable[[], float]]:
    """What to time by name; each returns seconds."""
    grad = torch.randn(shape)
    floats = torch.relu(torch.randn(shape))
    bools = floats > 0
    out, warm = torch.empty_like(floats), torch.zeros(floats.nbytes, dtype=torch.uint8)

    def backward(saved: Tensor) -> float:
        started = time.perf_counter()
        torch.ops.aten.threshold_backward.grad_input(grad, saved, 0, grad_input=out)
        return time.perf_counter() - started

    def touch(huge: bool) -> float:
        # Never touched before, which malloc does not promise; shared memory would not get huge pages.
        with mmap.mmap(-1, floats.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
            fresh = torch.frombuffer(memory, dtype=torch.uint8)
            if huge:
                advise_huge(fresh)
            seconds = fill(fresh)
            del fresh
        return seconds

    def fill(memory: Tensor) -> float:
        started = time.perf_counter()
        memory.fill_(1)
        return time.perf_counter() - started

    return {
        "relu's backward from floats": lambda: backward(floats),
        "relu's backward from bools": lambda: backward(bools),
        "fill fresh memory": lambda: touch(huge=False),
        "fill fresh memory, huge pages": lambda: touch(huge=True),
        "fill warm memory": lambda: fill(warm),
    }


def head_tasks(tokens: int, width: int, words: int) -> dict[str, Callable[[], float]]:
    """The head and its loss, forward and backward, to time by name; each returns seconds."""
    plain, chunked = nn.Linear(width, words, bias=False), nn.Linear(width, words, bias=False)
    chunked_loss(chunked, "")
    hidden, targets = torch.randn(tokens, width, requires_grad=True), torch.randint(words, (tokens,))

    def timed(loss: Callable[[], Tensor]) -> float:
        hidden.grad = plain.weight.grad = chunked.weight.grad = None
        started = time.perf_counter()
        torch.autograd.backward([loss()])
        return time.perf_counter() - started

    losses = {
        "head, plain": lambda: F.cross_entropy(plain(hidden), targets),
        "head, chunked_loss": lambda: F.cross_entropy(chunked(hidden), targets),
    }
    if hasattr(F, "linear_cross_entropy"):
        options = nn.LinearCrossEntropyOptions()
        losses["head, torch's linear_cross_entropy"] = lambda: F.linear_cross_entropy(
            hidden, plain.weight, targets, options=options
        )
    return {name: partial(timed, loss) for name, loss in losses.items()}


if __name__ == "__main__":
    raise SystemExit(main())
