"""Movement hidden behind a link, in simulated time: ``python -m bench.hiding --json docs/results/hiding-DATE.json``.

Two networks run as narrow copies, with a clock that moves only when something computes or waits: each module that has
no others in it takes its part of the step, and backward takes twice that. The whole step takes as many seconds, and
everything that ``offload`` moves has as many bytes, as on the GPU of the measured file, times as large a batch as is
asked for. The link has a known speed. So what a schedule waits for is exact, and the same on every machine; what copies
cost the memory of a device is not in it. Each way's gradients are compared with plain's, bit for bit.

The floor of a step is a time that no schedule of the same bytes can go below: everything leaves before backward begins
and comes back after that. For ``offload``, which moves everything, it is the bytes over the speed, out and then back.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from backstash import Policy, Session, policies
from backstash.planning.measure.link import of_speed
from backstash.planning.run.hidden import OffloadHidden
from backstash.stores import HostStore
from backstash.stores.host import IN_FLIGHT
from bench.link import LinkStore
from bench.results import Results
from bench.rounds import table
from tests.networks import families
from tests.networks.resnet import resnet
from tests.simulated_clock import Clock

MEASURED = Path(__file__).parents[1] / "docs" / "results" / "gpu-cuda-2026-11-23.json"

BYTES_PER_SECOND = 55e9
"""Of each direction: pinned memory over 16 lanes of PCIe 5."""

LATENCY = 10e-6

GIB = (0.25, 0.5, 1.0, 1.5)
STEPS = 4
"""The first ones learn; the last one counts."""

BYTES_PER_FLOP = 0.03
"""A byte of memory takes as long as so many operations, inverted: 75 TFLOP/s beside 2.4 TB/s."""

Made = tuple[nn.Module, Callable[[], Tensor]]


def _resnet50() -> Made:
    model = resnet(num_classes=10, width=16)
    images, labels = torch.randn(2, 3, 32, 32), torch.arange(2)
    return model, lambda: functional.cross_entropy(model(images), labels)


def _gpt2() -> Made:
    model, inputs = families.make("GPT-2", families.Size(layers=4, width=32, tokens=32, image=32, batch=2))
    return model, lambda: model(**inputs).loss


NETWORKS: dict[str, tuple[str, Callable[[], Made], int, int]] = {
    "resnet50": ("ResNet-50", _resnet50, 64, 4),
    "gpt2, bf16": ("GPT-2, 4 layers", _gpt2, 16, 4),
}
"""By their names in the measured file: a title, what makes the narrow copy, the measured batch, times as large here."""


@dataclass(frozen=True)
class Row:
    """A step under a policy. Bytes and seconds are those of the network, not of its narrow copy.

    Attributes:
        way: which policy.
        moved_nbytes: bytes that go out.
        held_nbytes: bytes of what is saved that are on the device when backward begins.
        seconds: of the step.
        waited: seconds of them that it waited for the link.
        predicted: seconds that the policy has predicted; None for a policy that predicts none.
        floor: seconds below which no schedule of these bytes can go.
        exact: whether the gradients have the bits of plain PyTorch.
    """

    way: str
    moved_nbytes: float
    held_nbytes: float
    seconds: float
    waited: float
    predicted: float | None
    floor: float
    exact: bool


@dataclass(frozen=True)
class Network:
    """A network over a link.

    Attributes:
        title: its name.
        batch: of the network, not of its copy.
        scale: bytes of the network for each of its narrow copy.
        forward_seconds, backward_seconds: of a step that moves nothing.
        rows: one for each policy.
    """

    title: str
    batch: int
    scale: float
    forward_seconds: float
    backward_seconds: float
    rows: tuple[Row, ...]


class Running:
    """A network whose modules take a clock's time.

    Args:
        make: makes it.
        seconds: of a step.
    """

    def __init__(self, make: Callable[[], Made], seconds: float) -> None:
        torch.manual_seed(0)
        self.model, self.loss = make()
        self.clock = Clock()
        self._state = {key: value.clone() for key, value in self.model.state_dict().items()}
        self._share: dict[nn.Module, float] = {}
        for module in self.model.modules():
            if not any(True for _ in module.children()):
                module.register_forward_hook(self._compute)
        self._unit = 0.0
        self._costs: dict[nn.Module, float] = {}
        self.step(None)
        self._unit = seconds / (3 * sum(self._costs.values()))

    def _compute(self, module: nn.Module, arguments: Any, result: Any) -> None:
        cost = self._costs.setdefault(module, _cost(module, arguments, result)) * self._unit
        self.clock.sleep(cost)
        if isinstance(result, Tensor) and result.grad_fn is not None:
            result.grad_fn.register_hook(lambda *_: self.clock.sleep(2 * cost))

    def step(self, session: Session | None) -> tuple[float, float, list[Tensor | None]]:
        """Runs a step as if it were the first one; returns the seconds of forward and of backward, and gradients."""
        self.model.load_state_dict(self._state)
        self.model.zero_grad()
        torch.manual_seed(1)
        began = self.clock.now
        with session or nullcontext():
            loss = self.loss()
        forward = self.clock.now - began
        loss.backward()
        gradients = [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]
        return forward, self.clock.now - began - forward, gradients


def _cost(module: nn.Module, arguments: Any, result: Any) -> float:
    """Returns what a module's forward takes, in the time of a byte of memory."""
    tensors = [each for each in (*arguments, result) if isinstance(each, Tensor)]
    nbytes = sum(each.nbytes for each in tensors)
    weight = getattr(module, "weight", None)
    flops = 0
    is_product = isinstance(weight, Tensor) and weight.dim() > 1 and not isinstance(module, nn.Embedding)
    if isinstance(result, Tensor) and isinstance(weight, Tensor) and is_product:
        flops = 2 * result.numel() * weight.numel() // max(1, result.shape[1 if weight.dim() == 4 else -1])
    return max(nbytes, BYTES_PER_FLOP * flops)


def measure(name: str, measured: dict[str, Any], bytes_per_second: float) -> Network:
    """Runs a network under every policy."""
    title, make, batch, times = NETWORKS[name]
    rows = {row["way"]: row for row in measured["rows"]}
    seconds = times * rows["plain"]["seconds"]["median"]
    moved_in_all = times * (rows["plain"]["peak_nbytes"] - rows["offload"]["peak_nbytes"])
    running = Running(make, seconds)
    forward, backward, expected = running.step(None)
    probe = LinkStore(HostStore(), 1e30, clock=running.clock, sleep=running.clock.sleep)
    session = Session("offload", model=running.model, stores={"host": probe}, min_nbytes=0)
    for _ in range(2):
        before = probe.out_nbytes
        running.step(session)
    scale = moved_in_all / (probe.out_nbytes - before)
    speed = bytes_per_second / scale
    link = of_speed(speed, LATENCY)
    hidden = {"smallest": 0, "link": link, "clock": running.clock}
    ways: dict[str, Policy] = {
        "lossless": policies.lossless(),
        "offload": policies.offload(),
        "offload_hidden": policies.offload_hidden(**hidden),  # type: ignore[arg-type]
        **{
            f"offload_hidden, {gib} GiB": policies.offload_hidden(nbytes=math.ceil(gib * 2**30 / scale), **hidden)  # type: ignore[arg-type]
            for gib in GIB
        },
    }
    found = []
    for way, policy in ways.items():
        in_flight = math.ceil(IN_FLIGHT / scale)
        store = LinkStore(
            HostStore(), speed, LATENCY, in_flight=in_flight, clock=running.clock, sleep=running.clock.sleep
        )
        session = Session(policy, model=running.model, stores={"host": store}, min_nbytes=0)
        for _ in range(STEPS):
            out, back, stalled = store.out_nbytes, store.back_nbytes, store.usage().stall_seconds
            first, second, gradients = running.step(session)
        out, back, stalled = store.out_nbytes - out, store.back_nbytes - back, store.usage().stall_seconds - stalled
        exact = all(
            a is b or (a is not None and b is not None and torch.equal(a, b))
            for a, b in zip(gradients, expected, strict=True)
        )
        decision = policy.decision if isinstance(policy, OffloadHidden) else None
        predicted = None if decision is None else forward + backward + decision.found.passage.added
        floor = max(forward, out / speed) + max(backward, back / speed)
        report = session.report()
        held = scale * (report.stash_nbytes - report.moved_nbytes)
        found.append(Row(way, scale * out, held, first + second, stalled, predicted, floor, exact))
    return Network(title, batch * times, scale, forward, backward, tuple(found))


def lines(network: Network) -> list[tuple[str, ...]]:
    """Returns a network's rows as text."""
    plain = network.forward_seconds + network.backward_seconds
    return [
        (
            f"{network.title}, batch {network.batch}" if number == 0 else "",
            row.way,
            f"{row.moved_nbytes / 2**30:.2f}",
            f"{row.held_nbytes / 2**30:.2f}",
            f"{row.seconds / plain:.3f}",
            "" if row.predicted is None else f"{row.predicted / plain:.3f}",
            f"{row.floor / plain:.3f}",
            f"{row.seconds / row.floor:.3f}",
            "same" if row.exact else "DIFFER",
        )
        for number, row in enumerate(network.rows)
    ]


HEADER = ("network", "policy", "moved, GiB", "held, GiB", "step", "predicted", "floor", "of the floor", "bits")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs everything, prints a table and writes the JSON; returns 1 if a gradient differs."""
    parser = argparse.ArgumentParser(prog="python -m bench.hiding", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="the file to write")
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument(
        "--bytes-per-second", type=float, default=BYTES_PER_SECOND, help="of each direction of the link"
    )
    asked = parser.parse_args(arguments)
    if not asked.bytes_per_second > 0:
        raise SystemExit(f"bench.hiding was asked for {asked.bytes_per_second} bytes per second, but it takes more.")
    measured = {each["name"]: each for each in json.loads(MEASURED.read_text())["networks"]}
    results = Results(
        "bench.hiding", asked.json, arguments, measured=MEASURED.name, bytes_per_second=asked.bytes_per_second
    )
    found = []
    for name in asked.networks:
        found.append(measure(name, measured[name], asked.bytes_per_second))
        results.write(networks=found)
        print(table(HEADER, lines(found[-1])), flush=True)
    print(results.close())
    return int(not all(row.exact for network in found for row in network.rows))


if __name__ == "__main__":
    raise SystemExit(main())
