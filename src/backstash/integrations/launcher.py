"""Runs a training script or module, unchanged, under a Session: ``backstash run``."""

from __future__ import annotations

import builtins
import io
import os
import pkgutil
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any, Protocol

import torch

from backstash.compile import patch_compile
from backstash.errors import BudgetError, ScriptError
from backstash.policies.base import Policy
from backstash.session import Session
from backstash.stash.ledger import Report

INTERRUPTED = 130
"""Exit code of a script that was interrupted from the keyboard: 128 plus the number of SIGINT, as in shells."""

_OWN = tuple(f"{folder}{os.sep}" for folder in (Path(__file__).parents[1], Path(torch.__file__).parent))
"""The folders of backstash and torch, as the names of their files begin."""

Failed = Callable[[BaseException], None]
"""A function that is called with the exception that ends a script, before its traceback is printed."""


@dataclass(frozen=True)
class Launched:
    """How a script ended.

    Attributes:
        exit_code: the exit code that ``python script.py`` would have had.
        report: the Session's report. A script that failed has one as well.
        error: the exception that ended the script; None if it came to its end or called ``sys.exit``.
        compiled: the report of the graphs that the script has compiled; None if there are none.
    """

    exit_code: int
    report: Report
    error: BaseException | None = None
    compiled: Report | None = None


def launch(
    script: str | Path,
    args: Sequence[str] = (),
    policy: str | Policy = "lossless",
    *,
    is_module: bool = False,
    min_nbytes: int | None = None,
    failed: Callable[[BaseException, Report], None] | None = None,
) -> Launched:
    """Runs a script under one Session, from its first line to its last.

    Args:
        script: path of the script, or with ``is_module`` the dotted name of a module.
        args: the script's arguments.
        policy, min_nbytes: the Session's.
        is_module: whether ``script`` is run as ``python -m`` runs a module.
        failed: is called with the exception that ends the script and the Session's report, before the traceback is
            printed.

    Raises:
        ScriptError: there is no such file or module.
        UnknownNameError: no policy has that name.
    """
    require_script(script, is_module)
    session = Session(policy, min_nbytes=min_nbytes)
    with patch_compile(policy, min_nbytes=min_nbytes) as patched:
        launched = launch_under(session, script, args, is_module=is_module, failed=failed)
    return replace(launched, compiled=patched.report())


class Run(AbstractContextManager[object], Protocol):
    """What a script runs under: a Session, or what opens Sessions of its own."""

    def report(self) -> Report:
        """The report of the last step."""


def launch_under(
    run: Run,
    script: str | Path,
    args: Sequence[str] = (),
    *,
    is_module: bool = False,
    failed: Callable[[BaseException, Report], None] | None = None,
) -> Launched:
    """Runs a script inside ``run``, from its first line to its last.

    Args:
        run: a context that reports.

    Raises:
        ScriptError: there is no such file or module.
    """
    require_script(script, is_module)
    ended_by: list[BaseException] = []

    def note(error: BaseException) -> None:
        ended_by.append(error)
        if failed is not None:
            failed(error, run.report())

    with run:
        exit_code = execute(script, args, is_module=is_module, failed=note)
    return Launched(exit_code, run.report(), ended_by[0] if ended_by else None)


def execute(
    script: str | Path, args: Sequence[str] = (), *, is_module: bool = False, failed: Failed | None = None
) -> int:
    """Runs a script as ``python script.py`` does, or a module as ``python -m module`` does, in this process.

    The script is ``__main__``, has its own ``sys.argv``, and imports from its own folder first; a module imports from
    the current folder first, and its relative imports work. If it fails, its traceback is printed without the frames of
    this launcher; if no plan fits a budget, it ends where the script calls torch, and the message follows.

    Args:
        script: path of the script, of a folder or an archive with a ``__main__``, or dotted name of the module.
        is_module: whether ``script`` is the name of a module.
        failed: is called with the exception that ends the script, before its traceback is printed.

    Returns:
        The exit code that Python would end with.

    Raises:
        ScriptError: there is no such file or module.
    """
    require_script(script, is_module)
    streams = sys.stdout, sys.stderr
    with _as_main(str(script), args, is_module) as namespace:
        try:
            exec(_code(str(script), namespace, is_module), namespace)
        except SystemExit as stop:
            return _exit_code(stop)
        except BaseException as error:  # any exception ends a script, as it does in Python itself
            if failed is not None:
                failed(error)
            sys.excepthook(type(error), error, _from_script(error))
            return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
        finally:
            _settle_streams(streams)
    return 0


def is_own_process() -> bool:
    """Whether this process was started as the command ``backstash``, so that it ends with the script."""
    program = Path(sys.argv[0])
    return program.stem == "backstash" or program.parent.name == "backstash"


def require_script(script: str | Path, is_module: bool = False) -> None:
    """Checks that a script is a file, or that Python finds a module.

    Raises:
        ScriptError: there is no such file or module.
    """
    if is_module:
        with _searching(str(Path.cwd())):
            _require_module(str(script))
    elif not Path(script).exists() or (Path(script).is_dir() and not (Path(script) / "__main__.py").is_file()):
        is_folder = Path(script).is_dir()
        found = (
            "that is a folder without a __main__.py"
            if is_folder
            else f"there is no such file (looked from {Path.cwd()})"
        )
        raise ScriptError(
            f"the training script {str(script)!r} was asked for, but {found}. Give the path of a Python file, or -m "
            f"and the name of a module; backstash's own options come before it."
        )


def _require_module(name: str) -> None:
    try:
        if _spec(name) is not None:
            return
        found = "Python finds no module of that name that can be run"
    except ModuleNotFoundError as missing:
        if missing.name is None or not f"{name}.".startswith(f"{missing.name}."):
            return  # one of its packages fails when it is imported, which is shown when the module is run
        found = f"Python finds no module named {missing.name!r}"
    except Exception:  # likewise: a package may fail with any exception
        return
    advice = "Give the name without .py and with dots" if name.endswith(".py") or "/" in name else "Check the name"
    raise ScriptError(
        f"the module {name!r} was asked for, but {found} (looked from {Path.cwd()}). {advice}, and start in the folder "
        f"that holds its package."
    )


def _spec(name: str) -> ModuleSpec | None:
    """The spec of the module that ``python -m name`` would run: of a package that is its ``__main__``."""
    try:
        spec = find_spec(name)
    except ValueError:  # a module that is loaded already and has no spec
        return None
    if spec is not None and spec.submodule_search_locations is not None:
        spec = find_spec(f"{name}.__main__")
    return spec


def _code(script: str, namespace: dict[str, object], is_module: bool) -> CodeType:
    """The program. For a module, the namespace is given what tells it the package that it is in."""
    if not is_module and not _is_searched(script):
        path = os.path.abspath(script)
        text = Path(path).read_bytes()  # once: it may be a pipe
        compiled: CodeType | None = pkgutil.read_code(io.BytesIO(text))
        if compiled is not None:
            return compiled
        # Without dont_inherit the script would inherit this file's "from __future__ import annotations".
        return compile(text, path, "exec", dont_inherit=True)
    spec = _spec(script) if is_module else PathFinder.find_spec("__main__", [script])
    get_code = getattr(spec.loader, "get_code", None) if spec is not None else None
    code = get_code(spec.name) if spec is not None and get_code is not None else None
    if spec is None or code is None:
        raise ImportError(f"the module {script!r} has no code that Python can run", name=script)
    namespace.update(
        __file__=spec.origin,
        __cached__=spec.cached,
        __loader__=spec.loader,
        __package__=spec.parent,
        __spec__=spec,
    )
    if is_module:
        sys.argv[0] = str(spec.origin)
    return code  # type: ignore[no-any-return]


def _is_searched(script: str) -> bool:
    """Whether Python searches a script for its ``__main__``: it is a folder or an archive."""
    return os.path.isdir(script) or zipfile.is_zipfile(script)


def _from_script(error: BaseException) -> TracebackType | None:
    """Has an error's traceback begin at the script's first frame, and returns it. A BudgetError's ends at its last."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    error.__traceback__ = trace
    if isinstance(error, BudgetError):  # an answer to the user, and no fault of a line in backstash
        last = None
        while trace is not None:
            if not trace.tb_frame.f_code.co_filename.startswith(_OWN):
                last = trace
            trace = trace.tb_next
        if last is not None:
            last.tb_next = None
    return error.__traceback__


def _settle_streams(before: tuple[Any, Any]) -> None:
    """Flushes what the script prints to. In place of a stream that can no longer be used comes the one before."""
    for name, original in zip(("stdout", "stderr"), before, strict=True):
        usable = (stream for stream in (getattr(sys, name), original) if _is_flushed(stream))
        setattr(sys, name, next(usable, None))  # None prints nothing, as where Python is started without the stream


def _is_flushed(stream: Any) -> bool:
    """Flushes a stream; whether that can be written to."""
    try:
        stream.write("")
        stream.flush()
    except Exception:  # it is closed, or an object of the script's that writes to something closed, or no stream
        return False
    return True


@contextmanager
def _searching(folder: str, stays: bool = False) -> Iterator[None]:
    """Has Python import from that folder first, in place of the one of this process; for good if it ``stays``."""
    search = sys.path[:]
    if not sys.flags.safe_path:  # python -P does not import from the script's folder, and neither do we
        sys.path[0] = folder
    try:
        yield
    finally:
        if not stays:
            sys.path[:] = search


@contextmanager
def _as_main(script: str, args: Sequence[str], is_module: bool) -> Iterator[dict[str, object]]:
    """Yields the namespace of a fresh ``__main__``. Restores argv, the import path and ``__main__`` on leaving.

    In a process of the command's own they stay: the script's threads may go on, and functions that it has registered
    for the end of the process run, after its last line. They may pickle what it has defined, and import more.
    """
    module = ModuleType("__main__")
    module.__dict__.update(__builtins__=builtins, __cached__=None)
    if not is_module:
        path = os.path.abspath(script)
        module.__dict__.update(__file__=path, __loader__=SourceFileLoader("__main__", path))
    folder = os.getcwd() if is_module else os.path.dirname(os.path.realpath(script))
    if not is_module and _is_searched(script):
        folder = script
    before, stays = (sys.argv, sys.modules["__main__"]), is_own_process()
    with _searching(folder, stays):
        sys.argv = ["-m" if is_module else script, *args]
        sys.modules["__main__"] = module
        try:
            yield module.__dict__
        finally:
            if not stays:
                sys.argv, sys.modules["__main__"] = before


def _exit_code(stop: SystemExit) -> int:
    """The exit code of ``sys.exit(argument)``: the argument if it is a number. Any other is printed and means 1."""
    if stop.code is None or isinstance(stop.code, int):
        return int(stop.code or 0)
    print(stop.code, file=sys.stderr)
    return 1
