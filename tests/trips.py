"""Two trips through the package, traced: a step of relu and pooling, and a script run within a budget.

    python -m tests.trips relu
    python -m tests.trips budget

Each prints JSON: by the name of a stretch, the functions that it enters in their order, and how many files and calls.
"""

from __future__ import annotations

import json
import runpy
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

SOURCE = Path(__file__).parents[1] / "src" / "backstash"


class Trip:
    """The functions of the package that are entered, in their order.

    Attributes:
        calls: how many.
    """

    def __init__(self) -> None:
        self.calls = 0
        self._functions: dict[tuple[str, str, int], None] = {}

    def _enter(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(SOURCE)) and code.co_name != "<module>":
            self.calls += 1
            self._functions.setdefault((code.co_filename, code.co_name, code.co_firstlineno))

    @contextmanager
    def traced(self) -> Iterator[None]:
        """Notes what is entered inside."""
        threading.setprofile(self._enter)
        sys.setprofile(self._enter)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def __call__(self) -> dict[str, Any]:
        """What there is to print: the functions as pairs of a file and a name, in the order of their first calls."""
        functions = [(str(Path(file).relative_to(SOURCE)), name) for file, name, _ in self._functions]
        return {"files": len({file for file, _ in functions}), "functions": functions, "calls": self.calls}


def relu() -> dict[str, Any]:
    """A first step and a repeated one of a convolution, a relu and a pooling, forward and backward."""
    import torch
    from torch import nn

    import backstash as bs

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 15 * 15, 2))
    batch = torch.randn(4, 3, 32, 32)
    session = bs.Session("lossless", model=model, min_nbytes=0, stop_if_useless=False)

    def step() -> None:
        with session:
            loss = model(batch).sum()
        loss.backward()

    found = {}
    for name, before in (("first", 0), ("repeated", 9)):
        for _ in range(before):
            step()
        trip = Trip()
        with trip.traced():
            step()
        found[name] = trip()
    return found


SCRIPT = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(128, 128), nn.ReLU())), nn.Linear(128, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(60):
    optimizer.zero_grad()
    model(torch.randn(4096, 128)).square().mean().backward()
    optimizer.step()
"""


def budget() -> dict[str, Any]:
    """``backstash run --budget 90% train.py``, from where all modules of the command line are there."""
    import backstash.cli.commands  # noqa: F401

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.py"
        path.write_text(SCRIPT)
        trip = Trip()
        sys.argv = ["backstash", "run", "--budget", "90%", str(path)]
        with trip.traced():
            with suppress(SystemExit):
                runpy.run_module("backstash", run_name="__main__", alter_sys=True)
    return {"run": trip()}


TRIPS: dict[str, Callable[[], dict[str, Any]]] = {"relu": relu, "budget": budget}

if __name__ == "__main__":
    print(json.dumps(TRIPS[sys.argv[1]]()))
