"""A training step as a planner sees it: a :class:`StepProfile`, plain data without tensors.

A step is a sequence of positions: the functions of the forward pass, then the nodes of the backward pass. What the step
holds has two parts. The *base* is all that no policy can change: feature maps on their way, gradients, workspaces. The
*planned values* are what autograd alone holds between the two passes, and each of them offers choices.

What a choice costs, position by position, is defined in peak.py.

Note: [reserve]
    How much a codec such as zvc makes of a value depends on the numbers. In training these change: where a relu
    returns zero for half of the elements today, it will do so for some more or less of them in a thousand steps, or
    with another batch. So a plan leaves room for a share of the value's dense bytes beside those that were measured, as
    far as the codec may take more bytes at all. Codecs of a fixed rate, such as a bit per element, need none.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

from backstash.errors import PlanError
from backstash.planning.model.sealed import plain, restore, seal, unseal
from backstash.saved import MIN_NBYTES

Kind = Literal["keep", "encode", "recompute", "offload"]
KINDS: tuple[Kind, ...] = get_args(Kind)
KIND_WORDS: dict[Kind, str] = {"keep": "kept", "encode": "encoded", "recompute": "remade", "offload": "moved"}
"""The kinds in words, in the order in which they are told."""

LARGEST = 1 << 50
"""The most bytes of a value, a choice or a position: thousands of them can be added up in 64 bits."""


@dataclass(frozen=True, slots=True)
class Position:
    """One function of the forward pass, or one node of the backward pass.

    Attributes:
        name: name of the function or node, such as ``"conv2d"`` or ``"ConvolutionBackward0"``.
        module: path of the module whose value it reads; ``""`` where it reads none that is planned.
        is_backward: whether it is a node of the backward pass.
        seconds: how long it takes in a plain step.
    """

    name: str
    module: str
    is_backward: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to hold a value between the forward pass and its readers.

    Attributes:
        name: ``"keep"``, ``"recompute"``, ``"offload"``, or the id of a codec such as ``"zvc"``. Where a value is moved
            in a form for dense values (see rounding.DENSE), ``"offload exponents"``; with ``" in turn"`` behind it
            where it comes back when no other value does.
        kind: what the executor does: hold the value dense, encode it on the device, remake it, or move it to a store.
        held_nbytes: bytes of device memory that are held from the value's birth through its last need. A value that is
            kept holds its own bytes; one that is remade or moved as a whole holds none.
        reserve_nbytes: bytes that are planned for beside ``held_nbytes``, because the codec's size depends on the
            numbers (Note: [reserve]).
        encode_nbytes: extra bytes at the value's birth, while it is encoded or moved.
        decode_nbytes: extra bytes at each position that needs the value, while it is there in decoded form; 0 if the
            backward kernels read the planes themselves.
        encode_seconds: time to encode or move the value once.
        decode_seconds: time to decode the value, or to bring it back, at one position that needs it.
        parents: for a value that is remade, indices of the values that it is remade from. What else the recipe reads,
            such as parameters, is held anyway and does not count.
        workspace_nbytes: for a value that is remade, extra bytes at the position where it is remade, beside its own.
        seconds: for a value that is remade, time to remake it once from its parents.
        error: predicted relative error of all gradients together, if this value alone is held in this way: the length
            of the error over that of the gradient. 0.0 if the choice is exact, and above it if the codec has a bound.
        fetches: for a value that is moved, and for each of its reads, the position from which on it is on its way
            back and takes ``decode_nbytes``; empty if it is asked for when it is read.
        calls: for a value that is remade, names of the calls that its recipe makes (see CallPlace), each of which is
            proven in a first step; empty where they are not known.
        in_place: whether one of these calls works in place.
        reason: why this choice is offered, or what its numbers rest on; ``explain()`` shows it.
    """

    name: str
    kind: Kind
    held_nbytes: int
    encode_nbytes: int = 0
    decode_nbytes: int = 0
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0
    parents: tuple[int, ...] = ()
    workspace_nbytes: int = 0
    seconds: float = 0.0
    error: float = 0.0
    fetches: tuple[int, ...] = ()
    reason: str = ""
    reserve_nbytes: int = 0
    calls: tuple[str, ...] = ()
    in_place: bool = False

    @classmethod
    def keep(cls, nbytes: int) -> Choice:
        """Returns the choice to hold a value of ``nbytes`` as it is."""
        return cls("keep", "keep", nbytes)

    def flaw(self) -> str | None:
        """Returns what is wrong with the choice by itself, or None."""
        sizes = (self.held_nbytes, self.encode_nbytes, self.decode_nbytes, self.workspace_nbytes, self.reserve_nbytes)
        times = (self.encode_seconds, self.decode_seconds, self.seconds, self.error)
        if self.kind not in KINDS:
            return f"kind={self.kind!r} is none of {', '.join(KINDS)}"
        if min(sizes) < 0 or not all(0.0 <= time < float("inf") for time in times):
            return "a number of bytes, a time or an error is negative or not finite"
        if max(sizes) > LARGEST:
            return "a number of bytes is larger than any memory"
        if self.kind != "recompute" and (self.parents or self.workspace_nbytes or self.seconds):
            return "only a value that is remade has parents, a workspace and a time to remake it"
        if self.kind == "recompute" and (self.held_nbytes or self.encode_nbytes or self.decode_nbytes):
            return "a value that is remade holds nothing, and is neither encoded nor decoded"
        if self.kind == "recompute" and (self.encode_seconds or self.decode_seconds):
            return "a value that is remade is neither encoded nor decoded"
        if self.fetches and self.kind != "offload":
            return "only a value that is moved is fetched"
        if self.reserve_nbytes and self.kind != "encode":
            return "only a value that is encoded may take more bytes in another step"
        if self.kind == "keep" and any((*sizes[1:], *times)):
            return "to keep a value costs nothing but its bytes"
        return None


@dataclass(frozen=True, slots=True)
class PlannedValue:
    """A value that autograd alone holds from some position of the forward pass on.

    Attributes:
        key: a name that is the same in every step (see saved.SavedTensor).
        module: path of the module whose forward saved it.
        op: name of the autograd node that saved it, such as ``"Relu"``.
        spec: dtype and shape as text.
        nbytes: bytes of the value's storage.
        born: the position from which on only autograd holds the value. Before it, the value is part of the base.
        reads: the backward positions whose nodes read it, ascending, at least one.
        choices: the ways to hold it. The first is always to keep it.
    """

    key: str
    module: str
    op: str
    spec: str
    nbytes: int
    born: int
    reads: tuple[int, ...]
    choices: tuple[Choice, ...]

    def flaw(self) -> str | None:
        """Returns what is wrong with the value by itself, or None."""
        if not self.choices or self.choices[0] != Choice.keep(self.nbytes):
            return f"its first choice is not Choice.keep({self.nbytes})"
        if len({choice.name for choice in self.choices}) != len(self.choices):
            return "two of its choices have the same name"
        if not self.reads or any(a >= b for a, b in zip(self.reads, self.reads[1:], strict=False)):
            return f"its reads {self.reads} are not one or more ascending positions"
        if not 0 <= self.nbytes <= LARGEST or not 0 <= self.born <= self.reads[0]:
            return f"it has {self.nbytes} bytes and is born at {self.born}, with its first read at {self.reads[0]}"
        for choice in self.choices:
            is_each = len(choice.fetches) in (0, len(self.reads))
            if not is_each or any(at > read or at < 0 for at, read in zip(choice.fetches, self.reads, strict=False)):
                return f"its choice {choice.name!r} is fetched at {choice.fetches}, but is read at {self.reads}"
        flaws = ((choice.name, choice.flaw()) for choice in self.choices)
        return next((f"its choice {name!r}: {flaw}" for name, flaw in flaws if flaw), None)


@dataclass(frozen=True)
class StepProfile:
    """One training step, as a planner sees it.

    Attributes:
        positions: the functions of the forward pass and then the nodes of the backward pass, in their order.
        base_nbytes: for each position the most bytes that are alive at it of everything but the planned values, above
            ``held_nbytes``. Below 0 where the step frees what was held before it, such as the gradients of another.
        values: the planned values. Those that a value is remade from may stand before or after it.
        plain_peak_nbytes: the counted peak of a step of plain PyTorch, above ``held_nbytes``.
        held_nbytes: bytes that were held before the step: parameters, gradients, the state of the optimizer.
        machine: the machine on which the seconds were measured.
        versions: versions of the libraries that were used, by name.
        device: the type of the device whose memory is planned.
        others: keys of saved tensors that a policy is asked about although the program holds them, such as the batch.
            They are no values to plan. With the spec behind it, where a value has that key.
        cycles: how many forward and backward passes the step has, one after the other.
        session_seconds: what a Session adds to a step with its hooks, whatever it does with the values.
        tries: the families of choices that were tried on the values (see budget.py).
        store: name of the store that a value is moved to.
        directory: folder of that store's file, if it is a disk store.
        moments: for each position the bytes of ``base_nbytes`` each time when they had risen and were about to fall;
            empty where they were not noted. From those of several shapes the base of another one follows (shapes.py).
        min_nbytes: smaller tensors were kept, and are in no values.
        tries_more: takes the profile of the step once more with more families of choices, and returns it; None for a
            profile that was read from a file. It is no part of the data.
        reorders: proves that the loss of the model's head may be computed in chunks of so many bytes of logits, and
            returns the head's path and the profile of the step with that; None for a profile that was read from a file.
        off_by: runs the step under a policy, undoes it, and returns by how much the gradients are off, relative to
            their length; None where that cannot be measured, and for a profile that was read from a file.
        rehearse: runs the step under a policy, undoes it, and returns the most bytes that were alive at each position;
            None for a profile that was read from a file. It is no part of the data.
        clock: as ``rehearse``: runs plain steps and steps under a policy in turns, and returns how many times as long
            the latter take.
        together: a context in which ``rehearse`` and ``clock`` share one copy of what the step changes, which takes
            time where weights are large; None for a profile that was read from a file.

    Raises:
        PlanError: the parts do not fit together.

    Example:
        >>> forward, backward = Position("relu", "", False, 0.1), Position("ReluBackward0", "", True, 0.2)
        >>> choices = Choice.keep(100), Choice("bitmask", "encode", 4, encode_nbytes=100)
        >>> value = PlannedValue("/Relu#0:result", "", "Relu", "float32 [25]", 100, 0, (1,), choices)
        >>> profile = StepProfile((forward, backward), (200, 300), (value,), 400)
        >>> StepProfile.from_json(profile.to_json()) == profile
        True
    """

    positions: tuple[Position, ...]
    base_nbytes: tuple[int, ...]
    values: tuple[PlannedValue, ...]
    plain_peak_nbytes: int
    held_nbytes: int = 0
    machine: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    device: str = "cpu"
    others: tuple[str, ...] = ()
    cycles: int = 1
    session_seconds: float = 0.0
    tries: tuple[str, ...] = ("lossless", "recompute", "offload", "bounded")
    store: str = "host"
    directory: str = ""
    moments: tuple[tuple[int, ...], ...] = ()
    min_nbytes: int = MIN_NBYTES
    rehearse: ClassVar[Callable[[Any], tuple[int, ...]] | None] = None
    clock: ClassVar[Callable[..., float] | None] = None
    together: ClassVar[Callable[[], AbstractContextManager[None]] | None] = None
    off_by: ClassVar[Callable[[Any], float | None] | None] = None
    tries_more: ClassVar[Callable[..., StepProfile] | None] = None
    reorders: ClassVar[Callable[[int], tuple[str, StepProfile]] | None] = None

    def __post_init__(self) -> None:
        flaw = self._flaw()
        if flaw is not None:
            raise PlanError(
                f"StepProfile was asked for a step of {len(self.positions)} positions and {len(self.values)} values, "
                f"but {flaw}. Take the profile of the step again."
            )

    @property
    def seconds(self) -> float:
        """The time of a plain step: the sum over its positions."""
        return sum(position.seconds for position in self.positions)

    @property
    def trial_nbytes(self) -> int:
        """About the most bytes that it takes to try a choice of a value: what is made of it, and its forms."""
        return max((value.nbytes + _form_nbytes(value) for value in self.values), default=0)

    def fingerprint(self) -> str:
        """Returns a hash of what a step must have for a plan of this profile to fit it; times do not count."""
        values = [[v.key, v.spec, v.nbytes, [choice.name for choice in v.choices]] for v in self.values]
        return hashlib.sha256(json.dumps([self.device, self.cycles, values]).encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """Returns the profile as a JSON document with a checksum."""
        return seal("StepProfile", plain(self))

    @classmethod
    def from_json(cls, text: str) -> StepProfile:
        """Returns the profile that :meth:`to_json` has written.

        Raises:
            PlanError: the text is no such document, or it was edited or damaged.
        """
        return restore(cls, unseal("StepProfile", text), "StepProfile")

    def _flaw(self) -> str | None:
        """Returns what is wrong with the profile, or None."""
        count = len(self.positions)
        if not count or len(self.base_nbytes) != count:
            return f"there are {len(self.base_nbytes)} base_nbytes, or no position at all"
        if self.moments and tuple(max(each, default=None) for each in self.moments) != self.base_nbytes:
            return "the most bytes of each position's moments are not its base_nbytes"
        if min(self.plain_peak_nbytes, self.held_nbytes, self.min_nbytes) < 0:
            return "plain_peak_nbytes, held_nbytes or min_nbytes is negative"
        if max(map(abs, (self.plain_peak_nbytes, self.held_nbytes, *self.base_nbytes))) > LARGEST:
            return "a number of bytes is larger than any memory"
        if self.cycles < 1:
            return f"it has {self.cycles} forward passes"
        if not all(0.0 <= position.seconds < float("inf") for position in self.positions):
            return "the seconds of a position are negative or not finite"
        if not 0.0 <= self.session_seconds < float("inf"):
            return "session_seconds are negative or not finite"
        keys: set[str] = set()
        for value in self.values:
            flaw = value.flaw()
            if flaw is None and value.key in keys:
                flaw = "two values have this key"
            if flaw is None and not (value.reads[-1] < count and self.positions[value.reads[0]].is_backward):
                flaw = f"its reads {value.reads} are not positions of backward"
            parents = {parent for choice in value.choices for parent in choice.parents}
            if flaw is None and not all(0 <= parent < len(self.values) for parent in parents):
                flaw = f"its parents {sorted(parents)} are not all among the values"
            if flaw is not None:
                return f"the value {value.key!r} does not fit: {flaw}"
            keys.add(value.key)
        return None if children_first(self.values) is not None else "a value would be remade from itself"


def _form_nbytes(value: PlannedValue) -> int:
    """What it takes beside a value to make it again, to encode it twice, or to find that no codec pays."""
    return max([value.nbytes, *(choice.workspace_nbytes + 2 * choice.held_nbytes for choice in value.choices[1:])])


def children_first(values: tuple[PlannedValue, ...]) -> list[int] | None:
    """Returns the indices of all values, each before all that it may be remade from; None if there is a cycle."""
    parents = [tuple({p for choice in value.choices for p in choice.parents}) for value in values]
    waiting = [0] * len(values)
    for found in parents:
        for parent in found:
            waiting[parent] += 1
    order = [index for index, children in enumerate(waiting) if not children]
    for index in order:
        for parent in parents[index]:
            waiting[parent] -= 1
            if not waiting[parent]:
                order.append(parent)
    return order if len(order) == len(values) else None
