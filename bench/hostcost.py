"""Processor time per saved tensor: ``python -m bench.hostcost [--json FILE] [--only NAME] [--profile]``.

Small tensors on one thread, so that Python sets the pace, as it does on every GPU. Timed is the thread's own processor
time of a step, forward and backward; the cost is what a step takes above a plain one, divided by the number of tensors
that autograd saves in it. All candidates take turns; ``plain again`` is plain PyTorch once more, and so the noise.

The cases ``held ...`` keep every output, as unrolled recurrent networks, rollouts and ``output_hidden_states`` do; in
the cases ``relus ...`` every output is encoded. The cost per tensor must not grow with their number.

After the cases come *events*: small programs in which one thing happens again and again, such as a torch function that
saves nothing, or a relu whose bits are stored and read by a claim. Forward and backward are timed apart.

``--profile`` measures nothing of this. It runs each case under cProfile and prints how its processor time divides
between the rooms of the package, from the observer to the backward kernels (see `bench.stages`).
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
from torch.utils.checkpoint import checkpoint

from backstash import Session
from bench.results import Results
from bench.rounds import UNTIL_SETTLED, Deadline, Effort, Summary, interleave, spread, summarise, table
from bench.stages import profile
from tests.networks import build

FORMAT = 1
"""Version of the JSON's layout."""

Loss = Callable[[], Any]

Forward = Callable[[Loss], Any]
"""How a candidate runs a forward pass: it returns what the loss returns."""

FLOOR = 16 << 10
"""Bytes from which on a Session may look at tensors at all; what the candidate ``from 16 KiB on`` is about."""


class Nothing(TorchFunctionMode):
    """Sees every torch function and does nothing."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def identity_hooks() -> AbstractContextManager[object]:
    """Saved-tensor hooks that do nothing."""
    return torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)


def within(context: AbstractContextManager[object]) -> Forward:
    """Runs forward passes inside that context, which can be entered again and again."""

    def forward(loss: Loss) -> Any:
        with context:
            return loss()

    return forward


def _checkpointed(loss: Loss) -> Any:
    """Runs a forward pass that saves nothing, and all of it again in backward."""
    return checkpoint(loss, use_reentrant=False)


def _node_hook() -> dict[str, Forward]:
    """Collects every autograd node when it is made, as a Session without a function mode could; from torch 2.15 on."""
    make = getattr(torch.autograd.graph, "node_creation_hook", None)
    if make is None:
        return {}

    def forward(loss: Loss) -> Any:
        nodes: list[Any] = []
        with make(nodes.append):
            return loss()

    return {"node creation hook": forward}


def candidates() -> dict[str, Forward]:
    """All candidates by name, plain PyTorch first; a Session is one for all steps, as a training loop has it."""
    return {
        "plain": within(nullcontext()),
        "plain again": within(nullcontext()),
        "identity hooks": within(identity_hooks()),
        "function mode": within(Nothing()),
        **_node_hook(),
        "save_on_cpu": within(torch.autograd.graph.save_on_cpu()),
        "checkpoint": _checkpointed,
        "keep": within(Session("keep")),
        "lossless_stored": within(Session("lossless_stored")),
        "lossless": within(Session("lossless")),
        "lossless from 16 KiB on": within(Session("lossless", min_nbytes=FLOOR)),
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


def _vit() -> Loss:
    from transformers import ViTConfig, ViTForImageClassification

    sizes: dict[str, Any] = {
        "hidden_size": 192,
        "intermediate_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 3,
        "image_size": 64,
        "patch_size": 8,
        "num_labels": 10,
    }
    model, x = ViTForImageClassification(ViTConfig(**sizes)), torch.randn(2, 3, 64, 64)
    return lambda: model(pixel_values=x).logits.square().mean()


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


class Repeated(nn.Module):
    """Runs a function of a tensor again and again, on its own results; a module, so that a Session knows its steps."""

    def __init__(self, x: Tensor, function: Callable[[Tensor], Tensor], times: int) -> None:
        super().__init__()
        self.x, self.function, self.times = x, function, times

    def forward(self) -> Tensor:
        """The sum of the last result's elements."""
        y = self.x
        for _ in range(self.times):
            y = self.function(y)
        return y.sum()


GROWING = (500, 2000, 20000)
"""Numbers of outputs between which the cost of one should not differ."""


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


def _many_relus(number: int) -> Loss:
    """Relus of 16 KiB, nothing else of which is saved."""
    return Repeated(torch.randn(64, 64, requires_grad=True), lambda y: torch.relu(y + 0.001), number)


CASES: dict[str, Callable[[], Loss]] = {
    "ResNet-50, 64x64": _resnet50,
    "GPT-2 12 x 128": _gpt2,
    "ViT 12 x 192": _vit,
    "100-layer MLP": _mlp,
    "LSTM, 64 steps": _lstm,
    **{f"held {number}": partial(_held, number) for number in GROWING},
    **{f"relus {number}": partial(_many_relus, number) for number in GROWING},
}


# -- events ------------------------------------------------------------------------------------------------------------

EVENTS = 200
"""How often an event happens in a step."""


def _functions() -> Loss:
    """Torch functions of tensors that need no gradient: nothing is saved, and no call is noted."""
    weight = torch.ones(1, requires_grad=True)
    model = Repeated(torch.randn(64), torch.abs, EVENTS)
    return lambda: model() * weight


def _small() -> Loss:
    """Products of tensors of 256 bytes, whose factors are held as they are."""
    weight = torch.ones(64)
    return Repeated(torch.ones(64, requires_grad=True), lambda y: y * weight, EVENTS)


def _kept() -> Loss:
    """Products of matrices of 16 KiB: each is looked at, no codec takes it, and it is kept."""
    weight = nn.Parameter(torch.eye(64))
    return Repeated(torch.randn(64, 64, requires_grad=True), lambda y: y @ weight, EVENTS)


def _relus() -> Loss:
    """Relus of 16 KiB: each is encoded as bits, and a claim stands for it in backward."""
    return Repeated(torch.randn(64, 64, requires_grad=True), lambda y: torch.relu(y + 0.001), EVENTS)


def _blocks() -> Loss:
    """Batch norm, relu and convolution on 16 KiB: one value is kept, and one is forgotten and remade."""
    layers = [layer for _ in range(EVENTS) for layer in (nn.BatchNorm2d(8), nn.ReLU(True), nn.Conv2d(8, 8, 1))]
    model, x = nn.Sequential(nn.Conv2d(3, 8, 1), *layers), torch.randn(2, 3, 16, 16)
    return lambda: model(x).square().mean()


EVENT_CASES: dict[str, Callable[[], Loss]] = {
    "torch function that saves nothing": _functions,
    "small saved tensor": _small,
    "saved tensor that is kept after a look": _kept,
    "relu that is encoded, and its claim": _relus,
    "block of batch norm, relu and convolution, remade": _blocks,
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
        first_times_plain: the same over the median of plain's later steps.
    """

    case: str
    candidate: str
    saved: int
    seconds: Summary
    times_plain: Summary
    microseconds: Summary
    first_seconds: float
    first_times_plain: float


@dataclass(frozen=True)
class Event:
    """What one candidate's event costs above plain's.

    Attributes:
        event, candidate: their names.
        forward, backward: microseconds of thread time per event.
    """

    event: str
    candidate: str
    forward: Summary
    backward: Summary


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


def _step(loss: Loss, forward: Forward) -> float:
    return sum(_parts(loss, forward))


def _parts(loss: Loss, forward: Forward) -> tuple[float, float]:
    """Runs a step; returns the thread time of its forward and of its backward pass, in seconds."""
    started = time.thread_time()
    value = forward(loss)
    between = time.thread_time()
    value.backward()
    return between - started, time.thread_time() - between


def measure(name: str, effort: Effort) -> list[Row]:
    """All candidates on one case, interleaved."""
    torch.manual_seed(0)
    loss = CASES[name]()
    saved = count_saved(loss)
    compared = candidates()
    first = {which: _step(loss, forward) for which, forward in compared.items()}
    for forward in [*compared.values()] * UNTIL_SETTLED:
        _step(loss, forward)
    found = interleave({which: partial(_step, loss, forward) for which, forward in compared.items()}, effort)
    plain = summarise(found["plain"])
    rows = []
    for which, seconds in found.items():
        above = [(own - other) / saved * 1e6 for own, other in zip(seconds, found["plain"], strict=True)]
        ratios = [own / other for own, other in zip(seconds, found["plain"], strict=True)]
        summaries = summarise(seconds), summarise(ratios), summarise(above)
        rows.append(Row(name, which, saved, *summaries, first[which], first[which] / plain.median))
    return rows


def measure_event(name: str, effort: Effort) -> list[Event]:
    """What one event costs under each candidate that is about Python's work, interleaved."""
    torch.manual_seed(0)
    loss, known = EVENT_CASES[name](), candidates()
    names = ("plain", "plain again", "identity hooks", "function mode", "keep", "lossless from 16 KiB on")
    compared = {which: known[which] for which in names}
    for forward in [*compared.values()] * UNTIL_SETTLED:
        _step(loss, forward)
    found = interleave({which: partial(_parts, loss, forward) for which, forward in compared.items()}, effort)
    rows = []
    for which in names[1:]:
        above = [
            [(own[part] - plain[part]) / EVENTS * 1e6 for own, plain in zip(found[which], found["plain"], strict=True)]
            for part in (0, 1)
        ]
        rows.append(Event(name, which, *map(summarise, above)))
    return rows


def show(rows: Sequence[Row]) -> str:
    """A line for each candidate of each case."""
    header = ("case", "candidate", "saved", "step ms", "x plain", "us per saved tensor", "first step ms", "x plain")
    lines = [
        (
            row.case,
            row.candidate,
            str(row.saved),
            spread(row.seconds, 1e3),
            spread(row.times_plain),
            spread(row.microseconds, 1.0, 1),
            f"{row.first_seconds * 1e3:.1f}",
            f"{row.first_times_plain:.2f}",
        )
        for row in rows
    ]
    return table(header, lines)


def show_events(rows: Sequence[Event]) -> str:
    """A line for each candidate of each event."""
    header = ("event", "candidate", "us in forward", "us in backward")
    lines = [(row.event, row.candidate, spread(row.forward, 1.0, 1), spread(row.backward, 1.0, 1)) for row in rows]
    return table(header, lines)


def show_profile(name: str) -> str:
    """Where a Session's processor time goes in a step of that case, by room of the package."""
    torch.manual_seed(0)
    loss, forward = CASES[name](), candidates()["lossless from 16 KiB on"]
    saved = count_saved(loss)
    for _ in range(UNTIL_SETTLED):
        _step(loss, forward)
    stages = profile(lambda: _step(loss, forward), steps=5)
    lines = [
        (stage.name, f"{stage.calls:.0f}", f"{stage.seconds * 1e3:.2f}", f"{stage.seconds / saved * 1e6:.1f}")
        for stage in stages
    ]
    return f"{name}\n{table(('room', 'calls', 'ms per step', 'us per saved tensor'), lines)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures every case, prints a table, writes the JSON; returns 0."""
    parser = argparse.ArgumentParser(prog="python -m bench.hostcost", description="Host time per saved tensor.")
    parser.add_argument("--json", type=Path, help="the file to write (default: none)")
    parser.add_argument("--seconds", type=float, default=240.0, help="for everything (default: 240)")
    parser.add_argument("--rounds", type=int, default=9, help="of each case, at most (default: 9)")
    known = [*CASES, *EVENT_CASES]
    parser.add_argument("--only", action="append", choices=sorted(known), help="this one (may be given several times)")
    parser.add_argument("--profile", action="store_true", help="where the time of the cases goes, by cProfile")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    names = [name for name in known if asked.only is None or name in asked.only]
    if asked.profile:
        print("\n\n".join(show_profile(name) for name in names if name in CASES))
        return 0
    deadline = Deadline.after(asked.seconds)
    results = Results("bench.hostcost", asked.json, arguments, format=FORMAT)
    rows: list[Row] = []
    events: list[Event] = []
    for index, name in enumerate(names):
        effort = Effort(asked.rounds, deadline.part(1 / (len(names) - index)))
        if name in CASES:
            rows += measure(name, effort)
        else:
            events += measure_event(name, effort)
        results.write(rows=rows, events=events)
    print("\n\n".join([*([show(rows)] if rows else []), *([show_events(events)] if events else []), results.close()]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
