"""The pattern of a place's calls, by which the next call that is like them is noted without a closer look.

Note: [patterns of calls]
    To note a call is to find out what it does to its arguments, which of them are tensors, and how these look. The call
    of the next step at the same place is like it, but for the numbers in its tensors. So a place keeps a pattern of the
    latest call that was noted there: the arguments, with the specs of tensors in their places. A call that fits into
    it in every argument, in the result and in what aliases what, is noted by the pattern's answers; any other one is
    looked at anew. Recipes whose calls have the same patterns, in the same tree, are alike.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from backstash.interpreter import is_odd
from backstash.remake.calls import INPUT, tensors_in
from backstash.saved import PLAIN, TensorSpec

if TYPE_CHECKING:
    from backstash.remake.calls import Call

_COMPARABLE = (
    type(None),
    bool,
    int,
    float,
    str,
    torch.dtype,
    torch.layout,
    torch.device,
    torch.memory_format,
    torch.Size,
)
"""Types of arguments of which equal ones have the same effect. Of floats the bits have to be equal."""


class Slot:
    """How a tensor in the arguments looks.

    Attributes:
        kind: its type.
        spec: its spec.
        offset: where it begins in its storage.
    """

    __slots__ = ("kind", "offset", "spec")

    def __init__(self, x: Tensor) -> None:
        self.kind, self.spec, self.offset = type(x), TensorSpec.of(x), int(x.storage_offset())


class Pattern:
    """A call with the specs of tensors in their places (Note: [patterns of calls]).

    Attributes:
        args, kwargs: the arguments that the function was called with.
        result: the spec of the result, which fills its storage.
        in_place: whether the first argument is what has become the result.
        slots: of the tensors that the call reads, in order.
        chosen: which of the tensors among the arguments these are; None for all of them.
        call: the call itself, without its inputs.
        places: the positions of these tensors in the call's arguments, where they are given one by one and none of them
            by its name; else None.
    """

    __slots__ = ("args", "call", "chosen", "in_place", "kwargs", "places", "result", "slots")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], read: list[Tensor], call: Call) -> None:
        self.args = tuple([_described(arg) for arg in args])
        self.kwargs = {key: _described(arg) for key, arg in kwargs.items()}
        self.result, self.in_place = call.spec, call.in_place
        tensors = tensors_in(args, kwargs)
        is_all = len(read) == len(tensors) and all(x is each for x, each in zip(tensors, read, strict=True))
        position = {id(x): index for index, x in enumerate(tensors)}
        self.chosen = None if is_all else tuple([position[id(x)] for x in read])
        self.slots = tuple([Slot(x) for x in read])
        self.call = call
        places = tuple([place for place, arg in enumerate(call.args) if arg is INPUT])
        is_simple = len(places) == len(read) and call.output is None
        self.places = places if is_simple else None


def pattern_of(args: tuple[Any, ...], kwargs: dict[str, Any], read: list[Tensor], call: Call) -> Pattern | None:
    """The pattern of a call; None where equal calls could not be told from others.

    Args:
        args, kwargs: what the function was called with.
        read: the tensors that the call reads when it is repeated, in order.
        call: what was noted.
    """
    if call.random_state is not None:
        return None
    if not all(map(_is_comparable, (*args, *kwargs.values()))):
        return None
    return Pattern(args, kwargs, read, call.without_inputs())


def _described(arg: Any) -> Any:
    if type(arg) in PLAIN:
        return Slot(arg)
    if type(arg) in (list, tuple):
        return type(arg)([_described(item) for item in arg])
    return arg


def _is_comparable(arg: Any) -> bool:
    if type(arg) in PLAIN:
        return True
    if type(arg) in (list, tuple):
        return all(type(item) in _COMPARABLE or type(item) in PLAIN for item in arg)
    return type(arg) in _COMPARABLE


def fitting(
    pattern: Pattern, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor, storage: torch.UntypedStorage
) -> list[Tensor] | None:
    """The tensors that a call reads, if it fits into a pattern, else None.

    Args:
        pattern: the pattern.
        args, kwargs, result: what was called with what, and the plain tensor that it has returned.
        storage: of the result.
    """
    if len(args) != len(pattern.args) or list(kwargs) != list(pattern.kwargs):
        return None
    if result.storage_offset() != 0 or result.nbytes != storage.nbytes() or not pattern.result.describes(result):
        return None
    found: list[Tensor] = []
    given = zip((*args, *kwargs.values()), (*pattern.args, *pattern.kwargs.values()), strict=True)
    for index, (arg, known) in enumerate(given):
        aliases = pattern.in_place and index == 0
        if not _fits(arg, known, storage, aliases, found):
            return None
    return found if pattern.chosen is None else [found[index] for index in pattern.chosen]


def _fits(arg: Any, known: Any, storage: torch.UntypedStorage, aliases: bool, found: list[Tensor]) -> bool:
    if type(known) is Slot:
        if type(arg) is not known.kind or arg.layout is not torch.strided or is_odd(arg):
            return False
        if (arg.untyped_storage() is storage) is not aliases:
            return False
        found.append(arg)
        return known.spec.describes(arg) and arg.storage_offset() == known.offset
    if type(arg) is not type(known):
        return False
    if type(known) in (list, tuple):
        return len(arg) == len(known) and all(
            _fits(item, other, storage, False, found) for item, other in zip(arg, known, strict=True)
        )
    if arg is known:
        return True
    if type(known) is float:
        return struct.pack("d", arg) == struct.pack("d", known)
    return bool(arg == known)
