"""Asks every value of a step what it would cost to hold it in another way.

The step runs with everything kept. At the moment when autograd alone holds a value, it is encoded and decoded by every
exact codec that takes it, and remade from the values that it would be remade from, which are all still there. So the
bytes and seconds of each choice are measured on the value itself. What these trials allocate lies between two notes in
the profiler's record, and is left out of the step's own memory.

Note: [kinds of values]
    A loop of sixty cells saves the same value sixty times, and layers repeat themselves. What is timed of one value
    holds for all that are like it: read by the same op in the same role, of the same spec, held by the same codec, or
    remade by the same calls on tensors of the same specs. The bytes of a codec whose size depends on the numbers are
    asked of each value. Values below SMALL take as long as each other, whatever their shape.

    In a loop of the program's own, values are tried in several steps, and then a step is recorded. It takes the bytes
    that a value's codecs had in the step that tried them: those of another step's numbers, as in each later step. So
    little is tried in the recorded step, and its record is short.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from backstash import accelerator
from backstash.codecs import Exponents, Upcast, base
from backstash.codecs.base import Codec, Encoded, flat
from backstash.codecs.shape import Shape
from backstash.errors import CodecRefusedError
from backstash.planning.measure.events import note
from backstash.planning.model.problem import Choice
from backstash.planning.model.rounding import DENSE, candidates, codec_name, reason_of
from backstash.policies import Action, Keep, Policy, Stash, get
from backstash.redeem import table
from backstash.remake.calls import Group
from backstash.remake.onepass import has_form
from backstash.remake.proving import equals, fetch_unguarded
from backstash.remake.recipes import Recipe
from backstash.saved import Need, SavedTensor, TensorSpec
from backstash.stash.accounts import Account
from backstash.stash.encode import misreads, without_error
from backstash.stash.value import Value
from backstash.telling import note_progress
from backstash.torch_internals import no_torch_function

WORTHWHILE = 0.9
"""A codec is offered if it leaves at most this share of the bytes: one that hardly pays may decline in another step."""

RESERVE = 0.08
"""Share of a value's dense bytes that is reserved where the codec's size depends on the numbers (Note: [reserve] in
problem.py). In small networks, whose relus change most, sizes grew by less than this in forty steps of training."""

ESCAPES = 1 / 32
"""Share of a value's elements for whose escapes room is reserved where exponents are shortened: each takes a byte. What
Llamas, GPT-2s and networks of images save has at most 0.6 % of them, because a window is chosen for each block."""

DENSE_WORTHWHILE = 0.85
"""As WORTHWHILE, of codecs for dense values. Of float32, shorter exponents save an eighth, for two slow passes."""

RUNS, LONG = 3, 0.02
"""How often what a choice takes is timed: so many times, for large values twice, or until so many seconds are over."""

CACHE, CACHED = 64 << 20, 1 << 20
"""Bytes that are written between two runs, to have a processor's caches forget the values, and the smallest values for
which that is done."""


SMALL = 4 << 10
"""Values of fewer bytes are not timed one by one: what is done with them takes as long as to call a kernel."""

MOST_SHAPES = 2
"""In how many shapes a value is tried before the recorded step. One that has another shape in each step, as those of
experts have, is tried in that step anyway."""

ValueKind = tuple[object, ...]
"""What tells whether two values are alike (Note: [kinds of values])."""


class KindMeasurements:
    """What was measured of kinds of values (Note: [kinds of values]).

    Attributes:
        codecs: seconds to encode and to decode.
        fixed: what was found out, where a codec's size does not depend on the numbers.
        recipes: seconds to find out how a value is remade, seconds to remake it, and whether the calls may run fused.
        values: what was found out about values whose codecs were all tried, by their keys, specs, needs and bytes:
            steps of other shapes may have been among those that tried them.
        shapes: of how many of these each key is.
    """

    def __init__(self) -> None:
        self.codecs: dict[ValueKind, tuple[float, float]] = {}
        self.fixed: dict[ValueKind, Rounded] = {}
        self.recipes: dict[ValueKind, tuple[float, float, bool]] = {}
        self.values: dict[tuple[str, TensorSpec, Need, int], SurveyedValue] = {}
        self.shapes: Counter[str] = Counter()


class Stopwatch:
    """Times what a choice takes, as a steady step would run it.

    The first run also pays for fresh memory and for what a library prepares for a shape. All others are given values
    that are in no cache, like those that were saved a long time ago.
    """

    @cached_property
    def _written(self) -> Any:
        """What is written between two runs; not torch's memory, which may be recorded while a value is tried."""
        return np.empty(CACHE, dtype=np.uint8)

    def shortest(self, run: Callable[[], object], whole: Tensor) -> float:
        """Returns the shortest time of a few runs in seconds."""
        times: list[float] = []
        runs = 2 if whole.nbytes >= CACHED else RUNS
        while len(times) < runs and sum(times) < LONG:
            if times and whole.is_cpu and whole.nbytes >= CACHED:
                self._written.fill(0)
            started = _now(whole)
            run()
            times.append(_now(whole) - started)
        return min(times[1:] or times)


def _now(whole: Tensor) -> float:
    accelerator.synchronize(whole.device.type)
    return time.perf_counter()


class KeepForSurvey(Policy):
    """Keeps every value that backward reads, and has the Session note how each was made.

    Args:
        cycles: as in Policy.

    Attributes:
        asked: keys of the tensors that it was asked about, in the order of the questions.
    """

    is_fixed = True
    remakes_anything = True

    def __init__(self, cycles: int = 0) -> None:
        self.asked: dict[str, None] = {}
        self.cycles = cycles

    def __str__(self) -> str:  # not __repr__, by which what was learned under one object would serve another
        return f"{type(self).__name__}()"

    def decide(self, saved: SavedTensor) -> Action:
        """Returns Keep(), but for a tensor of which only the shape is read: every plan lets go of that."""
        self.asked.setdefault(saved.key)
        return Stash(Shape()) if saved.need is Need.SHAPE else Keep()


class KeepForTiming(KeepForSurvey):
    """Keeps every value as a plan does where its peak lies elsewhere. Nothing is made again, so no call is noted."""

    is_fixed = True
    recomputes = remakes_anything = False

    def has_room_for(self, key: str) -> bool:
        """Returns True."""
        return True


@dataclass(frozen=True, slots=True)
class Rounded:
    """A choice with an error.

    Attributes:
        choice: what it takes; its error is yet to be measured.
        noise: the length of the error of the value itself, over that of the value.
    """

    choice: Choice
    noise: float


@dataclass(frozen=True, slots=True)
class Movable:
    """What it takes to move a value in one form.

    Attributes:
        nbytes: bytes that are moved: of an exact form that was found, or of the value as it is.
        decode_nbytes: bytes on the device while it is read: what was moved, and what that is decoded into.
        encode_seconds, decode_seconds: time to make that form of it and to decode it again, without the transfer.
        codec: the name of the codec that makes the form, where it is one for dense values (see rounding.DENSE).
    """

    nbytes: int
    decode_nbytes: int
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0
    codec: str = ""


@dataclass
class SurveyedValue:
    """What was found out about one value.

    Attributes:
        facts: of the saved tensor with the strongest need.
        choices: keep, and what each codec would take; without the choice to remake it.
        exact: the choice of them that leaves out zeros or keeps fewer bits; None where there is none.
        parents: ids of the values that it would be remade from; None where it cannot be remade.
        remake_seconds: time to remake it once from them.
        account: of the value; where it is exposed, the value cannot be remade either.
        reason: why it cannot be remade, or what is repeated.
        calls: names of the calls that this takes (see CallPlace).
        in_place: whether one of them has worked in place.
        section: number of the trial section in which it was remade, which tells the workspace.
        group: the call whose other tensors are remade with it, if it was saved inside of a function.
        rounded: the choices with an error, the most exact first.
        movable: what it takes to move it, in the form that leaves out zeros or as it is, and in the smallest form for
            dense values; nothing where that was not asked for.
    """

    facts: SavedTensor
    nbytes: int
    choices: list[Choice]
    exact: Choice | None = None
    parents: tuple[int, ...] | None = None
    account: Account | None = None
    remake_seconds: float = 0.0
    reason: str = ""
    calls: tuple[str, ...] = ()
    in_place: bool = False
    section: int = -1
    group: Group | None = None
    rounded: list[Rounded] = field(default_factory=list)
    movable: tuple[Movable, ...] = ()


class Births:
    """A watcher that notes in the profiler's record when a value is decided on, and who reads it."""

    def storing(self, encoded: Encoded) -> None:
        """Notes nothing."""

    def fetched(self, encoded: Encoded) -> None:
        """Notes nothing."""

    def taken(self, memory: Tensor) -> None:
        """Notes nothing."""

    def released(self, memory: Tensor) -> None:
        """Notes nothing."""

    def decided(self, value: Value, whole: Tensor, find_recipe: Callable[[], Recipe | str]) -> None:
        """Notes from when on autograd alone holds a value."""
        note("born", key=value.key)

    def read(self, tensor: Tensor, is_stored: bool, key: str) -> None:
        """Notes that a node reads a value."""
        if key:
            note("read", key=key)

    def dropped(self, keys: Iterable[str]) -> None:
        """Notes nothing."""

    def end_step(self) -> None:
        """The step that it was to watch is over."""


class Silent(Births):
    """A watcher that notes nothing. A Session that is watched never becomes idle."""

    def decided(self, value: Value, whole: Tensor, find_recipe: Callable[[], Recipe | str]) -> None:
        """Notes nothing."""

    def read(self, tensor: Tensor, is_stored: bool, key: str) -> None:
        """Notes nothing."""


class Survey(Births):
    """Tries each value's choices as well.

    Args:
        tries: words for the families of choices that are tried (see budget.py). Exact codecs, and to remake a value,
            always are.
        watch: made before the record begins, so that its memory is not the step's. By default it is made now.
        measured: what was measured before, to which this survey adds.
        seconds: for how long values are tried. After that, those of new kinds are left for another step.

    Attributes:
        found: what was found out, by the value's key.
        keys: by the ids of values their keys, of which those have several that are decided on again.
        trials: how many trial sections there are in the record.
        is_complete: whether no value was left for another step.
        spent: seconds that the trials took.
    """

    def __init__(
        self,
        tries: Collection[str] = (),
        watch: Stopwatch | None = None,
        measured: KindMeasurements | None = None,
        seconds: float = math.inf,
    ) -> None:
        self.tries = frozenset(tries)
        self.found: dict[str, SurveyedValue] = {}
        self.keys: dict[int, list[str]] = {}
        self._alive: list[Value] = []  # so that ids stay their own in the step
        self._calls: dict[Group, tuple[float, int]] = {}  # seconds and trial sections of calls that save inside
        self._sections: dict[ValueKind, int] = {}  # trial sections of recipes
        self._measured = measured or KindMeasurements()
        self._seconds = seconds
        self.is_complete, self.spent = True, 0.0
        self._exact = get("lossless_stored")
        self.trials = 0
        self._watch = watch or Stopwatch()

    def decided(self, value: Value, whole: Tensor, find_recipe: Callable[[], Recipe | str]) -> None:
        """Tries each choice of a value."""
        facts = value.facts
        assert facts is not None
        super().decided(value, whole, find_recipe)
        if value.key in self.found:  # the same place once more: its first value stands for both
            return
        nbytes = whole.untyped_storage().nbytes()
        place = value.key, facts.spec, facts.need, nbytes
        before = self._measured.values.get(place)
        is_known = before is not None or self._measured.shapes[value.key] == MOST_SHAPES
        if self._seconds < math.inf and (is_known or not self._may_try()):
            return
        found = SurveyedValue(facts, nbytes, [Choice.keep(nbytes)]) if before is None else replace(before)
        self.found[value.key] = found
        self.keys.setdefault(id(value), []).append(value.key)
        self._alive.append(value)
        started = time.perf_counter()
        note_progress("asking each value what its forms would cost", len(self.found))
        with no_torch_function(), torch.no_grad():
            if before is None:
                self._try_codecs(value, facts, whole, found)
                if "bounded" in self.tries:
                    self._try_rounding(value, facts, whole, found)
                if "offload" in self.tries and facts.need is not Need.SHAPE:
                    found.movable = _movable(value, found)
                self._measured.values[place] = replace(found)  # without what it is remade from, which is alive
                self._measured.shapes[value.key] += 1
            # Of a sign or an index a few bits are stored, and nothing begins from them.
            recipe = find_recipe() if facts.need is Need.VALUE else "backward reads few bits of it"
            if isinstance(recipe, Recipe):
                self._try_recipe(recipe, find_recipe, value, whole, found)
            else:
                found.reason = recipe
        self.spent += time.perf_counter() - started

    def dropped(self, keys: Iterable[str]) -> None:
        """Forgets values of a graph that is gone, whose keys those of the next one have."""
        for key in keys:
            self.found.pop(key, None)

    def end_step(self) -> None:
        """Lets go of the step's values, of which a program's own hold their memory."""
        self._alive.clear()

    def _may_try(self) -> bool:
        """Whether a value is tried; if not, it is left for another step."""
        may_try = self.spent < self._seconds
        self.is_complete = self.is_complete and may_try
        return may_try

    def _try_codecs(self, value: Value, facts: SavedTensor, whole: Tensor, found: SurveyedValue) -> None:
        action = self._exact.decide(facts)
        readers = [saved.tensor for saved in value.saved() if saved.tensor is not None]
        for codec in without_error(action).codecs if isinstance(action, Stash) else ():  # as decision.action_of
            found.exact = self._worthwhile(codec, whole, readers, found.nbytes)
            if found.exact is not None:
                found.choices.append(found.exact)
                break  # a Stash takes the first codec that accepts
        for codec in DENSE if facts.need is Need.VALUE else ():
            least = min(choice.held_nbytes for choice in found.choices)
            dense = self._worthwhile(codec, whole, readers, least)
            if dense is not None and dense.held_nbytes + dense.reserve_nbytes <= DENSE_WORTHWHILE * least:
                found.choices.append(dense)

    def _worthwhile(self, codec: Codec, whole: Tensor, readers: list[SavedTensor], nbytes: int) -> Choice | None:
        """Returns the choice of an exact codec, if it takes the value and that in clearly fewer bytes than these."""
        with self._trial():  # a look at a sample takes memory too, which is not the step's
            refused = codec.accepts(TensorSpec.of(whole)) or codec.declines(whole)
        tried = None if refused is not None else self._try_codec(codec, whole, readers)
        return None if tried is None or tried.choice.held_nbytes > WORTHWHILE * nbytes else tried.choice

    def _try_rounding(self, value: Value, facts: SavedTensor, whole: Tensor, found: SurveyedValue) -> None:
        members = [saved for saved in value.saved() if saved.tensor is not None]
        readers = [saved.tensor for saved in members if saved.tensor is not None]
        for codec in candidates(facts, readers):
            with self._trial():
                refused = codec.accepts(TensorSpec.of(whole)) or misreads(codec, members) or codec.declines(whole)
            tried = self._try_codec(codec, whole, readers) if refused is None else None
            if tried is not None and tried.choice.held_nbytes < found.nbytes and math.isfinite(tried.noise):
                found.rounded.append(tried)

    def _try_codec(self, codec: Codec, whole: Tensor, readers: list[SavedTensor]) -> Rounded | None:
        """Returns what a codec takes; None if it refuses the value."""
        kind = repr(codec), *sorted((reader.op, reader.role) for reader in readers), *_size(whole)
        measured = self._measured
        if kind in measured.fixed:
            return measured.fixed[kind]
        with self._trial():  # what it makes is gone when the trial ends
            return self._tried(codec, whole, readers, kind)

    def _tried(self, codec: Codec, whole: Tensor, readers: list[SavedTensor], kind: ValueKind) -> Rounded | None:
        measured = self._measured
        try:
            encoded = codec.encode(whole)
        except CodecRefusedError:
            return None
        out = None
        if kind not in measured.codecs or codec.bound is not None:
            out = torch.empty_strided(whole.shape, whole.stride(), dtype=whole.dtype, device=whole.device)
        if kind not in measured.codecs:
            encode_seconds = self._watch.shortest(lambda: codec.encode(whole), whole)
            decode_seconds = self._watch.shortest(lambda: codec.decode(encoded, out), whole)
            measured.codecs[kind] = encode_seconds, decode_seconds
        elif out is not None:
            codec.decode(encoded, out)
        noise = 0.0 if codec.bound is None or out is None else _noise(whole, out)
        encode_seconds, decode_seconds = measured.codecs[kind]
        forms = [table.FORMS.get(reader.op) for reader in readers]
        is_direct = all(form is not None and base.direct(codec, form) is not None for form in forms)
        nbytes, most = whole.untyped_storage().nbytes(), codec.nbytes_bound(encoded.spec)
        spare = 0 if whole.is_cpu or encoded.nbytes == most else self._spare(codec, whole, encoded)
        choice = Choice(
            base.label(codec) if codec.bound is None else codec_name(codec),
            "encode",
            encoded.nbytes,
            encode_nbytes=nbytes,
            decode_nbytes=0 if is_direct else nbytes,
            encode_seconds=encode_seconds,
            decode_seconds=0.0 if is_direct else decode_seconds,
            reason=reason_of(encoded.nbytes, nbytes, noise),
            reserve_nbytes=max(0, min(most - encoded.nbytes, _reserve(codec, whole) + spare)),
        )
        if codec.bound is None and encoded.nbytes == most and nbytes >= SMALL:
            measured.fixed[kind] = Rounded(choice, noise)
        return Rounded(choice, noise)

    def _spare(self, codec: Codec, whole: Tensor, encoded: Encoded) -> int:
        """Returns how many bytes more planes take that are made before it is known how many are needed."""
        makes = base.drafting(codec)
        known = None if makes is None else makes.known(encoded)
        if makes is None or known is None:
            return 0
        return max(0, makes.draft(whole, known).encoded.nbytes - encoded.nbytes)

    def _try_recipe(
        self,
        recipe: Recipe,
        find_recipe: Callable[[], Recipe | str],
        value: Value,
        whole: Tensor,
        found: SurveyedValue,
    ) -> None:
        parents = tuple(dict.fromkeys(recipe.leaves))
        found.parents, found.account = tuple(map(id, parents)), value.account
        self._alive += parents
        group = recipe.call.group if recipe.call.saved is not None else None
        found.reason, found.group = str(recipe), group
        found.calls, found.in_place = tuple(sorted(recipe.places())), recipe.has_in_place()
        if group is not None and group in self._calls:  # which has made this value with the others
            found.remake_seconds, found.section = self._calls[group]
            return
        kind: ValueKind = (repr(recipe.likeness()), recipe.call.saved, whole.untyped_storage().nbytes())
        measured = self._measured.recipes
        if kind not in measured:
            started = time.perf_counter()
            find_recipe()  # once more, as in every step: the first time has decided about older values
            asked = time.perf_counter() - started
            is_fused = False
            if has_form(recipe):
                with self._trial():
                    is_fused = equals(recipe.run(fetch_unguarded), whole)
            trusted = recipe if is_fused else recipe.unfused()  # as a plan will run it
            self._sections[kind] = self.trials
            with self._trial():
                seconds = self._watch.shortest(lambda: trusted.run(fetch_unguarded), whole)
            measured[kind] = asked, seconds, is_fused
        elif kind not in self._sections:  # for what else it allocates
            self._sections[kind] = self.trials
            with self._trial():
                (recipe if measured[kind][2] else recipe.unfused()).run(fetch_unguarded)
        asked, seconds, _ = measured[kind]
        found.remake_seconds, found.section = asked + seconds, self._sections[kind]
        if group is not None:
            self._calls[group] = found.remake_seconds, found.section

    @contextmanager
    def _trial(self) -> Iterator[None]:
        note("trial", number=self.trials)
        self.trials += 1
        try:
            yield
        finally:
            note("tried")


def _reserve(codec: Codec, whole: Tensor) -> int:
    """Returns how many bytes more a codec may take in another step, whose numbers are others."""
    if isinstance(codec, (Exponents, Upcast)):
        return int(ESCAPES * whole.numel())
    return int(RESERVE * whole.untyped_storage().nbytes())


def _size(whole: Tensor) -> tuple[object, ...]:
    """What the time to encode a tensor depends on, beside its numbers."""
    nbytes = whole.untyped_storage().nbytes()
    spec = TensorSpec.of(whole)
    return (spec.dtype, str(spec.device), "small") if nbytes < SMALL else (str(spec), spec.stride, nbytes)


def _noise(whole: Tensor, rounded: Tensor) -> float:
    """Returns the length of the error of a rounded tensor over that of the tensor, both of them dense."""
    exact, off = flat(whole).float(), flat(rounded).float()
    length = float(torch.linalg.vector_norm(exact))
    return float(torch.linalg.vector_norm(off - exact)) / length if length else 0.0


def _movable(value: Value, found: SurveyedValue) -> tuple[Movable, ...]:
    """Returns what it takes to move a value, in each form that may be worth it (see SurveyedValue)."""
    dense = [choice for choice in found.choices if choice.name in map(base.label, DENSE)]
    smallest = [_encoded_form(dense[-1], dense[-1].name)] if dense else []  # each is smaller than those before it
    if found.exact is not None:
        return _encoded_form(found.exact), *smallest
    borrows = all(saved.builtin for saved in value.saved())  # others may write into it, and get a copy
    return Movable(found.nbytes, found.nbytes if borrows else 2 * found.nbytes), *smallest


def _encoded_form(choice: Choice, codec: str = "") -> Movable:
    """Returns what it takes to move the planes of a choice."""
    decoded = choice.held_nbytes + choice.decode_nbytes
    return Movable(choice.held_nbytes, decoded, choice.encode_seconds, choice.decode_seconds, codec)
