"""Programs in which nothing of the package is imported yet: forks of a process that has imported torch and no more.

A process of its own for each of them would import torch first, which takes most of its time.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType


@cache
def _origin() -> subprocess.Popen[str]:
    """The process that forks, which each process of tests keeps until it ends."""
    started = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(started.communicate)
    return started


def run_fresh(program: str, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Runs a program as ``python -c`` does, to its very end.

    Args:
        program: its text.
        arguments: what it finds in ``sys.argv[1:]``.
        settings: variables of its environment, which is the tests' own otherwise.
    """
    origin = _origin()
    assert origin.stdin is not None and origin.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        shown = [Path(folder) / name for name in ("stdout", "stderr")]
        order = {
            **{"program": program, "arguments": arguments, "shown": [str(path) for path in shown]},
            **{"environment": {**os.environ, **settings}, "folder": os.getcwd()},
        }
        origin.stdin.write(json.dumps(order) + "\n")
        origin.stdin.flush()
        answer = origin.stdout.readline()
        assert answer, f"the process that forks has ended with {origin.wait()}"
        return subprocess.CompletedProcess(program, json.loads(answer), *(path.read_text() for path in shown))


def _await_orders() -> tuple[str, ModuleType]:
    """Forks for each order. Returns in the forks alone: a program, and the module that it is to be."""
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if child:
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
            continue
        for number, path in zip((0, 1, 2), (os.devnull, *order["shown"]), strict=True):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
        sys.stdin = os.fdopen(0)
        os.environ.clear()
        os.environ.update(order["environment"])
        os.chdir(order["folder"])
        sys.argv, sys.path[0] = ["-c", *order["arguments"]], ""
        sys.modules["__main__"] = ModuleType("__main__")
        return order["program"], sys.modules["__main__"]
    os._exit(0)


if __name__ == "__main__":
    import gc

    import torch  # noqa: F401

    gc.freeze()  # otherwise the end of each fork visits, and so copies, all that torch has
    text, main = _await_orders()
    exec(compile(text, "<string>", "exec"), vars(main))
