"""The JSON file of a benchmark: what ran, where and when, then what was found."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.machine import describe


class Results:
    """What a benchmark has found so far, and the file that it is written to.

    Making one prints the machine's line and starts the clock.

    Attributes:
        machine: the machine that this process runs on.
        found: the JSON's content: what the machine is and what ran, then what :meth:`write` was given.

    Raises:
        SystemExit: what is to be resumed was measured with another command line, or in another format.

    Args:
        name: the benchmark's module.
        path: the file to write; None for no file.
        arguments: its command line; None for that of this process.
        format: the number of the file's format, one more with every change that a reader has to know of.
        device: ``"cpu"``, or the accelerator's type.
        resume: go on with what the file has, if it is there. It has to be of the same command line otherwise.
        asked: what was asked for, as far as a reader of the file wants to know; by name, as :func:`plain` takes it.
    """

    def __init__(
        self,
        name: str,
        path: Path | None,
        arguments: Sequence[str] | None,
        *,
        format: int = 1,
        device: str = "cpu",
        resume: bool = False,
        **asked: Any,
    ) -> None:
        self._began = time.monotonic()
        self._path = path
        self.machine = describe(device)
        print(self.machine, flush=True)
        self.found: dict[str, Any] = {
            "format": format,
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": ["python", "-m", name, *(sys.argv[1:] if arguments is None else arguments)],
            "device": device,
            **plain(asked),
            "machine": asdict(self.machine),
        }
        if resume and path is not None and path.exists():
            self.found |= self._resumed(path)

    def _resumed(self, path: Path) -> dict[str, Any]:
        """What an earlier run of the same command has found; its machine and its start stay those of the file.

        Where the code was another then, ``resumed`` has the time and the commit of this run.
        """
        earlier: dict[str, Any] = json.loads(path.read_text())

        def settings(found: dict[str, Any]) -> list[Any]:
            return [found.get("format"), *(word for word in found.get("command", []) if word not in ("--resume",))]

        if settings(earlier) != settings(self.found):
            raise SystemExit(
                f"{path} was to be resumed, but it was measured by {' '.join(earlier.get('command', ['?']))} (format "
                f"{earlier.get('format')}). Give the same arguments, or another file."
            )
        self._began -= earlier.get("seconds", 0.0)
        commits = [earlier.get("machine", {}).get("commit"), *(run["commit"] for run in earlier.get("resumed", ()))]
        if self.machine.commit != commits[-1]:
            run = {"started": self.found["started"], "commit": self.machine.commit}
            earlier["resumed"] = [*earlier.get("resumed", ()), run]
        return earlier

    def write(self, **found: Any) -> None:
        """Adds ``found`` and writes the file. Call it after every part: what was measured then outlives a failure.

        Args:
            found: by name, as :func:`plain` takes it.
        """
        self.found |= {name: plain(value) for name, value in found.items()}
        self.found["seconds"] = time.monotonic() - self._began
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(self.found, indent=1, allow_nan=False) + "\n")

    def close(self) -> str:
        """The last line to print: how long everything took, and where it is."""
        where = "" if self._path is None else f"; everything is in {self._path}"
        return f"{self.found.get('seconds', 0.0):.0f} s{where}"


def plain(value: Any) -> Any:
    """What JSON knows: dataclasses as objects, tuples as arrays, NaN and the infinities as null, wherever they are."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
