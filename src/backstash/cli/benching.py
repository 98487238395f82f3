"""The command ``bench``: the repository's benchmarks, where there is the repository."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from backstash.cli.endings import exits
from backstash.errors import ScriptError, UnknownNameError

BENCHES = {
    "gist": "what Gist's paper measured: ratios, footprints, times, batches of deep ResNets",
    "run": "the tables of ratios, codecs and steps",
    "peak": "peaks and what is alive at them",
    "kernels": "speed of the kernels",
    "density": "where csr overtakes zvc",
    "gist_accuracy": "test accuracy with reduced precision",
    "allocator": "what keeping freed memory gives, under each allocator that is installed",
    "snapshot": "a snapshot of CUDA's allocator beside the model of it",
    "disk": "speed of the disk store",
    "layrub": "memory and time when activations are moved, and networks too deep for their memory",
    "cdma": "bytes that would cross the link, by codec",
    "comet": "accuracy and ratios under a bound that follows the gradients",
    "nodes": "time of single nodes of the backward pass, plain and under a Session",
    "gpu": "six programs for a GPU: host, steps, largest batches, bits of kernels, graphs, compiled steps",
    "hostcost": "processor time per saved tensor, beside identity hooks; growth with tensors that are kept",
    "steptime": "time of whole steps of full networks under a Session, beside identity hooks",
    "frontier": "peak against the time of a step: plans for budgets beside checkpoints",
    "heldout_plans": "plans of programs that the planner was not built on: peaks, predictions, bits",
    "planner": "greedy plans beside exact ones, and the time to make them",
    "compile": "what compiled graphs save, beside activation_memory_budget",
    "families": "fourteen families of transformers, with and without a Session",
    "sz_table": "ratio and speed of the error-bounded coder, beside others",
    "zoo": "models of torchvision and timm: bits, plans and compiled steps beside plain PyTorch",
}
"""The programs in the repository's folders bench and studies, by module, and what each measures."""

FOLDERS = ("bench", "studies")


def bench(
    name: Annotated[str, typer.Argument(help="; ".join(f"{name}: {text}" for name, text in BENCHES.items()) + ".")],
    args: Annotated[list[str] | None, typer.Argument(help="The benchmark's own arguments.")] = None,
) -> None:
    """Run one of the repository's benchmarks; all that follows its name is passed to it (--help lists its options).

    The exit code is the benchmark's. Benchmarks are not installed with the package: this command needs a clone of the
    repository.
    """
    with exits():
        root, folder = _repository(name)
        paths = [str(root), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        command = [sys.executable, "-P", "-m", f"{folder}.{name}", *(args or ())]  # -P: no other folder bench
        exit_code = subprocess.run(command, env=environment, check=False).returncode
    raise typer.Exit(exit_code)


def clone_with(name: str) -> tuple[Path, str] | None:
    """The clone of the repository that has this benchmark, above the package or the current folder, and its folder."""
    for root in (Path(__file__).resolve().parents[3], Path.cwd()):
        for folder in FOLDERS:
            if any((root / folder / path).is_file() for path in (f"{name}.py", f"{name}/__main__.py")):
                return root, folder
    return None


def _repository(name: str) -> tuple[Path, str]:
    if name not in BENCHES:
        raise UnknownNameError(f"benchmark {name!r} was asked for, but there are {', '.join(BENCHES)}.")
    found = clone_with(name)
    if found is None:
        raise ScriptError(
            f"benchmark {name!r} was asked for, but there is no bench/{name}.py or studies/{name}.py in "
            f"{Path(__file__).resolve().parents[3]} or {Path.cwd()}. Benchmarks are not installed with the package: "
            f"clone the repository and run this in it."
        )
    return found
