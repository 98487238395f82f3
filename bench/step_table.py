"""Training steps: what each way of saving costs in bytes and in time.

For each case, in this order:

1. The gate. One step of each candidate from the same weights, data and dropout: losses and all gradients must have the
   bits of plain's, else the case fails and nothing is timed. The same step is the one whose bytes are counted.
2. The resident peak, on CPU: each candidate in a process of its own, so that none finds memory that another one left.
3. The time: rounds in one process, every candidate once per round, each round in another order. Its step is run twice
   and the second is timed: the first meets a heap that another candidate has left, which on CPU is 4 % of a ResNet-50.

A step is a forward and a backward pass into gradients that were there before; zeroing them, seeding dropout and
updating the weights are not timed and the same for all. Weights never change, so every step does the same work.

The file is long because the gate, the three measurements and their table belong to one result file.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import math
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import backstash
from backstash.report import meter
from backstash.stash import buffers
from backstash.stash.ledger import CodecTotal, Report
from bench.cases import SEED, Case, Workload, build, find
from bench.machine import ROOT, load
from bench.peers import StepPeer, peak_peers, step_peers
from bench.peers.base import Forward
from bench.rounds import Deadline, Effort, Summary, interleave, mib, spread, summarise, table

RESIDENT_STEPS = 3
"""Most steps that the resident peak is the median of."""


class GateError(AssertionError):
    """A candidate that has to be exact computed another loss or gradient than plain PyTorch."""


@dataclass(frozen=True)
class Gate:
    """What the comparison with plain PyTorch said.

    Attributes:
        equal: whether the loss and all compared gradients have the same bits.
        differing: names of those that have not.
        unstable: names of those that plain PyTorch itself computes differently a second time, and that were therefore
            not compared (some CUDA kernels add in any order).
        error: norm of the difference of all gradients over the norm of plain's; 0 where none differs.
    """

    equal: bool
    differing: tuple[str, ...] = ()
    unstable: tuple[str, ...] = ()
    error: float = 0.0


@dataclass(frozen=True)
class Resident:
    """The resident high-water mark of a step, in a process of its own.

    Attributes:
        growth_nbytes: median growth above what was resident before the step; gradients and parameters were.
        before_nbytes: resident then, freed memory given back to the system.
        growths: of every step measured.
    """

    growth_nbytes: int
    before_nbytes: int
    growths: tuple[int, ...]


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step.

    Attributes:
        seconds: forward and backward.
        forward_seconds: the forward pass alone; None on CUDA, where the host does not wait in between.
    """

    seconds: float
    forward_seconds: float | None


@dataclass(frozen=True)
class CandidateResult:
    """One candidate in one case.

    Attributes:
        name: the candidate.
        gate: the comparison with plain.
        saved_nbytes: bytes that its forward pass saves, parameters excluded, before any encoding; None where nobody
            counts them.
        stash_nbytes: bytes held for them between forward and backward.
        peak_nbytes: the most bytes of tensors alive at once in a step above its start; on CPU counted from torch's
            allocations, on CUDA ``max_memory_allocated``.
        resident: the resident peak; None on CUDA, or where it was not measured.
        resident_note: why it was not.
        encode_seconds, decode_seconds: host time that the last round spent on it; None where nobody counts it.
        by_codec: which codec did how much of it.
        seconds: of a step.
        forward: of its forward pass.
        times_plain: seconds over plain's, round by round.
        times_plain_of_medians: median seconds over plain's median.
        rounds: every round, in order.
    """

    name: str
    gate: Gate
    saved_nbytes: int | None
    stash_nbytes: int | None
    peak_nbytes: int
    resident: Resident | None
    resident_note: str
    encode_seconds: float | None
    decode_seconds: float | None
    by_codec: tuple[CodecTotal, ...]
    seconds: Summary
    forward: Summary | None
    times_plain: Summary
    times_plain_of_medians: float
    rounds: tuple[StepTime, ...]


@dataclass(frozen=True)
class CaseResult:
    """One case.

    Attributes:
        case: the case.
        status: ``"measured"``, ``"skipped"`` or ``"failed"`` (at the gate).
        reason: why it was skipped or failed.
        data: what was trained on.
        segments: what checkpoint recomputes.
        parameter_nbytes: bytes of the parameters.
        rounds: rounds done.
        load_before, load_after: load averages of the machine, 1, 5 and 15 minutes.
        candidates: the results; the first is plain's.
    """

    case: Case
    status: str
    reason: str = ""
    data: str = ""
    segments: str = ""
    parameter_nbytes: int = 0
    rounds: int = 0
    load_before: tuple[float, ...] = ()
    load_after: tuple[float, ...] = ()
    candidates: tuple[CandidateResult, ...] = ()


@dataclass(frozen=True)
class Plan:
    """How to measure a case.

    Attributes:
        effort: rounds, and the deadline of the whole case.
        resident: whether to measure the resident peak in processes of their own.
        quick: whether the cases are the small ones, for the other processes to find.
    """

    effort: Effort
    resident: bool = True
    quick: bool = False


def measure(case: Case, device: str, plan: Plan, peers: Sequence[StepPeer] | None = None) -> CaseResult:
    """Measures a case, or says why not.

    Args:
        case: what to train.
        device: ``"cpu"`` or ``"cuda"``.
        plan: how much to measure.
        peers: the candidates, plain first; None for all of the device.
    """
    reason = case.absent()
    if reason is not None:
        return CaseResult(case, "skipped", reason)
    before = load()
    workload = build(case, device)
    candidates = {peer.name: peer for peer in peers or step_peers(device)}
    forwards = {name: peer.start(workload) for name, peer in candidates.items()}
    try:
        checks = check(workload, candidates, forwards)
    except GateError as error:
        return CaseResult(case, "failed", str(error), workload.data, load_before=before, load_after=load())
    resident = _resident(case, device, plan, list(candidates))
    tasks = {name: partial(timed_step, workload, forward) for name, forward in forwards.items()}
    with uncollected():
        times = interleave(tasks, plan.effort)
    plain = times[next(iter(candidates))]
    results = [
        _result(name, checks[name], resident[name], forward.report(), times[name], plain)
        for name, forward in forwards.items()
    ]
    return CaseResult(
        case,
        "measured",
        data=workload.data,
        segments=workload.segments,
        parameter_nbytes=workload.parameter_nbytes,
        rounds=len(plain),
        load_before=before,
        load_after=load(),
        candidates=tuple(results),
    )


# -- the gate ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Checked:
    """What the gate's step told of a candidate: see CandidateResult."""

    gate: Gate
    peak_nbytes: int


def check(workload: Workload, peers: Mapping[str, StepPeer], forwards: Mapping[str, Forward]) -> dict[str, Checked]:
    """One counted step of each candidate, compared with the first's, bit by bit.

    Raises:
        GateError: a candidate that has to be exact is not.
    """
    first, *others = peers
    with _deterministic(workload.device):
        reference, peak = _observe(workload, forwards[first])
        checks = {first: Checked(Gate(True), peak)}
        for name in others:
            seen, peak = _observe(workload, forwards[name])
            gate = _compare(workload, forwards[first], reference, seen)
            if peers[name].exact and not gate.equal:
                raise GateError(_gate_message(workload.case, name, gate, len(reference)))
            checks[name] = Checked(gate, peak)
    return checks


def _observe(workload: Workload, forward: Forward) -> tuple[dict[str, Tensor], int]:
    """The loss and the gradients of the second of two steps, by name, and its peak bytes.

    In its first step a Session proves that what it recomputes has the right bits, and holds both for a moment.
    """
    buffers.release_buffers()  # another candidate's
    _prepare(workload)
    _step(forward)
    _prepare(workload)
    if workload.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        at_start = torch.cuda.memory_allocated()
        loss = _step(forward)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - at_start
    else:
        with meter.CountedPeak() as counter:
            loss = _step(forward)
        peak = counter.peak_nbytes
    seen = {"loss": loss}
    for name, parameter in workload.model.named_parameters():
        assert parameter.grad is not None
        seen[name] = parameter.grad.clone()
    return seen, peak


def _compare(workload: Workload, plain: Forward, reference: dict[str, Tensor], seen: dict[str, Tensor]) -> Gate:
    differing = [name for name, value in reference.items() if not same_bits(value, seen[name])]
    if not differing:
        return Gate(True)
    again, _ = _observe(workload, plain)
    unstable = [name for name, value in reference.items() if not same_bits(value, again[name])]
    differing = [name for name in differing if name not in unstable]
    return Gate(not differing, tuple(differing), tuple(unstable), _error(reference, seen) if differing else 0.0)


def _error(reference: Mapping[str, Tensor], seen: Mapping[str, Tensor]) -> float:
    differences, norms = [], []
    for name, plain in reference.items():
        if name != "loss":
            differences.append(float(torch.linalg.vector_norm(seen[name] - plain, dtype=torch.float64)))
            norms.append(float(torch.linalg.vector_norm(plain, dtype=torch.float64)))
    difference, norm = math.hypot(*differences), math.hypot(*norms)
    return difference / norm if norm else math.inf if difference else 0.0


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits; NaN is equal to itself, 0.0 is not -0.0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.view(whole), b.view(whole))


def _gate_message(case: Case, name: str, gate: Gate, count: int) -> str:
    first = ", ".join(gate.differing[:3]) + (", ..." if len(gate.differing) > 3 else "")
    return (
        f"{name} was to compute the loss and gradients of {case} bit for bit as plain PyTorch does; "
        f"{len(gate.differing)} of {count} differ ({first}); nothing was timed. Find the codec or need that is wrong."
    )


@contextmanager
def _deterministic(device: str) -> Iterator[None]:
    """On CUDA: kernels that compute the same twice, where there are some."""
    if device != "cuda":
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*deterministic.*")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before, warn_only=warn_only)


# -- steps and time ----------------------------------------------------------------------------------------------------


def _prepare(workload: Workload) -> None:
    for parameter in workload.model.parameters():
        assert parameter.grad is not None
        parameter.grad.zero_()
    gc.collect()
    torch.manual_seed(SEED)


def _step(forward: Forward) -> Tensor:
    loss = forward.loss()
    torch.autograd.backward([loss])
    return loss.detach()


def timed_step(workload: Workload, forward: Forward) -> StepTime:
    """The second of two steps, timed: the first finds the heap as another candidate left it."""
    for _ in range(2):
        _prepare(workload)
        if workload.device == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        loss = forward.loss()
        between = time.perf_counter()
        torch.autograd.backward([loss])
        if workload.device == "cuda":
            torch.cuda.synchronize()
        ended = time.perf_counter()
        del loss
    return StepTime(ended - started, None if workload.device == "cuda" else between - started)


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage collection inside a timed step: it is asked for before each one."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# -- the resident peak -------------------------------------------------------------------------------------------------


def _resident(case: Case, device: str, plan: Plan, names: Sequence[str]) -> dict[str, Resident | str]:
    """The resident peak of each candidate, or why there is none."""
    if device == "cuda":
        return dict.fromkeys(names, "measured on CPU only")
    if not plan.resident:
        return dict.fromkeys(names, "not asked for")
    if plan.effort.deadline is not None and plan.effort.deadline.left() <= 0:
        return dict.fromkeys(names, "no time was left")
    return {name: _resident_in_child(case, name, plan) for name in names}


def _resident_in_child(case: Case, name: str, plan: Plan) -> Resident | str:
    deadline = plan.effort.deadline
    seconds = 60.0 if deadline is None else deadline.left() / 30
    command = [sys.executable, "-m", "bench.step_table", "--case", case.name, "--candidate", name]
    command += ["--seconds", f"{seconds:.1f}", "--threads", str(torch.get_num_threads())]
    paths = [str(ROOT), str(Path(backstash.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    result = subprocess.run(
        [*command, *(["--quick"] if plan.quick else [])],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode != 0:
        return f"its process failed: {result.stderr.strip().splitlines()[-1:]}"
    answer = json.loads(result.stdout.splitlines()[-1])
    if answer is None:
        return "this system does not let a process reset its high-water mark"
    return Resident(answer["growth_nbytes"], answer["before_nbytes"], tuple(answer["growths"]))


def measure_resident(workload: Workload, forward: Forward, deadline: Deadline) -> Resident | None:
    """The resident peak of a step, in this process; None where the system cannot tell.

    One step runs before, so that what libraries allocate once is there.
    """
    growths: list[int] = []
    before = 0
    _prepare(workload)
    _step(forward)
    for number in range(RESIDENT_STEPS):
        if number and deadline.left() < 0:
            break
        _prepare(workload)
        give_back()
        at_start = meter.resident_nbytes() if meter.reset_resident_peak() else None
        _step(forward)
        peak = meter.resident_peak_nbytes()
        if at_start is None or peak is None:
            return None
        before = at_start
        growths.append(peak - at_start)
    return Resident(int(summarise(growths).median), before, tuple(growths))


def give_back() -> None:
    """Has the C library return freed memory to the system, which else would be resident already when it is used."""
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures the resident peak of one candidate in this process, which should be a fresh one, and prints it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--case", required=True)
    parser.add_argument("--candidate", required=True)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args(arguments)
    if asked.threads:
        torch.set_num_threads(asked.threads)
    case = find(asked.case, "cpu", asked.quick)
    peer = {peer.name: peer for peer in (*step_peers("cpu"), *peak_peers(case.network))}[asked.candidate]
    workload = build(case, "cpu")
    resident = measure_resident(workload, peer.start(workload), Deadline.after(asked.seconds))
    print(json.dumps(None if resident is None else asdict(resident)))


# -- results -----------------------------------------------------------------------------------------------------------


def _result(
    name: str,
    checked: Checked,
    resident: Resident | str,
    report: Report | None,
    times: Sequence[StepTime],
    plain: Sequence[StepTime],
) -> CandidateResult:
    seconds = summarise([one.seconds for one in times])
    forwards = [one.forward_seconds for one in times if one.forward_seconds is not None]
    ratios = [own.seconds / base.seconds for own, base in zip(times, plain, strict=True)]
    coded = () if report is None else tuple(total for total in report.by_codec() if total.codec != "kept")
    return CandidateResult(
        name=name,
        gate=checked.gate,
        saved_nbytes=None if report is None else report.saved_nbytes,
        stash_nbytes=None if report is None else report.stash_nbytes,
        peak_nbytes=checked.peak_nbytes,
        resident=None if isinstance(resident, str) else resident,
        resident_note=resident if isinstance(resident, str) else "",
        encode_seconds=report.encode_seconds if report is not None and coded else None,
        decode_seconds=report.decode_seconds if report is not None and coded else None,
        by_codec=coded,
        seconds=seconds,
        forward=summarise(forwards) if forwards else None,
        times_plain=summarise(ratios),
        times_plain_of_medians=seconds.median / summarise([one.seconds for one in plain]).median,
        rounds=tuple(times),
    )


HEADER = (
    "candidate",
    "bits",
    "stash MiB",
    "peak MiB",
    "resident MiB",
    "step ms",
    "forward",
    "x plain",
    "of medians",
)


LEGEND = """\
bits: loss and gradients against plain's. stash: held between forward and backward, parameters excluded. peak: most
bytes of tensors alive at once above the step's start; gradients were there, what is added to them is not yet.
resident: growth of the process, what libraries allocate included. Times: median [quartiles]; x plain: round by round,
and of medians."""


def show(result: CaseResult) -> str:
    """The table of one case."""
    title = f"{result.case.name}: {result.case}"
    if result.status != "measured":
        return f"{title}: {result.status.upper()}: {result.reason}"
    facts = (
        f"{result.data}; {result.rounds} rounds; checkpoint of {result.segments}; parameters "
        f"{mib(result.parameter_nbytes)} MiB; load {_load(result.load_before)} before, {_load(result.load_after)} after"
    )
    lines = [title, facts, table(HEADER, map(_line, result.candidates))]
    for one in result.candidates:
        if one.gate.unstable:
            lines.append(f"{one.name}: not compared, since plain PyTorch differs from itself: {len(one.gate.unstable)}")
        if one.resident is None and one.resident_note:
            lines.append(f"{one.name}: no resident peak: {one.resident_note}")
    return "\n".join(lines)


def _line(one: CandidateResult) -> tuple[str, ...]:
    return (
        one.name,
        "equal" if one.gate.equal else f"{len(one.gate.differing)} DIFFER",
        mib(one.stash_nbytes),
        mib(one.peak_nbytes),
        mib(one.resident.growth_nbytes if one.resident else None),
        spread(one.seconds, 1e3, 1),
        "" if one.forward is None else f"{one.forward.median * 1e3:.1f}",
        spread(one.times_plain, digits=3),
        f"{one.times_plain_of_medians:.3f}",
    )


def _load(averages: tuple[float, ...]) -> str:
    return f"{averages[0]:.1f}" if averages else "unknown"


if __name__ == "__main__":
    main()
