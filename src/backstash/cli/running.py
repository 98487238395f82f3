"""The command ``run``: a script, unchanged, under a Session."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from backstash import policies
from backstash.cli.endings import WRONG_ARGUMENT, exits
from backstash.cli.options import (
    AllocatorName,
    Arguments,
    IsModule,
    MinNbytes,
    PolicyName,
    Quiet,
    Script,
    file_for,
    require_apart,
)
from backstash.cli.planning import Allow, ErrorLimit, OffloadTo, check_options, folder_to, is_typed, run_within
from backstash.errors import PlanError
from backstash.integrations import allocator as allocators
from backstash.integrations import ranks
from backstash.integrations.launcher import Launched, is_own_process, launch, require_script
from backstash.integrations.ranks import Rank
from backstash.planning.model.plan import Plan
from backstash.report.meter import ResidentPeaks, peak_so_far_nbytes
from backstash.stash.ledger import Report
from backstash.stash.tables import amount

_STARTED_AGAIN = "BACKSTASH_STARTED_UNDER"
"""The variable that tells a process that it was started again, under that allocator."""


def run(
    context: typer.Context,
    script: Script,
    args: Arguments = None,
    is_module: IsModule = False,
    policy: PolicyName = "lossless",
    min_nbytes: MinNbytes = None,
    budget: Annotated[
        str | None,
        typer.Option(
            envvar="BACKSTASH_BUDGET",
            metavar="BYTES|SHARE",
            help="Plan the steps for this peak above what is held before them: 2GiB, or 60% of the plain step's.",
            show_default=False,
        ),
    ] = None,
    allow: Allow = "lossless,recompute",
    error_limit: ErrorLimit = None,
    offload_to: OffloadTo = None,
    plan: Annotated[
        Path | None, typer.Option(envvar="BACKSTASH_PLAN", help="Run under the plan in this file.", show_default=False)
    ] = None,
    allocator: AllocatorName = "auto",
    report_json: Annotated[
        Path | None, typer.Option(envvar="BACKSTASH_REPORT_JSON", help="Also write the report to this file.")
    ] = None,
    report_html: Annotated[
        Path | None, typer.Option(envvar="BACKSTASH_REPORT_HTML", help="Also write the report as a page to this file.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Print every value, and not only the largest.")] = False,
    quiet: Quiet = False,
    keep_memory: Annotated[
        bool, typer.Option("--keep-memory", help="Keep freed memory in the process, instead of paging it in again.")
    ] = False,
) -> None:
    """Run a training script, unchanged, under a Session, and print what was saved.

    Options before the script are backstash's; all that follows the script is passed to it. The exit code is the
    script's. Under torchrun, rank 0 prints its report, and each rank writes files of its own.
    """
    report_json, report_html = file_for("--report-json", report_json), file_for("--report-html", report_html)
    require_apart(("--report-json", report_json), ("--report-html", report_html))
    rank = Rank.here()
    check_options(budget, allow, error_limit)
    with exits():
        require_script(script, is_module)
        policies.require(policy)
        _require_one(budget, plan)
        if (budget is not None or plan is not None) and is_typed(context, "policy"):
            raise typer.BadParameter(
                "a plan decides in the place of a policy: give one of the two, and say by --allow what a plan may do",
                param_hint="--policy",
            )
        for option in () if budget is not None else ("allow", "error_limit", "offload_to"):
            if is_typed(context, option):
                raise typer.BadParameter(
                    "it says how a plan is made, and none is made: give --budget too, or leave it out",
                    param_hint=f"--{option.replace('_', '-')}",
                )
        offload_to = folder_to(context, offload_to, allow)
        with exits(otherwise=WRONG_ARGUMENT):
            planned = None if plan is None else _plan_in(plan)
        _start_under(allocator if not keep_memory else allocators.SYSTEM, quiet or not rank.is_first)
    if keep_memory and not allocators.keep_memory():
        typer.echo("backstash: --keep-memory needs glibc, and does nothing here", err=True)
    before = allocators.ProcessorTime.now()
    process = os.getpid()

    def failed(error: BaseException, report: Report) -> None:
        """Says what is known in one line above the traceback, which stays the last thing on the screen."""
        if not quiet and os.getpid() == process:
            name = type(error).__name__
            typer.echo(f"backstash: {script} ended with {name}, {_steps(report)}; {report.headline()}", err=True)

    with exits():
        if budget is not None:
            launched, within, resident = run_within(
                script, args or (), budget, allow, is_module, min_nbytes, failed, error_limit, offload_to
            )
            planned = within.plan
        else:
            resident = ResidentPeaks()
            chosen = policy if planned is None else planned
            launched = launch(script, args or (), chosen, is_module=is_module, min_nbytes=min_nbytes, failed=failed)
    if os.getpid() != process:
        _end_forked(launched.exit_code, has_profiled=budget is not None)
    report = launched.report
    for file, text in ((report_json, report.to_json()), (report_html, report.to_html())):
        if file is not None:
            rank.own(file).write_text(text + "\n")
    heard = ranks.gather_ranks(rank, _own_peaks(report, resident))
    if not quiet and rank.is_first and launched.error is None:
        _show(script, launched, full)
        if budget is not None:
            typer.echo(f"backstash: {within}")
            if resident.after is not None:
                typer.echo(f"backstash: {_resident(resident)}")
        if planned is not None and planned.notice():
            typer.echo(f"backstash: {planned.notice()}", err=True)
        for line in _peaks(rank, heard):
            typer.echo(f"backstash: {line}")
        advice = None if keep_memory else allocators.ProcessorTime.now().since(before).advice()
        if advice is not None:
            typer.echo(f"backstash: {advice}", err=True)
    raise typer.Exit(launched.exit_code)


def _end_forked(exit_code: int, has_profiled: bool) -> NoReturn:
    """Ends a process that the script has forked, without a report: that is told by the process that it was forked from.

    Args:
        has_profiled: whether torch's profiler may have run before the fork. Its destructor waits for a thread that is
            not there after a fork, and aborts the process. So such a process ends before destructors run.
    """
    if not has_profiled:
        raise typer.Exit(exit_code)
    threading._shutdown()  # type: ignore[attr-defined]  # what Python itself does at the end, in this order
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(exit_code & 0xFF)


def _show(script: str, launched: Launched, full: bool) -> None:
    """Prints the report, or in one line why there is none."""
    report = launched.report
    if launched.compiled is not None:
        typer.echo(f"\nbackstash: {script}, compiled graphs\n{launched.compiled}")
    if not report.rows:
        steps = f", {_steps(report)}" if report.steps else ""
        typer.echo(f"\nbackstash: {script}{steps}: {'; '.join(report.notes) or report.headline()}")
        return
    typer.echo(f"\nbackstash: {script}, {_steps(report)}\n{report}")
    if full:
        typer.echo(f"\n{report.table()}")


def _require_one(budget: str | None, plan: Path | None) -> None:
    if plan is not None and not plan.is_file():
        raise typer.BadParameter(f"there is no file {plan}", param_hint="--plan")
    if plan is not None and budget is not None:
        raise typer.BadParameter("a plan has its budget already: give one of the two", param_hint="--budget, --plan")


def _steps(report: Report) -> str:
    return f"{report.steps} step{'' if report.steps == 1 else 's'}"


def _start_under(asked: str, quiet: bool) -> None:
    """Starts this process again under an allocator, if it is to have one that it has not."""
    if not is_own_process():
        return  # somebody else's process, such as that of the tests, which runs the command by calling it
    chosen = allocators.choose_allocator(asked)
    if chosen is None or chosen.is_loaded or os.environ.get(_STARTED_AGAIN) == chosen.path:
        return
    if not quiet:
        typer.echo(f"backstash: starting under {chosen.name} ({chosen.path}); --allocator system does not", err=True)
    sys.stdout.flush()
    sys.stderr.flush()
    environment = chosen.environment(os.environ) | {_STARTED_AGAIN: chosen.path}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def _plan_in(file: Path) -> Plan:
    try:
        return Plan.from_json(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(
            f"the plan in {str(file)!r} was asked for, but it cannot be read: {error}. Pass a file that 'backstash "
            f"plan --out' or Plan.to_json() has written."
        ) from None
    except PlanError as error:
        raise PlanError(f"in {str(file)!r}: {error}") from None


def _resident(resident: ResidentPeaks) -> str:
    first = "" if resident.before is None else f" under the plan, {amount(resident.before)} in the first steps"
    return f"resident peak of the process, weights and libraries included: {amount(resident.after or 0)}{first}"


def _own_peaks(report: Report, resident: ResidentPeaks) -> dict[str, Any]:
    so_far = peak_so_far_nbytes()
    return {
        "saved_nbytes": report.saved_nbytes,
        "stash_nbytes": report.device_nbytes,
        "peak_stash_nbytes": report.peak_stash_nbytes,
        "peak_nbytes": so_far if so_far is None else max(so_far, resident.before or 0),
    }


def _peaks(rank: Rank, heard: dict[int, dict[str, Any]]) -> list[str]:
    """Lines about the largest peaks of all ranks."""
    if rank.count == 1:
        return []
    silent = [str(other) for other in range(rank.count) if other not in heard]
    lines = []
    for key, name in (("peak_stash_nbytes", "stash"), ("peak_nbytes", "memory of the process")):
        known = {number: said[key] for number, said in heard.items() if said.get(key) is not None}
        if known:
            most, least = max(known, key=known.__getitem__), min(known, key=known.__getitem__)
            lines.append(
                f"largest {name} of {len(known)} ranks: {amount(known[most])} on rank {most}; smallest "
                f"{amount(known[least])} on rank {least}"
            )
    if silent:
        lines.append(f"nothing was heard of rank {', '.join(silent)}: its launcher shares no store, or it failed")
    return lines
