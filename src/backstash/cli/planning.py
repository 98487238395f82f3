"""The commands of the planner: ``profile``, ``plan`` and ``estimate``."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from backstash.cli.endings import WRONG_ARGUMENT, exits
from backstash.cli.options import Arguments, IsModule, Quiet, Script, file_for, require_apart
from backstash.cli.waiting import INTERRUPTED_NOTE, waiting
from backstash.compile import patch_compile
from backstash.errors import PlanError
from backstash.integrations.launcher import INTERRUPTED, Launched, execute, launch_under, require_script
from backstash.planning.model.budget import limit_of_errors, parse_budget
from backstash.planning.model.explain import outline
from backstash.planning.model.plan import Plan
from backstash.planning.model.problem import StepProfile
from backstash.planning.run.budgeted import Budgeted
from backstash.planning.run.running import ProfiledRun
from backstash.planning.run.within import Within
from backstash.planning.search.planner import Growth, Planner, growth
from backstash.report.meter import ResidentPeaks
from backstash.report.plan_page import plan_page
from backstash.stash.ledger import Report
from backstash.stash.tables import amount
from backstash.torch_internals import QUIET_LOGS

Budget = Annotated[
    str,
    typer.Option(
        envvar="BACKSTASH_BUDGET",
        metavar="BYTES|SHARE",
        help="Bytes that a step may take above what is held before it, such as 2GiB, or 60% of the plain step's peak.",
        show_default=False,
    ),
]
Allow = Annotated[
    str,
    typer.Option(
        envvar="BACKSTASH_ALLOW",
        help="What may be done: lossless, recompute, offload, bounded, or names of codecs, with commas between.",
    ),
]
ErrorLimit = Annotated[
    float | None,
    typer.Option(
        envvar="BACKSTASH_ERROR_LIMIT",
        help="How far gradients may be off, relative to their length, if bounded is allowed; 0.01 by default.",
        show_default=False,
    ),
]
OffloadTo = Annotated[
    str | None,
    typer.Option(
        envvar="BACKSTASH_OFFLOAD_TO",
        metavar="FOLDER",
        help="On CPU, move values to a file in this folder, on a local disk, if offload is allowed.",
        show_default=False,
    ),
]


def profile(
    context: typer.Context,
    script: Script,
    args: Arguments = None,
    is_module: IsModule = False,
    allow: Allow = "lossless,recompute",
    offload_to: OffloadTo = None,
    out: Annotated[Path | None, typer.Option(help="Write the profile to this file.", show_default=False)] = None,
    full: Annotated[bool, typer.Option("--full", help="Print every value, and not modules.")] = False,
    quiet: Quiet = False,
) -> None:
    """Run the first steps of a training script, and show what they save, why, and what it could be.

    The script is ended as soon as a step was profiled.
    """
    out = file_for("--out", out)
    check_options(None, allow)
    offload_to = folder_to(context, offload_to, allow)
    with exits(), waiting(quiet) as say:
        say(f"the first steps of {script}")
        found = profiled(script, args or (), is_module, allow, offload_to)
    if out is not None:
        out.write_text(found.to_json() + "\n")
    if not quiet:
        typer.echo(f"\nbackstash: {script}\n{outline(found, full)}")


def plan(
    context: typer.Context,
    script: Script,
    budget: Budget,
    args: Arguments = None,
    is_module: IsModule = False,
    allow: Allow = "lossless,recompute",
    error_limit: ErrorLimit = None,
    offload_to: OffloadTo = None,
    out: Annotated[Path | None, typer.Option(help="Write the plan to this file.", show_default=False)] = None,
    page: Annotated[Path | None, typer.Option(help="Write it as a page to this file.", show_default=False)] = None,
    quiet: Quiet = False,
) -> None:
    """Profile a training script, and show the fastest plan whose peak stays within a budget.

    `run --plan FILE` runs the script under a plan that was written to a file.
    """
    out, page = file_for("--out", out), file_for("--page", page)
    require_apart(("--out", out), ("--page", page))
    check_options(budget, allow, error_limit)
    offload_to = folder_to(context, offload_to, allow)
    with exits(), waiting(quiet) as say:
        say(f"the first steps of {script}")
        step = profiled(script, args or (), is_module, allow, offload_to)
        say(f"a plan for {budget}")
        found, interrupted = _plan_or_best_so_far(Planner(step, words(allow), error_limit), as_budget(budget))
    if out is not None:
        out.write_text(found.to_json() + "\n")
    if page is not None:
        page.write_text(plan_page(step, found, script), encoding="utf-8")
    if not quiet:
        typer.echo(f"\nbackstash: {script}\n{found.explain()}")
    if interrupted:
        typer.echo(f"backstash: {INTERRUPTED_NOTE}: a plan that fits, and a faster one may be there", err=True)
        raise typer.Exit(INTERRUPTED)


def _plan_or_best_so_far(planner: Planner, budget: int | str) -> tuple[Plan, bool]:
    """Returns the plan; after Ctrl-C that which is known by then, if any fits, and True."""
    try:
        return planner.plan(budget), False
    except KeyboardInterrupt:
        nbytes = parse_budget(budget, planner.profile.plain_peak_nbytes)
        if not planner.has_found(nbytes):
            raise
        return planner.plan_so_far(nbytes), True


def estimate(
    context: typer.Context,
    script: Script,
    budget: Budget,
    args: Arguments = None,
    is_module: IsModule = False,
    allow: Allow = "lossless,recompute",
    error_limit: ErrorLimit = None,
    offload_to: OffloadTo = None,
) -> None:
    """Profile a training script, and say how many times larger its batch may be within a budget.

    All that a step allocates is taken to grow with the batch, but for the gradients of weights.
    """
    check_options(budget, allow, error_limit)
    offload_to = folder_to(context, offload_to, allow)
    with exits(), waiting() as say:
        say(f"the first steps of {script}")
        found = profiled(script, args or (), is_module, allow, offload_to)
        nbytes = parse_budget(as_budget(budget), found.plain_peak_nbytes)
        say(f"batches within {budget}")
        times = growth(found, nbytes, words(allow), error_limit)
    for line in _said(times, found, nbytes):
        typer.echo(line)


def profiled(
    script: str,
    args: Sequence[str],
    is_module: bool,
    allow: str = "lossless,recompute",
    offload_to: str | None = None,
) -> StepProfile:
    """Runs a script until a step of it was profiled.

    Raises:
        Exit: there is nowhere to move values to.
        PlanError: the script ended before.
        ScriptError: there is no such file or module.
    """
    require_script(script, is_module)
    for name, value in QUIET_LOGS.items():
        os.environ.setdefault(name, value)
    with exits(otherwise=WRONG_ARGUMENT):
        run = ProfiledRun(allow=words(allow), offload_to=offload_to)
    with run:
        exit_code = execute(script, args, is_module=is_module)
    if run.profile is None:
        ended = f"it ended with exit code {exit_code}" if exit_code else "it ended"
        raise PlanError(
            f"a profile of {script} was asked for, but {ended} before a step could be profiled, which takes five "
            f"backward passes of one loop on the main thread. Let it train for some more steps."
        )
    return run.profile


def run_within(
    script: str,
    args: Sequence[str],
    budget: str,
    allow: str,
    is_module: bool,
    min_nbytes: int | None,
    failed: Callable[[BaseException, Report], None],
    error_limit: float | None = None,
    offload_to: str | None = None,
) -> tuple[Launched, Within, ResidentPeaks]:
    """Runs a script whose first steps are profiled, and whose other steps stay within a budget.

    What it compiles is treated from the start, and is a part of the steps that are profiled.

    Returns:
        What has run, what became of the budget, and the resident peaks of the process before and under the plan.
    """
    for name, value in QUIET_LOGS.items():
        os.environ.setdefault(name, value)
    with exits(otherwise=WRONG_ARGUMENT):
        run = _Observed(
            as_budget(budget), words(allow), error_limit=error_limit, min_nbytes=min_nbytes, offload_to=offload_to
        )
    with patch_compile("lossless", min_nbytes=min_nbytes) as patched:
        run.spared = lambda: 0 if (found := patched.report()) is None else found.saved_nbytes - found.stash_nbytes
        launched = launch_under(run, script, args, is_module=is_module, failed=failed)
    run.resident.end()
    return replace(launched, compiled=patched.report()), run.found, run.resident


class _Observed(Budgeted):
    """Notes the resident peak of the first steps, which no plan keeps small, apart from that of all others."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.resident = ResidentPeaks()
        super().__init__(*args, **kwargs)

    def settled(self) -> None:
        """The first steps are over."""
        self.resident.separate()


def check_options(budget: str | None, allow: str, error_limit: float | None = None) -> None:
    """Ends the command with exit code 2 if one of these options means nothing. An error limit needs a budget."""
    with exits(otherwise=WRONG_ARGUMENT):
        if budget is not None:
            parse_budget(as_budget(budget), 1 << 30)
        limit_of_errors(None if budget is None else error_limit, words(allow))
        if not words(allow):
            raise PlanError(
                "a plan was asked for that may do nothing: --allow is empty. Name what it may do, or leave it out."
            )


def folder_to(context: typer.Context, offload_to: str | None, allow: str) -> str | None:
    """Returns the folder that values are moved to, if they may be. One that means nothing is refused if it is typed."""
    if "offload" in words(allow):
        return offload_to
    if is_typed(context, "offload_to"):
        raise typer.BadParameter(
            f"nothing is moved to {offload_to!r}, as --allow is {allow!r}: add 'offload', or leave the folder out",
            param_hint="--offload-to",
        )
    return None


def is_typed(context: typer.Context, option: str) -> bool:
    """Whether the command line has that option; in the environment, or a file, it may be meant for other commands."""
    source = context.get_parameter_source(option)
    return source is not None and source.name == "COMMANDLINE"


def words(allow: str) -> tuple[str, ...]:
    """The words of a list with commas."""
    return tuple(word.strip() for word in allow.split(",") if word.strip())


def as_budget(budget: str) -> str:
    """A budget without a unit is a number of bytes."""
    return f"{budget} B" if budget.isdigit() else budget


def _said(times: Growth, profile: StepProfile, nbytes: int) -> list[str]:
    plain = f"plain, a step takes {amount(profile.plain_peak_nbytes)}"
    planned = f"{times.planned:.2f} times, at {times.seconds:.2f} times the plain step's time per example"
    if times.planned < 0.005:
        planned = f"hardly any: at least {amount(round(nbytes / times.planned))} are there for the batch that it is now"
    return [
        f"{plain}. Within {amount(nbytes)}:",
        f"  without backstash, the batch may be {times.plain:.2f} times what it is now;",
        f"  with a plan, {planned}.",
    ]
