"""A forward pass that goes the long way is written down as a script: see :mod:`backstash.replay.program`."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from backstash import repeatable
from backstash.capture import naming
from backstash.capture.forward import Forward
from backstash.capture.names import ModuleEvent, Names
from backstash.capture.observer import ends_pass
from backstash.codecs import base
from backstash.codecs.masks.codec import Bitmask
from backstash.codecs.narrow.codec import Narrow
from backstash.codecs.raw import Raw
from backstash.interpreter import is_odd, is_traced
from backstash.numerics import CHOOSES_ORDER
from backstash.ops import backends
from backstash.ops.layout import Rounding, images
from backstash.policies.base import Policy, knows_room
from backstash.redeem import accumulation, linear, table
from backstash.remake import calls, fused, onepass, patterns
from backstash.remake.calls import Content, Held, Leaf
from backstash.remake.contents import Contents
from backstash.remake.patterns import Pattern
from backstash.remake.recipes import Recipe
from backstash.remake.tape import CallTape
from backstash.replay.kernels import kernel_of, zvc_planes
from backstash.replay.program import (
    AffinePass,
    CallTree,
    ClaimWay,
    Fetching,
    GivenInput,
    InputSource,
    KnownCall,
    MadeContent,
    NotedCall,
    OnePassTree,
    ReplayedInput,
    Save,
    SaveKind,
    SavingNode,
    Script,
    ValueFate,
    ValueProgram,
)
from backstash.saved import PLAIN, UNKNOWN_OP, Mask, Need, SavedTensor, TensorSpec
from backstash.stash import parameters
from backstash.stash.decode import decoded_dtype
from backstash.stash.encode import strength
from backstash.stash.looking import PERIOD, SPARED
from backstash.stash.place import Place
from backstash.stash.prefetch import Prefetcher
from backstash.stash.value import Form, Saved
from backstash.stash.value import Value as Stored
from backstash.stores import DeviceStore
from backstash.torch_internals import hide_from_dynamo, in_backward, next_sequence_number, no_torch_function


class RefusedError(Exception):
    """Why a pass cannot be written down."""


@dataclass(slots=True)
class Ways:
    """How a value is encoded.

    Attributes:
        codec: the codec.
        mask: the mask whose outcome is stored; None where values are.
        spec: of what is encoded.
        facts: about the value.
        nbytes: of its planes, as the policy was told last.
        store: the name of the store that they are put into; None where they stay on the device.
    """

    codec: base.Codec
    mask: Mask | None
    spec: TensorSpec
    facts: SavedTensor
    nbytes: int
    store: str | None


@dataclass(slots=True)
class _Entry:
    """A save, and what was packed.

    Attributes:
        save: the save.
        saved: what was packed; None for parameters and small tensors.
        address: of the numbers of what is small.
        next_number: that of the node that is made next.
        node: the number of the node that has saved it, where it is found; else None.
        cdata: the address of its storage.
        place, value, is_builtin, strength: of what was packed, as it may be dropped before the pass is written down.
        was_decided: whether the value was decided on when that was dropped.
    """

    save: Save
    saved: weakref.ref[Saved] | None = None
    address: int = 0
    next_number: int = 0
    node: int | None = None
    cdata: int = 0
    place: Place | None = None
    value: weakref.ref[Stored] | None = None
    is_builtin: bool = False
    strength: tuple[int, float] = (0, 0.0)
    was_decided: bool = False

    def note(self) -> None:
        """Its node has a name now, or never will."""
        saved = None if self.saved is None else self.saved()
        if saved is None or saved.place is None or saved.value is None:
            return
        self.place, self.value = saved.place, weakref.ref(saved.value)
        self.is_builtin, self.strength = saved.builtin, strength(saved)
        self.saved = weakref.ref(saved, self._drop)

    def _drop(self, _: object) -> None:
        value = None if self.value is None else self.value()
        self.was_decided = value is not None and value.facts is not None


@dataclass(slots=True, eq=False)
class _Made:
    """A content that was made in a call: its result, or what autocast has converted for a save.

    Attributes:
        content, call: the content, and how it is made again.
        pattern: what the function is given then.
        draws: whether it draws random numbers.
        shared: which of the tensors that are read are parameters of the model, whose copies calls share.
        settings: the number of the process's settings then.
        save: the number of its save; -1 for a result.
    """

    content: Content
    call: calls.Call
    pattern: Pattern | None
    draws: bool
    shared: tuple[bool, ...]
    settings: int
    save: int = -1


@dataclass(slots=True)
class _Call:
    """A call in progress, or one that has ended."""

    function: Any
    first: int
    saves: int = 0
    named: list[tuple[Any, list[tuple[str, Saved]]]] = field(default_factory=list)
    nodes: list[SavingNode] = field(default_factory=list)
    made: list[_Made] = field(default_factory=list)
    cast: _Made | None = None


class RecordingForward(Forward):
    """A Forward that tells its recorder of everything.

    A Session's own becomes one for a pass.
    """

    __slots__ = ()

    @property
    def _recorder(self) -> Recorder:
        recorder: Recorder = self.recorder
        return recorder

    def pack(self, x: Tensor) -> Any:
        """As Forward.pack."""
        if is_traced() or in_backward():
            return super().pack(x)
        recorder = self._recorder
        with no_torch_function():  # checkpoints save outside of any function, where an observer would see this look
            entry = recorder.begin_save(x)
        packed = super().pack(x)
        if self.recorder is recorder:  # else all that was saved before is gone, and another pass has begun
            recorder.end_save(entry, packed, x)
        return packed

    def _take_of_node(self, node: Any, found: list[tuple[str, Saved]]) -> None:
        before = self.counted[2]
        super()._take_of_node(node, found)
        self._recorder.named(node, found, self.counted[2] - before)

    def made(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, random_state: Tensor | None
    ) -> None:
        """As Forward.made."""
        contents = self._recorder.tape.contents
        results = [x for x in _results(result) if _is_noted(x)]
        before = [contents.of(x).call for x in results]
        super().made(function, args, kwargs, result, random_state)
        for x, call in zip(results, before, strict=True):
            if contents.of(x).call is not call:
                self._recorder.made(contents, contents.of(x), args, kwargs)
        self._recorder.made_inside(contents, args, kwargs)

    def cast_inside(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> Sequence[tuple[Saved, Tensor]]:
        """As Forward.cast_inside."""
        casts = super().cast_inside(function, args, kwargs, result)
        for saved, x in casts:
            self._recorder.cast(saved, x, args, kwargs)
        return casts


class Recorder:
    """Writes a pass down.

    Args:
        names, tape: of the Session.
        type_of_node: what tells nodes of one type from those of another.
        settings_now: the number of the process's settings.
    """

    def __init__(
        self, names: Names, tape: CallTape, type_of_node: Callable[[Any], int], settings_now: Callable[[], int]
    ) -> None:
        self.names, self.tape, self._type_of_node, self._settings_now = names, tape, type_of_node, settings_now
        self.entries: list[_Entry] = []
        self.calls: list[_Call] = []
        self.refusal = ""
        self._is_over = False  # for the interpreter, which begins the backward pass
        self._open: _Call | None = None
        self._left_out: list[_Call] = []  # since the last one of ``calls``
        self._by_saved: dict[int, int] = {}
        self.module_events: tuple[ModuleEvent, ...] = ()
        names.note_calls(lambda: len(self.entries))

    def end(self) -> None:
        """Nothing more happens in the pass."""
        self._refuse_open()
        self.module_events = self.names.noted_calls()

    def clear(self) -> None:
        """Nothing of the pass is asked for any more; the function that begins a backward pass holds the recorder."""
        self.entries.clear()
        self.calls.clear()
        self._left_out.clear()
        self._open = None

    def copied(self) -> list[weakref.ref[Tensor]]:
        """Parameters of an accelerator that the pass has copied."""
        return list(self.tape.noting().copied.values())

    def refuse(self, why: str) -> None:
        """The pass cannot be written down."""
        self.refusal = self.refusal or why

    # -- what happens --------------------------------------------------------------------------------------------

    def begin_call(self, function: Any) -> None:
        """A torch function is about to run that autograd records."""
        self._refuse_open()
        self._open = _Call(function, len(self.entries))
        self._is_over = self._is_over or ends_pass(function)

    def _refuse_open(self) -> None:
        """Refuses a pass in which a call has saved something, and raised, or was interrupted while it was noted."""
        if self._open is not None and len(self.entries) > self._open.first:
            self.refuse("a call that has saved something did not end")

    def end_call(self, result: Any) -> None:
        """It has returned."""
        if self._open is not None:
            self._note_end(self._open, result)
            self._open = None  # not before: what was interrupted has not ended

    def _note_end(self, call: _Call, result: Any) -> None:
        call.saves = len(self.entries) - call.first
        if call.saves:
            self._find_nodes(call, result)
        call.named.clear()
        if not call.saves and not call.made:
            self._left_out.append(call)
            return
        # One of the same function that is left out would be taken for this one.
        alike = [each for each in self._left_out if each.first == call.first and each.function is call.function]
        self.calls += [*alike, call]
        self._left_out.clear()
        for entry in self.entries[call.first :]:
            entry.save.call = len(self.calls) - 1
            entry.note()

    def begin_save(self, x: Tensor) -> _Entry:
        """A tensor is about to be packed."""
        if self._is_over:
            self.refuse("it takes gradients in its middle")
        save = Save(SaveKind.LOOSE, call=-1 if self._open is None else 0)  # which one, its end tells
        entry = _Entry(save, next_number=next_sequence_number())
        if type(x) not in PLAIN or is_odd(x):
            self.refuse("a saved tensor is of another class")
        elif x.layout is not torch.strided:
            save.kind, save.spec = SaveKind.SPARSE, TensorSpec.of(x)
        else:
            save.spec, save.offset = TensorSpec.of(x), int(x.storage_offset())
            storage = x.untyped_storage()
            save.storage_nbytes, entry.cdata = storage.nbytes(), storage._cdata
            save.is_pinned = parameters.is_pinned(x)
        self.entries.append(entry)
        return entry

    def end_save(self, entry: _Entry, packed: object, x: Tensor) -> None:
        """It was packed."""
        number = len(self.entries) - 1
        if type(packed) is parameters.HeldParameter:
            entry.save.kind, entry.save.parameter = SaveKind.PARAMETER, entry.cdata
        elif type(packed) is Saved:
            entry.saved = weakref.ref(packed)
            self._by_saved[id(packed)] = number
            if packed.origin.wrapping is not None:
                self.refuse("a saved tensor is wrapped")
        elif type(packed) is tuple:
            entry.save.kind = SaveKind.SMALL
            entry.address = x.data_ptr()
        else:
            self.refuse("a saved tensor was packed in another way")
        if self._open is None:
            entry.note()

    def named(self, node: Any, found: list[tuple[str, Saved]], looks: int) -> None:
        """A node was found that has saved tensors under these roles, which have added to the sum of their pass."""
        number = self._by_saved.get(id(found[0][1]), -1) if found else -1
        if number >= 0:
            self.entries[number].save.looks += looks
        if self._open is None:
            self.refuse("a node was found outside of any torch function")
            return
        self._open.named.append((node, list(found)))

    def made_inside(self, contents: Contents, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A function has made what it has saved inside (Note: [saved inside] in remake/repeating.py)."""
        first = len(self.entries) if self._open is None else self._open.first
        for number, entry in enumerate(self.entries[first:], first):
            saved = None if entry.saved is None else entry.saved()
            if saved is None or saved.dense is None or not _is_noted(saved.dense):
                continue
            content = contents.of(saved.dense)
            if content.call is not None and content.call.saved == number - first:
                self.made(contents, content, args, kwargs, number)

    def made(
        self, contents: Contents, content: Content, args: tuple[Any, ...], kwargs: dict[str, Any], save: int = -1
    ) -> None:
        """A function has made a content, which is a result, or what that save has saved."""
        call = content.call
        if self._open is None or call is None:
            return
        pattern, draws = call.pattern, call.random_state is not None
        if draws:
            pattern = Pattern(args, kwargs, calls.tensors_in(args, kwargs), call.without_inputs())
        shared: tuple[bool, ...] = ()
        if pattern is not None:
            tensors = calls.tensors_in(args, kwargs)
            read = tensors if pattern.chosen is None else [tensors[index] for index in pattern.chosen]
            shared = tuple([_is_shared(contents, x) for x in read])
        self._open.made.append(_Made(content, call, pattern, draws, shared, self._settings_now(), save))

    def cast(self, saved: Saved, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """What a function has saved is the conversion of its argument ``x``: of one call, a script knows one."""
        number, contents = self._by_saved.get(id(saved), -1), self.tape.contents
        if self._open is None or self._open.cast is not None or number < 0 or saved.dense is None:
            return
        content = contents.of(saved.dense)
        if content.call is not None:
            pattern, shared = patterns.pattern_of(args, kwargs, [x], content.call), (_is_shared(contents, x),)
            self._open.cast = _Made(content, content.call, pattern, False, shared, self._settings_now(), number)

    def _find_nodes(self, call: _Call, result: Any) -> None:
        """Finds the way from the results to each node that has saved something."""
        ways = _ways(_results(result), call.saves)
        numbered: dict[Any, int] = {}
        for node, found in call.named:
            kind = self._type_of_node(node)
            if node not in ways or not kind:
                self.refuse(f"{type(node).__name__} is not found behind its results")
                return
            numbers = []
            for _, saved in found:
                number = self._by_saved.get(id(saved), -1)
                if number < 0:
                    self.refuse("a saved tensor was packed by somebody else")
                    return
                entry = self.entries[number]
                entry.node = node._sequence_nr()
                entry.save.gap = entry.next_number - entry.node
                numbers.append(number)
            asked = self._asked(found[0][1])
            numbered[node] = len(call.nodes)
            call.nodes.append(SavingNode(*_way_to(node, ways, numbered), kind, tuple(numbers), asked))
        for node in islice(ways, 8):
            if type(node).__name__ in accumulation.LINEAR:
                self._note_linear(call, node)

    def _asked(self, saved: Saved) -> tuple[tuple[str, Any], ...]:
        """The scalars of a node on which it depends what is known of it."""
        if saved.place is None:
            return ()
        for known in (known for variants in self.names.learned.nodes.values() for known in variants):
            if any(place is saved.place for place in known.places):
                return known.asked
        self.refuse("a saved tensor is in no place that is remembered")
        return ()

    def _note_linear(self, call: _Call, node: Any) -> None:
        """Notes which of a linear layer's matrices may be claimed: see redeem/linear.py."""
        sizes = getattr(node, linear.INPUT_SIZES[type(node).__name__])
        large = math.prod(node._saved_mat2_sym_sizes) >= accumulation.LARGE // accumulation.WIDEST
        for entry in self.entries[call.first :]:
            save = entry.save
            save.may_claim_input |= large and len(save.spec.shape) == 2
            is_wide = math.prod(sizes) * save.spec.dtype.itemsize >= table.LARGE
            save.may_claim_weight |= is_wide and len(save.spec.shape) == 2 and not save.spec.dtype.is_complex

    # -- what is written -----------------------------------------------------------------------------------------

    def script(self, min_nbytes: int, stores: Any, policy: Policy, prefetcher: Prefetcher) -> Script:
        """The script of the pass, whose values have become what they become under a policy.

        Raises:
            RefusedError: it cannot be replayed.
        """
        if self.refusal:
            raise RefusedError(self.refusal)
        return _Writer(self, min_nbytes, stores, policy, prefetcher).script()


class _Writer:
    """Makes a script of what was recorded."""

    def __init__(
        self, recorder: Recorder, min_nbytes: int, stores: Any, policy: Policy, prefetcher: Prefetcher
    ) -> None:
        self._recorder, self._min_nbytes, self._stores = recorder, min_nbytes, stores
        self._policy, self._prefetcher = policy, prefetcher
        self._fetching = Fetching.NOTHING
        if not prefetcher.idle:
            self._fetching = Fetching.PLACE if prefetcher.fetches is None else Fetching.KEY
        self._entries = recorder.entries
        self._values: dict[int, int] = {}  # by the id of what is stored
        self._stored: list[Stored] = []
        self._members: list[list[int]] = []
        self._registers: dict[int, int] = {}  # by the id of a content
        self._kept: list[Any] = []  # so that no id is given away
        casts = [[] if call.cast is None else [call.cast] for call in recorder.calls]
        self._made = [call.made for call in recorder.calls] + casts
        self._numbers = {id(each.call): number for number, made in enumerate(self._made) for each in made}
        self._used: dict[int, list[_Made]] = {}  # by the number of the call
        self._masks: dict[Mask, Mask] = {}
        self._leaves: set[int] = set()

    def script(self) -> Script:
        saves = [self._save(number, entry) for number, entry in enumerate(self._entries)]
        values: list[ValueProgram] = []
        while len(values) < len(self._stored):  # of which some are found by what is made from them
            values.append(self._value(len(values)))
        for leaf in self._leaves:  # what others are made from stays as it is
            values[leaf].spares = 0
        self._check(values)
        written = [self._call(number, call) for number, call in enumerate(self._recorder.calls)]
        counted = len(saves), sum(save.spec.nbytes for save in saves if save.kind is not SaveKind.SPARSE)
        copied = [x for reference in self._recorder.copied() if (x := reference()) is not None]
        told = self._recorder.names.counted(), self._recorder.module_events, self._fetching, self._fetches(values)
        return Script(saves, values, written, len(self._registers), self._min_nbytes, counted, copied, *told)

    def _fetches(self, values: list[ValueProgram]) -> tuple[str, ...]:
        """When moved values are asked for, as text: what backward read in the step before, or what is planned."""
        if self._fetching is Fetching.NOTHING:
            return ()
        numbers: dict[str, list[str]] = {}
        for number, value in enumerate(values):
            numbers.setdefault(value.key, []).append(f"v{number}")
        if self._prefetcher.fetches is None:
            order = [numbers[key][count] for key, count in self._prefetcher.order if count < len(numbers.get(key, ()))]
            return (f"fetched in this order: {', '.join(order)}",) if order else ()
        planned = self._prefetcher.fetches.items()
        return tuple(
            f"with {', '.join(numbers[key])}: {', '.join(each for other in wanted for each in numbers.get(other, ()))}"
            for key, wanted in planned
            if key in numbers
        )

    def _check(self, values: list[ValueProgram]) -> None:
        """Refuses values that go the long way alone where a policy has counted what a pass holds."""
        asked = [number for number, value in enumerate(values) if value.program is ValueFate.ASK]
        if any(number in self._leaves for number in asked) and self._policy.remakes_anything:
            raise RefusedError("a value is made again from one that is decided on anew in each pass")
        if any(values[number].whole.device.type != "cpu" for number in asked) and knows_room(self._policy):
            raise RefusedError("a plan has counted what is held until the host knows that a value is whole")

    def _save(self, number: int, entry: _Entry) -> Save:
        save = entry.save
        if entry.saved is None or save.kind is SaveKind.SPARSE:
            return save
        saved = entry.saved()
        if saved is None:  # its part of the graph was dropped, and the value as well unless others are made from it
            return save
        if saved.origin.modified is not None:
            raise RefusedError("a saved tensor was changed")
        if saved.tensor is None or saved.place is None:
            save.kind = SaveKind.LOOSE
            return save
        facts = saved.tensor
        if save.call >= 0 and entry.node is None and facts.op != UNKNOWN_OP:  # of which all is read, whoever reads it
            name = getattr(self._recorder.calls[save.call].function, "__name__", "a torch function")
            raise RefusedError(f"{name} has saved a tensor by a node that is not found")
        self._describe(save, saved.place, saved.builtin)
        if self._fetching is not Fetching.NOTHING:
            is_planned = self._fetching is Fetching.KEY and saved.value is not None
            save.read_as = saved.value.key if is_planned else facts.key  # type: ignore[union-attr]
        if save.call < 0 and facts.need not in (Need.VALUE, Need.INDEX):
            raise RefusedError("a tensor that is saved outside of any torch function is not read as a whole")
        if saved.value is None:
            if saved.origin.counter is None or saved.dense is not None or save.call < 0:
                raise RefusedError("a saved tensor follows another one's memory")
            save.kind = SaveKind.SHAPE
            return save
        stored = saved.value
        if not saved.builtin and any(reader.need is Need.SHAPE for reader in stored.account.shared_by or ()):
            raise RefusedError("a node that may write into a value reads it, and another one reads its shape alone")
        self._add(number, stored)
        self._claims(save, saved, stored)
        return save

    def _describe(self, save: Save, place: Place, is_builtin: bool) -> None:
        """What was saved at that place, by a node of torch's own or by another."""
        facts = place.facts
        save.facts, save.place, save.is_builtin = facts, place, is_builtin
        save.reads_value, save.reads_sign = facts.need in (Need.VALUE, Need.INDEX), facts.need is Need.SIGN
        save.mask = None if facts.mask is None else self._masks.setdefault(facts.mask, facts.mask)

    def _add(self, number: int, stored: Stored) -> None:
        """That save is one of the value."""
        save = self._entries[number].save
        save.kind, save.value = SaveKind.VALUE, self._values.setdefault(id(stored), len(self._stored))
        if save.value == len(self._stored):
            self._stored.append(stored)
            self._members.append([])
        self._members[save.value].append(number)

    def _number_of(self, stored: Stored) -> int:
        """The number of a value that others are made from, by what has saved it though that was dropped since."""
        if id(stored) not in self._values:
            members = [(n, each) for n, each in enumerate(self._entries) if each.value and each.value() is stored]
            last = [(number, entry) for number, entry in members if entry.was_decided] or members
            for number, entry in last:
                assert entry.place is not None
                self._describe(entry.save, entry.place, entry.is_builtin)
                entry.save.may_claim_input = False
                self._add(number, stored)
            if not members:
                raise RefusedError("a value is made again from one of an earlier pass")
        return self._values[id(stored)]

    def _claims(self, save: Save, saved: Saved, stored: Stored) -> None:
        if not saved.claimable:
            save.may_claim_input = False
            return
        op = saved.tensor.op if saved.tensor is not None else ""
        form, has_room = table.FORMS.get(op), stored.reads.has_room
        codec = None if stored.state.form is None else stored.state.form.codec
        is_direct = form is not None and codec is not None and base.direct(codec, form) is not None
        nbytes = save.spec.nbytes
        whole = _claim(op, nbytes, False, has_room)
        is_other = is_direct and type(codec) is not Bitmask
        save.as_held = whole
        save.as_stored = ClaimWay.ALWAYS if is_other else _claim(op, nbytes, is_direct, has_room)
        has_bits = form is not None and save.mask is not None and base.direct(Bitmask(save.mask), form) is not None
        save.as_bits = ClaimWay.ALWAYS if has_bits else whole

    def _register(self, content: Content | None) -> int:
        if content is None:
            return -1
        self._kept.append(content)
        return self._registers.setdefault(id(content), len(self._registers))

    def _value(self, number: int) -> ValueProgram:
        stored, members = self._stored[number], self._members[number]
        strongest = max(members, key=lambda each: self._entries[each].strength)
        save, first, account = self._entries[strongest].save, self._entries[strongest].place, stored.account
        assert first is not None
        whole, is_whole = save.spec, True
        if save.offset or save.spec.nbytes != save.storage_nbytes or not first.is_dense:
            numel = save.storage_nbytes // save.spec.dtype.itemsize
            spec = save.spec
            whole, is_whole = TensorSpec((numel,), (1,), spec.dtype, spec.device, save.storage_nbytes), False
        place = stored.place or first
        value = ValueProgram(
            ValueFate.HOLD,
            len(members),
            strongest,
            self._register(stored.content),
            save.storage_nbytes,
            is_whole,
            whole,
            whole,
            stored.key or account.facts.key,
            account.reason,
            delay=place.delay,
            held=place.held,
            gone=place.gone,
            settled=place.settled,
            account=account,
            kept_as=(account.stash_nbytes, account.codec, account.reason, account.store),
        )
        is_asked = place.declined is not None and not any(self._entries[each].save.is_pinned for each in members)
        if is_asked and stored.state.recipe is None and stored.state.form is None:
            value.spares = SPARED if whole.device.type == "cpu" else PERIOD
            value.spared = max(1, place.spared)
        if stored.state.recipe is not None:
            self._remake(value, stored, stored.state.recipe)
        elif stored.state.form is not None:
            self._encode(value, stored, stored.state.form)
        return value

    def _encode(self, value: ValueProgram, stored: Stored, form: Form) -> None:
        store, codec, spec = self._stores["device"], form.codec, form.spec
        is_moved = form.tag is not None
        is_ours = is_moved or (form.store is store and type(store) is DeviceStore and store._holdings.capacity is None)
        has_look = spec.device.type != "cpu" and not _never_looks(codec, spec)  # for which the host would wait
        asks_again = has_look or hasattr(codec, "refuses_reader")  # which may depend on the settings of the moment
        if type(form) is not Form or not is_ours or asks_again:
            value.program, value.text = ValueFate.ASK, base.label(codec)
            value.is_exact_form = Need.VALUE in codec.preserves
            return
        if spec.shape != value.whole.shape or spec.stride != value.whole.stride or spec.dtype is not value.whole.dtype:
            raise RefusedError("a value was encoded in another layout")
        name = stored.account.store if is_moved else None
        value.program = ValueFate.MOVE if is_moved else ValueFate.ENCODE
        value.codec, value.text = codec, f"{name}, {base.label(codec)}" if is_moved else base.label(codec)
        value.is_exact_form, value.has_view = Need.VALUE in codec.preserves, base.view(codec) is not None
        value.mask = None if form.mask is None else self._masks.setdefault(form.mask, form.mask)
        assert stored.facts is not None
        value.ways = Ways(codec, value.mask, spec, stored.facts, form.ticket.nbytes, name)
        dtype = decoded_dtype(codec, spec)
        value.decoded = TensorSpec(spec.shape, spec.stride, dtype, spec.device, spec.numel * dtype.itemsize)
        if is_moved:
            return
        value.kernel = kernel_of(codec, spec, dtype)
        is_told = self._policy.observes_changes and not self._policy.is_fixed  # of other bytes than before
        value.zvc = None if is_told else zvc_planes(codec, spec)

    def _remake(self, value: ValueProgram, stored: Stored, recipe: Recipe) -> None:
        if stored.state.form is not None or recipe.from_statistics:
            raise RefusedError("a value is made again within bounds")
        if recipe.first_use is not None:
            raise RefusedError("it is not known yet how a value is made again")
        value.shares = recipe.any_producer
        value.program, value.text = ValueFate.REMAKE, str(recipe)
        value.tree = self._tree(recipe)

    def _tree(self, recipe: Recipe) -> CallTree:
        call = recipe.call
        number = self._numbers.get(id(call), -1)
        pattern, made = self._use(number, call)
        if CHOOSES_ORDER and call.function is torch.einsum and len(call.inputs) > 2:
            raise RefusedError("the interpreter does not see by which order einsum contracts more than two tensors")
        given: list[GivenInput] = []
        inner: list[CallTree] = []
        for index, each in enumerate(recipe.inputs):
            if isinstance(each, Held):
                given.append(GivenInput(InputSource.COPY, index, TensorSpec.of(each.tensor)))
            elif isinstance(each, Leaf):
                leaf = self._number_of(each.value)
                given.append(GivenInput(InputSource.VALUE, leaf, each.spec, each.offset))
                self._leaves.add(leaf)
            else:
                given.append(GivenInput(InputSource.CALL, len(inner), each[1].spec, each[1].offset))
                inner.append(self._tree(each[0]))
        affine = self._affine(recipe) if recipe.fused else None
        one_pass = self._one_pass(recipe) if recipe.fused and affine is None else None
        is_all = not call.needs_grad and call.autocast is None and not repeatable.may_draw(call.function)
        places = pattern.places if is_all else None  # see repeating.repeat
        inside = -1 if call.saved is None else call.saved
        made_by = number, made, inside, recipe.function, _alone(call), places
        return CallTree(*made_by, tuple(given), tuple(inner), call.spec, call.name, affine, one_pass)

    def _use(self, number: int, call: calls.Call) -> tuple[Pattern, int]:
        """The pattern of a call that is repeated, and the position of what it makes among all that is used of it."""
        found = [each for each in self._made[number] if each.call is call] if number >= 0 else []
        if not found or found[0].pattern is None:
            raise RefusedError(f"{call.name} was not noted in a way that can be compared")
        used = self._used.setdefault(number, [])
        if found[0] not in used:
            used.append(found[0])
        return found[0].pattern, used.index(found[0])

    def _one_pass(self, recipe: Recipe) -> OnePassTree | None:
        found = onepass.one_pass_of(recipe)
        if found is None:
            return None
        operands: list[ReplayedInput] = []
        for each in found.operands:
            if isinstance(each.given, Leaf):
                leaf = self._values[id(each.given.value)]
                given = GivenInput(InputSource.VALUE, leaf, each.given.spec, each.given.offset)
                operands.append(ReplayedInput(-1, each.place, given))
                continue
            number = self._numbers[id(each.call)]  # those of the whole tree are known by now
            if each.place < 0 and -1 in self._statistics_of(number):
                return None
            operands.append(ReplayedInput(number, each.place, None))
        return OnePassTree(tuple(operands), found.make)

    def _affine(self, recipe: Recipe) -> AffinePass | None:
        parts = fused.parts_of(recipe)
        if parts is None:
            return None
        activation, norm, source, residual = parts
        spec = recipe.call.spec
        if source.spec.shape != spec.shape or source.spec.stride != spec.stride:
            return None
        lies = images(torch.empty_strided(spec.shape, spec.stride, device="meta"))
        if lies is None or source.spec.dtype is not torch.float32:
            return None
        device = spec.device
        rounding = "" if device.type == "cpu" else fused.rounding_of(spec, lies[1] == 1)
        if device.type != "cpu" and not rounding:
            return None
        made: CallTree | None = None
        added: GivenInput | None = None
        second = fused.norm_within(residual, recipe.call)
        seconds = -1, -1, -1
        if second is not None:
            leaf = second.inputs[0]
            assert isinstance(leaf, Leaf)
            added = GivenInput(InputSource.VALUE, self._values[id(leaf.value)], leaf.spec, leaf.offset)
            seconds = self._vectors(second)
        elif isinstance(residual, Leaf):
            added = GivenInput(InputSource.VALUE, self._values[id(residual.value)], residual.spec, residual.offset)
        elif isinstance(residual, tuple):
            made = self._tree(residual[0])
            if not fused.fills(residual):
                return None
            added = GivenInput(InputSource.CALL, 0, residual[1].spec, residual[1].offset)
        code, lo, hi = activation or (0, 0.0, 0.0)
        return AffinePass(
            *self._vectors(norm),
            GivenInput(InputSource.VALUE, self._values[id(source.value)], source.spec, source.offset),
            added,
            made,
            *seconds,
            int(code),
            lo,
            hi,
            lies[0],
            spec.shape[1],
            lies[1],
            None if device.type == "cpu" else (backends.serving(device.type).affine, Rounding[rounding]),
        )

    def _vectors(self, norm: Recipe) -> tuple[int, int, int]:
        """The number of a batch norm's call, and which of its inputs weight and bias are; -1 for none."""
        number = self._numbers.get(id(norm.call), -1)
        self._use(number, norm.call)
        indices = {id(each): index for index, each in enumerate(norm.call.inputs)}
        weight, bias = norm.call.named_input("weight"), norm.call.named_input("bias")
        return number, indices.get(id(weight), -1), indices.get(id(bias), -1)

    def _call(self, number: int, call: _Call) -> KnownCall:
        noted, cast = self._noted(number), self._noted(number + len(self._recorder.calls))
        own = range(call.first, call.first + call.saves)
        unknown = [each for each in own if self._entries[each].node is None and self._entries[each].save.value >= 0]
        return KnownCall(call.function, call.first, call.saves, call.nodes, tuple(unknown), noted, cast)

    def _noted(self, number: int) -> NotedCall | None:
        if number not in self._used:
            return None
        used = self._used[number]
        made, mean, invstd = used[0], -1, -1  # all of them were called in the same way
        noted, pattern = made.call, made.pattern
        assert pattern is not None
        if any(each.call.statistics is not None for each in used):
            mean, invstd = self._statistics_of(number)
        held = [given if isinstance(given, Held) else None for given in noted.inputs]
        registers = tuple([-1 if isinstance(given, Held) else self._register(given.content) for given in noted.inputs])
        return NotedCall(
            pattern.args,
            pattern.kwargs,
            tuple([self._content_of(each) for each in used]),
            noted.in_place,
            made.draws,
            pattern.chosen,
            registers,
            tuple([each is not None and is_shared for each, is_shared in zip(held, made.shared, strict=True)]),
            tuple([each is not None and each.is_reference for each in held]),
            noted.needs_grad,
            mean,
            invstd,
            None if noted.autocast is None else noted.autocast[1],
            noted.settings,
            made.settings,
        )

    def _content_of(self, made: _Made) -> MadeContent:
        output = -1 if made.call.output is None else made.call.output
        return MadeContent(made.call.spec, self._register(made.content), output, made.save)

    def _statistics_of(self, number: int) -> tuple[int, int]:
        """The numbers of the saves that hold a norm's statistics; -1 for those of rows that are stored otherwise."""
        call = self._recorder.calls[number]
        made = next(each for each in self._made[number] if each.call.statistics is not None)
        assert made.call.statistics is not None
        numbers = []
        for held in made.call.statistics:
            found = [
                call.first + index
                for index, entry in enumerate(self._entries[call.first : call.first + call.saves])
                if _address_of(entry) == held.tensor.data_ptr()
            ]
            if len(found) != 1 and made.call.name in calls.ROW_NORMS:
                return -1, -1
            if len(found) != 1:
                raise RefusedError("a batch norm's statistics are not among what it saves")
            numbers.append(found[0])
        return numbers[0], numbers[1]


_Ways = dict[Any, tuple[Any, int]]
"""For nodes behind results the node from which an edge leads there, and its number; or None, and that of the result."""


def _ways(results: list[Any], saves: int) -> _Ways:
    """The shortest ways from a function's results to the nodes behind them, the nearest ones first."""
    ways: _Ways = {}
    for number, x in enumerate(results):
        if type(x) is Tensor and x.grad_fn is not None:
            ways.setdefault(x.grad_fn, (None, number))
    waiting = deque(ways)
    for _ in range(naming.most_nodes(saves)):
        if not waiting:
            break
        node = waiting.popleft()
        for edge, (following, _) in enumerate(node.next_functions):
            if following is not None and following not in ways:
                ways[following] = node, edge
                waiting.append(following)
    return ways


def _way_to(node: Any, ways: _Ways, numbered: dict[Any, int]) -> tuple[int, int, tuple[int, ...]]:
    """The result, the node among those that are numbered, and the edges from there: where a node is found."""
    path: list[int] = []
    while True:
        before, number = ways[node]
        if before is None:
            return number, -1, tuple(reversed(path))
        path.append(number)
        if before in numbered:
            return -1, numbered[before], tuple(reversed(path))
        node = before


def _results(result: Any) -> list[Any]:
    """What a function has returned, one by one."""
    return list(result) if isinstance(result, (tuple, list)) else [result]


def _is_noted(x: Any) -> bool:
    """Whether a result is one whose content may be noted."""
    return type(x) is Tensor and x.layout is torch.strided and not is_odd(x)


def _is_shared(contents: Contents, x: Tensor) -> bool:
    """Whether calls share the copy of a tensor, because it is a parameter of the model."""
    storage, parameters_of = x.untyped_storage(), contents.parameters
    return parameters_of.include(x, storage) and not parameters_of.may_be_freed(storage)


def _alone(call: calls.Call) -> calls.Call:
    """A call that is made for its result: of what it saves inside nothing is wanted."""
    return replace(call.without_inputs(), group=None)


def _address_of(entry: _Entry) -> int:
    """Of the numbers of what was saved, as long as they are held as they are; else 0."""
    saved = None if entry.saved is None else entry.saved()
    return entry.address if saved is None or saved.dense is None else saved.dense.data_ptr()


def _never_looks(codec: base.Codec, spec: TensorSpec) -> bool:
    """Whether a codec takes all tensors like that into planes whose sizes are known."""
    return isinstance(codec, (Bitmask, Raw)) or (isinstance(codec, Narrow) and spec.dtype is torch.bool)


def _claim(op: str, nbytes: int, is_direct: bool, has_room: bool) -> ClaimWay:
    """As unpack decides, of what is known beforehand."""
    is_faster = op in table.FASTER and nbytes >= table.CHEAP_CLAIM
    if has_room and not is_direct and not is_faster:
        return ClaimWay.NEVER
    if is_direct:
        if op not in table.MASKED or nbytes >= table.LARGE:
            return ClaimWay.ALWAYS
        return ClaimWay.NEVER if nbytes < table.TINY else ClaimWay.IF_NO_ROOM
    if nbytes < table.LARGE or op in table.NEVER_WHOLE:
        return ClaimWay.NEVER
    return ClaimWay.ALWAYS if nbytes >= table.CHEAP_CLAIM else ClaimWay.IF_NO_ROOM


for _function in (
    RecordingForward.pack,
    RecordingForward.made,
    RecordingForward.cast_inside,
    Recorder.begin_call,
    Recorder.end_call,
):
    hide_from_dynamo(_function, and_all_below=True)
