"""Settings of a project: the table ``[tool.backstash]`` of its ``pyproject.toml``."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from backstash.errors import SettingError

TABLE = "[tool.backstash]"


def defaults(commands: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the values of options by command and name, as typer takes them for its ``default_map``.

    A key of the table is an option's name without its dashes, for every command that has it. A table of its own, such
    as ``[tool.backstash.compare]``, has the options of one command.

    Args:
        commands: the commands by name, each with ``params``.

    Raises:
        SettingError: the file is no TOML, no command has an option of that name, or a value is of another kind.
    """
    file = _nearest(Path.cwd())
    table = _table(file) if file is not None else {}
    options = {name: _options(command) for name, command in commands.items()}
    found: dict[str, dict[str, Any]] = {name: {} for name in commands}
    ordered = sorted(table.items(), key=lambda item: isinstance(item[1], dict))  # what is for one command comes last
    for key, value in ordered:
        if isinstance(value, dict) and key in commands:
            for inner, setting in value.items():
                _set(found, options, {key}, inner, setting, f"{file}, [tool.backstash.{key}]")
        else:
            _set(found, options, set(commands), key, value, f"{file}, {TABLE}")
    return found


def _set(
    found: dict[str, dict[str, Any]],
    options: Mapping[str, Mapping[str, str]],
    commands: set[str],
    key: str,
    value: Any,
    where: str,
) -> None:
    having = [name for name in commands if key in options[name]]
    if not having:
        known = sorted({option for name in commands for option in options[name]})
        near = get_close_matches(key, known, n=1)
        raise SettingError(
            f"{where} asks for {key!r}, but there are {', '.join(known)}."
            + (f" Did you mean {near[0]!r}?" if near else "")
        )
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        value = ",".join(value)
    if not isinstance(value, (str, int, float, bool)):
        raise SettingError(f"{where} asks for {key} = {value!r}, but an option is a text, a number or a switch.")
    for name in having:
        found[name][options[name][key]] = value


def _options(command: Any) -> dict[str, str]:
    return {
        option.removeprefix("--"): parameter.name
        for parameter in command.params
        if parameter.param_type_name == "option"
        for option in parameter.opts
        if option.startswith("--") and option not in ("--help", "--module")
    }


def _nearest(folder: Path) -> Path | None:
    return next((file for one in (folder, *folder.parents) if (file := one / "pyproject.toml").is_file()), None)


def _table(file: Path) -> dict[str, Any]:
    try:
        tool = tomllib.loads(file.read_text(encoding="utf-8")).get("tool", {})
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingError(f"settings were looked for in {file}, but it cannot be read: {error}. Mend it.") from None
    table = tool.get("backstash", {}) if isinstance(tool, dict) else {}
    if not isinstance(table, dict):
        raise SettingError(f"{file} has tool.backstash = {table!r}, but that is a table of options. Write {TABLE}.")
    return table
