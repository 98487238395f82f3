"""Scripts: what autograd saves in a forward pass, in order, and the program of each value. Data that prints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from backstash.capture.names import CallCounts, ModuleEvent
from backstash.codecs.base import Encoded
from backstash.numerics import Settings
from backstash.saved import Mask, SavedTensor, TensorSpec

NOTHING = TensorSpec((), (), torch.float32, torch.device("cpu"), 4)
"""In the place of a spec that nobody reads."""


class SaveKind(IntEnum):
    """What a saved tensor is."""

    PARAMETER = 0
    SMALL = 1
    LOOSE = 2
    """A weight's copy, which autocast has made: it is held as it is, and belongs to no value."""
    SHAPE = 3
    """Nothing of it is read but its shape."""
    VALUE = 4
    SPARSE = 5
    """Of another layout than a strided one: it is held as it is."""


class ClaimWay(IntEnum):
    """Whether a saved tensor is unpacked as a claim (redeem/claims.py)."""

    NEVER = 0
    ALWAYS = 1
    IF_NO_ROOM = 2


class InputSource(IntEnum):
    """Where an input of a repeated call comes from."""

    COPY = 0
    VALUE = 1
    CALL = 2


class ValueFate(IntEnum):
    """What becomes of a value."""

    HOLD = 0
    ENCODE = 1
    REMAKE = 2
    ASK = 3
    """It is decided on the long way, in each pass anew."""
    MOVE = 4
    """It is encoded, and its planes are put into another store."""


class Fetching(IntEnum):
    """What is told when backward reads a saved tensor, so that moved values come back in time (stash/prefetch.py)."""

    NOTHING = 0
    """No value is moved."""
    PLACE = 1
    """How far backward has come, by what is read on the device: the order in which moved values are read is learned."""
    KEY = 2
    """Which value is read: it is planned what is asked for then."""


@dataclass(slots=True)
class Save:
    """One tensor that autograd saves.

    Attributes:
        kind, spec, offset, storage_nbytes: what it is, how it looks, and the bytes of its storage.
        gap: from the number of the node that saves it to that of the next node.
        value: the number of its value; -1 for none.
        call: the number of the call in which it is saved; -1 outside of any.
        is_builtin: whether a node of torch's own saves it.
        is_pinned: whether it is a leaf that autograd accumulates into, or a view of one.
        reads_value, reads_sign: how much of it is read.
        may_claim_weight, may_claim_input: whether a linear layer may be given a claim for it.
        as_held, as_stored, as_bits: whether it is claimed where it is held, stored in a form, or read as mask bits.
        parameter: the address of a parameter's storage.
        looks: what the node that saves it adds to the sum in Forward.counted.
        facts: about it; None where it is not looked at.
        read_as: the key by which the prefetcher is told that backward reads it; None where it is told of nothing.
        mask: what is read of its sign.
        place: what the long way knows of it.
    """

    kind: SaveKind
    spec: TensorSpec = NOTHING
    offset: int = 0
    storage_nbytes: int = 0
    gap: int = 0
    value: int = -1
    call: int = -1
    is_builtin: bool = True
    is_pinned: bool = False
    reads_value: bool = False
    reads_sign: bool = False
    may_claim_weight: bool = False
    may_claim_input: bool = False
    as_held: ClaimWay = ClaimWay.NEVER
    as_stored: ClaimWay = ClaimWay.NEVER
    as_bits: ClaimWay = ClaimWay.NEVER
    parameter: int = 0
    looks: int = 0
    facts: SavedTensor | None = None
    read_as: str | None = None
    mask: Mask | None = None
    place: Any = None


@dataclass(frozen=True, slots=True)
class GivenInput:
    """An input of a repeated call: the number of a copy, of a value or of a tree, and how the call sees it."""

    source: InputSource
    number: int
    spec: TensorSpec
    offset: int = 0


@dataclass(frozen=True, slots=True)
class CallTree:
    """A call that is repeated.

    Attributes:
        call: its number among the script's calls.
        made: which of the contents that it makes is wanted.
        inside: the number of the tensor that it saves inside, if that is wanted; -1 for a result.
        function: what is called, which may write over its first argument.
        as_called: the call as it was noted, without its inputs.
        places: of its inputs among the arguments, where calling the function is all that there is to do; else None.
        given: its inputs.
        inner: the calls that make some of them.
        spec: of the result.
        name: of the function.
        affine: how a batch norm is made in one pass; None where it is not.
        one_pass: how another value is; None where it is not.
    """

    call: int
    made: int
    inside: int
    function: Any
    as_called: Any
    places: tuple[int, ...] | None
    given: tuple[GivenInput, ...]
    inner: tuple[CallTree, ...]
    spec: TensorSpec
    name: str
    affine: AffinePass | None = None
    one_pass: OnePassTree | None = None

    def __str__(self) -> str:
        made = f"{self.name}({', '.join(self._inputs())})"
        return made if self.inside < 0 else f"{made}, saved inside as number {self.inside}"

    def _inputs(self) -> Iterator[str]:
        for each in self.given:
            if each.source is InputSource.CALL:
                yield str(self.inner[each.number])
            else:
                yield f"v{each.number}" if each.source is InputSource.VALUE else "copy"


@dataclass(frozen=True, slots=True)
class ReplayedInput:
    """What a pass reads: a value, if ``call`` is -1, or else what that call has read, or saved of its input.

    Attributes:
        call: the number of the call.
        place: which of its copies; MEAN or RSTD of remake/onepass.py for a statistic that it has saved.
        value: an input that is a value; otherwise one that nobody reads.
    """

    call: int
    place: int
    value: GivenInput | None


@dataclass(frozen=True, slots=True)
class OnePassTree:
    """A value that is made in one pass: see remake/onepass.py.

    Attributes:
        operands: what is read.
        make: fills the result, given their tensors.
    """

    operands: tuple[ReplayedInput, ...]
    make: Any


@dataclass(frozen=True, slots=True)
class AffinePass:
    """``activation(batch_norm(source) + residual)`` in one pass: see remake/fused.py.

    Attributes:
        norm: the number of the batch norm's call.
        weight, bias: which of its copies these are; -1 for none.
        source, residual: inputs; the residual is None where nothing is added.
        inner: the tree that makes the residual.
        second, second_weight, second_bias: of a residual that is a batch norm too; -1 for none.
        activation, lo, hi, outer, channels, inside: as the kernel ``affine`` takes them.
        kernel: what calls the kernel off the CPU.
    """

    norm: int
    weight: int
    bias: int
    source: GivenInput
    residual: GivenInput | None
    inner: CallTree | None
    second: int
    second_weight: int
    second_bias: int
    activation: int
    lo: float
    hi: float
    outer: int
    channels: int
    inside: int
    kernel: Any


@dataclass(frozen=True, slots=True)
class PlaneKernel:
    """A codec's kernels, by which the interpreter makes planes that have one size: see native/planes.h.

    Attributes:
        encode, decode: their addresses.
        how: what both are told besides.
        nbytes: of the planes.
        encoded: returns what is encoded, given the planes in one piece of memory, uint8 [nbytes].
    """

    encode: int
    decode: int
    how: bytes
    nbytes: int
    encoded: Callable[[Tensor], Encoded]


@dataclass(frozen=True, slots=True)
class ZvcPlanes:
    """Planes of zvc that the interpreter makes, and the look at a sample before: see codecs/sample.py.

    Attributes:
        runs, run, step: of the sample.
        most_nonzeros: how many of its elements may at most not be zero; the codec declines where there are more.
        chunks: elements of the plane of offsets.
    """

    runs: int
    run: int
    step: int
    most_nonzeros: int
    chunks: int


@dataclass(slots=True)
class ValueProgram:
    """What becomes of a value.

    Attributes:
        program: whether it is held, encoded or made again.
        members, strongest: how many saves it has, and which of them needs most of it.
        contents: the register of what it holds.
        nbytes: of its storage.
        is_whole: whether the strongest save shows all of it, in its own layout.
        is_exact_form: whether its form has every bit.
        shares: whether what is made again is held for all who read it.
        whole, decoded: the spec of all of it, and that of what it is decoded to.
        key: under which it is reported.
        codec, mask, ways: of a value that is encoded.
        has_view: whether what is encoded may be read as a view of a plane.
        kernel: by which the interpreter encodes it; None where Python does.
        zvc: how it makes planes of zvc; None where it does not.
        tree: of a value that is made again.
        text: what a report says of that: the codec, the recipe, or why it is held.
        delay, held, gone, settled: as in stash/place.py.
        spared, spares: in how many passes codecs that have declined it are asked again, and then; 0 for never.
        account: of the value in the pass that was written down.
        kept_as: the bytes, codec, reason and store of that account.
    """

    program: ValueFate
    members: int
    strongest: int
    contents: int
    nbytes: int
    is_whole: bool
    whole: TensorSpec
    decoded: TensorSpec
    key: str
    text: str
    is_exact_form: bool = False
    shares: bool = False
    codec: Any = None
    mask: Mask | None = None
    ways: Any = None
    has_view: bool = False
    kernel: PlaneKernel | None = None
    zvc: ZvcPlanes | None = None
    tree: CallTree | None = None
    delay: int = 1
    held: int = 0
    gone: int = 0
    settled: int = 0
    spared: int = 0
    spares: int = 0
    account: Any = None
    kept_as: tuple[int, str, str, str] = (0, "", "", "device")

    def __str__(self) -> str:
        what = self.program.name.capitalize()
        return f"{what}({self.text})"


@dataclass(frozen=True, slots=True)
class SavingNode:
    """A node that saves tensors: where it is found behind the results of its call, and what has to be true of it.

    Attributes:
        result: the number of the result behind which it is found.
        behind: the number of the call's node behind which it is found; -1 for the result.
        path: which edges lead to it from there.
        type: what tells its type from others.
        saves: the numbers of what it saves.
        asked: names of its scalars, and what they were.
    """

    result: int
    behind: int
    path: tuple[int, ...]
    type: int
    saves: tuple[int, ...]
    asked: tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True)
class MadeContent:
    """What a call makes: one of its results, or a tensor that it saves.

    Attributes:
        spec: of the tensor, which fills its storage.
        register: of what it holds.
        output: which of several results it is; -1 for the only one.
        saved: the number of its save; -1 for a result.
    """

    spec: TensorSpec
    register: int
    output: int
    saved: int


@dataclass(frozen=True, slots=True)
class NotedCall:
    """What a call that makes values again has to be like: see remake/patterns.py.

    Attributes:
        args, kwargs: the arguments, with a Slot in the place of each tensor.
        made: what of that which the call makes others are made from, or are.
        in_place: whether the first argument becomes the result.
        draws: whether it draws random numbers.
        chosen: which of the tensors among the arguments are read; None for all.
        registers: what each of these holds; -1 for one that is copied.
        shared: which of them are parameters of the model, whose copies calls share.
        referenced: which of them are parameters that are read where they are.
        needs_grad: for each whether autograd followed it; empty where that makes no difference.
        mean, invstd: the numbers of the saves that are a batch norm's statistics; -1 for none.
        autocast: the dtype of autocast; None where that was off.
        settings: of the process, under which the call was noted.
        number: of all such settings, as the interpreter tells them apart.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: tuple[MadeContent, ...]
    in_place: bool
    draws: bool
    chosen: tuple[int, ...] | None
    registers: tuple[int, ...]
    shared: tuple[bool, ...]
    referenced: tuple[bool, ...]
    needs_grad: tuple[bool, ...]
    mean: int
    invstd: int
    autocast: torch.dtype | None
    settings: Settings
    number: int


@dataclass(slots=True)
class KnownCall:
    """A torch function that saves something, or makes what is made again.

    Attributes:
        function: what is called.
        first, saves: the number of the first save in it, and how many there are.
        nodes: what saves them.
        unknown: the numbers of those that are saved by nodes that are not found, as by an operation in place on a view.
        noted: how it makes its results, and what it saves inside.
        cast: how autocast converts what it saves; in a tree, its number is that of the call behind those of all calls.
    """

    function: Any
    first: int
    saves: int = 0
    nodes: list[SavingNode] = field(default_factory=list)
    unknown: tuple[int, ...] = ()
    noted: NotedCall | None = None
    cast: NotedCall | None = None


@dataclass(slots=True)
class Script:
    """What a forward pass does.

    Attributes:
        saves, values, calls: in the order in which they come.
        registers: how many contents are told apart.
        min_nbytes: what is smaller is kept.
        counted: how many tensors were saved, and their bytes.
        copied: parameters of an accelerator that recipes have copied, to be copied together.
        counts: of modules' calls, and of nodes outside of modules, at the pass's end.
        module_events: the modules' calls, as they began and ended.
        fetching: what the prefetcher is told.
        fetches: when moved values are asked for: in the order of these lines, as long as there is room, or as planned.
    """

    saves: list[Save]
    values: list[ValueProgram]
    calls: list[KnownCall]
    registers: int
    min_nbytes: int
    counted: tuple[int, int]
    copied: list[Tensor]
    counts: CallCounts
    module_events: tuple[ModuleEvent, ...]
    fetching: Fetching = Fetching.NOTHING
    fetches: tuple[str, ...] = ()

    def saved_by(self, saves: int, named: int) -> tuple[int, int, int]:
        """What a pass has saved when it has saved and named that many tensors, as Forward.counted."""
        nbytes = sum(save.spec.nbytes for save in self.saves[:saves])
        return saves, nbytes, sum(save.looks for save in self.saves[:named])

    def __str__(self) -> str:
        lines = [f"{len(self.saves)} saves, {len(self.calls)} calls, {len(self.values)} values"]
        lines += [f"v{number} {value.key}: {value}" for number, value in enumerate(self.values)]
        return "\n".join((*lines, *self.fetches))
