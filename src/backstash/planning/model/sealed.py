"""Frozen dataclasses as JSON documents with a checksum, read again with every field checked.

A plan decides what a training step does, so a document that was damaged or edited is refused as a whole. A checksum
finds accidents and careless edits; it is no protection against somebody who computes it anew.
"""

from __future__ import annotations

import hashlib
import json
import reprlib
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from backstash.errors import PlanError

_T = TypeVar("_T")

VERSION = 5
"""The version of all documents. A document of another version is refused, because nothing is known about its fields."""

LARGEST = 1 << 62
"""The largest number in a document: a planner counts in 64 bits."""

_shown = reprlib.Repr()
_shown.maxlevel, _shown.maxstring, _shown.maxother = 3, 60, 60


def shown(found: Any) -> str:
    """Returns a short text of whatever a document has, however deep or long it is."""
    return _shown.repr(found)[:200]


def plain(value: Any) -> Any:
    """Returns a dataclass, and everything in it, as dicts, lists, strings and numbers."""
    if is_dataclass(value) and not isinstance(value, type):
        return {name: plain(getattr(value, name)) for name in _hints(type(value))}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return value


def seal(kind: str, content: Any) -> str:
    """Returns plain data as a JSON document that names its kind, its version and its checksum."""
    text = _canonical(content)
    return json.dumps(
        {"backstash": kind, "version": VERSION, "checksum": _checksum(text), "content": content}, indent=1
    )


def unseal(kind: str, text: str) -> Any:
    """Returns the content of a document that :func:`seal` has written.

    Raises:
        PlanError: the text is no such document, is of another kind or version, or its content was changed.
    """
    asked = f"a {kind} was asked for from a JSON text"
    again = f"Pass the text that {kind}.to_json() has written, unchanged"
    document, checksum = parsed(kind, text)
    if not isinstance(document, dict) or document.get("backstash") != kind or "content" not in document:
        found = document.get("backstash") if isinstance(document, dict) else type(document).__name__
        raise PlanError(f"{asked}, but it holds {shown(found)}. {again}.")
    if document.get("version") != VERSION:
        raise PlanError(
            f"{asked}, but it is of version {shown(document.get('version'))}, and this backstash reads version "
            f"{VERSION}. Make it again with this backstash."
        )
    if document.get("checksum") != checksum:
        raise PlanError(f"{asked}, but its checksum does not fit: it was edited or damaged. {again}, or make it again.")
    return document["content"]


def parsed(kind: str, text: str) -> tuple[Any, str]:
    """Returns what a JSON text says, and the checksum of its content, if it has any.

    Args:
        kind: what the text is, for errors.

    Raises:
        PlanError: it is no JSON, is nested too deeply, or names something twice.
    """
    asked = f"a {kind} was asked for from a JSON text"
    again = f"Pass the text that {kind}.to_json() has written, unchanged"
    try:
        document = json.loads(text, object_pairs_hook=_without_repetitions)
        return document, _checksum(_canonical(document.get("content"))) if isinstance(document, dict) else ""
    except RecursionError:
        raise PlanError(f"{asked}, but it is nested more deeply than any {kind} is. {again}.") from None
    except (TypeError, ValueError) as error:
        raise PlanError(f"{asked}, but it is no JSON: {error}. {again}.") from None


def restore(cls: type[_T], content: Any, where: str) -> _T:
    """Returns the dataclass whose plain data ``content`` is.

    Args:
        cls: a dataclass whose fields are numbers, strings, bools, tuples, dicts of strings, or such dataclasses.
        where: what the data is, for errors.

    Raises:
        PlanError: a field is missing, unknown, or of another type.
    """
    if not isinstance(content, dict):
        raise PlanError(f"{where} was asked for, but got {shown(content)}, which has no fields. Make the file again.")
    hints = _hints(cls)  # type: ignore[arg-type]  # a class is hashable
    if content.keys() != hints.keys():
        missing, unknown = sorted(hints.keys() - content.keys()), sorted(content.keys() - hints.keys())
        raise PlanError(
            f"{where} was asked for, but the data lacks {missing or 'nothing'} and has {shown(unknown or 'nothing')} "
            f"beside what it needs. Make the file again with this backstash."
        )
    return cls(**{name: _value(hint, content[name], f"{where}, {name}") for name, hint in hints.items()})


def _value(hint: Any, found: Any, where: str) -> Any:
    """Returns ``found`` as a value of the annotated type ``hint``."""
    origin = get_origin(hint)
    if origin is tuple and isinstance(found, list):
        inner, *rest = get_args(hint)
        if rest == [...]:
            return tuple(_value(inner, item, where) for item in found)
        if len(found) == 1 + len(rest):
            return tuple(_value(kind, item, where) for kind, item in zip((inner, *rest), found, strict=True))
    elif origin is dict and isinstance(found, dict):
        return {name: _value(get_args(hint)[1], item, where) for name, item in found.items()}
    elif origin is Literal and isinstance(found, str) and found in get_args(hint):
        return found
    elif origin is UnionType and found is None and NoneType in get_args(hint):
        return None
    elif origin is UnionType:
        return _value(next(kind for kind in get_args(hint) if kind is not NoneType), found, where)
    elif is_dataclass(hint) and isinstance(hint, type):
        return restore(hint, found, where)
    elif hint in (str, bool) and type(found) is hint:
        return found
    elif hint in (int, float) and type(found) in (int, hint) and -LARGEST <= found <= LARGEST:  # NaN is not
        return hint(found)
    raise PlanError(f"{where} was asked for as {hint}, but got {shown(found)}. Make the file again.")


@cache
def _hints(cls: type) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls) if field.init}  # type: ignore[arg-type]  # is a dataclass


def _canonical(content: Any) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"))


def _without_repetitions(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a JSON object as a dict."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object in it names something twice")
    return found


def _checksum(text: str) -> str:
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()
