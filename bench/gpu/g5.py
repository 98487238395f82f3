"""The share of a copy to the host that hides behind computing.

1. Products of matrices on one stream, a copy out and back on another one: alone, and both at once.
2. Steps of networks in which ``offload_hidden`` moves so many bytes, or as many as hide, and treats the rest as
   ``lossless`` does. A trace says how long the device copied, and for how much of it it computed as well.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import backstash as bs
from backstash.planning.measure.link import SMALLEST
from bench.gpu import steps
from bench.gpu.networks import NETWORKS, Training
from bench.gpu.parts import Run
from bench.gpu.ways import AGAIN, PLAIN, WAYS, Way
from bench.rounds import Effort, Summary, interleave, summarise

CHOSEN = ("resnet50", "gpt2")
GIB = (0.25, 0.5, 1.0, 1.5)


@dataclass(frozen=True)
class Hidden:
    """A copy out and back beside products of matrices. Seconds.

    Attributes:
        compute: of the products alone.
        copy: of the copies alone.
        both: of both at once.
        hidden: the share of the copies' time that both at once do not take.
    """

    compute: Summary
    copy: Summary
    both: Summary
    hidden: Summary


@dataclass(frozen=True)
class Overlap:
    """What a trace of the device says of a step. Seconds.

    Attributes:
        kernels: in which a kernel ran.
        copies: in which a copy over the link ran.
        both: in which both did.
    """

    kernels: float
    copies: float
    both: float


def measure(run: Run) -> None:
    """Measures everything."""
    for gib in GIB:
        run.part(f"copy/{gib} GiB", partial(_hidden, run, gib))
    for name in CHOSEN:
        if find_spec(NETWORKS[name].needs) is not None:
            _network(run, name)


def _nbytes(run: Run, gib: float) -> int:
    return int(gib * (1 << 20 if run.small else 1 << 30))


def _hidden(run: Run, gib: float) -> Hidden:
    device, nbytes = run.device, _nbytes(run, gib)
    side = 64 if run.small else 8192
    a = torch.randn(side, side, device=device.kind, dtype=torch.bfloat16)
    x = torch.empty(nbytes, dtype=torch.uint8, device=device.kind)
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    stream = torch.Stream()

    def copy() -> None:
        stream.wait_stream(torch.accelerator.current_stream())
        with stream:
            host.copy_(x, non_blocking=True)
            x.copy_(host, non_blocking=True)

    def products(count: int) -> None:
        for _ in range(count):
            a @ a

    copy()
    products(1)
    count = max(1, round(1.5 * device.seconds(copy) / device.seconds(partial(products, 1))))
    count = min(count, 3 if run.small else count)

    def both() -> None:
        copy()
        products(count)

    works: dict[str, Callable[[], None]] = {"compute": partial(products, count), "copy": copy, "both": both}
    found = interleave({name: partial(device.seconds, work) for name, work in works.items()}, Effort(run.rounds))
    rows = zip(found["compute"], found["copy"], found["both"], strict=True)
    hidden = [(alone + copying - at_once) / copying for alone, copying, at_once in rows]
    compute, copies, together = (summarise(found[name]) for name in works)
    return Hidden(compute, copies, together, summarise(hidden))


def _network(run: Run, name: str) -> None:
    @cache
    def training() -> Training:
        return Training(NETWORKS[name], run.device, run.small)

    @cache
    def way(of: str) -> Way:
        made = _make(run, training(), of)
        for _ in range(steps.LEARNING):
            made.step()
        return made

    ways = [PLAIN, AGAIN, "checkpoint", "lossless", "offload_hidden", *(f"{gib} GiB" for gib in GIB), "offload"]
    expected = cache(lambda: steps.gradients(Way(training())))
    for of in ways:
        run.part(f"{name}/{of}", lambda of=of: steps.judge(way(of), expected()))  # type: ignore[misc]
        run.part(f"{name}/trace/{of}", lambda of=of: _overlap(run, way(of)))  # type: ignore[misc]
    right = [of for of in ways if run.parts.get(f"{name}/{of}", {}).get("result")]
    if PLAIN in right:
        run.part(f"{name}/times", lambda: steps.times({of: way(of) for of in right}, run.rounds))


def _make(run: Run, training: Training, of: str) -> Way:
    if of in WAYS:
        return WAYS[of](training)
    nbytes = None if of == "offload_hidden" else _nbytes(run, float(of.removesuffix(" GiB")))
    smallest = 0 if run.small else SMALLEST
    policy = bs.policies.offload_hidden(nbytes=nbytes, smallest=smallest)
    return Way(training, bs.Session(policy, model=training.module, min_nbytes=training.min_nbytes))


def _overlap(run: Run, way: Way) -> Overlap | None:
    """Returns what a trace says; None for a device of which torch's profiler knows nothing."""
    if run.device.kind != "cuda":
        return None
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        way.step()
        run.device.wait()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return overlap(json.loads(path.read_text())["traceEvents"])


def overlap(events: Sequence[dict[str, Any]]) -> Overlap:
    """Returns the overlap that the events of a trace tell, in torch's format: microseconds, by category."""
    kernels = _spans(events, lambda event: event.get("cat") == "kernel")
    copies = _spans(events, lambda event: event.get("cat") == "gpu_memcpy" and "DtoD" not in event.get("name", ""))
    both = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in kernels for b in copies)
    return Overlap(sum(b - a for a, b in kernels) / 1e6, sum(b - a for a, b in copies) / 1e6, both / 1e6)


def _spans(events: Sequence[dict[str, Any]], is_chosen: Any) -> list[tuple[float, float]]:
    """Returns the times in which at least one of the chosen events ran."""
    spans: list[tuple[float, float]] = []
    for event in sorted((event for event in events if is_chosen(event)), key=lambda event: float(event["ts"])):
        begin, end = float(event["ts"]), float(event["ts"]) + float(event["dur"])
        if spans and begin <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(spans[-1][1], end)
        else:
            spans.append((begin, end))
    return spans
