"""Facts of the ground that design decisions stand on: ``python -m benchmarks.ground [--json FILE]``, CPU only.

* relu's backward, given what it saved as floats and as bools.
* The first touch of fresh memory, with and without huge pages, beside memory that was touched before.
"""

from __future__ import annotations

import argparse
import mmap
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from backstash.ops.backends import advise_huge
from benchmarks.results import Results
from benchmarks.rounds import Effort, interleave, spread, summarise, table

SHAPE = (8, 64, 224, 224)
"""VGG16's first activation at batch 8, [N, C, H, W]."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints a table, writes the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ground", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15, help="rounds (default: 15)")
    parser.add_argument("--json", type=Path, help="file to write")
    asked = parser.parse_args(arguments)
    results = Results("ground", asked.json, arguments, shape=SHAPE)
    seconds = interleave(tasks(SHAPE), Effort(asked.rounds))
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


if __name__ == "__main__":
    raise SystemExit(main())
