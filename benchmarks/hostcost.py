"""What a saved tensor costs the processor: ``python -m benchmarks.hostcost [--json FILE] [--seconds N] [--only NAME]``.

Small tensors on one thread, so that Python sets the pace, as it does on every GPU. Timed is the thread's own processor
time of a step, forward and backward; the cost is what a step takes above a plain one, divided by the number of tensors
that autograd saves in it. All candidates take turns; ``plain again`` is plain PyTorch once more, and so the noise.

The cases ``held ...`` keep every output, as unrolled recurrent networks, rollouts and ``output_hidden_states`` do: the
cost per tensor must not grow with their number.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from backstash import Session
from benchmarks.networks import build
from benchmarks.results import Results
from benchmarks.rounds import Deadline, Effort, Summary, interleave, spread, summarise, table

FORMAT = 1
"""Version of the JSON's layout."""

Loss = Callable[[], Any]


class Nothing(TorchFunctionMode):
    """Sees every torch function and does nothing."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def identity_hooks() -> AbstractContextManager[object]:
    """Saved-tensor hooks that do nothing."""
    return torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)


def _contexts() -> dict[str, AbstractContextManager[object]]:
    """The candidates; a Session is one for all steps, as a training loop has it."""
    return {
        "plain": nullcontext(),
        "plain again": nullcontext(),
        "identity hooks": identity_hooks(),
        "function mode": Nothing(),
        "save_on_cpu": torch.autograd.graph.save_on_cpu(),
        "keep": Session("keep"),
        "lossless_stored": Session("lossless_stored"),
        "lossless": Session("lossless"),
        "lossless from 16 KiB on": Session("lossless", min_nbytes=16 << 10),
    }


# -- cases -------------------------------------------------------------------------------------------------------------


def _resnet50() -> Loss:
    model, x = build("resnet50", num_classes=10), torch.randn(2, 3, 64, 64)
    return lambda: model(x).square().mean()


def _gpt2() -> Loss:
    from transformers import GPT2Config, GPT2LMHeadModel

    without: dict[str, Any] = {
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    config = GPT2Config(n_layer=12, n_embd=128, n_head=4, vocab_size=512, n_positions=64, **without)
    model, words = GPT2LMHeadModel(config), torch.randint(512, (2, 64))
    return lambda: model(words, labels=words).loss  # type: ignore[no-any-return]


def _mlp() -> Loss:
    layers = [layer for _ in range(100) for layer in (nn.Linear(96, 96), nn.ReLU())]
    model, x = nn.Sequential(*layers), torch.randn(64, 96)
    return lambda: model(x).square().mean()


def _lstm() -> Loss:
    cell, x = nn.LSTMCell(64, 64), torch.randn(64, 128, 64)

    def loss() -> Any:
        state = None
        for step in range(x.shape[0]):
            state = cell(x[step], state)
        assert state is not None
        return state[0].square().mean()

    return loss


def _held(number: int) -> Loss:
    """Outputs of 16 KiB each, all of which are kept until the step is over."""
    layer, x = nn.Linear(64, 64), torch.randn(64, 64)

    def loss() -> Any:
        kept = [layer(x).tanh() for _ in range(number)]
        total = kept[0].sum()
        for y in kept[1:]:
            total = total + y[0, 0]
        return total

    return loss


CASES: dict[str, Callable[[], Loss]] = {
    "ResNet-50, 64x64": _resnet50,
    "GPT-2 12 x 128": _gpt2,
    "100-layer MLP": _mlp,
    "LSTM, 64 steps": _lstm,
    **{f"held {number}": partial(_held, number) for number in (500, 1000, 2000, 4000)},
}


# -- measuring ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One candidate on one case.

    Attributes:
        case, candidate: their names.
        saved: how many tensors autograd saves in a step.
        seconds: thread time of a step.
        times_plain: the same over plain's in the same round.
        microseconds: per saved tensor above plain's.
        first_seconds: thread time of the first step, in which a Session learns.
    """

    case: str
    candidate: str
    saved: int
    seconds: Summary
    times_plain: Summary
    microseconds: Summary
    first_seconds: float


def count_saved(loss: Loss) -> int:
    """Returns how many tensors autograd saves in a forward pass."""
    number = 0

    def pack(x: Tensor) -> Tensor:
        nonlocal number
        number += 1
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss()
    return number


def _step(loss: Loss, context: AbstractContextManager[object]) -> float:
    started = time.thread_time()
    with context:
        value = loss()
        value.backward()
    return time.thread_time() - started


def measure(name: str, effort: Effort) -> list[Row]:
    """All candidates on one case, interleaved."""
    torch.manual_seed(0)
    loss = CASES[name]()
    saved = count_saved(loss)
    contexts = _contexts()
    first = {which: _step(loss, context) for which, context in contexts.items()}
    for context in contexts.values():  # the second step is the last one in which anything is new
        _step(loss, context)
    found = interleave({which: partial(_step, loss, context) for which, context in contexts.items()}, effort)
    rows = []
    for which, seconds in found.items():
        above = [(own - plain) / saved * 1e6 for own, plain in zip(seconds, found["plain"], strict=True)]
        ratios = [own / plain for own, plain in zip(seconds, found["plain"], strict=True)]
        rows.append(Row(name, which, saved, summarise(seconds), summarise(ratios), summarise(above), first[which]))
    return rows


def show(rows: Sequence[Row]) -> str:
    """A line for each candidate of each case."""
    header = ("case", "candidate", "saved", "step ms", "x plain", "us per saved tensor", "first step ms")
    lines = [
        (
            row.case,
            row.candidate,
            str(row.saved),
            spread(row.seconds, 1e3),
            spread(row.times_plain),
            spread(row.microseconds, 1.0, 1),
            f"{row.first_seconds * 1e3:.1f}",
        )
        for row in rows
    ]
    return table(header, lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures every case, prints a table, writes the JSON; returns 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hostcost", description="Host time per saved tensor.")
    parser.add_argument("--json", type=Path, help="the file to write (default: none)")
    parser.add_argument("--seconds", type=float, default=240.0, help="for everything (default: 240)")
    parser.add_argument("--rounds", type=int, default=9, help="of each case, at most (default: 9)")
    parser.add_argument("--only", action="append", choices=sorted(CASES), help="this case (may be given several times)")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    deadline = Deadline.after(asked.seconds)
    results = Results("hostcost", asked.json, arguments, format=FORMAT)
    names = [name for name in CASES if asked.only is None or name in asked.only]
    rows: list[Row] = []
    for index, name in enumerate(names):
        part = deadline.part(1 / (len(names) - index))
        rows += measure(name, Effort(asked.rounds, part))
        results.write(rows=rows)
    print(f"{show(rows)}\n\n{results.close()}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
