"""Measures one unchanged script under several policies: the data behind ``backstash compare``.

Each run is a fresh process, so that no policy profits from memory that another policy has left behind. The module
``backstash.report.watch`` measures a run, and says in which steps.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from backstash import policies as registry
from backstash.errors import MeasureError, ScriptFailedError, UnknownNameError
from backstash.integrations.launcher import require
from backstash.report.machine import Machine, describe
from backstash.report.watch import COUNTED, PLAIN, Observed

TAIL = 30
"""How many lines of a failed script's stderr are shown."""

Progress = Callable[[str, int, str | None], None]
"""A function that is called with the policy's name, the number of the repeat, and a line that the script has printed.

When a run begins, the line is None.
"""


@dataclass(frozen=True)
class Row:
    """The results of one policy, as medians over its runs.

    Attributes:
        policy: the policy's name.
        peak_nbytes: counted peak of a step above the step's start; None if no step was counted.
        resident_nbytes: growth of the resident peak since the start of the training; None on CUDA, or if the system
            does not report it.
        saved_nbytes: dense bytes that autograd saved; for plain, as the Session of another policy counted them.
        stash_nbytes: bytes that were held for them; for plain, the same number.
        step_seconds: seconds of a step; None for a script that is too short to be timed.
        final_loss: the last loss, exact; None if the script never called ``backward()`` of a loss.
        losses_equal: whether all losses of all runs have the bits of the baseline's first run; None without losses.
        weights_equal: whether the parameters after the last step of all runs have the bits of that run.
    """

    policy: str
    peak_nbytes: int | None
    resident_nbytes: int | None
    saved_nbytes: int | None
    stash_nbytes: int | None
    step_seconds: float | None
    final_loss: float | None
    losses_equal: bool | None
    weights_equal: bool


@dataclass(frozen=True)
class Comparison:
    """The runs of a script under several policies, and the machine that they ran on.

    Attributes:
        script: path of the script.
        args: the script's arguments.
        machine: the machine.
        runs: the runs, one for each policy and repeat, in the order of time.
    """

    script: str
    args: tuple[str, ...]
    machine: Machine
    runs: tuple[Observed, ...]

    @property
    def policies(self) -> tuple[str, ...]:
        """Names of the policies, in the order of their first runs."""
        return tuple(dict.fromkeys(run.policy for run in self.runs))

    @property
    def baseline(self) -> str:
        """The policy that the others are compared with: plain, or the first policy if plain did not run."""
        return PLAIN if PLAIN in self.policies else self.policies[0]

    @property
    def made_on(self) -> str:
        """Machine, versions and kernels in one line."""
        return f"{self.machine}; {self.runs[0].kernels} kernels"

    def of(self, policy: str) -> tuple[Observed, ...]:
        """The runs of one policy."""
        return tuple(run for run in self.runs if run.policy == policy)

    def rows(self) -> tuple[Row, ...]:
        """One row per policy."""
        return tuple(self._row(policy) for policy in self.policies)

    def _row(self, policy: str) -> Row:
        runs, first = self.of(policy), self.of(self.baseline)[0]
        # Autograd saves the same tensors under every policy, so the count of any Session holds for plain as well.
        reports = [run.report for run in (runs if policy != PLAIN else self.runs) if run.report]
        saved = _median([report["saved_nbytes"] for report in reports])
        stash = _median([report["stash_nbytes"] for report in reports]) if policy != PLAIN else saved
        losses = runs[-1].losses
        return Row(
            policy=policy,
            peak_nbytes=_whole(_median([run.peak_nbytes for run in runs])),
            resident_nbytes=_whole(_median([run.resident_nbytes for run in runs])),
            saved_nbytes=_whole(saved),
            stash_nbytes=_whole(stash),
            step_seconds=_median([seconds for run in runs for seconds in run.step_seconds]),
            final_loss=float.fromhex(losses[-1]) if losses else None,
            losses_equal=all(run.losses == first.losses for run in runs) if losses else None,
            weights_equal=all(run.weights == first.weights for run in runs),
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
                "runs": [asdict(run) for run in self.runs],
            },
            indent=1,
        )


def compare(
    script: str | Path,
    args: Sequence[str] = (),
    policies: Sequence[str] = (PLAIN, "lossless"),
    repeats: int = 1,
    progress: Progress = lambda policy, repeat, line: None,
) -> Comparison:
    """Runs a script under each policy in turn, ``repeats`` times.

    Args:
        script: path of the script.
        args: the script's arguments.
        policies: names of policies; ``"plain"`` stands for a run without a Session.
        repeats: number of runs of each policy.
        progress: is called when a run begins, and with each line that the script prints.

    Raises:
        ScriptError: there is no such script.
        UnknownNameError: no policy has that name.
        ScriptFailedError: a run ended with an error.
        MeasureError: the script ran too few steps to be measured.
    """
    require(script)
    for name in policies:
        if name != PLAIN and name not in registry.names():
            known = ", ".join(sorted([PLAIN, *registry.names()]))
            raise UnknownNameError(f"policy {name!r} was asked for, but there are {known}.")
    if not policies or repeats < 1:
        raise MeasureError(
            f"compare was asked for {len(policies)} policies and {repeats} repeats. It needs at least one of each."
        )
    runs = []
    for repeat in range(repeats):
        for policy in dict.fromkeys(policies):
            progress(policy, repeat, None)
            runs.append(_run(script, args, policy, partial(progress, policy, repeat)))
    return Comparison(str(script), tuple(args), describe(), tuple(runs))


def _run(script: str | Path, args: Sequence[str], policy: str, printed: Callable[[str], None]) -> Observed:
    """Runs the script in a process of its own, which never outlives this function."""
    with tempfile.TemporaryDirectory(prefix="backstash-") as folder:
        result, errors = Path(folder, "result.json"), Path(folder, "stderr.txt")
        command = [sys.executable, "-m", "backstash.report.watch", policy, str(result), str(script), *args]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}  # so that each printed line arrives at once
        with (
            errors.open("w") as stderr,
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
        if child.returncode != 0:
            raise ScriptFailedError(_failure(script, policy, child.returncode, errors.read_text(errors="replace")))
        observed = Observed(**json.loads(result.read_text()))
    if observed.steps < COUNTED:
        raise MeasureError(
            f"compare was asked to measure {script}, but it made {observed.steps} optimizer steps under {policy}. "
            f"Let it make at least {COUNTED + 1}: the memory of step {COUNTED} is counted, what follows is timed."
        )
    return observed


def _failure(script: str | Path, policy: str, code: int, stderr: str) -> str:
    ending = f"ended with exit code {code}"
    if code < 0:
        ending = f"was killed by {signal.Signals(-code).name}"
        if -code == signal.SIGKILL:
            ending += ", which is also how Linux ends a process when memory runs out"
    lines = stderr.splitlines()[-TAIL:] or ["(it printed nothing to stderr)"]
    alone = f"python {script}" if policy == PLAIN else f"backstash run --policy {policy} {script}"
    return "\n".join(
        [
            f"{script} was to be measured under {policy}, but it {ending}. Its last lines on stderr:",
            *(f"    {line}" for line in lines),
            f"Run it on its own first: {alone} ...",
        ]
    )


def _median(numbers: Sequence[float | None]) -> float | None:
    known = [number for number in numbers if number is not None]
    return statistics.median(known) if known else None


def _whole(number: float | None) -> int | None:
    return None if number is None else round(number)
