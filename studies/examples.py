"""The examples with and without backstash: ``python -m studies.examples [--json FILE]``.

Each example runs twice, with ``--plain`` and without, in fresh processes, for three steps of its optimizer. In the
second step every byte that torch allocates is counted. Losses and final weights are compared bit for bit. The exit code
is 1 if any bit differs.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from backstash.stash.tables import mib
from bench.results import Results
from bench.rounds import table

FOLDER = Path(__file__).resolve().parents[1] / "examples"
"""Where the examples are."""


@dataclass(frozen=True)
class Example:
    """An example and the sizes that it runs at.

    Attributes:
        framework: whose loop it is.
        line: the line that adds backstash.
        arguments: its command line for the table.
        tiny: its command line for tests.
    """

    framework: str
    line: str
    arguments: tuple[str, ...]
    tiny: tuple[str, ...]


EXAMPLES = {
    "train_gpt2": Example(
        "Hugging Face Trainer", "attach(trainer)", ("--batch=2",), ("--layers=1", "--width=64", "--length=32")
    ),
    "classify_lightning": Example(
        "Lightning", "callbacks=[BackstashCallback()]", ("--batch=128",), ("--batch=4", "--image-size=16")
    ),
    "segment_volumes": Example("a loop of its own", "bs.wrap(model)", (), ("--size=8", "--width=4")),
    "train_spiking": Example(
        "a loop of its own", "bs.wrap(model)", (), ("--width=4", "--batch=4", "--times=2", "--image-size=16")
    ),
    "finetune_lora": Example(
        "Accelerate", "attach(accelerator, model)", ("--batch=2",), ("--layers=1", "--width=64", "--length=32")
    ),
}


@dataclass(frozen=True)
class Row:
    """One example with backstash, beside the same one without.

    Attributes:
        name: the example's module.
        framework, line: as in Example.
        arguments: its command line.
        saved_nbytes: bytes that autograd saves in a step, without parameters.
        stash_nbytes: bytes that are held for them.
        ratio: the one divided by the other.
        plain_peak_nbytes, peak_nbytes: the most bytes alive in a step above those alive at its start.
        losses_equal, weights_equal: whether all losses, and the final weights, have the same bits.
    """

    name: str
    framework: str
    line: str
    arguments: tuple[str, ...]
    saved_nbytes: int
    stash_nbytes: int
    ratio: float
    plain_peak_nbytes: int
    peak_nbytes: int
    losses_equal: bool
    weights_equal: bool


def compare(name: str, tiny: bool = False, run: Callable[[str, Sequence[str]], Any] | None = None) -> Row:
    """Runs an example with and without backstash.

    Args:
        name: the example's module.
        tiny: whether at the sizes of the tests.
        run: what runs it; a process of its own each time, by default.

    Raises:
        RuntimeError: a run has failed.
    """
    run = run or _run
    example = EXAMPLES[name]
    arguments = (*(example.tiny if tiny else example.arguments), "--steps=3")
    plain, found = run(name, (*arguments, "--plain")), run(name, arguments)
    report = found["report"]
    return Row(
        name,
        example.framework,
        example.line,
        arguments,
        report["saved_nbytes"],
        report["stash_nbytes"],
        report["ratio"],
        plain["peak_nbytes"],
        found["peak_nbytes"],
        bool(plain["losses"]) and plain["losses"] == found["losses"],
        plain["weights"] == found["weights"],
    )


def _run(name: str, arguments: Sequence[str]) -> Any:
    """What an example has given in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "observed.json"
        command = [sys.executable, "-m", "studies.examples", "--observe", str(file), name, *arguments]
        done = subprocess.run(command, cwd=FOLDER.parent, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the example {name} failed:\n{done.stdout}{done.stderr}")
        return json.loads(file.read_text())


def observe(name: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Runs an example in this process, and returns what it has given, as JSON knows it.

    Args:
        name: the example's module, which Python must find.
        arguments: its command line.
    """
    from backstash.report.watch import Watch

    example = importlib.import_module(name)
    with Watch() as watch, contextlib.redirect_stdout(io.StringIO()):
        report = example.main(arguments)
    return asdict(watch.observed()) | {"report": None if report is None else json.loads(report.to_json())}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs all examples, prints a table, writes the JSON."""
    parser = argparse.ArgumentParser(prog="python -m studies.examples", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", choices=sorted(EXAMPLES), nargs="+", help="these examples only")
    parser.add_argument("--tiny", action="store_true", help="the sizes of the tests, which show bits and no ratios")
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--observe", nargs=2, metavar=("FILE", "NAME"), help=argparse.SUPPRESS)
    asked, rest = parser.parse_known_args(arguments)
    if asked.observe:
        sys.path.insert(0, str(FOLDER))  # as Python does for a script
        Path(asked.observe[0]).write_text(json.dumps(observe(asked.observe[1], rest)))
        return 0
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    results = Results("studies.examples", asked.json, arguments)
    rows: list[Row] = []
    for name in asked.only or EXAMPLES:
        rows.append(compare(name, asked.tiny))
        print(f"{name}: ratio {rows[-1].ratio:.2f}", flush=True)
        results.write(examples=rows)
    print(
        table(
            ("example", "saved", "ratio", "peak, plain", "peak", "losses", "weights"),
            [
                (
                    row.name,
                    mib(row.saved_nbytes),
                    f"{row.ratio:.2f}",
                    mib(row.plain_peak_nbytes),
                    mib(row.peak_nbytes),
                    "same bits" if row.losses_equal else "DIFFER",
                    "same bits" if row.weights_equal else "DIFFER",
                )
                for row in rows
            ],
        )
    )
    return int(not all(row.losses_equal and row.weights_equal for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
