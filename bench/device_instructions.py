"""The host's instructions in a step under each policy, by callgrind, on the fake device, which computes nothing.

    python -m bench.device_instructions --json docs/results/device-instructions-DATE.json

Instructions repeat themselves to some percent, on a loaded machine as well; times do not. Python, torch, the
fake device and the policies are all in them, so what counts is a policy's number beside plain's. Steps warm up with
real numbers. Those that are counted compute and copy nothing, and the garbage collector rests in them. It needs
valgrind with its headers, and a C++ compiler; without them it says so and ends.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench.rounds import UNTIL_SETTLED

FORMAT = 1
STEPS = 3
NETWORKS = ("resnet50", "gpt2", "resnet50+bfloat16", "gpt2+bfloat16")
"""Networks of tests/device/networks.py, and under autocast to which dtype they run."""

WAYS = ("plain", "keep", "lossless", "lossless_stored", "offload", "cdma", "quantized, 8 bits", "quantized, 4 bits")

CLIENT = """
#include <valgrind/callgrind.h>
extern "C" void start() { CALLGRIND_START_INSTRUMENTATION; CALLGRIND_ZERO_STATS; }
extern "C" void stop(const char* name) { CALLGRIND_DUMP_STATS_AT(name); CALLGRIND_STOP_INSTRUMENTATION; }
"""
"""What the counted process tells callgrind."""


@dataclass(frozen=True)
class Row:
    """What a step under one policy takes of the host.

    Attributes:
        way: the policy, as a user names it.
        instructions: of a step, the median.
        least, most: the same, of the steps that were counted.
        operations: of the device in such a step.
    """

    way: str
    instructions: int
    least: int
    most: int
    operations: int


def missing() -> str | None:
    """Returns what is not there of what is needed; None if all is."""
    if shutil.which("valgrind") is None:
        return "valgrind"
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        return f"the C++ compiler {compiler!r}"
    includes = [compiler, "-E", "-x", "c++", "-include", "valgrind/callgrind.h", os.devnull]
    if subprocess.run(includes, capture_output=True).returncode:
        return "valgrind's header callgrind.h"
    return None


def count(networks: Sequence[str], ways: Sequence[str]) -> Iterator[tuple[str, Row]]:
    """Yields networks and what their ways take, each as soon as it is counted.

    All of them run in one process under callgrind, in which imports take minutes.
    """
    with tempfile.TemporaryDirectory() as folder:
        client = Path(folder) / "client.so"
        compiler = [os.environ.get("CXX", "g++"), "-shared", "-fPIC", "-O1", "-x", "c++", "-", "-o", str(client)]
        subprocess.run(compiler, input=CLIENT, text=True, check=True)
        valgrind = [
            *("valgrind", "--tool=callgrind", "--instr-atstart=no", "--quiet"),
            f"--callgrind-out-file={folder}/callgrind.out",
        ]
        pairs = [f"{network}/{way}" for network in networks for way in ways]
        program = [sys.executable, "-m", "bench.device_instructions", "--inside", str(client), *pairs]
        environment = os.environ | {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        with subprocess.Popen([*valgrind, *program], env=environment, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:  # the operations of a pair, and the pair
                operations, pair = line.rstrip("\n").split(" ", 1)
                yield pair.partition("/")[0], read(Path(folder), pair, int(operations))
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, "valgrind")


def read(folder: Path, pair: str, operations: int) -> Row:
    """Returns what the files of callgrind in a folder say of a network and a way."""
    texts = [path.read_text() for path in sorted(folder.glob("callgrind.out.*"))]
    numbers = [number for name, number in map(dumped, texts) if name == pair]
    return Row(pair.partition("/")[2], int(median(numbers)), min(numbers), max(numbers), operations)


def dumped(text: str) -> tuple[str | None, int]:
    """Returns the name with which a file of callgrind was asked for, and the instructions in it.

    Those are the file's ``totals``, the sum over its functions. Its ``summary`` is less from the second file on.
    """
    name = re.search(r"^desc: Trigger: Client Request: (.*)$", text, re.MULTILINE)
    total = re.search(r"^totals: (\d+)", text, re.MULTILINE)
    return None if name is None else name[1], 0 if total is None else int(total[1])


def inside(client: str, pairs: Sequence[str]) -> None:
    """Runs the steps of networks and ways, and tells callgrind which to count."""
    from tests.device import fake  # registers the device, and so comes before backstash
    from tests.device.networks import NETWORKS as BUILT

    # isort: split
    import torch

    from bench import device_counts

    callgrind = ctypes.CDLL(client)
    makers: dict[str, Callable[[Any], Any]] = {"keep": lambda training: training.session("keep"), **device_counts.WAYS}
    for pair in pairs:
        network, way = pair.split("/", 1)
        network, _, dtype = network.partition("+")
        training = BUILT[network]().to("fake")
        training.autocast = getattr(torch, dtype) if dtype else training.autocast
        training.step()
        session = makers[way](training)
        for _ in range(UNTIL_SETTLED):
            training.step(session)
        with fake.idle():
            (asked,) = training.count(session)
            gc.collect()
            gc.disable()
            for _ in range(STEPS):
                callgrind.start()
                training.step(session)
                callgrind.stop(pair.encode())
            gc.enable()
        print(asked.operations, pair, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Counts, prints a line for each way, and writes the results."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.device_instructions",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, help="the file to write")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--ways", nargs="+", default=list(WAYS))
    parser.add_argument("--inside", nargs="+", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.inside:
        inside(asked.inside[0], asked.inside[1:])
        return 0
    lacking = missing()
    if lacking is not None:
        print(f"instructions are not counted: {lacking} is not there")
        return 0
    from bench.results import Results

    version = subprocess.run(["valgrind", "--version"], capture_output=True, text=True).stdout.strip()
    results = Results("bench.device_instructions", asked.json, arguments, format=FORMAT, steps=STEPS, valgrind=version)
    found: dict[str, list[Row]] = {}
    for network, row in count(asked.networks, asked.ways):
        print(f"{network}, {row.way}: {row.instructions / 1e6:.1f} million instructions", flush=True)
        found.setdefault(network, []).append(row)
        results.write(networks=found)
    print(results.close())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
