"""The time of whole steps under a Session, over plain's: ``python -m bench.steptime [--json FILE] [--seconds N]``.

The networks have their published sizes, and torch uses its default number of threads. `bench.hostcost` is the
opposite: small tensors on one thread, where the Session's own work is nearly all that is seen.

For each network, in this order:

1. Some GiB of memory are written to and freed, since memory that a virtual machine has not used for a while is slow at
   first.
2. The gate: each candidate takes two steps from the same weights, data and dropout. All gradients must have the bits of
   plain's after every step; otherwise nothing of this network is timed. The first step of a Session, in which it learns
   what the network does, is timed apart.
3. The rounds: every candidate once per round, each round in another order. A candidate's step runs twice and the second
   step is timed, because the first step finds the heap as another candidate left it.

A step is a forward and a backward pass. The gradients were allocated before. Setting them to zero, seeding dropout and
collecting garbage are not timed.

Nothing else may run on the machine. Torch's threads wait for one another many times in a step, and a thread that shares
its core with another program lets all of them wait: MobileNetV2's step has been seen to take twenty times as long. The
results have the machine's load before and after each network.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backstash import Session
from bench import cases
from bench.cases import SEED, Case, Workload
from bench.hostcost import count_saved, identity_hooks
from bench.machine import load
from bench.results import Results
from bench.rounds import UNTIL_SETTLED, Deadline, Effort, Summary, interleave, spread, summarise, table
from bench.step_table import GateError, same_bits, uncollected

FORMAT = 1
"""Version of the JSON's layout."""

CASES = (
    Case("resnet50", "resnet50", 8, 224),
    Case("vgg16", "vgg16", 4, 224, share=2.0),
    Case("alexnet", "alexnet", 32, 224),
    Case("mobilenet_v2", "mobilenet_v2", 8, 224),
    Case("densenet121", "densenet121", 4, 224),
    Case("nin", "nin", 16, 224),
    Case("convnext_tiny", "convnext_tiny", 4, 224, needs="transformers"),
    Case("vit_b16", "vit_b16", 4, 224, share=1.5, needs="transformers"),
    Case("swin_tiny", "swin_tiny", 4, 224, needs="transformers"),
    Case("gpt2", "gpt2_words", 2, 512, share=1.5, needs="transformers"),
)

GATED_STEPS = 2
"""Steps of each candidate before the rounds, unless it is a Session, which settles first."""


@dataclass(eq=False)
class Candidate:
    """A context around the forward pass.

    Attributes:
        context: returns the context of the next step.
        last: the context of the last step.
    """

    context: Callable[[], AbstractContextManager[object]]
    last: AbstractContextManager[object] = field(default_factory=nullcontext)

    def forward(self, workload: Workload) -> Tensor:
        """Returns the loss."""
        self.last = self.context()
        with self.last:
            return workload.loss()


def candidates() -> dict[str, Candidate]:
    """All candidates by name; plain is the first, and ``plain again`` shows the noise."""
    lossless, keep = Session("lossless"), Session("keep")
    return {
        "plain": Candidate(nullcontext),
        "plain again": Candidate(nullcontext),
        "identity hooks": Candidate(identity_hooks),
        "keep": Candidate(lambda: keep),
        "lossless": Candidate(lambda: lossless),
        "lossless, new Session": Candidate(lambda: Session("lossless")),
    }


@dataclass(frozen=True)
class Row:
    """One candidate on one network.

    Attributes:
        candidate: its name.
        seconds: wall time of a step.
        times_plain: the same over plain's in the same round.
        first_seconds: wall time of the candidate's very first step. The first step of ``lossless`` is the only one in
            which a Session knows nothing; ``lossless, new Session`` finds what that Session learned about the network.
        saved_nbytes: bytes that the forward pass saves, parameters excluded; None without a Session.
        stash_nbytes: bytes that are held for them between forward and backward; None without a Session.
        ratio: the former over the latter.
    """

    candidate: str
    seconds: Summary
    times_plain: Summary
    first_seconds: float
    saved_nbytes: int | None
    stash_nbytes: int | None
    ratio: float | None


@dataclass(frozen=True)
class Measured:
    """All candidates on one network.

    Attributes:
        case: the network, and the batch that it was trained on.
        status: ``"measured"``, ``"skipped"`` or ``"failed"`` (at the gate).
        reason: why it was skipped or failed.
        data: the kind of the images or texts.
        saved: number of tensors that autograd saves in a step.
        unstable: names of the gradients that plain PyTorch computes differently at every step; nobody's are compared.
        load_before, load_after: load averages of the machine, 1, 5 and 15 minutes.
        rows: the results, those of plain first.
    """

    case: Case
    status: str
    reason: str = ""
    data: str = ""
    saved: int = 0
    unstable: tuple[str, ...] = ()
    load_before: tuple[float, ...] = ()
    load_after: tuple[float, ...] = ()
    rows: tuple[Row, ...] = ()


def step(workload: Workload, candidate: Candidate) -> float:
    """Runs a forward and a backward pass, from gradients of zero; returns their seconds."""
    for parameter in workload.model.parameters():
        assert parameter.grad is not None
        parameter.grad.zero_()
    gc.collect()
    torch.manual_seed(SEED)
    started = time.perf_counter()
    loss = candidate.forward(workload)
    torch.autograd.backward([loss])
    return time.perf_counter() - started


def touch_memory(nbytes: int) -> None:
    """Writes to this much memory, but at most to half of what is free, and frees it again.

    The host of a virtual machine may take memory back that the machine does not use. The first write to such memory is
    slow: on one such machine it took seven times as long as the same write to memory that had been used just before.
    """
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if "SC_AVPHYS_PAGES" in os.sysconf_names else 0
    torch.empty(min(nbytes, free // 2), dtype=torch.uint8).fill_(1)


def second_step(workload: Workload, candidate: Candidate) -> float:
    """Runs two steps; returns the seconds of the second."""
    step(workload, candidate)
    return step(workload, candidate)


@dataclass(frozen=True)
class Gated:
    """What the gate returns.

    Attributes:
        first_seconds: seconds of the first step of each candidate, by name.
        unstable: see Measured.
    """

    first_seconds: dict[str, float]
    unstable: tuple[str, ...]


def gate(workload: Workload, compared: Mapping[str, Candidate]) -> Gated:
    """Compares the gradients of each candidate's first steps with those of plain's first step, bit by bit.

    Args:
        workload: the network and its batch.
        compared: the candidates by name, those of plain PyTorch first.

    Raises:
        GateError: a candidate's gradients differ.
    """
    reference: dict[str, Tensor] = {}
    first_seconds: dict[str, float] = {}
    unstable: set[str] = set()
    for name, candidate in compared.items():
        for number in range(UNTIL_SETTLED):
            if number >= GATED_STEPS and not isinstance(candidate.last, Session):
                break
            seconds = step(workload, candidate)
            first_seconds.setdefault(name, seconds)
            found = {key: value.grad for key, value in workload.model.named_parameters() if value.grad is not None}
            if not reference:
                reference = {key: gradient.clone() for key, gradient in found.items()}
            differing = {key for key, gradient in found.items() if not same_bits(gradient, reference[key])}
            if name.startswith("plain"):
                unstable |= differing
            elif differing - unstable:
                names = sorted(differing - unstable)
                raise GateError(
                    f"{name} was to compute the gradients of {workload.case} bit for bit as plain PyTorch does; "
                    f"{len(names)} of {len(reference)} differ in step {number + 1} ({', '.join(names[:3])}); nothing "
                    "was timed. Find the codec or need that is wrong."
                )
    return Gated(first_seconds, tuple(sorted(unstable)))


def measure(case: Case, effort: Effort) -> Measured:
    """Measures all candidates on one network, or says why not."""
    reason = case.absent()
    if reason is not None:
        return Measured(case, "skipped", reason)
    before = load()
    workload, measured = cases.build(case, "cpu"), candidates()
    saved = count_saved(workload.loss)
    try:
        gated = gate(workload, measured)
    except GateError as error:
        return Measured(case, "failed", str(error), workload.data, saved, (), before, load())
    with uncollected():
        found = interleave({name: partial(second_step, workload, it) for name, it in measured.items()}, effort)
    rows = []
    for name, seconds in found.items():
        ratios = [own / plain for own, plain in zip(seconds, found["plain"], strict=True)]
        last = measured[name].last
        report = last.report() if isinstance(last, Session) else None
        accounts = (None, None, None) if report is None else (report.saved_nbytes, report.stash_nbytes, report.ratio)
        rows.append(Row(name, summarise(seconds), summarise(ratios), gated.first_seconds[name], *accounts))
    return Measured(case, "measured", "", workload.data, saved, gated.unstable, before, load(), tuple(rows))


def show(measured: Sequence[Measured]) -> str:
    """A line for each candidate of each network, then a line for each network that was not measured."""
    header = ("network", "candidate", "saved", "step ms", "x plain", "first step ms", "stash ratio")
    lines = [
        (
            str(found.case),
            row.candidate,
            str(found.saved),
            spread(row.seconds, 1e3, 1),
            spread(row.times_plain, digits=3),
            f"{row.first_seconds * 1e3:.1f}",
            "" if row.ratio is None else f"{row.ratio:.2f}",
        )
        for found in measured
        for row in found.rows
    ]
    notes = ["load before and after: " + ", ".join(map(_load, measured))]
    notes += [f"{found.case}: {found.status.upper()}: {found.reason}" for found in measured if found.reason]
    notes += [
        f"{found.case}: not compared, since plain PyTorch differs from itself: {len(found.unstable)} gradients"
        for found in measured
        if found.unstable
    ]
    return "\n".join([table(header, lines), *notes])


def _load(found: Measured) -> str:
    averages = " to ".join(f"{load[0]:.1f}" for load in (found.load_before, found.load_after) if load)
    return f"{found.case.name} {averages or 'unknown'}"


ENOUGH = 5
"""Rounds below which a network is measured again by a run that is resumed."""


def _measured_before(found: dict[str, Any]) -> Measured:
    """A network of the JSON."""
    rows = [
        Row(**{**row, "seconds": Summary(**row["seconds"]), "times_plain": Summary(**row["times_plain"])})
        for row in found["rows"]
    ]
    return Measured(**{**found, "case": Case(**found["case"]), "rows": tuple(rows)})


def _is_whole(network: Measured) -> bool:
    return network.status == "measured" and all(row.seconds.count >= ENOUGH for row in network.rows)


def _ordered(measured: Mapping[str, Measured]) -> list[Measured]:
    return [measured[case.name] for case in CASES if case.name in measured]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures every network, prints a table, writes the JSON; returns 1 if a gate failed, else 0."""
    parser = argparse.ArgumentParser(prog="python -m bench.steptime", description="Time of whole steps.")
    parser.add_argument("--json", type=Path, help="the file to write (default: none)")
    parser.add_argument("--seconds", type=float, default=1800.0, help="for everything (default: 1800)")
    parser.add_argument("--touch-gib", type=float, default=4.0, help="memory to write to before (default: 4)")
    parser.add_argument("--rounds", type=int, default=7, help="of each network, at most (default: 7)")
    names = [case.name for case in CASES]
    parser.add_argument("--only", action="append", choices=names, help="this network (may be given several times)")
    parser.add_argument(
        "--resume", action="store_true", help=f"leave out the networks of which --json has {ENOUGH} rounds or more"
    )
    asked = parser.parse_args(arguments)
    deadline = Deadline.after(asked.seconds)
    results = Results("bench.steptime", asked.json, arguments, format=FORMAT, resume=asked.resume)
    known = [_measured_before(network) for network in results.found.get("networks", [])]
    measured = {network.case.name: network for network in known if _is_whole(network)}
    chosen = [case for case in CASES if asked.only is None or case.name in asked.only]
    missing = [case for case in chosen if case.name not in measured]
    for index, case in enumerate(missing):
        part = deadline.part(case.share / sum(other.share for other in missing[index:]))
        touch_memory(int(asked.touch_gib * 2**30))
        measured[case.name] = measure(case, Effort(asked.rounds, part))
        results.write(networks=_ordered(measured))
    print(f"{show(_ordered(measured))}\n\n{results.close()}")
    return int(any(found.status == "failed" for found in measured.values()))


if __name__ == "__main__":
    raise SystemExit(main())
