"""Arguments and options that several commands share."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from backstash import policies as registry
from backstash.planning.model.sealed import LARGEST

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_KNOWN = ", ".join(one.name for one in registry.descriptions())


def parse_size(text: str | int) -> int:
    """Bytes from a text such as ``"64KiB"``, or ``"65536"``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", str(text).strip(), re.ASCII)
    if match is None or match[2].upper() not in _UNITS:
        raise typer.BadParameter(f"{text!r} is no size in bytes. Give a number, or one with a unit such as 64KiB.")
    return int(min(float(match[1]) * _UNITS[match[2].upper()], LARGEST))


def file_for(option: str, file: Path | None) -> Path | None:
    """Returns the absolute path of a file that is written in the end: a script may change the current folder.

    Raises:
        BadParameter: it cannot be written.
    """
    if file is None:
        return None
    if not file.parent.is_dir():
        raise typer.BadParameter(f"the folder {file.parent} is not there", param_hint=option)
    if file.is_dir():
        raise typer.BadParameter(f"{file} is a folder", param_hint=option)
    return file.absolute()


def require_apart(*files: tuple[str, Path | None]) -> None:
    """Refuses two outputs of one file, of which the second would replace the first.

    Args:
        files: each with its option; None for one that was not asked for.
    """
    taken: dict[Path, str] = {}
    for option, file in files:
        if file is not None and (other := taken.setdefault(file.resolve(), option)) != option:
            raise typer.BadParameter(f"{file} is written by {other} already: name another", param_hint=option)


def complete_policy(incomplete: str) -> list[tuple[str, str]]:
    """The policies whose names begin so, each with what it does, for a shell's completion."""
    return [(one.name, one.does) for one in registry.descriptions() if one.name.startswith(incomplete)]


def complete_policies(incomplete: str) -> list[tuple[str, str]]:
    """As :func:`complete_policy`, for the last name of a list with commas."""
    head, comma, last = incomplete.rpartition(",")
    return [(f"{head}{comma}{name}", does) for name, does in complete_policy(last)]


def complete_allocator(incomplete: str) -> list[tuple[str, str]]:
    """The allocators' names, for a shell's completion."""
    known = (
        ("auto", "the best that is installed, for a script on CPU"),
        ("system", "the C library's own"),
        ("tcmalloc", "Debian, Ubuntu: libtcmalloc-minimal4"),
        ("jemalloc", "Debian, Ubuntu: libjemalloc2"),
        ("mimalloc", "Debian, Ubuntu: libmimalloc2.0"),
    )
    return [one for one in known if one[0].startswith(incomplete)]


class ScriptCommand(TyperCommand):
    """A command whose long options may also stand among the script's, while everything else there is the script's.

    ``compare train.py -m resnet --repeats 3`` gives ``-m resnet`` to the script and ``--repeats 3`` to the command. An
    option that was given in front of the script is the script's own behind it, and so is all behind ``--``.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Sorts the arguments before they are parsed: the command's options, the script, the script's arguments."""
        takes_value = {
            option: not getattr(parameter, "is_flag", False)
            for parameter in self.params
            if parameter.param_type_name == "option"
            for option in (*parameter.opts, *parameter.secondary_opts)
        }
        own: list[str] = []
        ahead: set[str] = set()  # options in front of the script
        script: list[str] = []
        waiting = list(args)
        while waiting:
            word = waiting.pop(0)
            name, has_value, _ = word.partition("=")
            if word == "--":
                script += waiting
                break
            if name in takes_value and (not script or (name.startswith("--") and name not in ahead)):
                own.append(word)
                if not script:
                    ahead.add(name)
                if takes_value[name] and not has_value and waiting:
                    own.append(waiting.pop(0))
            elif script or not word.startswith("-"):
                script.append(word)
            else:
                own.append(word)  # --help, or what there is not
        return super().parse_args(ctx, [*own, "--", *script])


Script = Annotated[
    str, typer.Argument(help="The training script, or with -m the name of a module.", show_default=False)
]
Arguments = Annotated[list[str] | None, typer.Argument(help="The script's own arguments.", show_default=False)]
IsModule = Annotated[bool, typer.Option("--module", "-m", help="Run a module, as python -m does.", show_default=False)]
PolicyName = Annotated[
    str,
    typer.Option(
        envvar="BACKSTASH_POLICY",
        help=f"Name of the policy: {_KNOWN}. `backstash policies` explains them.",
        autocompletion=complete_policy,
    ),
]
MinNbytes = Annotated[
    int | None,
    typer.Option(
        envvar="BACKSTASH_MIN_NBYTES",
        parser=parse_size,
        metavar="BYTES",
        help="Keep tensors below this size, such as 64KiB. By default the policy decides.",
        show_default=False,
    ),
]
AllocatorName = Annotated[
    str,
    typer.Option(
        envvar="BACKSTASH_ALLOCATOR",
        metavar="auto|system|NAME|PATH",
        help="Start the script under this allocator: auto is the best that is installed, for a script on CPU.",
        autocompletion=complete_allocator,
    ),
]
NoProgress = Annotated[
    bool,
    typer.Option("--quiet", envvar="BACKSTASH_QUIET", help="Print the result alone, no progress.", show_default=False),
]
OnlyAdvice = Annotated[
    bool,
    typer.Option("--quiet", envvar="BACKSTASH_QUIET", help="Print the recommendation alone.", show_default=False),
]
Quiet = Annotated[
    bool, typer.Option("--quiet", envvar="BACKSTASH_QUIET", help="Print nothing but errors.", show_default=False)
]
