"""Notebooks: ``%load_ext backstash`` brings a cell magic that runs a cell under a Session and shows its report."""

from __future__ import annotations

import shlex
from argparse import ArgumentParser
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
    fails shows its traceback and no report.
    """
    parser = _Parser(prog="%%backstash", add_help=False)
    parser.add_argument("policy", nargs="?", default="lossless")
    parser.add_argument("--budget", type=lambda text: int(text) if text.isdigit() else text)
    parser.add_argument("--min-nbytes", type=int)
    parser.add_argument("--output", "-o", metavar="NAME")

    def backstash(line: str, cell: str) -> None:
        """Runs the cell under a Session: %%backstash [POLICY] [--budget BYTES] [--min-nbytes BYTES] [--output NAME]."""
        from IPython.display import display

        try:
            asked = parser.parse_args(shlex.split(line))
            session = session_for(asked.policy, asked.budget, min_nbytes=asked.min_nbytes)
        except (BackstashError, ValueError) as error:
            print(f"backstash: {error}")
            return
        with session:
            done = shell.run_cell(cell, store_history=False)
        report = session.report()
        if asked.output:
            shell.user_ns[asked.output] = report
        if done.success:
            display(report)

    shell.register_magic_function(backstash, "cell", "backstash")


def unload_ipython_extension(shell: Any) -> None:
    """Is called by IPython for ``%unload_ext backstash``."""
    shell.magics_manager.magics["cell"].pop("backstash", None)
