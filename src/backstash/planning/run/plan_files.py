"""Plans in a folder, from run to run: a cache, so whatever becomes of its files, training goes on.

Note: [plans in a folder]
    Several runs may share a folder, forked processes and threads among them, and each of them may be killed at any
    moment. So a file is written beside its place under a name that nobody else has, and then takes its place at once: a
    reader finds an old plan, a new one, or none. A file that cannot be read, or says something else than a plan, is
    warned of, and the step is planned anew. A file that cannot be written is warned of, and the next run plans anew.
"""

from __future__ import annotations

import os
import stat
import time
import uuid
import warnings
from pathlib import Path

from backstash.arguments import is_path
from backstash.errors import PlanError
from backstash.planning.model.plan import Plan

LARGEST = 1 << 28
"""Bytes above which a file is no plan. One of 10,000 values takes some 10 MiB."""

ABANDONED = 3600.0
"""Seconds after which a file that is still being written was left behind by a process that was killed."""


class PlanFiles:
    """The plans in a folder, by name.

    Raises:
        PlanError: there is no such folder.
    """

    def __init__(self, folder: str | Path) -> None:
        # Path.is_dir() raises an error where a folder above it may not be entered.
        if not is_path(folder) or not os.path.isdir(folder):
            raise PlanError(
                f"plans were asked for from the folder {str(folder)!r:.200}, but there is no such folder. Make it "
                f"first, or leave folder= out to plan anew in each run."
            )
        self.folder = Path(folder).absolute()  # the program may change the current folder
        self._warned: set[str] = set()

    def read(self, name: str) -> Plan | None:
        """Returns the plan of that name; None if there is none, or if it cannot be read, which is warned of once."""
        file = self._file(name)
        try:
            return Plan.from_json(_content(file).decode("utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, PlanError, UnicodeDecodeError) as error:
            self._warn(
                f"a plan was asked for from the file {str(file)!r}, but it cannot be read: "
                f"{str(error).rstrip('.')}. The step is planned anew.",
                str(file),
            )
            return None

    def write(self, name: str, plan: Plan) -> None:
        """Writes a plan under that name, in the place of what was there. If that is not possible, it warns once."""
        file = self._file(name)
        part = file.with_name(f"{name}.{uuid.uuid4().hex}.part")
        try:
            try:
                _write(part, plan.to_json() + "\n")
                os.replace(part, file)
            except BaseException:
                part.unlink(missing_ok=True)
                raise
            self._remove_abandoned()
        except OSError as error:
            self._warn(
                f"a plan was to be kept in the file {str(file)!r}, but it cannot be written: {error}. Training goes "
                f"on; the next run plans anew.",
                "",
            )

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def _remove_abandoned(self) -> None:
        """Removes what processes that were killed have left behind."""
        for part in self.folder.glob("*.part"):
            try:
                if time.time() - part.stat().st_mtime > ABANDONED:
                    part.unlink()
            except OSError:  # another process has removed it
                continue

    def _warn(self, message: str, about: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            warnings.warn(message, stacklevel=2)


def _content(file: Path) -> bytes:
    """Returns all bytes of a regular file."""
    # Something else in the place of the file, such as a named pipe, would block the training for ever.
    descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError("it is no file")
        if found.st_size > LARGEST:
            raise OSError(f"it has {found.st_size} bytes, which is too much for a plan")
        with open(descriptor, "rb", closefd=False) as opened:
            return opened.read()
    finally:
        os.close(descriptor)


def _write(file: Path, text: str) -> None:
    """Writes a new file, and waits until it is on the disk: else it may be empty after a failure of the machine."""
    with file.open("x", encoding="utf-8") as opened:
        opened.write(text)
        opened.flush()
        os.fsync(opened.fileno())
