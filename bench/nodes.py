"""Times of single nodes of the backward pass: ``python -m bench.nodes [--json FILE] [--seconds N]``.

A function runs on numbers that its forward pass frees, and its node gets a gradient that nobody else holds. Timed is
the node, unpacking included, as torch's profiler sees it; the peak is of the whole small graph's backward, above what
was alive before. Plain PyTorch and a Session take turns.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from backstash import Session, policies
from backstash.policies.base import Policy
from backstash.report.meter import CountedPeak
from bench.results import Results
from bench.rounds import Deadline, Effort, Summary, interleave, mib, spread, summarise, table

FORMAT = 1
"""Version of the JSON's layout."""


@dataclass(frozen=True)
class Case:
    """A function of one argument.

    Attributes:
        function: the function; the last node that it makes is measured.
        policy: the Session's.
        channels_last: the argument's layout.
    """

    function: Callable[[Tensor], Tensor]
    policy: Callable[[], Policy] = policies.lossless
    channels_last: bool = False


CODES = partial(policies.gist, "fp16", fewbit=3, recompute=False)
CASES: dict[str, Case] = {
    "relu": Case(F.relu),
    "leaky_relu": Case(lambda x: F.leaky_relu(x, 0.1)),
    "dropout": Case(lambda x: F.dropout(x, 0.1)),
    "gelu, 3 bits": Case(F.gelu, CODES),
    "silu, 3 bits": Case(F.silu, CODES),
    "gelu": Case(F.gelu),
    "max_pool2d": Case(lambda x: F.max_pool2d(x, 3, 1, 1)),
    "batch_norm": Case(lambda x: F.batch_norm(x, None, None, training=True)),
    "batch_norm, channels last": Case(lambda x: F.batch_norm(x, None, None, training=True), channels_last=True),
    "layer_norm": Case(lambda x: F.layer_norm(x, x.shape[-1:])),
    "group_norm": Case(lambda x: F.group_norm(x, 8)),
    "softmax": Case(lambda x: F.softmax(x, -1)),
}
"""By name; numbers as a convolution makes them, float32 [N, 64, 128, 128]."""


@dataclass(frozen=True)
class Row:
    """A node under plain PyTorch and under a Session.

    Attributes:
        case: its name.
        nbytes: of its gradient.
        plain, ours: seconds.
        times_plain: of ours, round by round.
        plain_peak_nbytes, ours_peak_nbytes: of the backward pass.
    """

    case: str
    nbytes: int
    plain: Summary
    ours: Summary
    times_plain: Summary
    plain_peak_nbytes: int
    ours_peak_nbytes: int


def graph(case: Case, images: int, session: AbstractContextManager[object]) -> tuple[Tensor, Tensor, str]:
    """The end of a small graph, the gradient to begin from, and the name of the node that is measured."""
    layout = torch.channels_last if case.channels_last else torch.contiguous_format
    x = torch.randn(images, 64, 128, 128, generator=torch.Generator().manual_seed(0))
    x = x.contiguous(memory_format=layout).requires_grad_()
    with session:
        y = case.function(x.neg())
        name = type(y.grad_fn).__name__
        z = y.neg()
        del y  # or the Session keeps it, as the program does
    return z, torch.randn(z.shape, generator=torch.Generator().manual_seed(1)).contiguous(memory_format=layout), name


def seconds(case: Case, images: int, session: AbstractContextManager[object]) -> float:
    """How long the node takes."""
    z, gradient, name = graph(case, images, session)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as seen:
        z.backward(gradient)
    whole = f"autograd::engine::evaluate_function: {name}"
    return float(sum(event.cpu_time_total for event in seen.key_averages() if event.key == whole)) / 1e6


def peak(case: Case, images: int, session: AbstractContextManager[object]) -> int:
    """Bytes at most during backward."""
    z, gradient, _ = graph(case, images, session)
    with CountedPeak() as counted:
        z.backward(gradient)
    return counted.peak_nbytes


def measure(name: str, images: int, effort: Effort) -> Row:
    """Both in turn, after a step each that is not counted."""
    case = CASES[name]
    sides: dict[str, Callable[[], AbstractContextManager[object]]] = {
        "plain": nullcontext,
        "ours": lambda: Session(case.policy(), min_nbytes=0),
    }
    for side in sides.values():
        seconds(case, images, side())
    tasks = {which: partial(lambda side: seconds(case, images, side()), side) for which, side in sides.items()}
    found = interleave(tasks, effort)
    ratios = [ours / plain for plain, ours in zip(found["plain"], found["ours"], strict=True)]
    peaks = [peak(case, images, side()) for side in sides.values()]
    summaries = summarise(found["plain"]), summarise(found["ours"]), summarise(ratios)
    return Row(name, images * 64 * 128 * 128 * 4, *summaries, *peaks)


def show(rows: Sequence[Row]) -> str:
    """A line for each node."""
    header = ("node of", "plain ms", "ours ms", "x plain", "peak MiB, plain", "ours")
    lines = [
        (
            row.case,
            spread(row.plain, 1e3),
            spread(row.ours, 1e3),
            spread(row.times_plain),
            mib(row.plain_peak_nbytes),
            mib(row.ours_peak_nbytes),
        )
        for row in rows
    ]
    return table(header, lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures every node, prints a table, writes the JSON; returns 0."""
    parser = argparse.ArgumentParser(prog="python -m bench.nodes", description="Single nodes of backward.")
    parser.add_argument("--json", type=Path, help="the file to write (default: none)")
    parser.add_argument("--seconds", type=float, default=120.0, help="for everything (default: 120)")
    parser.add_argument("--rounds", type=int, default=9, help="of each node, at most (default: 9)")
    parser.add_argument("--images", type=int, default=16, help="of 4 MiB each (default: 16)")
    asked = parser.parse_args(arguments)
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or the profiler prints two lines each time
    deadline = Deadline.after(asked.seconds)
    results = Results("bench.nodes", asked.json, arguments, format=FORMAT, images=asked.images)
    rows: list[Row] = []
    for index, name in enumerate(CASES):
        part = deadline.part(1 / (len(CASES) - index))
        rows.append(measure(name, asked.images, Effort(asked.rounds, part)))
        results.write(rows=rows)
    print(f"{show(rows)}\n\n{results.close()}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
