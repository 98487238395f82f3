"""Verifies an unchanged training script: the data behind ``backstash verify``.

Each run is a fresh process with the same seeds: the script as it is, and with every saver switched off; if anything
differs, each once more. A run is ended after some steps. Where a step ends is told in steps.py.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from backstash.capture import passes
from backstash.errors import MeasureError, ScriptFailedError
from backstash.integrations.launcher import execute, require_script
from backstash.report.compare import Program, last_lines, run_in_child
from backstash.report.steps import Steps
from backstash.torch_internals import QUIET_LOGS, ignore_global_hooks_of_compiled_modules, in_backward
from backstash.verifying.facts import generator_digests
from backstash.verifying.gradients import first_unequal, gradient_errors, state_sums
from backstash.verifying.observing import ObservedRun
from backstash.verifying.reference import Reference
from backstash.verifying.runlog import RunLog
from backstash.verifying.step import IN_PLACE, looked_at, rounds_otherwise
from backstash.verifying.verdict import Verification, judge, needs_closer_look
from backstash.verifying.watch import WatchedRun

Told = Callable[[str, str | None], None]
"""A function that is called with the name of a run, and a line that the script has printed; None when a run begins."""


@dataclass(frozen=True)
class VerifyRequest:
    """What a child process is asked to run.

    Attributes:
        steps: the program is ended after this many steps.
        seed: of all default generators, before the program begins.
        is_reference: whether savers are switched off.
        copies: of a reference run, whether autograd saves copies.
        kept, traced, recomputing, keep_pass: as in WatchedRun.
    """

    script: str
    args: list[str]
    result: str
    is_module: bool = False
    steps: int = 2
    seed: int = 0
    is_reference: bool = False
    copies: bool = False
    compiled: bool = False
    kept: list[int] = field(default_factory=list)
    traced: list[int] = field(default_factory=list)
    recomputing: list[str] = field(default_factory=list)
    keep_pass: int | None = None


class EndsAfter:
    """Inside the ``with``, SystemExit ends the program when it has made some training steps."""

    def __init__(self, steps: int) -> None:
        self._most = steps
        self._steps = Steps(lambda is_complete: None, self._ended, lambda: None)

    def __enter__(self) -> EndsAfter:
        ignore_global_hooks_of_compiled_modules()
        self._hook = nn.modules.module.register_module_forward_pre_hook(self._enter_module)
        self._step_hook = register_optimizer_step_post_hook(self._optimized)
        passes.listen(self, of_grad=False)
        return self

    def __exit__(self, *raised: object) -> None:
        passes.unlisten(self)
        self._step_hook.remove()
        self._hook.remove()

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled() and not in_backward():
            self._steps.forward()

    def _optimized(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._steps.optimized(optimizer)

    def begin_backward(self, tensors: Any) -> None:
        """A backward pass begins."""
        self._steps.forward()

    def end_backward(self) -> None:
        """A backward pass has ended."""
        self._steps.went_backward()

    def fail_backward(self) -> None:
        """A backward pass has raised."""

    def _ended(self) -> None:
        if self._steps.count >= self._most:
            raise SystemExit(0)


def carry_out_verification(order: VerifyRequest) -> int:
    """Runs a program, writes the record of the run and its gradients, and returns the program's exit code."""
    random.seed(order.seed)
    np.random.seed(order.seed % (1 << 32))
    torch.manual_seed(order.seed)
    under: ObservedRun
    if order.is_reference:
        under = Reference(order.recomputing, order.keep_pass, order.compiled, order.copies)
    else:
        under = WatchedRun(order.kept, order.traced, order.recomputing, order.keep_pass)
    failed: list[str] = []
    with EndsAfter(order.steps), under:
        exit_code = execute(
            order.script,
            order.args,
            is_module=order.is_module,
            failed=lambda error: failed.append(f"{type(error).__name__}: {error}"),
        )
        under.log.state = state_sums(under.paths)
        under.log.generators = generator_digests()
    if failed:
        under.log.error = failed[0]
    Path(order.result).write_text(under.log.to_json())
    if order.keep_pass is not None:
        torch.save(under.gradients, order.result + ".gradients")
    return exit_code


def verify_script(
    program: Program, steps: int = 2, seed: int = 0, tolerance: float = 0.0, told: Told = lambda name, line: None
) -> Verification:
    """Runs a script two or four times, each in a fresh process, and returns the verdict.

    Ctrl-C during a closer look ends that, and what the first two runs say is the verdict.

    Args:
        steps: how many training steps are watched.
        seed: of all default generators in each run, before the script begins.
        tolerance: as for :func:`backstash.verify`.
        told: is called when a run begins, and with each line that the script prints.

    Raises:
        ScriptError: there is no such script.
        ScriptFailedError: the script ended with an error, and nothing was found by then.
        MeasureError: it ran no backward pass.
    """
    require_script(program.script, program.is_module)

    def run(name: str, tolerates: bool = False, **options: Any) -> tuple[RunLog, dict[str, Tensor]]:
        return _run(program, name, lambda line: told(name, line), steps, seed, tolerates, options)

    def run_plainly(name: str, **options: Any) -> tuple[RunLog, dict[str, Tensor]]:
        log, gradients = run(name, tolerates=True, is_reference=True, **options)
        if log.error is not None and IN_PLACE in log.error:
            return run(name, is_reference=True, copies=True, **options)
        if log.error is not None:
            raise ScriptFailedError(f"{program.command} ran as it is, but without savers it ended with {log.error}.")
        return log, gradients

    watched, _ = run("as it is")
    if not watched.passes:
        raise MeasureError(
            f"{program.command} was to be verified, but it ran no backward pass in the process that was started. Let "
            f"it train, or verify a step of it with backstash.verify()."
        )
    reference, _ = run_plainly("without savers", recomputing=watched.recomputing)
    compiled = rounds_otherwise(watched, reference)
    if compiled:
        reference, _ = run_plainly("compiled without a budget", recomputing=watched.recomputing, compiled=True)
    name = program.command
    if not needs_closer_look(watched, reference):
        return judge(name, watched, reference)
    differing = first_unequal(watched.gradients, reference.gradients)

    def look_closer() -> tuple[RunLog, dict[str, Tensor]]:
        kept, traced = looked_at(watched)
        return run("closer look", kept=kept, traced=traced, recomputing=watched.recomputing, keep_pass=differing)

    try:
        closer, gradients = look_closer()
        if closer.differing and not watched.differing:
            watched = closer
            closer, gradients = look_closer()
        options: dict[str, Any] = {"recomputing": watched.recomputing, "keep_pass": differing, "compiled": compiled}
        again, expected = run_plainly("without savers, again", **options)
    except KeyboardInterrupt:
        return replace(judge(name, watched, reference, tolerance=tolerance), is_interrupted=True)
    errors = gradient_errors(gradients, expected)
    return judge(name, watched, reference, closer, again, errors, tolerance)


def _run(
    program: Program,
    name: str,
    printed: Callable[[str | None], None],
    steps: int,
    seed: int,
    tolerates: bool,
    options: dict[str, Any],
) -> tuple[RunLog, dict[str, Tensor]]:
    """Runs the script in a process of its own, and returns the record and the gradients that were kept."""
    printed(None)
    environment = {**QUIET_LOGS, "PYTHONHASHSEED": "0", **os.environ, "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryDirectory(prefix="backstash-") as folder:
        result = Path(folder, "run.json")
        order = VerifyRequest(
            program.script, list(program.args), str(result), program.is_module, steps, seed, **options
        )
        exit_code, errors = run_in_child("verified", order, environment, printed)
        log = RunLog.from_json(result.read_text()) if result.exists() else RunLog(error=f"exit code {exit_code}")
        was_watched = log.differing or any(each.runs_again for each in log.regions)
        if exit_code != 0 and not was_watched and not tolerates:
            raise ScriptFailedError(
                f"{program.command} was to be verified ({name}), but it ended with exit code {exit_code}. Its last "
                f"lines on stderr:\n{last_lines(errors)}"
            )
        kept = Path(order.result + ".gradients")
        gradients: dict[str, Tensor] = torch.load(kept, weights_only=True) if kept.exists() else {}
        return log, gradients


if __name__ == "__main__":
    # As a module of its own name, so that what it hands out is what others import.
    from backstash.report import verified

    sys.exit(verified.carry_out_verification(verified.VerifyRequest(**json.loads(sys.argv[1]))))
