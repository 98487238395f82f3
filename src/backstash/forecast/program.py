"""Runs a training script without numbers, once for each size that is traced; with numbers where it needs them."""

from __future__ import annotations

import gc
import io
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from typing import Any
from unittest import mock

from backstash.errors import MeasureError
from backstash.forecast.sizes import TRACED, SizedSteps
from backstash.forecast.tracing import STEPS, StepTracer, TracedSteps
from backstash.integrations.launcher import execute
from backstash.telling import note_progress

SHARE = 1 / 3
"""The share of this machine's free memory that may be alive in steps with numbers."""

UNKNOWN_ROOM = 2 << 30
"""The same in bytes, where the system does not say how much is free."""

SIZE = "{size}"
"""What stands for the size among a script's arguments."""


def traced_script(script: str, args: Sequence[str] = (), *, is_module: bool = False, unit: int = 1) -> SizedSteps:
    """Runs a script without numbers and returns its steps, at any size if ``{size}`` is among its arguments.

    Args:
        script: path of the script, or dotted name of the module.
        args: the script's arguments, in which ``{size}`` stands for two, three and four units in turn.
        is_module: whether ``script`` is the name of a module.
        unit: what the size is a multiple of.

    Raises:
        MeasureError: the script failed, or ended before enough steps, or needs numbers and takes too much memory.
        ScriptError: there is no such file or module.
    """
    has_size = any(SIZE in each for each in args)
    sizes = TRACED if has_size else TRACED[:1]

    def traced(computed: str = "") -> SizedSteps:
        traces = []
        for number, units in enumerate(sizes, 1):
            note_progress(f"tracing steps{' with numbers' if computed else ''}", number, len(sizes))
            sized = [each.replace(SIZE, str(units * unit)) for each in args]
            traces.append(_traced(script, sized, is_module, computed))
            gc.collect()  # the program's model and optimizer are cycles
        return SizedSteps(traces)

    try:
        return traced()
    except _FailedError as failure:
        why = failure.why
    return traced(why)


class _FailedError(MeasureError):
    """A script has failed in its plain steps."""

    def __init__(self, message: str, why: str) -> None:
        super().__init__(message)
        self.why = why


def _traced(
    script: str, args: Sequence[str], is_module: bool, computed: str = "", order: Sequence[str] = STEPS
) -> TracedSteps:
    """Runs a script until its steps were traced."""
    failed: list[BaseException] = []
    shown: list[tuple[Any, ...]] = []
    most = _room() if computed else None
    with (
        redirect_stdout(io.StringIO()),  # its numbers would mean nothing
        mock.patch.object(sys, "excepthook", lambda *error: shown.append(error)),
        StepTracer(order=order, most_nbytes=most) as tracer,
    ):
        execute(script, args, is_module=is_module, failed=failed.append)
        changed = tracer.changed
    if tracer.is_too_large:
        raise MeasureError(
            f"a forecast was asked for, but without numbers {script} fails with {computed}, and with numbers its step "
            f"takes more than the {most} bytes that may be used of this machine's memory. Ask for a smaller "
            f"model or size here, or on a machine with more memory; or leave out of these steps what needs numbers."
        )
    if not failed or tracer.is_done:
        return replace(tracer.found(), computed=computed)
    why = f"{type(failed[0]).__name__}: {_first_line(failed[0])}"
    if changed == "dropped":
        again = _traced(script, args, is_module, computed, [each for each in order if each != changed])
        return replace(again, unplanned=why)
    if changed:
        return replace(tracer.found(why), computed=computed)
    if computed:
        for error in shown:
            sys.excepthook(*error)
    raise _FailedError(
        f"a forecast was asked for, but {script} failed after {len(tracer.steps)} of {len(order)} backward passes: "
        f"{type(failed[0]).__name__}: {str(failed[0])[:300]}. Run it without backstash, and mend what fails there.",
        why,
    ) from failed[0]


def _room() -> int:
    """Bytes that a traced step may take on this machine, as much as is copied of it, and as much again."""
    try:
        return int(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * SHARE)
    except (AttributeError, OSError, ValueError):  # this system does not say
        return UNKNOWN_ROOM


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")[:200]
