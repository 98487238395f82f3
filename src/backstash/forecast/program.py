"""Runs a training script without numbers, once for each size that is traced."""

from __future__ import annotations

import gc
import io
from collections.abc import Sequence
from contextlib import redirect_stdout

from backstash.errors import MeasureError
from backstash.forecast.sizes import TRACED, SizedSteps
from backstash.forecast.tracing import STEPS, StepTracer, TracedSteps
from backstash.integrations.launcher import execute
from backstash.telling import note_progress

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
        MeasureError: the script failed, or ended before enough steps.
        ScriptError: there is no such file or module.
    """
    has_size = any(SIZE in each for each in args)
    traces = []
    sizes = TRACED if has_size else TRACED[:1]
    for number, units in enumerate(sizes, 1):
        note_progress("tracing steps", number, len(sizes))
        traces.append(_traced(script, [each.replace(SIZE, str(units * unit)) for each in args], is_module))
        gc.collect()  # the program's model and optimizer are cycles
    return SizedSteps(traces)


def _traced(script: str, args: Sequence[str], is_module: bool) -> TracedSteps:
    failed: list[BaseException] = []
    with redirect_stdout(io.StringIO()), StepTracer() as tracer:  # its numbers would mean nothing
        execute(script, args, is_module=is_module, failed=failed.append)
        is_cut = tracer.is_cutting
    is_uncut = bool(failed) and is_cut and not tracer.is_done
    if failed and not tracer.is_done and not is_uncut:
        where, mend = "", "if nothing does, it has read numbers of a tensor, each of which is 1 here"
        if isinstance(failed[0], (RuntimeError, TypeError)):  # as torch raises them
            where = " where its tensors have no numbers,"
            mend = (
                "if nothing does, what depends on numbers has to be left out of these steps: each is 1 here, and each "
                "mask is true"
            )
        raise MeasureError(
            f"a forecast was asked for, but {script} failed{where} after {len(tracer.steps)} of {len(STEPS)} backward "
            f"passes: {type(failed[0]).__name__}: {str(failed[0])[:300]}. Run it without backstash, and mend what "
            f"fails there; {mend}."
        ) from failed[0]
    return tracer.found(f"{type(failed[0]).__name__}: {_first_line(failed[0])}" if is_uncut else "")


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")[:200]
