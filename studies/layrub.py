"""Gains and costs of moving activations: ``python -m studies.layrub [--json FILE] [--only SECTIONS]``.

Layrub (TACO 2018) trains on a device what does not fit its memory, by moving activations to the host's. Its abstract
claims 58.2 % less memory on average, 98.9 % at most, at 1.241 times the time, and a ResNet of 1,517 layers. Here the
device is the processor itself, and the link to its host is simulated (:mod:`bench.link`). Three sections:

* networks: the paper's networks, plain, under Layrub's and vDNN's rules, and ours. Losses and gradients have the bits
  of plain's, or nothing is measured. Bytes are counted with the moved values in memory that torch does not count, so
  they are a device's; what is on its way out or back counts. Times are measured with a link that delays and copies
  nothing.
* prefetch: how much of the transfers a schedule hides, on a link that is as fast as a perfect schedule would need.
* deep: a network that its memory does not hold, by every way to train it (:mod:`studies.deep`).

The limit of a link: were every transfer under way while something is computed, forward would take as long as plain's
forward or the bytes out, whichever is longer, and backward as plain's backward or the bytes back. Memory that is freed
stays with the process, plain's too, as it does on a GPU.

The file is long because the three sections belong to one result file.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from backstash import Policy, Session, policies
from backstash.integrations import allocator
from backstash.stores import HostStore, Store
from bench import step_table
from bench.cases import Case, Workload, build
from bench.link import PCIE, FarStore, LinkStore
from bench.peers import Plain
from bench.peers.base import Forward, StepPeer
from bench.peers.stash import StashedForward
from bench.results import Results
from bench.rounds import Deadline, Effort, Summary, interleave, mib, spread, summarise, table
from bench.step_table import timed_step, uncollected
from studies import deep
from studies.deep import Asked, Deep, Run

Named = TypeVar("Named", Case, Deep)

SECTIONS = {"networks": 0.8, "prefetch": 0.2, "deep": 0.0}
"""The sections, in order, and their shares of the time; the deep ones take as long as they take."""

CASES = (
    Case("alexnet", "alexnet", 16, 224),
    Case("googlenet", "googlenet", 4, 224),
    Case("resnet18", "resnet18", 4, 224),
    Case("resnet34", "resnet34", 4, 224),
    Case("resnet50", "resnet50", 4, 224),
    Case("resnet101", "resnet101", 4, 224, share=1.5),
    Case("resnet152", "resnet152", 2, 224),
    Case("wrn28_10", "wrn28_10", 2, 32),
    Case("vgg16", "vgg16", 2, 224),
)
"""Layrub's networks, at a batch that two processor cores compute in a second."""

PREFETCHED = (Case("vgg16", "vgg16", 2, 224), Case("resnet50", "resnet50", 4, 224))
DEEP = (deep.RESNET1517, deep.RESNET15170)
QUICK = (Case("resnet_cifar20", "resnet_cifar20", 4, 32),)

POLICIES: dict[str, Callable[[], Policy]] = {
    "vdnn": policies.vdnn,
    "layrub": policies.layrub,
    "lossless": policies.lossless,
    "offload": policies.offload,
    "offload, one ahead": partial(policies.offload, ahead=1),
}

SCHEDULES: dict[str, Callable[[], Policy]] = {
    "vdnn": policies.vdnn,
    "stored, one ahead": partial(policies.offload, recompute=False, ahead=1),
    "stored, by room": partial(policies.offload, recompute=False),
    "offload": policies.offload,
}
"""Ours move the same bytes in the two rows that are called stored: what is saved, in its smallest exact form."""

BUSY = (0.5, 0.8)
"""Shares of the time of forward or backward, whichever is the tighter, that the link is busy."""


# -- what both sections measure ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Moving:
    """A policy with a link to its host.

    Attributes:
        name: in tables.
        policy: makes the policy.
        bytes_per_second: of the link.
        exact: gradients have plain's bits.
    """

    name: str
    policy: Callable[[], Policy]
    bytes_per_second: float = PCIE
    exact: bool = True

    def start(self, workload: Workload) -> MovingForward:
        """One Session for all steps, for timing."""
        return self._start(workload, HostStore())

    def count(self, workload: Workload) -> MovingForward:
        """The same, for counting."""
        return self._start(workload, FarStore())

    def _start(self, workload: Workload, host: Store) -> MovingForward:
        link = LinkStore(host, self.bytes_per_second)
        return MovingForward(workload, Session(self.policy(), model=workload.model, stores={"host": link}), link)


@dataclass(frozen=True, eq=False)
class MovingForward(StashedForward):
    """It at work.

    Attributes:
        link: to the host.
        began: what had been sent each way, and the seconds waited, when the last step began.
    """

    link: LinkStore
    began: list[float] = field(default_factory=list)

    def loss(self) -> Tensor:
        """The forward pass."""
        self.began[:] = self.sent()
        return super().loss()

    def sent(self) -> tuple[float, ...]:
        """What has been sent each way so far, and the seconds waited."""
        return self.link.out_nbytes, self.link.back_nbytes, self.link.usage().stall_seconds

    def transfer(self) -> Transfer:
        """Of the last step."""
        out, back, stalled = (now - then for now, then in zip(self.sent(), self.began, strict=True))
        seconds = (out + back) / self.link.bytes_per_second
        return Transfer(int(out), int(back), seconds, stalled, 1 - stalled / seconds if seconds else None)


@dataclass(frozen=True)
class Transfer:
    """What crossed the link in a step.

    Attributes:
        out_nbytes, back_nbytes: bytes each way.
        seconds: that the link was busy, both ways added.
        stall_seconds: that the step waited for it.
        hidden: the share of those seconds that it did not wait; None where nothing was moved.
    """

    out_nbytes: int
    back_nbytes: int
    seconds: float
    stall_seconds: float
    hidden: float | None


@dataclass(frozen=True)
class _Timed:
    """A timed step and, where there is a link, what crossed it."""

    step: step_table.StepTime
    transfer: Transfer | None = None


def _timed(workload: Workload, forward: Forward) -> _Timed:
    step = timed_step(workload, forward)  # of two steps the second, from which on the order of reading is known
    return _Timed(step, forward.transfer() if isinstance(forward, MovingForward) else None)


def _median(transfers: Sequence[Transfer]) -> Transfer:
    """That of the step with the median stall."""
    return sorted(transfers, key=lambda one: one.stall_seconds)[len(transfers) // 2]


@dataclass(frozen=True)
class Limit:
    """What the link allows.

    Attributes:
        seconds: of a step whose transfers are all under way while something is computed.
        reached: that over the seconds measured.
    """

    seconds: float
    reached: float


def _limit(forward: float, backward: float, transfer: Transfer, bytes_per_second: float, measured: float) -> Limit:
    out, back = transfer.out_nbytes / bytes_per_second, transfer.back_nbytes / bytes_per_second
    seconds = max(forward, out) + max(backward, back)
    return Limit(seconds, seconds / measured)


# -- networks ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NetworkRow:
    """A network under a policy.

    Attributes:
        policy: its name, or plain.
        stash_nbytes: on the device between forward and backward.
        peak_nbytes: counted device bytes of a step above its start, where parameters and gradients are.
        cut: of the peak, against plain's.
        cut_in_all: of the peak with the parameters and their gradients.
        seconds: of a step.
        times_plain: medians.
        transfer: of a step; None without a link.
        limit: what the link allows.
    """

    policy: str
    stash_nbytes: int
    peak_nbytes: int
    cut: float
    cut_in_all: float
    seconds: Summary
    times_plain: float
    transfer: Transfer | None
    limit: Limit | None


@dataclass(frozen=True)
class NetworkResult:
    """A network.

    Attributes:
        case: what was trained.
        failure: why nothing was measured; empty where it was.
        data: the images.
        parameter_nbytes: of the weights; the gradients take as many.
        rows: plain first.
    """

    case: Case
    failure: str = ""
    data: str = ""
    parameter_nbytes: int = 0
    rows: tuple[NetworkRow, ...] = ()


def measure(case: Case, effort: Effort) -> NetworkResult:
    """Gate, count and time one network."""
    workload = build(case, "cpu")
    moving = {name: Moving(name, policy) for name, policy in POLICIES.items()}
    peers: dict[str, StepPeer] = {"plain": Plain(), **moving}
    counted: dict[str, Forward] = {
        "plain": Plain().start(workload),
        **{name: one.count(workload) for name, one in moving.items()},
    }
    try:
        checks = step_table.check(workload, peers, counted)
    except step_table.GateError as error:
        return NetworkResult(case, str(error))
    stashes = {}
    for name, forward in counted.items():
        report = forward.report()
        assert report is not None
        stashes[name] = report.stash_nbytes - report.moved_nbytes
    counted.clear()
    forwards = {name: peer.start(workload) for name, peer in peers.items()}
    tasks = {name: partial(_timed, workload, forward) for name, forward in forwards.items()}
    with uncollected():
        times = interleave(tasks, effort)
    seconds = {name: summarise([one.step.seconds for one in found]) for name, found in times.items()}
    forward_seconds = summarise([one.step.forward_seconds or 0.0 for one in times["plain"]]).median
    state, plain = 2 * workload.parameter_nbytes, checks["plain"].peak_nbytes
    rows = []
    for name, found in times.items():
        transfers = [one.transfer for one in found if one.transfer is not None and one.transfer.out_nbytes]
        transfer = _median(transfers) if transfers else None
        peak, median = checks[name].peak_nbytes, seconds[name].median
        backward_seconds = seconds["plain"].median - forward_seconds
        limit = None
        if transfer is not None:
            limit = _limit(forward_seconds, backward_seconds, transfer, PCIE, median)
        cuts = 1 - peak / plain, 1 - (peak + state) / (plain + state)
        ratio = median / seconds["plain"].median
        rows.append(NetworkRow(name, stashes[name], peak, *cuts, seconds[name], ratio, transfer, limit))
    return NetworkResult(case, "", workload.data, workload.parameter_nbytes, tuple(rows))


LINK_HEADER = ("out MiB", "back MiB", "link ms", "stall ms", "hidden", "of limit")


def show_network(result: NetworkResult) -> str:
    """The table of one network."""
    if result.failure:
        return f"{result.case}: FAILED: {result.failure}"
    header = ("policy", "stash MiB", "peak MiB", "less", "in all", "step ms", "x plain", *LINK_HEADER)
    title = f"{result.case}, {result.data}; parameters {mib(result.parameter_nbytes)} MiB"
    return f"{title}\n{table(header, map(_network_line, result.rows))}"


def _network_line(row: NetworkRow) -> tuple[str, ...]:
    return (
        row.policy,
        mib(row.stash_nbytes),
        mib(row.peak_nbytes),
        f"{row.cut:.1%}",
        f"{row.cut_in_all:.1%}",
        spread(row.seconds, 1e3, 0),
        f"{row.times_plain:.2f}",
        *_transfer_cells(row.transfer),
        "" if row.limit is None else f"{row.limit.reached:.0%}",
    )


def _transfer_cells(transfer: Transfer | None) -> tuple[str, ...]:
    if transfer is None:
        return ("",) * 5
    hidden = "" if transfer.hidden is None else f"{transfer.hidden:.1%}"
    waited = f"{transfer.seconds * 1e3:.0f}", f"{transfer.stall_seconds * 1e3:.1f}"
    return (mib(transfer.out_nbytes), mib(transfer.back_nbytes), *waited, hidden)


# -- prefetch ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PrefetchRow:
    """A schedule on a link.

    Attributes:
        schedule: a key of `SCHEDULES`.
        busy: how much of the tighter one of forward and backward the link is busy.
        bytes_per_second: of the link, so that it is.
        compute_seconds: of a step whose link takes no time.
        seconds: of a step.
        transfer: of a step.
        limit: what the link allows, and how close the step comes.
    """

    schedule: str
    busy: float
    bytes_per_second: float
    compute_seconds: float
    seconds: float
    transfer: Transfer
    limit: Limit


@dataclass(frozen=True)
class PrefetchResult:
    """A network.

    Attributes:
        case: what was trained.
        rows: schedules on links.
    """

    case: Case
    rows: tuple[PrefetchRow, ...]


def measure_prefetch(case: Case, effort: Effort) -> PrefetchResult:
    """Times every schedule over links that it could hide."""
    workload = build(case, "cpu")
    rows = []
    with uncollected():
        for name, policy in SCHEDULES.items():
            free = _steps(Moving(name, policy, 1e15), workload, effort)
            forward = summarise([one.step.forward_seconds or 0.0 for one in free]).median
            compute = summarise([one.step.seconds for one in free]).median
            moved = _transfer(free)
            for busy in BUSY:
                speed = max(moved.out_nbytes / forward, moved.back_nbytes / (compute - forward)) / busy
                found = _steps(Moving(name, policy, speed), workload, effort)
                seconds, transfer = summarise([one.step.seconds for one in found]).median, _transfer(found)
                limit = _limit(forward, compute - forward, transfer, speed, seconds)
                rows.append(PrefetchRow(name, busy, speed, compute, seconds, transfer, limit))
    return PrefetchResult(case, tuple(rows))


def _steps(moving: Moving, workload: Workload, effort: Effort) -> list[_Timed]:
    return interleave({"": partial(_timed, workload, moving.start(workload))}, effort)[""]


def _transfer(found: Sequence[_Timed]) -> Transfer:
    return _median([one.transfer for one in found if one.transfer is not None])


def show_prefetch(result: PrefetchResult) -> str:
    """The table of one network."""
    header = ("schedule", "link busy", "GB/s", "compute ms", "step ms", *LINK_HEADER)
    rows = (
        (
            row.schedule,
            f"{row.busy:.0%}",
            f"{row.bytes_per_second / 1e9:.2f}",
            f"{row.compute_seconds * 1e3:.0f}",
            f"{row.seconds * 1e3:.0f}",
            *_transfer_cells(row.transfer),
            f"{row.limit.reached:.0%}",
        )
        for row in result.rows
    )
    return f"{result.case}\n{table(header, rows)}"


# -- deep --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeepResult:
    """A deep network.

    Attributes:
        deep: what was trained.
        layers: how many it has.
        runs: the ways, plain's first.
        equal: whether every run that ended well has the losses and weights of plain's, bit for bit.
        cut: of the counted peak, offload's against plain's; None where one of them was not counted.
        times_plain: the fastest step of offload over the link against plain's; None where one of them failed.
    """

    deep: Deep
    layers: int
    runs: tuple[Run, ...]
    equal: bool
    cut: float | None
    times_plain: float | None


DEEP_WAYS: dict[str, tuple[deep.Way, bool]] = {
    "plain": ("plain", False),
    "plain-limited": ("plain", True),
    "disk-limited": ("disk", True),
    "counted": ("counted", False),
    "link": ("link", False),
}
"""Ways to train a deep network, and whether in limited memory."""


def measure_deep(
    one: Deep, steps: int, folder: Path | None, ways: Sequence[str], known: Mapping[str, Run]
) -> Iterator[DeepResult]:
    """One way after the other; yields what is known after each.

    Args:
        one: the network.
        steps: of each run.
        folder: of a disk store's file.
        ways: keys of `DEEP_WAYS` that are run.
        known: runs of others, from before.
    """
    runs = dict(known)
    for name in ways:
        way, limited = DEEP_WAYS[name]
        runs[name] = deep.run(Asked(one, way, steps, limited), folder)
        if "plain" in runs:
            yield _judge(one, [runs[key] for key in DEEP_WAYS if key in runs])


def _known(path: Path | None, one: Deep) -> dict[str, Run]:
    """The runs of a network that a file has already."""
    found = json.loads(path.read_text()).get("deep", []) if path is not None and path.exists() else []
    same = [result["runs"] for result in found if result["deep"]["name"] == one.name]
    runs = [Run.of(fields) for fields in (same[0] if same else ())]
    return {key: run for key, asked in DEEP_WAYS.items() for run in runs if (run.way, run.limited) == asked}


def _judge(one: Deep, runs: Sequence[Run]) -> DeepResult:
    named = {run.way: run for run in reversed(runs)}  # of plain's two the first
    plain, counted, link = named["plain"], named.get("counted"), named.get("link")
    ended = [run for run in runs if not run.failure]
    equal = all((run.losses, run.weights) == (plain.losses, plain.weights) for run in ended)
    cut = 1 - counted.peak_nbytes / plain.peak_nbytes if counted and counted.peak_nbytes and plain.peak_nbytes else None
    ratio = min(link.seconds) / min(plain.seconds) if link and link.seconds and plain.seconds else None
    return DeepResult(one, one.layers, tuple(runs), equal, cut, ratio)


def show_deep(result: DeepResult) -> str:
    """The table of one deep network."""
    one = result.deep
    header = ("way", "steps", "bits", "peak MiB", "step s", "out MiB", "stall s", "may grow MiB", "grew MiB", "RSS MiB")
    plain = result.runs[0]

    def line(run: Run) -> tuple[str, ...]:
        equal = (run.losses, run.weights) == (plain.losses, plain.weights)
        bits = "-" if run.failure else "equal" if equal else "OTHER"
        return (
            f"{run.way}, limited" if run.limited else run.way,
            str(len(run.losses)),
            bits,
            mib(run.peak_nbytes) if run.peak_nbytes else "",
            " ".join(f"{seconds:.1f}" for seconds in run.seconds),
            mib(run.out_nbytes) if run.out_nbytes else "",
            f"{run.stall_seconds:.2f}" if run.stall_seconds else "",
            "" if run.limit_nbytes is None else mib(run.limit_nbytes - run.virtual_nbytes),
            mib(run.virtual_peak_nbytes - run.virtual_nbytes),
            mib(run.resident_peak_nbytes),
        )

    facts = (
        f"{one.name}: {result.layers} layers, blocks {'/'.join(map(str, one.blocks))}, first stage {one.width} wide, "
        f"batch {one.batch}, {one.size}x{one.size}; weights {mib(plain.parameter_nbytes)} MiB, as much of gradients "
        f"and of momenta"
    )
    lines = [facts, table(header, map(line, result.runs))]
    lines += [f"{run.way}{', limited' * run.limited}: {run.failure}" for run in result.runs if run.failure]
    if result.cut is not None and result.times_plain is not None:
        lines.append(f"peak: {result.cut:.2%} less; step: {result.times_plain:.2f}x plain; the fastest of each")
    return "\n".join(lines)


# -- the program -------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the sections, prints tables, writes the JSON; returns 1 where bits differ, else 0."""
    asked = _arguments(arguments)
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler that counts bytes else prints two lines per step
    allocator.keep_memory()
    results = Results("studies.layrub", asked.json, arguments, quick=asked.quick, bytes_per_second=PCIE)
    chosen = QUICK if asked.quick else _named(CASES, asked.networks)
    deadline = Deadline.after(asked.seconds)
    failed = False
    if "networks" in asked.only:
        measured = []
        for index, case in enumerate(chosen):
            left = sum(other.share for other in chosen[index:])
            share = 1.0 if "prefetch" not in asked.only else SECTIONS["networks"]
            one = measure(case, Effort(asked.rounds, deadline.part(share * case.share / left)))
            measured.append(one)
            failed |= bool(one.failure)
            results.write(networks=measured)
            print(f"\n{show_network(one)}", flush=True)
    if "prefetch" in asked.only:
        found = []
        for case in QUICK if asked.quick else PREFETCHED:
            found.append(measure_prefetch(case, Effort(min(3, asked.rounds))))
            results.write(prefetch=found)
            print(f"\n{show_prefetch(found[-1])}", flush=True)
    if "deep" in asked.only:
        done: list[DeepResult] = []
        for network in (deep.QUICK,) if asked.quick else _named(DEEP, asked.deep):
            so_far: DeepResult | None = None
            known = _known(asked.json, network) if asked.ways else {}
            ways = asked.ways.split(",") if asked.ways else tuple(DEEP_WAYS)
            for so_far in measure_deep(network, asked.steps, asked.folder, ways, known):
                results.write(deep=[*done, so_far])
            assert so_far is not None
            done.append(so_far)
            failed |= not so_far.equal
            print(f"\n{show_deep(so_far)}", flush=True)
    print(f"\n{results.close()}")
    return int(failed)


def _named(known: Sequence[Named], names: str | None) -> tuple[Named, ...]:
    of = {one.name: one for one in known}
    wanted = list(of) if names is None else names.split(",")
    for name in wanted:
        if name not in of:
            raise SystemExit(f"studies.layrub: the network {name!r} was asked for; use some of {', '.join(of)}")
    return tuple(of[name] for name in wanted)


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    text = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m studies.layrub", description=text)
    parser.add_argument("--json", type=Path, help="the file to write (default: none)")
    parser.add_argument("--only", default=",".join(SECTIONS), help=f"sections, of {','.join(SECTIONS)}")
    parser.add_argument("--networks", help="of the section networks, comma-separated (default: all)")
    parser.add_argument("--deep", help="of the section deep, comma-separated (default: all)")
    ways = f"of {','.join(DEEP_WAYS)}; the others' runs are taken from the file, which has to have plain's"
    parser.add_argument("--ways", help=f"to train the deep networks, {ways} (default: all, anew)")
    parser.add_argument("--seconds", type=float, default=280.0, help="for the networks (default: 280)")
    parser.add_argument("--rounds", type=int, default=5, help="of timed steps, at most (default: 5)")
    parser.add_argument("--steps", type=int, default=3, help="of every deep run (default: 3)")
    parser.add_argument("--folder", type=Path, help="on the disk that deep networks use (default: the system's)")
    parser.add_argument("--quick", action="store_true", help="small networks: shows that everything runs")
    asked = parser.parse_args(arguments)
    asked.only = asked.only.split(",")
    for name in asked.only:
        if name not in SECTIONS:
            parser.error(f"the section {name!r} was asked for; use some of {', '.join(SECTIONS)}")
    for name in asked.ways.split(",") if asked.ways else ():
        if name not in DEEP_WAYS:
            parser.error(f"the way {name!r} was asked for; use some of {', '.join(DEEP_WAYS)}")
    return asked


if __name__ == "__main__":
    raise SystemExit(main())
