"""The commands ``run``, ``compare``, ``bench`` and ``doctor``: their options, and what they print and write."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from backstash.cli.comparison import progress, show
from backstash.errors import BackstashError, ScriptError, UnknownNameError
from backstash.integrations import allocator
from backstash.integrations.launcher import INTERRUPTED, launch
from backstash.report import doctor as doctoring
from backstash.report.compare import compare as run_comparison

app = typer.Typer(
    name="backstash",
    help="Train bigger networks in the memory you have: saved tensors, stored smaller.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Script = Annotated[Path, typer.Argument(help="The training script.", show_default=False)]
Arguments = Annotated[list[str] | None, typer.Argument(help="The script's own arguments.", show_default=False)]

BENCHES = {
    "gist": "what Gist's paper measured: ratios, footprints, times, batches of deep ResNets",
    "run": "the tables of ratios, codecs and steps",
    "peak": "peaks and what is alive at them",
    "kernels": "speed of the kernels",
    "density": "where csr overtakes zvc",
    "gist_accuracy": "test accuracy with reduced precision",
    "allocator": "what keeping freed memory gives",
    "disk": "speed of the disk store",
    "layrub": "memory and time when activations are moved, and networks too deep for their memory",
    "cdma": "bytes that would cross the link, by codec",
    "comet": "accuracy and ratios under a bound that follows the gradients",
    "nodes": "time of single nodes of the backward pass, plain and under a Session",
    "hostcost": "processor time per saved tensor, beside identity hooks; growth with tensors that are kept",
    "steptime": "time of whole steps of full networks under a Session, beside identity hooks",
    "sz_table": "ratio and speed of the error-bounded coder, beside others",
}
"""The programs in the repository's folder benchmarks, by module, and what each measures."""


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    script: Script,
    args: Arguments = None,
    policy: Annotated[str, typer.Option(help="Name of the policy.")] = "lossless",
    report_json: Annotated[Path | None, typer.Option(help="Also write the report to this file.")] = None,
    keep_memory: Annotated[
        bool, typer.Option("--keep-memory", help="Keep freed memory in the process, instead of paging it in again.")
    ] = False,
) -> None:
    """Run a training script, unchanged, under a Session, and print what was saved.

    Options before the script are backstash's; all that follows the script is passed to it. The exit code is the
    script's.
    """
    if report_json is not None and not report_json.parent.is_dir():
        raise typer.BadParameter(f"the folder {report_json.parent} is not there", param_hint="--report-json")
    if keep_memory and not allocator.keep_memory():
        typer.echo("backstash: --keep-memory needs glibc, and does nothing here", err=True)
    before = allocator.Usage.now()
    with _exits():
        launched = launch(script, args or (), policy)
    advice = None if keep_memory else allocator.Usage.now().since(before).advice()
    print(f"\nbackstash: {script}, {launched.report}", flush=True)
    if advice is not None:
        typer.echo(f"backstash: {advice}", err=True)
    if report_json is not None:
        report_json.write_text(launched.report.to_json() + "\n")
    raise typer.Exit(launched.exit_code)


@app.command(context_settings={"ignore_unknown_options": True})
def compare(
    script: Script,
    args: Arguments = None,
    policies: Annotated[str, typer.Option(help="Names, comma-separated; plain: no Session.")] = "plain,lossless",
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each policy, taking turns.")] = 1,
    out: Annotated[Path, typer.Option(help="Folder of the results.", file_okay=False)] = Path("backstash-compare"),
) -> None:
    """Run a training script, unchanged, under several policies, each in a fresh process, and show them side by side.

    Writes comparison.json, comparison.png and comparison.svg. Options that compare does not know are passed to the
    script, and so is everything after --.
    """
    try:
        from backstash.report import plot
    except ModuleNotFoundError as missing:
        if missing.name != "matplotlib":
            raise
        typer.echo(
            "backstash: compare draws a chart, but matplotlib is not installed. Run: pip install 'backstash[cli,plot]'",
            err=True,
        )
        raise typer.Exit(1) from None
    names = [name.strip() for name in policies.split(",") if name.strip()]
    with _exits(), progress(len(set(names)) * repeats) as update:
        comparison = run_comparison(script, args or (), names, repeats, update)
    show(comparison)
    out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out) as unfinished:  # no file is ever half written under its name
        folder = Path(unfinished)
        folder.joinpath("comparison.json").write_text(comparison.to_json() + "\n")
        plot.save(comparison, folder / "comparison.png", folder / "comparison.svg")
        for file in sorted(folder.iterdir()):
            os.replace(file, out / file.name)
    typer.echo(f"wrote {out / 'comparison'}.json, .png, .svg")


@app.command(context_settings={"allow_interspersed_args": False})
def bench(
    name: Annotated[str, typer.Argument(help="; ".join(f"{name}: {text}" for name, text in BENCHES.items()) + ".")],
    args: Annotated[list[str] | None, typer.Argument(help="The benchmark's own arguments.")] = None,
) -> None:
    """Run one of the repository's benchmarks; all that follows its name is passed to it (--help lists its options).

    The exit code is the benchmark's. Benchmarks are not installed with the package: this command needs a clone of the
    repository.
    """
    with _exits():
        root = _repository(name)
        paths = [str(root), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        command = [sys.executable, "-P", "-m", f"benchmarks.{name}", *(args or ())]  # -P: no other folder benchmarks
        exit_code = subprocess.run(command, env=environment, check=False).returncode
    raise typer.Exit(exit_code)


@app.command()
def doctor() -> None:
    """Tell which kernels serve this machine, and check every codec. Exit code 1: something is wrong."""
    wrong = 0
    for finding in doctoring.examine():
        typer.echo(f"{'ok   ' if finding.ok else 'WRONG'} {finding.subject}: {finding.text}")
        wrong += not finding.ok
    typer.echo("everything works" if not wrong else f"{wrong} of these are wrong")
    raise typer.Exit(1 if wrong else 0)


def _repository(name: str) -> Path:
    """The clone of the repository that has this benchmark: above the package, or the current folder."""
    if name not in BENCHES:
        raise UnknownNameError(f"benchmark {name!r} was asked for, but there are {', '.join(BENCHES)}.")
    here = Path(__file__).resolve().parents[3]
    for folder in (here, Path.cwd()):
        if folder.joinpath("benchmarks", f"{name}.py").is_file():
            return folder
    raise ScriptError(
        f"benchmark {name!r} was asked for, but there is no benchmarks/{name}.py in {here} or {Path.cwd()}. Benchmarks "
        f"are not installed with the package: clone the repository and run this in it."
    )


@contextmanager
def _exits() -> Iterator[None]:
    """Turns an error of backstash into its message and an exit code: 2 for a wrong argument, 1 for any other error."""
    try:
        yield
    except BackstashError as error:
        typer.echo(f"backstash: {error}", err=True)
        raise typer.Exit(2 if isinstance(error, (ScriptError, UnknownNameError)) else 1) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
