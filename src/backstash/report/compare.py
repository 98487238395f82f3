"""Measures one unchanged script under several policies: the data behind ``backstash compare`` and ``choose``.

Each run is a fresh process, so that no policy profits from memory that another policy has left behind. The module
``backstash.report.watch`` measures a run, and says in which steps.
"""

from __future__ import annotations

import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from backstash import policies as registry
from backstash.errors import BackstashError, MeasureError, ScriptFailedError
from backstash.integrations import allocator as allocators
from backstash.integrations.allocator import Allocator
from backstash.integrations.launcher import require_script
from backstash.report.machine import Machine, describe_machine
from backstash.report.watch import COUNTED, PLAIN, MeasureRequest, Observed
from backstash.stash.ledger import Measured, Report
from backstash.stash.tables import amount
from backstash.torch_internals import QUIET_LOGS

TAIL = 30
"""How many lines of a failed script's stderr are shown."""

TIMED = 3
"""How many timed steps it takes for a settled time."""

OUT_OF_MEMORY = ("SIGKILL", "MemoryError", "allocate memory")
"""Words of Linux, Python and torch in the message about a run that has ended because memory did not suffice."""

Progress = Callable[[str, int, str | None], None]
"""A function that is called with a run's label, the number of the repeat, and a line that the script has printed.

When a run begins, the line is None.
"""


@dataclass(frozen=True)
class Program:
    """What is run.

    Attributes:
        script: path of the script, or name of the module.
        args: its arguments.
        is_module: whether it is a module.
        min_nbytes: smaller tensors are kept; None for the policy's own size.
        steps: it is ended after this many timed steps; None to let it run to its end.
    """

    script: str
    args: tuple[str, ...] = ()
    is_module: bool = False
    min_nbytes: int | None = None
    steps: int | None = None

    @property
    def command(self) -> str:
        """What a shell would be given after ``python``."""
        return " ".join(["-m", self.script] if self.is_module else [self.script])


@dataclass(frozen=True)
class Row:
    """The results of one policy under one allocator, as medians over its runs.

    Attributes:
        label: the policy's name, with the allocator's where plain has run under several.
        is_exact: whether the policy is one that changes no bit.
        peak_nbytes: counted peak of a step above the step's start; None if no step was counted.
        resident_nbytes: growth of the resident peak since the start of the training; None on CUDA, or if the system
            does not report it.
        saved_nbytes: dense bytes that autograd saved; for plain, as the Session of another policy counted them.
        stash_nbytes: bytes that were held for them in all stores; for plain, the same number.
        device_nbytes: of these, the bytes on the device.
        step_seconds: seconds of a step; None for a script that is too short to be timed.
        final_loss: the last loss, exact; None if the script never went backward from a loss.
        losses_equal: whether all losses of all runs have the bits of the baseline's first run; None without losses.
        weights_equal: whether the parameters after the last step of all runs have the bits of that run.
        gradient_error: how far off the policy made the first step's gradient, as a share of its length; None if the
            policy is exact or it could not be measured.
        loss_drift: the largest difference of a loss from the baseline's, as a share of it; None without losses.
    """

    label: str
    policy: str
    allocator: str
    is_exact: bool
    peak_nbytes: int | None
    resident_nbytes: int | None
    saved_nbytes: int | None
    stash_nbytes: int | None
    device_nbytes: int | None
    step_seconds: float | None
    final_loss: float | None
    losses_equal: bool | None
    weights_equal: bool
    gradient_error: float | None = None
    loss_drift: float | None = None


@dataclass(frozen=True)
class Comparison:
    """The runs of a script under several policies, and the machine that they ran on.

    Attributes:
        runs: the runs, one for each policy, allocator and repeat, in the order of time.
        failures: label and error message of runs that could not be measured.
        is_interrupted: whether Ctrl-C has ended it before all runs were over.
        timed: how many timed steps were asked for.
    """

    script: str
    args: tuple[str, ...]
    machine: Machine
    runs: tuple[Observed, ...]
    failures: tuple[tuple[str, str], ...] = ()
    is_interrupted: bool = False
    timed: int = TIMED

    @property
    def shortage(self) -> str:
        """That the script made too few steps for settled numbers, and how many it takes; empty if it made enough."""
        steps = min(run.steps for run in self.runs)
        timed = steps - COUNTED
        if timed >= self.timed:
            return ""
        known = f"{timed} of them {'was' if timed == 1 else 'were'} timed" if timed else "none of them was timed"
        return (
            f"{self.script} made only {steps} training steps, and {known}, so these numbers are not settled. Let it "
            f"make {COUNTED + self.timed} or more: the memory of step {COUNTED} is counted, what follows is timed."
        )

    @property
    def labels(self) -> tuple[str, ...]:
        """What tells the runs of a policy under an allocator from others, in the order of their first runs."""
        return tuple(dict.fromkeys(self.label(run) for run in self.runs))

    def label(self, run: Observed) -> str:
        """The policy's name; for plain under more than its own allocator, with the allocator's."""
        several = len({other.allocator for other in self.runs}) > 1
        return f"{run.policy}, {run.allocator}" if several else run.policy

    @property
    def baseline(self) -> str:
        """The label of what others are compared with: plain under their allocator, or else the first."""
        last = self.runs[-1].allocator
        of_plain = [run for run in self.runs if run.policy == PLAIN]
        return self.label(next((run for run in of_plain if run.allocator == last), [*of_plain, *self.runs][0]))

    @property
    def repeats_itself(self) -> bool | None:
        """Whether all runs of plain have the same losses; None if there was no second one."""
        found = [run.losses for run in self.runs if run.policy == PLAIN]
        return all(losses == found[0] for losses in found) if len(found) > 1 else None

    @property
    def made_on(self) -> str:
        """Machine, versions and kernels in one line."""
        return f"{self.machine}; {self.runs[0].kernels} kernels"

    def of(self, label: str) -> tuple[Observed, ...]:
        """The runs of one label."""
        return tuple(run for run in self.runs if self.label(run) == label)

    def rows(self) -> tuple[Row, ...]:
        """One row per label."""
        return tuple(self._row(label) for label in self.labels)

    def headline(self, row: Row) -> str:
        """What a policy gained, in one line, beside plain PyTorch under the same allocator."""
        base = next(other for other in self.rows() if other.label == self.baseline)
        report = self.of(row.label)[0].report
        if report is None or base.policy != PLAIN:
            return ""
        measured = Measured(row.peak_nbytes, base.peak_nbytes, row.step_seconds, base.step_seconds)
        return Report.from_json(report, measured).headline()

    def _row(self, label: str) -> Row:
        runs, first = self.of(label), self.of(self.baseline)[0]
        policy = runs[0].policy
        # Autograd saves the same tensors under every policy, so the count of any Session holds for plain as well.
        reports = [run.report for run in (runs if policy != PLAIN else self.runs) if run.report]
        saved = _median([report["saved_nbytes"] for report in reports])
        stash = _median([report["stash_nbytes"] for report in reports]) if policy != PLAIN else saved
        device = _median([report["device_nbytes"] for report in reports]) if policy != PLAIN else saved
        errors = [found["error"] for run in runs if run.report for found in run.report.get("gradient_error", [])]
        losses = runs[-1].losses
        return Row(
            label=label,
            policy=policy,
            allocator=runs[0].allocator,
            is_exact=policy == PLAIN or registry.describe(policy).is_exact,
            peak_nbytes=_whole(_median([run.peak_nbytes for run in runs])),
            resident_nbytes=_whole(_median([run.resident_nbytes for run in runs])),
            saved_nbytes=_whole(saved),
            stash_nbytes=_whole(stash),
            device_nbytes=_whole(device),
            step_seconds=_median([seconds for run in runs for seconds in run.step_seconds]),
            final_loss=float.fromhex(losses[-1]) if losses else None,
            losses_equal=all(run.losses == first.losses for run in runs) if losses else None,
            weights_equal=all(run.weights == first.weights for run in runs),
            gradient_error=max((error for error in errors if error is not None), default=None),
            loss_drift=max((_drift(run.losses, first.losses) for run in runs), default=None) if losses else None,
        )

    def to_json(self) -> str:
        """The comparison with the raw numbers of every run, as one JSON object."""
        return json.dumps(
            {
                "script": self.script,
                "args": self.args,
                "machine_line": self.made_on,
                "machine": asdict(self.machine),
                "baseline": self.baseline,
                "rows": [asdict(row) for row in self.rows()],
                "failures": dict(self.failures),
                "is_interrupted": self.is_interrupted,
                "runs": [asdict(run) for run in self.runs],
            },
            indent=1,
        )


def compare(
    program: Program,
    policies: Sequence[str] = (PLAIN, "lossless"),
    repeats: int = 1,
    allocator: Allocator | None = None,
    progress: Progress = lambda label, repeat, line: None,
    is_tolerant: bool = False,
    in_doubt: bool = False,
) -> Comparison:
    """Runs a script under each policy in turn, ``repeats`` times. Ctrl-C ends that, and what was measured is returned.

    Args:
        program: the script.
        policies: names of policies; ``"plain"`` stands for a run without a Session.
        repeats: number of runs of each policy.
        allocator: what the processes are started with. Plain then runs under the C library's own as well, because an
            allocator's gain is not a policy's.
        progress: is called when a run begins, and with each line that the script prints.
        is_tolerant: whether a run that fails is noted in ``failures`` as long as any other can be measured. If plain
            fails, others go on only where memory may be what it lacks.
        in_doubt: whether plain runs once more if its only run has other losses than an exact policy.

    Raises:
        ScriptError: there is no such script.
        UnknownNameError: no policy has that name.
        ScriptFailedError: a run ended with an error.
        MeasureError: the script ran too few steps to be measured, or they could not be told apart.
        KeyboardInterrupt: Ctrl-C came before a run was over.
    """
    require_script(program.script, program.is_module)
    for name in policies:
        registry.require(name, PLAIN)
    if not policies or repeats < 1:
        raise MeasureError(
            f"compare was asked for {len(policies)} policies and {repeats} repeats. It needs at least one of each."
        )
    runs: list[Observed] = []
    failures: dict[str, str] = {}
    first: BackstashError | None = None
    is_interrupted = False

    def orders() -> Iterator[tuple[int, tuple[str, Allocator | None]]]:
        yield from product(range(repeats), runs_of(policies, allocator))
        if in_doubt and _is_in_doubt(runs):
            yield repeats, (PLAIN, allocator)

    for repeat, (policy, chosen) in orders():
        label = policy if allocator is None else f"{policy}, {chosen.name if chosen else allocators.SYSTEM}"
        progress(label, repeat, None)
        try:
            runs.append(_run(program, policy, chosen, partial(progress, label, repeat)))
        except (ScriptFailedError, MeasureError) as error:
            if not is_tolerant or (policy == PLAIN and not any(words in str(error) for words in OUT_OF_MEMORY)):
                raise
            failures[label], first = str(error), first or error
        except KeyboardInterrupt:
            if not runs:
                raise
            is_interrupted = True
            break
    if not runs and first is not None:
        raise first
    failed = tuple(failures.items())
    timed = TIMED if program.steps is None else program.steps
    return Comparison(program.script, program.args, describe_machine(), tuple(runs), failed, is_interrupted, timed)


def _is_in_doubt(runs: Sequence[Observed]) -> bool:
    """Whether an exact policy has other losses than plain, which has run once, so that the script may be the reason."""
    plain = [run for run in runs if run.policy == PLAIN]
    exact = [run for run in runs if run.policy != PLAIN and registry.describe(run.policy).is_exact]
    return len(plain) == 1 and any(run.losses != plain[0].losses for run in exact)


def runs_of(policies: Sequence[str], allocator: Allocator | None) -> list[tuple[str, Allocator | None]]:
    """What is run in each repeat: policies and the allocators that they are started with, None for the system's."""
    plan = [(policy, allocator) for policy in dict.fromkeys(policies)]
    return [(PLAIN, None), *plan] if allocator is not None and PLAIN in policies else plan


def _run(program: Program, policy: str, allocator: Allocator | None, printed: Callable[[str], None]) -> Observed:
    """Runs the script in a process of its own and returns what was measured of it."""
    environment = {**QUIET_LOGS, **os.environ, "PYTHONUNBUFFERED": "1"}  # so that each printed line arrives at once
    if allocator is not None:
        environment = allocator.environment(environment)
    with tempfile.TemporaryDirectory(prefix="backstash-") as folder:
        result = Path(folder, "result.json")
        order = MeasureRequest(
            program.script,
            list(program.args),
            policy,
            str(result),
            program.is_module,
            allocator.name if allocator is not None else allocators.preloaded() or allocators.SYSTEM,
            program.min_nbytes,
            program.steps,
        )
        exit_code, errors = run_in_child("watch", order, environment, printed)
        if exit_code != 0:
            raise ScriptFailedError(_failure(program, policy, exit_code, errors))
        observed = Observed(**json.loads(result.read_text()))
    check(observed, program.command)
    return observed


def run_in_child(
    module: str, order: Any, environment: Mapping[str, str], printed: Callable[[str], None]
) -> tuple[int, str]:
    """Carries out an order in a process that never outlives this function. Returns its exit code and its stderr.

    Args:
        module: the module of ``backstash.report`` that carries it out, given the order as JSON.
        order: a dataclass of plain data.
    """
    command = [sys.executable, "-m", f"backstash.report.{module}", json.dumps(asdict(order))]
    with (
        _ending_signals_raised(),
        tempfile.TemporaryFile("w+", errors="replace") as stderr,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, text=True, errors="replace", env=environment
        ) as child,
    ):
        assert child.stdout is not None
        try:
            for line in child.stdout:
                printed(line.rstrip())
        except BaseException:
            child.kill()
            raise
        exit_code = child.wait()
        stderr.seek(0)
        return exit_code, stderr.read()


@contextmanager
def _ending_signals_raised() -> Iterator[None]:
    """Inside, a signal that ends this process raises, as Ctrl-C does, so that no child and no folder is left behind."""
    if threading.current_thread() is not threading.main_thread():
        yield  # where no handler can be set
        return

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    ending = [number for name in names if signal.getsignal(number := getattr(signal, name)) == signal.SIG_DFL]
    try:
        for number in ending:
            signal.signal(number, end)
        yield
    finally:
        for number in ending:
            signal.signal(number, signal.SIG_DFL)


def check(observed: Observed, command: str) -> None:
    """Refuses measurements that cannot be true.

    Raises:
        MeasureError: the script ran too few steps, or less memory was counted in a step than its stash held.
    """
    if observed.steps < COUNTED:
        raise MeasureError(
            f"{command} was to be measured under {observed.policy}, but it made {observed.steps} training steps. Let "
            f"it make at least {COUNTED + 1}: the memory of step {COUNTED} is counted, what follows is timed. A step "
            f"ends when an optimizer has stepped, or where there is none, when a backward pass is over."
        )
    if observed.report is None or observed.peak_nbytes is None:
        return
    # What the program holds may have been allocated before the step, such as its batch.
    own = [row for row in observed.report["rows"] if row["codec"] != "kept" or not row["reason"].startswith("held by")]
    held = sum(row["stash_nbytes"] for row in own if row["store"] == "device")
    if held > observed.peak_nbytes:
        raise MeasureError(
            f"{command} was to be measured under {observed.policy}, but in the step that was counted the peak was "
            f"{amount(observed.peak_nbytes)} and the stash {amount(held)}, so that was no whole step. Steps are told "
            f"apart by the forward passes of modules and by optimizer.step(), in the main thread: measure a step of "
            f"such a loop with backstash.measure()."
        )


def _failure(program: Program, policy: str, code: int, stderr: str) -> str:
    ending = f"ended with exit code {code}"
    if code < 0:
        ending = f"was killed by {signal.Signals(-code).name}"
        if -code == signal.SIGKILL:
            ending += ", which is also how Linux ends a process when memory runs out"
    module = "-m " if program.is_module else ""
    script = program.script
    alone = f"python {module}{script}" if policy == PLAIN else f"backstash run --policy {policy} {module}{script}"
    return "\n".join(
        [
            f"{program.command} was to be measured under {policy}, but it {ending}. Its last lines on stderr:",
            last_lines(stderr),
            f"Run it on its own first: {alone} ...",
        ]
    )


def last_lines(stderr: str) -> str:
    """Returns the last lines that a script has printed to stderr, indented."""
    lines = stderr.splitlines()[-TAIL:] or ["(it printed nothing to stderr)"]
    return "\n".join(f"    {line}" for line in lines)


def _drift(losses: Sequence[str], base: Sequence[str]) -> float:
    """The largest difference of a loss from the baseline's, as a share of it; infinite if one is not a number."""
    worst = 0.0
    for one, other in zip(losses, base, strict=False):
        if one != other:
            found, expected = float.fromhex(one), float.fromhex(other)
            share = abs(found - expected) / (abs(expected) or 1.0)
            worst = max(worst, share if math.isfinite(share) else math.inf)
    return worst


def _median(numbers: Sequence[float | None]) -> float | None:
    known = [number for number in numbers if number is not None]
    return statistics.median(known) if known else None


def _whole(number: float | None) -> int | None:
    return None if number is None else round(number)
