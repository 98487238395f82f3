"""Runs a training script, unchanged, under a Session: ``backstash run``."""

from __future__ import annotations

import builtins
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

from backstash.errors import ScriptError
from backstash.policies.base import Policy
from backstash.session import Session
from backstash.stash.ledger import Report

INTERRUPTED = 130
"""Exit code of a script that was interrupted from the keyboard: 128 plus the number of SIGINT, as in shells."""


@dataclass(frozen=True)
class Launched:
    """How a script ended.

    Attributes:
        exit_code: the exit code that ``python script.py`` would have had.
        report: the Session's report. A script that failed has one as well.
    """

    exit_code: int
    report: Report


def launch(script: str | Path, args: Sequence[str] = (), policy: str | Policy = "lossless") -> Launched:
    """Runs a script under one Session, from its first line to its last.

    Args:
        script: path of the script.
        args: the script's arguments.
        policy: the Session's policy, or its name.

    Raises:
        ScriptError: there is no such file.
        UnknownNameError: no policy has that name.
    """
    require(script)
    with Session(policy) as session:
        exit_code = execute(script, args)
    return Launched(exit_code, session.report())


def execute(script: str | Path, args: Sequence[str] = ()) -> int:
    """Runs a script as ``python script.py`` does, in this process.

    The script is ``__main__``, has its own ``sys.argv``, and imports from its own folder first. If it fails, its
    traceback is printed without the frames of this launcher.

    Args:
        script: path of the script.
        args: the script's arguments.

    Returns:
        The exit code that Python would end with.

    Raises:
        ScriptError: there is no such file.
    """
    require(script)
    path = os.path.abspath(script)
    with _as_main(str(script), path, args) as namespace:
        try:
            # Without dont_inherit the script would inherit this file's "from __future__ import annotations".
            exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), namespace)
        except SystemExit as stop:
            return _exit_code(stop)
        except BaseException as error:  # any exception ends a script, as it does in Python itself
            trace = error.__traceback__.tb_next if error.__traceback__ else None
            sys.excepthook(type(error), error.with_traceback(trace), trace)
            return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
    return 0


def require(script: str | Path) -> None:
    """Checks that a script is a file.

    Raises:
        ScriptError: there is no such file.
    """
    if not Path(script).is_file():
        found = "that is a folder" if Path(script).is_dir() else f"there is no such file (looked from {Path.cwd()})"
        raise ScriptError(
            f"the training script {str(script)!r} was asked for, but {found}. Give the path of a Python file; "
            f"backstash's own options come before it."
        )


@contextmanager
def _as_main(script: str, path: str, args: Sequence[str]) -> Iterator[dict[str, object]]:
    """Yields the namespace of a fresh ``__main__``. Restores argv, the import path and ``__main__`` on leaving."""
    module = ModuleType("__main__")
    module.__dict__.update(
        __file__=path, __builtins__=builtins, __cached__=None, __loader__=SourceFileLoader("__main__", path)
    )
    argv, search, main = sys.argv, sys.path[:], sys.modules["__main__"]
    sys.argv = [script, *args]
    if not sys.flags.safe_path:  # python -P does not import from the script's folder, and neither do we
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    sys.modules["__main__"] = module
    try:
        yield module.__dict__
    finally:
        sys.argv, sys.path[:], sys.modules["__main__"] = argv, search, main


def _exit_code(stop: SystemExit) -> int:
    """The exit code of ``sys.exit(argument)``: the argument if it is a number. Any other is printed and means 1."""
    if stop.code is None or isinstance(stop.code, int):
        return int(stop.code or 0)
    print(stop.code, file=sys.stderr)
    return 1
