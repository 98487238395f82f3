"""The operations of a checkpointed region, written down in forward and in the recomputation, and compared.

This is for a run in which a difference is looked into: each operation's inputs and outputs are summed. The first
operation that differs between the two says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from backstash.capture.naming import tensors_within
from backstash.saved import is_tensor
from backstash.torch_internals import TorchDispatchMode, is_seeded_tag
from backstash.verifying.checksum import Checksum, checksum, numbers_of, why_unchecked
from backstash.verifying.paths import address_of

_SILENT = ("aten.detach", "aten.alias", "aten.sym_size", "aten.sym_stride", "prim.device")
_BLANK = ("aten.empty", "aten.new_empty", "aten.empty_like", "aten.empty_strided", "aten.new_empty_strided")
_MOST = 20_000


@dataclass(slots=True)
class Operation:
    """One operation of a region.

    Attributes:
        name: of the operator, such as ``"aten.mm.default"``.
        numbers: its arguments but tensors, as text.
        inputs, outputs: checksums; None where there is none.
        layouts: strides and alignment of its tensors.
        names: what its inputs are.
        is_seeded: whether it draws random numbers.
        shapes: of its outputs.
    """

    name: str
    path: str
    numbers: str
    inputs: list[Checksum | None]
    layouts: list[tuple[Any, ...]]
    names: list[str]
    is_seeded: bool
    outputs: list[Checksum | None]
    shapes: list[str]

    @property
    def short_name(self) -> str:
        """The name without its overload, as torch's functions have it."""
        return self.name.split(".")[1] if "." in self.name else self.name


class OperationLog(TorchDispatchMode):
    """Inside the ``with``, the operations of this thread are written down.

    Args:
        name_of: returns what a tensor is that no operation inside has made, or None.
    """

    def __init__(self, path_of: Callable[[], str], name_of: Callable[[Tensor], str | None]) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self._path_of, self._name_of = path_of, name_of
        self._made: dict[int, str] = {}
        self._blank: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func)
        if name.startswith(_SILENT) or len(self.operations) >= _MOST:
            return func(*args, **kwargs)
        given = list(tensors_within((args, kwargs)))
        before = [self._sum(each) for each in given]
        layouts = [_layout(each) for each in given]
        names = [self._name(each) for each in given]
        numbers = _numbers((args, kwargs))
        returned = func(*args, **kwargs)
        outputs = list(tensors_within(returned))
        is_blank = name.startswith(_BLANK)
        for each in outputs:
            address = address_of(each)
            (self._blank.add if is_blank else self._blank.discard)(address)
            self._made[address] = name.split(".")[1]
        for each, is_written in zip(given, _written(func, args, kwargs), strict=False):
            if is_written:
                self._blank.discard(address_of(each))
        self.operations.append(
            Operation(
                name,
                self._path_of(),
                numbers,
                before,
                layouts,
                names,
                is_seeded_tag in getattr(func, "tags", ()),
                [None if is_blank else self._sum(each) for each in outputs],
                [f"{str(each.dtype).removeprefix('torch.')} {list(each.shape)}" for each in outputs],
            )
        )
        return returned

    def _sum(self, x: Tensor) -> Checksum | None:
        return None if why_unchecked(x) is not None or address_of(x) in self._blank else checksum(x)

    def _name(self, x: Tensor) -> str:
        made = self._made.get(address_of(x))
        return f"the result of {made}" if made is not None else self._name_of(x) or "a tensor from outside"


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """The first operation that differs.

    Attributes:
        kind: ``"operation"``, ``"numbers"``, ``"input"``, ``"dtype"``, ``"seeded"``, ``"layout"``, ``"kernel"``.
        path, name: of the operation in forward.
        text: what differs, as the end of a sentence.
        subject: the input's name, for the kind ``"input"``.
    """

    kind: str
    path: str
    name: str
    text: str
    subject: str = ""


def first_different_operation(forward: Sequence[Operation], again: Sequence[Operation]) -> FirstDifference | None:
    """Returns the first operation that differs; None if there is none, also where the recomputation ends earlier."""
    sums = [each for run in (forward, again) for op in run for each in (*op.inputs, *op.outputs) if each is not None]
    numbers = iter(numbers_of(sums))
    resolved = [
        [(_resolve(op.inputs, numbers), _resolve(op.outputs, numbers)) for op in run] for run in (forward, again)
    ]
    for place, other_place in _aligned([op.name for op in forward], [op.name for op in again]):
        found = _compare(forward[place], again[other_place], *resolved[0][place], *resolved[1][other_place])
        if found is not None:
            return found
    return None


def _aligned(forward: Sequence[str], again: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Pairs of places. A cast on one side alone is passed over: autocast keeps casts of weights from forward."""
    one = two = 0
    while one < len(forward) and two < len(again):
        if forward[one] != again[two] and _CAST in (forward[one], again[two]):
            one, two = one + (forward[one] == _CAST), two + (again[two] == _CAST)
            continue
        yield one, two
        one, two = one + 1, two + 1


_CAST = "aten._to_copy.default"


def _compare(
    op: Operation, other: Operation, given: list[Any], got: list[Any], given_again: list[Any], got_again: list[Any]
) -> FirstDifference | None:
    def found(kind: str, text: str, subject: str = "") -> FirstDifference:
        return FirstDifference(kind, op.path, op.short_name, text, subject)

    if op.name != other.name:
        return found("operation", f"forward ran {op.short_name} where the recomputation ran {other.short_name}")
    if op.numbers != other.numbers:
        return found("numbers", f"{op.short_name} was called with other arguments: {_apart(op.numbers, other.numbers)}")
    if op.shapes != other.shapes:
        text = f"{op.short_name} returned {', '.join(op.shapes)} and then {', '.join(other.shapes)}"
        return found("dtype", text)
    for place, (one, two) in enumerate(zip(given, given_again, strict=False)):
        if one is not None and two is not None and one != two:
            name = op.names[place]
            return found("input", f"{op.short_name} read {name}, which had other bits", name)
    if any(one != two for one, two in zip(got, got_again, strict=False) if one is not None and two is not None):
        if op.is_seeded:
            return found("seeded", f"{op.short_name} drew other random numbers")
        if op.layouts != other.layouts:
            return found("layout", f"{op.short_name} read the same bits in another layout, by another kernel")
        return found("kernel", f"{op.short_name} returned other bits for the same inputs")
    return None


def _resolve(sums: list[Checksum | None], numbers: Iterator[int]) -> list[int | None]:
    return [None if each is None else next(numbers) for each in sums]


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[bool]:
    """For each tensor among the arguments, whether the operator writes it."""
    schema = getattr(func, "_schema", None)
    declared = list(schema.arguments) if schema is not None else []
    by_name = {each.name: each for each in declared}
    for place, value in enumerate(args):
        info = declared[place].alias_info if place < len(declared) else None
        yield from (info is not None and info.is_write for _ in tensors_within(value))
    for key, value in kwargs.items():
        info = by_name[key].alias_info if key in by_name else None
        yield from (info is not None and info.is_write for _ in tensors_within(value))


def _numbers(tree: Any) -> str:
    if is_tensor(tree):
        return "_"
    if isinstance(tree, (tuple, list)):
        return "(" + ", ".join(_numbers(each) for each in tree) + ")"
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{key}={_numbers(each)}" for key, each in tree.items()) + "}"
    if isinstance(tree, torch.Generator):
        return "a generator"
    return repr(tree)


def _apart(one: str, other: str) -> str:
    return f"{one[:80]} and then {other[:80]}"


def _layout(x: Tensor) -> tuple[Any, ...]:
    address = address_of(x)
    return (x.stride(), address % 64) if x.layout is torch.strided and not x.is_nested else ()
