"""The command: ``python -m bench.gpu g1|g2|g3|g4|g5|g6 [--json FILE] [--resume] [--only TEXT]``."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PROGRAMS = {
    "g1": "what a step costs the host, what it asks of the device, and how fast the link is",
    "g2": "networks where the host sets the pace and where they fill the memory: bits, peaks, sizes, throughput",
    "g3": "which formulas have the bits of the device's own kernels, and the speed of each kernel of ours",
    "g4": "whole steps captured in a graph: bits of replays, memory, times",
    "g5": "how much of a copy to the host hides behind computing",
    "g6": "compiled models, plain and treated: bits, peaks, sizes, throughput, the text of the kernels",
}

SECONDS = 480.0
"""No part is begun after it. A part takes a minute or two, and a command is to end within ten minutes."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one program. Returns 1 if a part of it failed or an exact way has other bits, else 0."""
    described = "\n".join(f"  {name}  {text}" for name, text in PROGRAMS.items())
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu",
        description=f"Measurements on a GPU.\n\n{described}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("program", choices=PROGRAMS)
    parser.add_argument("--json", type=Path, help="the file to write; the page goes beside it, as .txt (default: none)")
    parser.add_argument("--resume", action="store_true", help="leave out the parts that the file has")
    parser.add_argument("--device", help="the accelerator's type; fake: the one of the tests (default: the one here)")
    parser.add_argument("--small", action="store_true", help="small networks, which show that everything runs")
    parser.add_argument("--rounds", type=int, default=7, help="of everything that is timed, at most (default: 7)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="no part is begun after it (default: 480)")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        help="a part, or a level of them, such as gpt2/steps; takes *; may be repeated",
    )
    parser.add_argument("--memory", type=float, help="GiB that may be allocated (default: all of the device)")
    asked = parser.parse_args(arguments)
    if asked.device == "fake":
        from tests.device import fake  # noqa: F401  # registers the device, and so comes before backstash
    from backstash import accelerator

    asked.device = asked.device or accelerator.kind()
    if asked.device is None or asked.device == "cpu" or not accelerator.is_here(asked.device):
        parser.error(
            f"{asked.program} measures an accelerator, and torch finds {accelerator.kind() or 'none'} here; "
            f"--device fake --small shows that everything runs"
        )
    from bench.gpu.parts import Run

    run = Run(asked, arguments)
    program: Any = importlib.import_module(f"bench.gpu.{asked.program}")
    with run.device.limited(None if asked.memory is None else int(asked.memory * 2**30)):
        program.measure(run)
    return run.close()


if __name__ == "__main__":
    raise SystemExit(main())
