"""A run of a program: its parts, each with a result of its own, so that a run that was stopped goes on."""

from __future__ import annotations

import argparse
import os
import re
import time
import warnings
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from bench.gpu import device, pages
from bench.results import Results, plain
from bench.rounds import Deadline

FORMAT = 1
"""Version of the JSON's layout."""

ATTEMPTS = 2
"""How often a part is begun that ends the process, or that a time limit ends."""


class Run:
    """A run of a program.

    Attributes:
        device: the accelerator.
        small: whether everything is small, because it is only to be shown that it runs.
        rounds: of what is timed, at most.
        parts: by name what each part has found, or the error that it ended with.

    Args:
        asked: the command line.
        arguments: as it was given.
    """

    def __init__(self, asked: argparse.Namespace, arguments: Sequence[str] | None) -> None:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS computes the same twice only with it
        self.program: str = asked.program
        self.small: bool = asked.small
        self.rounds: int = asked.rounds
        self.device = device.find(asked.device)
        self._only: list[str] = asked.only
        self._json: Path | None = asked.json
        self._deadline = Deadline.after(asked.seconds)
        self._results = Results(
            "bench.gpu",
            asked.json,
            arguments,
            format=FORMAT,
            device=asked.device,
            resume=asked.resume,
            program=asked.program,
        )
        self.parts: dict[str, Any] = self._results.found.setdefault("parts", {})
        self._left_out = 0
        self._results.write(parts=self.parts)

    def is_chosen(self, name: str) -> bool:
        """Whether the command line asks for a part."""
        return not self._only or any(fnmatch(name, text) or name.startswith(f"{text}/") for text in self._only)

    def part(self, name: str, work: Callable[[], Any]) -> Any:
        """Runs a part, unless the file has it. Returns its result; None for one that failed or was left out.

        An error is a result, and does not end the run.
        """
        known = self.parts.get(name, {})
        if "result" in known:
            return known["result"]
        if not self.is_chosen(name) or "error" in known:
            return None
        attempts = known.get("attempts", 0) + 1
        if attempts > ATTEMPTS:
            self._note(name, error="the process ended in this part")
            return None
        if self._deadline.left() <= 0:
            self._left_out += 1
            return None
        print(f"{name} ...", flush=True)
        self._note(name, attempts=attempts)
        started = time.monotonic()
        try:
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("default")
                result = work()
            heard = sorted({str(each.message).splitlines()[0][:300] for each in warned})
            found = {"result": plain(result), **({"warnings": heard} if heard else {})}
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {str(error)[:2000]}"}
            print(f"{name}: {found['error']}", flush=True)
        self._note(name, **found, took=time.monotonic() - started)
        self._require_device(name)
        return found.get("result")

    def _require_device(self, name: str) -> None:
        """Ends the process if the device is lost: each part after it would fail, and be noted as one that failed."""
        try:
            self.device.wait()
            self.device.clean()
        except Exception as error:
            raise SystemExit(
                f"{name}: the device does not answer any more ({error}). The same command with --resume goes on."
            ) from error

    def write(self, name: str, text: str) -> Path | None:
        """Writes a text into a folder beside the JSON. Returns the file's name; None where no JSON is written."""
        if self._json is None:
            return None
        folder = self._json.with_suffix("")
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / re.sub(r"[^\w.-]+", "_", name)
        path.write_text(text)
        return path.relative_to(self._json.parent)

    def _note(self, name: str, **found: Any) -> None:
        self.parts[name] = found
        self._results.write(parts=self.parts)

    def close(self) -> int:
        """Writes and prints the page. Returns 1 if a part failed or an exact way has other bits, else 0."""
        page = pages.text(self.program, self._results.found)
        print(f"\n{page}", flush=True)
        if self._json is not None:
            self._json.with_suffix(".txt").write_text(f"{page}\n")
        if self._left_out:
            print(f"\nno time was left for {self._left_out} parts; the same command with --resume goes on")
        print(self._results.close())
        return int(bool(pages.wrong(self.program, self._results.found)))
