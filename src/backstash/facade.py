"""Packages that import a public name when it is asked for first (PEP 562): a process loads only what it uses."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def on_demand(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns the functions ``__getattr__`` and ``__dir__`` of a package that imports its public names on demand.

    Its modules are imported likewise when they are asked for as attributes. What was asked for once is a plain
    attribute of the package from then on. Type checkers know the names from imports below ``if TYPE_CHECKING``, which
    ``tests/test_facade.py`` compares with ``homes``.

    Args:
        package: the package's name.
        homes: by each such name, the module below the package that defines it. None of these modules may have a public
            name's own name, because importing it would put the module in the name's place.
    """
    members = vars(sys.modules[package])

    def member(name: str) -> Any:
        if name in homes:
            found = getattr(import_module(f"{package}.{homes[name]}"), name)
        elif not name.startswith("_") and find_spec(f"{package}.{name}") is not None:
            found = import_module(f"{package}.{name}")
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        members[name] = found
        return found

    def names() -> list[str]:
        return sorted({*members, *homes})

    return member, names
