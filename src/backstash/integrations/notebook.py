"""Notebooks: ``%load_ext backstash`` brings a cell magic that runs a cell under a Session and shows its report."""

from __future__ import annotations

import keyword
import shlex
from argparse import ArgumentParser, ArgumentTypeError
from typing import Any, NoReturn

from backstash.errors import BackstashError
from backstash.integrations.attaching import session_for


class _Parser(ArgumentParser):
    """A parser whose errors do not end the notebook's process."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"%%backstash was asked for what it does not take: {message}. {self.format_usage().strip()}")


def load_ipython_extension(shell: Any) -> None:
    """Is called by IPython for ``%load_ext backstash``.

    Args:
        shell: IPython's InteractiveShell.

    The magic, as the first line of a cell::

        %%backstash [POLICY] [--budget BYTES|SHARE] [--min-nbytes BYTES] [--output NAME]

    runs the cell under a Session, or within a budget such as 2GiB or 60% of what its first steps take, and shows the
    report below what the cell shows. With ``--output`` the report becomes a variable of that name as well. A cell that
    fails does so as it would without the magic, and shows no report. What the magic does not take is a usage error of
    the cell, which is not run then.
    """
    parser = _Parser(prog="%%backstash", add_help=False, allow_abbrev=False)
    parser.add_argument("policy", nargs="?", default="lossless")
    parser.add_argument("--budget", type=lambda text: int(text) if text.isdigit() else text)
    parser.add_argument("--min-nbytes", type=int)
    parser.add_argument("--output", "-o", metavar="NAME", type=_name)

    def backstash(line: str, cell: str) -> None:
        """Runs the cell under a Session: %%backstash [POLICY] [--budget BYTES] [--min-nbytes BYTES] [--output NAME]."""
        from IPython.core.error import UsageError
        from IPython.display import display

        try:
            asked = parser.parse_args(shlex.split(line))
            session = session_for(asked.policy, asked.budget, min_nbytes=asked.min_nbytes)
        except (BackstashError, ValueError) as error:
            raise UsageError(f"backstash: {error}") from None
        try:
            with session:
                _run(shell, cell)
        finally:
            report = session.report()
            if asked.output:
                shell.user_ns[asked.output] = report
        display(report)

    shell.register_magic_function(backstash, "cell", "backstash")


def _run(shell: Any, cell: str) -> None:
    """Runs a cell, and raises its error here: whoever runs the notebook has to see that the outer cell has failed.

    IPython shows the error of an inner cell and goes on. So it is told to show nothing there; it will show the same
    error, with the same traceback, for the outer cell.
    """
    quiet = dict.fromkeys(("showtraceback", "showsyntaxerror", "showindentationerror"), _show_nothing)
    before = {name: shell.__dict__[name] for name in quiet if name in shell.__dict__}
    handled, shell.custom_exceptions = shell.custom_exceptions, ()
    shell.__dict__.update(quiet)
    try:
        done = shell.run_cell(cell, store_history=False)
    finally:
        for name in quiet:
            del shell.__dict__[name]
        shell.__dict__.update(before)
        shell.custom_exceptions = handled
    done.raise_error()


def _show_nothing(*args: Any, **options: Any) -> None:
    """Stands in for what shows an error."""


def _name(text: str) -> str:
    if not text.isidentifier() or keyword.iskeyword(text):
        raise ArgumentTypeError(f"{text!r} is no name of a variable")
    return text


def unload_ipython_extension(shell: Any) -> None:
    """Is called by IPython for ``%unload_ext backstash``."""
    shell.magics_manager.magics["cell"].pop("backstash", None)
