"""The fate of a value that only autograd holds: kept, encoded, or forgotten and made again."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from backstash import codecs, graphs
from backstash.codecs import base
from backstash.codecs.base import Codec, Draft, is_dense
from backstash.errors import CodecRefusedError, NeedNotMetError, UnknownNameError
from backstash.policies.base import Action, Keep, Outcome, Policy, Recompute, Slice, Stash, knows_room
from backstash.saved import Need, SavedTensor, TensorSpec, first_life_of
from backstash.stash import looking
from backstash.stash.decode import follow_original
from backstash.stash.drafts import Drafted, DraftedForm, Drafts, expect_whole
from backstash.stash.live import Live
from backstash.stash.looking import SPARED
from backstash.stash.place import Place
from backstash.stash.value import Dense, Form, Remade, Saved, Value
from backstash.stores import Store

if TYPE_CHECKING:
    from backstash.stash.looking import Looked
    from backstash.stash.seams import Producer


class Encoder:
    """Does with values what the policy says.

    Args:
        policy: decides.
        stores: stores by name.
        live: the running totals.
        producer: makes values again.

    Attributes:
        is_fixed: whether the policy says the same of the same facts whenever it is asked.
        only_keep: whether the policy is fixed and has said nothing but Keep in this step.
        is_looking: whether numbers are on their way to the host by which values of the next step will be judged.
        turns: numbers for the places, which are looked at again in turn (Note: [looks without waiting]).
        drafts: what was encoded on an accelerator and is not known to be whole yet.
    """

    __slots__ = (
        "_knows_room",
        "_live",
        "_producer",
        "drafts",
        "is_fixed",
        "is_looking",
        "only_keep",
        "policy",
        "stores",
        "turns",
    )

    def __init__(self, policy: Policy, stores: Mapping[str, Store], live: Live, producer: Producer) -> None:
        self.policy = policy
        self.stores = stores
        self._live = live
        self._producer = producer
        self.is_fixed = policy.is_fixed
        self.turns = count()
        self.drafts = Drafts()
        self._knows_room = live.buffers.is_planned = knows_room(policy)
        self.only_keep, self.is_looking = self.is_fixed, False

    def begin_step(self) -> None:
        """Nothing was decided yet."""
        self.drafts.look()
        self.only_keep, self.is_looking = self.is_fixed, False

    def encode(self, value: Value) -> None:
        """Store a value that nobody but autograd holds in the form that the policy chooses."""
        fresh = unchanged(value)
        if fresh:
            self.decide(value, fresh)

    def decide(self, value: Value, fresh: list[Saved]) -> None:
        """Store a value of which these saved tensors are left, none of which was changed."""
        strongest = fresh[0] if len(fresh) == 1 else max(fresh, key=strength)
        facts = strongest.tensor
        assert facts is not None and value.waiting.storage is not None
        if len(fresh) > 1:
            if facts.need is Need.SIGN and any(saved.mask != facts.mask for saved in fresh if saved.need is Need.SIGN):
                facts = SavedTensor(facts.key, facts.op, facts.role, facts.fqn, facts.spec, Need.VALUE)
            if any(saved.spec.dtype is not facts.spec.dtype for saved in fresh if saved.spec):
                self.keep(value, facts, "its storage is seen as different types")
                return
        whole = whole_of(strongest, value.waiting.storage)
        if whole is None:
            self.keep(value, facts, "its storage is seen as different types")
            return
        if value.key and self.policy.cycles is not None:
            facts = replace(facts, key=_next_life(facts.key, value.key))
        value.facts = facts
        if self._knows_room:
            value.reads.has_room = self.policy.has_room_for(facts.key)
            if not whole.is_cpu:
                self._limit_drafts(facts.key)
        place = strongest.place
        if self.is_fixed and place is not None and place.facts is facts and place.action is not None:
            action = place.action
        else:
            action = self._action(value, strongest, facts, fresh)
        if isinstance(value.state, Dense) and value.state.otherwise is not None:  # it is stored once more (decode.thaw)
            action = value.state.otherwise
        watcher = self._live.watcher
        if watcher is not None:
            watcher.decided(value, whole, lambda: self._producer.find(value, strongest))
        if isinstance(action, Keep):
            self.keep(value, facts, action.reason)
            return
        self.only_keep = False
        started = time.perf_counter()
        why, exact_roots = "", False
        if isinstance(action, Recompute):
            exact_roots = action.exact_roots
            remade = self._producer.forget(value, strongest, whole, action)
            if isinstance(remade, Remade):
                self._forget(value, fresh, facts, whole, remade, started)
                return
            action, why = action.otherwise, f"; not recomputed: {remade}"
        self.store(value, strongest, fresh, facts, whole, action, why, exact_roots, started)

    def store(
        self,
        value: Value,
        strongest: Saved,
        fresh: list[Saved],
        facts: SavedTensor,
        whole: Tensor,
        action: Keep | Stash,
        why: str,
        exact_roots: bool,
        started: float,
    ) -> None:
        """Store a value that is not made again, ``why`` if that was tried: encoded, or as it is."""
        if isinstance(action, Keep):
            self.keep(value, facts, action.reason + why)
            return
        producer = self._producer if exact_roots else None
        is_root = producer is not None and has_error(action) and producer.is_stored_exactly(value, whole.nbytes)
        if (value.dependents.height or is_root) and has_error(action):  # proven recipes begin from exact numbers
            action, why = without_error(action), f"{why}; exact, because others are made again of it"
        if isinstance(action, Slice) and (facts.op, facts.role) == ("Convolution", "input"):
            action = action.sliced()
        place = strongest.place if self.is_fixed or self.policy.revision is not None else None
        if place is not None and place.spared and place.declined is not None and place.declined[0] is action:
            place.spared -= 1
            form, reason = None, place.declined[1]
        elif strongest.place is not None and not whole.is_cpu:
            form, reason = looking.encoded(self, strongest.place, whole, facts, action, fresh)
        else:
            form, reason = self.form(whole, facts, action, fresh)
            if place is not None:
                place.declined, place.spared = (action, reason) if form is None else None, SPARED
        if form is None:
            value.account.encode_seconds += time.perf_counter() - started
            self.keep(value, facts, reason + why)
            return
        form.errors = value.state.errors
        value.state, value.dependents.guard = form, None
        if form.codec.bound is not None:
            form.errors = frozenset((facts.key,))
            self._keep_exact(value, whole)
            if producer is not None:
                producer.stored(value, strongest, form.ticket.nbytes)
        if action.store != "device":
            self._live.prefetcher.put(form, facts.key)
        label = base.label(form.codec)
        self.release(value, fresh, facts, label, form.ticket.nbytes, why.removeprefix("; "), started, action.store)
        if type(form) is DraftedForm:
            self.drafts.add(value, form)

    def _keep_exact(self, value: Value, whole: Tensor) -> None:
        """Keeps the exact data of a value that has an error, if the error of the gradient is measured."""
        monitor = self._live.monitor
        if monitor is not None and monitor.is_due:
            monitor.exact[value] = whole.detach()

    def _limit_drafts(self, key: str) -> None:
        """Holds no more for drafts than the policy has room for, from that value on."""
        self.drafts.limit = self.policy.in_flight_for(key)
        if self.drafts.limit is not None:
            self.drafts.keep_within(self.drafts.limit)

    def _draft(
        self, looked: Looked | None, number: int, codec: Codec, x: Tensor
    ) -> tuple[Draft, Drafted | None] | None:
        """Drafts an encoding; None where it has to be known at once, or something is counting what planes take."""
        if looked is None or self._live.watcher is not None:
            return None
        if graphs.capture() is None and not self.drafts.admits(x.untyped_storage().nbytes()):
            return None
        return looked.draft(number, codec, x, self.drafts.limit is not None)

    def releases_shape(self, place: Place) -> bool:
        """Whether the policy lets go of what was saved at that place, of which only the shape is read."""
        if place.releases is None or not self.is_fixed:
            action = self._answer(place, place.facts, (place.facts,))
            place.releases = isinstance(action, Stash) and any(codec.id == codecs.Shape.id for codec in action.codecs)
        return place.releases

    def _action(self, value: Value, strongest: Saved, facts: SavedTensor, fresh: list[Saved]) -> Action:
        """Returns the policy's action for a value. A fixed policy is asked once for each known place."""
        if self.is_fixed:
            place = strongest.place
            if place is None or place.facts is not facts:
                return self.policy.decide(facts)
            if place.action is None:
                place.action = self.policy.decide(facts)
            return place.action
        readers = [saved.tensor for saved in fresh if saved.tensor is not None]
        place = strongest.place
        if self.policy.revision is None or place is None:
            self.policy.trace(facts, readers, lambda: self._producer.sources(value, strongest))
            return self.policy.decide_together(facts, readers)
        return self._answer(place, facts, readers)

    def _answer(self, place: Place, facts: SavedTensor, readers: Sequence[SavedTensor]) -> Action:
        """Returns the policy's action, of which a policy with a revision is asked once in each place."""
        revision, asked = self.policy.revision, (facts, *readers)
        known = place.answer
        if known is not None and revision is not None and known[0] is revision and known[1] == asked:
            return known[2]
        action = self.policy.decide_together(facts, readers)
        place.answer = revision, asked, action
        return action

    def _forget(
        self, value: Value, fresh: list[Saved], facts: SavedTensor, whole: Tensor, remade: Remade, started: float
    ) -> None:
        """Let go of a value that its recipe makes again."""
        recipe = remade.recipe
        if recipe.from_statistics:
            remade.form = self._mask(whole, facts, fresh)
        if remade.errors:
            self._keep_exact(value, whole)
        value.state, value.dependents.guard = remade, None
        nbytes = 0 if remade.form is None else remade.form.ticket.nbytes
        label = "recompute within" if recipe.from_statistics else "recompute"
        self.release(value, fresh, facts, label, nbytes, str(recipe), started)

    def release(
        self,
        value: Value,
        fresh: list[Saved],
        facts: SavedTensor,
        codec: str,
        nbytes: int,
        note: str,
        started: float,
        store: str = "device",
    ) -> None:
        """Let go of the dense data, which is stored in another form now."""
        for saved in fresh:
            saved.dense = None
        value.take(nbytes, store)
        account = value.account
        account.codec, account.reason = codec, note
        account.encode_seconds += time.perf_counter() - started
        if not self.is_fixed:
            self._tell(value, Outcome(facts, codec, nbytes))

    def keep(self, value: Value, facts: SavedTensor, reason: str) -> None:
        """Hold a value as it is."""
        value.account.codec, value.account.reason = "kept", reason
        if not self.is_fixed:
            self._tell(value, Outcome(facts, None, value.account.stash_nbytes, reason))

    def _tell(self, value: Value, outcome: Outcome) -> None:
        """Tells a policy that is not fixed what became of a value, if it wants to know."""
        revision, place = self.policy.revision, value.place
        if revision is not None:
            if not self.policy.observes_changes:
                return
            if place is not None:
                known, place.told = place.told, (revision, outcome.nbytes)
                if known is not None and known[0] is revision and known[1] == outcome.nbytes:
                    return
        self.policy.observe(outcome)

    def form(
        self,
        x: Tensor,
        facts: SavedTensor,
        action: Stash,
        readers: list[Saved],
        looked: looking.Looked | None = None,
        first: int = -1,
    ) -> tuple[Form | None, str]:
        """Encode with the first codec of the action that takes ``x``; else None and the last reason.

        Args:
            x: the value.
            facts: about it.
            action: names the codecs and the store.
            readers: the saved tensors that read it.
            looked: what is known of the codecs at the place; None where nothing is.
            first: the number of a codec that took such a value before, which is asked first and without a look.
        """
        store = self.stores.get(action.store)
        if store is None:
            raise UnknownNameError(
                f"store {action.store!r} was asked for by {self.policy!r}, but there are {', '.join(self.stores)}. "
                f"Pass it to Session(stores=...)."
            )
        reason = "the policy named no codec"
        for number, codec in enumerate(action.codecs[max(0, first) :], max(0, first)):
            of_another_test = facts.need is Need.SIGN and base.mask_of(codec) not in (None, facts.mask)
            if facts.need not in codec.preserves or of_another_test:
                raise NeedNotMetError(
                    f"codec {codec.id!r} preserves {{{', '.join(sorted(need.name for need in codec.preserves))}}}, but "
                    f"backward of {facts.op} reads the {facts.need.name} of its {facts.role!r} ({facts.key}, "
                    f"{facts.spec}). Use a codec that preserves it, such as zvc, or Keep()."
                )
            spec = TensorSpec.of(x)
            refusal = codec.accepts(spec) or misreads(codec, readers)
            captured = graphs.capture()
            if captured is not None and (number != first or looked is None or looked.known.get(number) is None):
                refusal = refusal or (looking.ASKS if base.drafting(codec) is not None else None)
            if refusal is None and number != first:
                refusal = codec.declines(x)
            if refusal is None:
                try:
                    # Nobody else holds the memory, so it may become the plane: nothing is copied, nothing lives twice.
                    drafted = self._draft(looked, number, codec, x)
                    encoded = base.adopt(codec, x) if drafted is None else drafted[0].encoded
                except CodecRefusedError as refused:  # only the full pass could tell
                    refusal = str(refused)
                else:
                    if number == first and encoded.nbytes > spec.nbytes:
                        reason = f"{base.label(codec)}: it takes more bytes than the value"
                        continue
                    mask = facts.mask if facts.need is Need.SIGN else None
                    if self._live.watcher is not None:
                        self._live.watcher.storing(encoded)
                    if drafted is not None and drafted[1] is None:
                        assert captured is not None and looked is not None
                        expect_whole(captured, drafted[0], looked, number, facts.key)
                    elif drafted is not None and drafted[1] is not None:
                        self.is_looking = True  # whether it has freed anything is not known yet
                        return DraftedForm(codec, mask, drafted[0], store, x, drafted[1]), ""
                    elif looked is not None:
                        looked.learn(number, codec, encoded)
                    return Form(codec, mask, encoded.spec, store, store.put(encoded)), ""
            reason = f"{base.label(codec)}: {refusal}"
        return None, reason

    def _mask(self, whole: Tensor, facts: SavedTensor, readers: list[Saved]) -> Form | None:
        """For a value that is made again within bounds, what its readers of signs read; None where there are none."""
        mask = next((saved.mask for saved in readers if saved.need is Need.SIGN), None)
        if mask is None:
            return None
        form, _ = self.form(whole, replace(facts, need=Need.SIGN, mask=mask), Stash(codecs.Bitmask(mask)), readers)
        return form


def _next_life(key: str, before: str) -> str:
    """The key of a value that is decided on once more (Note: [backward with a graph]): ``key~2``, then ``key~3``."""
    life = before.rpartition(":")[2].partition("~")[2]
    return f"{first_life_of(key)}~{int(life or 1) + 1}"


def strength(saved: Saved) -> tuple[int, float]:
    """Orders saved tensors by what is read of them, and equal ones by their nodes, the first node's on top.

    So a value has the same key in each step, in whichever order its tensors were packed.
    """
    return saved.need.value, -math.inf if saved.node is None else -saved.node


def unchanged(value: Value) -> list[Saved]:
    """The saved tensors that view a value and were not changed since; notes the new version of those that were.

    A saved tensor follows the program's own tensor where its ``.data`` was assigned.
    """
    fresh = []
    for saved in value.saved():
        follow_original(saved)
        dense = saved.dense
        if saved.value is not value and saved is not value.dependents.guard:  # it follows another tensor's memory now
            continue
        if dense is not None and dense._version != saved.origin.version:
            saved.origin.modified, saved.dense = dense._version, None
        elif dense is not None:
            fresh.append(saved)
    return fresh


def whole_of(saved: Saved, storage: torch.UntypedStorage) -> Tensor | None:
    """Returns everything in the storage of a saved tensor: the tensor itself if it fills the storage, else flat [n].

    None if the storage is no whole number of its elements.
    """
    dense, spec = saved.dense, saved.spec
    assert dense is not None and spec is not None
    itemsize, nbytes = spec.dtype.itemsize, storage.nbytes()
    if saved.offset == 0 and spec.nbytes == nbytes:
        place = saved.place
        if is_dense(spec.shape, spec.stride) if place is None or place.facts.spec is not spec else place.is_dense:
            return dense
    if nbytes % itemsize:
        return None
    return dense.as_strided((nbytes // itemsize,), (1,), 0)


def has_error(action: Action) -> bool:
    """Whether the action may store a value with an error."""
    stash = action.otherwise if isinstance(action, Recompute) else action
    return isinstance(stash, Stash) and any(codec.bound is not None for codec in stash.codecs)


def without_error(action: Stash) -> Stash:
    """The same action without the codecs that have an error."""
    return Stash(tuple(codec for codec in action.codecs if codec.bound is None), action.store)


def misreads(codec: Codec, readers: list[Saved]) -> str | None:
    """Returns why a codec with an error cannot serve every reader of a value, or None if it can."""
    if codec.bound is None:
        return None
    for reader in readers:
        facts = reader.tensor
        assert facts is not None
        if not base.serves_function(codec, facts.function):
            return f"backward of {facts.op} reads more of it than that derivative"
        refusal = base.refuses_reader(codec, facts)
        if refusal is not None:
            return refusal
        if facts.need is Need.SIGN and (facts.mask is None or not base.keeps(codec, facts.mask)):
            return f"backward of {facts.op} reads on which side of a threshold it is"
    return None
