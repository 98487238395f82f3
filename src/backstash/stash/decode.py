"""The way back of a value that is not held dense: decoded, or remade by its recipe."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
from torch import Tensor

from backstash.codecs import base
from backstash.codecs.base import Codec, Encoded
from backstash.codecs.direct import Direct, MaskBits, Readable
from backstash.codecs.masks.codec import Bitmask
from backstash.codecs.numbers import deferring
from backstash.errors import SavedTensorModifiedError
from backstash.policies.base import Stash
from backstash.saved import Need, SavedTensor, TensorSpec
from backstash.stash import fused
from backstash.stash.buffers import SMALLEST, new_memory
from backstash.stash.calls import Leaf, Memory
from backstash.stash.comparing import COMPUTED, check_sample
from backstash.stash.drafts import DraftedForm, make_certain
from backstash.stash.leaves import guard_with
from backstash.stash.value import Form, Saved, Value, version_of
from backstash.torch_internals import in_backward, without_gradients

COPIES_BOOLS = frozenset({"cpu"})
"""Types of devices whose backward kernels make a floating copy of a bool first (see Bitmask.decode)."""


class StashedTensor:
    """A saved tensor as the package backward sees it."""

    __slots__ = ("__weakref__", "overwrites", "saved", "spec", "value")

    def __init__(self, saved: Saved, spec: TensorSpec, value: Value) -> None:
        self.saved, self.spec, self.value = saved, spec, value
        self.overwrites = saved.live.overwrites

    def whole(self) -> Tensor:
        """The tensor, decoded or remade."""
        saved = self.saved
        if saved.dense is not None:
            check_version(saved)
            return saved.dense
        with saved.live.lock:
            return decode(saved, self.spec, self.value)

    def direct(self, form: type[Readable]) -> Readable | None:
        """The planes of exactly what the reader needs, in that form; None where they are not stored in it."""
        saved, value = self.saved, self.value
        with saved.live.lock:
            if _exact(value) is not None:
                return None
            if value.bits is not None and value.bits[0] == saved.mask:
                _, codec, encoded = value.bits
                read = base.direct(codec, form) if _same_layout(encoded.spec, self.spec) else None
                found = None if read is None else read(encoded)
            else:
                stored = value.form
                make_certain(stored)
                if stored is None or stored.mask != saved.mask or not _same_layout(stored.spec, self.spec):
                    return None
                if form is MaskBits and base.mask_of(stored.codec) != saved.mask:
                    return None
                read = base.direct(stored.codec, form)
                found = None if read is None else read(planes(value, stored))
            return found if isinstance(found, form) else None

    def release(self) -> None:
        """Its reader is done: free what was decoded, but for the bits that others will read."""
        self.saved.has_read()
        if self.saved.dense is None:
            with self.saved.live.lock:
                release(self.value)

    def adopt(self, dead: Tensor) -> None:
        """Decode into that memory from now on. Nothing is decoded for the reader of what is held as it is."""
        if self.saved.dense is not None:
            return
        with self.saved.live.lock:
            self.saved.live.buffers.adopt(dead)


def decode(saved: Saved, spec: TensorSpec, value: Value) -> Tensor:
    """The saved tensor in its own layout, without a graph."""
    if torch.is_grad_enabled():
        if value.live.monitor is None and in_backward():
            without_gradients(lambda: thaw(value))
            assert saved.dense is not None
            return saved.dense
        return without_gradients(lambda: _decode(saved, spec, value, borrows=False))
    return _decode(saved, spec, value, borrows=saved.builtin and in_backward())


def thaw(value: Value) -> None:
    """Holds a value dense again, and nothing else of it.

    Note: [backward with a graph]
        A backward pass that is itself differentiated saves what it has unpacked, and holds it as long as its graph is
        there. Were the value held in another form as well, there would be more than plain PyTorch has. So what such a
        pass decodes or makes again is the value from then on, for all who read it.
    """
    form, recipe = value.form, value.recipe
    make_certain(form)
    spec = None if form is None else form.spec
    is_whole = form is None or Need.VALUE in form.codec.preserves
    whole, buffers = dense(value, False, False).detach(), value.buffers
    assert buffers is not None
    value.hold(None)
    buffers.part_with(whole)
    account = value.account
    value.live.add(-account.device_nbytes)
    account.stash_nbytes, account.store = whole.untyped_storage().nbytes(), "device"
    value.live.add(account.device_nbytes)
    account.codec, account.reason = "kept", "a backward pass that has a graph of its own holds it"
    hold_dense(value, whole)
    if not is_whole or value.errors:
        value.content = None
    if value.live.read_with_graph is None or (spec is not None and spec.dtype is not whole.dtype):
        return
    if value.errors:  # its numbers must not be rounded again
        if recipe is not None or form is None or form.tag is not None or not base.repeats(form.codec):
            return
        value.otherwise = Stash(form.codec)
    value.live.read_with_graph(value, whole)


def hold_dense(value: Value, whole: Tensor) -> None:
    """Has the saved tensors of a value hold its data, of which no other form is left."""
    value.form = value.recipe = value.sample = value.bits = None
    value.depth, value.shares = 0, False
    value.round = value.unread = 0
    for saved in value.saved():
        saved.round = 0
        if saved.modified is None:  # else it raises when it is read
            assert saved.spec is not None
            # A view would hold `whole` as well, and the storage would have a use that is no saved tensor's.
            saved.dense = whole.as_strided(saved.spec.shape, saved.spec.stride, saved.offset).detach()
            saved.version, saved.original = saved.dense._version, None
    if value.height:  # others are remade from it
        guard_with(value, whole)
        assert value.guard is not None
        value.guard.tensor = value.facts


def _decode(saved: Saved, spec: TensorSpec, value: Value, borrows: bool) -> Tensor:
    exact = _exact(value)
    if exact is not None:
        exact = exact.as_strided(spec.shape, spec.stride, saved.offset)
        return exact if saved.builtin else exact.clone()  # others may write into it
    whole = dense(value, False, borrows)
    saved.has_read()
    value.let_go()
    if not saved.builtin:  # may write into it
        value.hold(None)
        assert value.buffers is not None
        value.buffers.forget(value if value.form is None else value.form)
        if value.live.monitor is None or not value.live.monitor.is_measuring:
            value.written = [*(value.written or ()), (version_of(whole), whole._version)]
    if whole.shape == spec.shape and whole.stride() == spec.stride:
        return whole.detach()
    return whole.as_strided(spec.shape, spec.stride, saved.offset)


def has_direct(value: Value, form: type[Direct] | None) -> bool:
    """Whether a value is stored by a codec whose planes a backward kernel can read in that form."""
    if form is None:
        return False
    if value.bits is not None and base.direct(value.bits[1], form) is not None:
        return True
    return value.form is not None and base.direct(value.form.codec, form) is not None


def _exact(value: Value) -> Tensor | None:
    """The exact data of a value that is stored with an error, while the gradient's error is measured."""
    monitor = value.live.monitor
    return value.exact if monitor is not None and monitor.is_exact else None


def dense(value: Value, ahead: bool, borrows: bool) -> Tensor:
    """Returns the whole of a value that is not held dense, by decoding or remaking it.

    What was stored as it is need not be copied for a reader that ``borrows`` it: one that does not write into it.

    Note: [made ahead]
        What is made as the beginning of something else (``ahead``) will be read by nodes of its own soon, and is held
        for them as long as there is room in what backward has freed already; else it is made once more then. So a chain
        of recomputed values never takes more than storing would.
    """
    buffers = value.buffers
    assert buffers is not None
    if value.shares:
        return shared(value)
    owner: Any = value if value.form is None else value.form
    whole = value.remade if value.remade is not None else buffers.holding(owner)
    return _made(value, owner, ahead, borrows) if whole is None else whole


def _made(value: Value, owner: Any, ahead: bool, borrows: bool) -> Tensor:
    """The whole of a value, of which nothing is there that was decoded or remade before; see :func:`dense`."""
    form, buffers = value.form, value.buffers
    assert buffers is not None
    make_certain(form)
    value.begin_round()
    started = time.perf_counter()
    if value.recipe is not None:
        whole = remake(value)
        if not ahead or value.live.may_hold(whole.untyped_storage().nbytes()):
            value.hold(whole.detach())
        for leaf in value.recipe.leaves:
            if leaf.recipe is not None and leaf.remade is None:
                buffers.shrink()  # there was no room for them
                break
    elif form is not None and borrows and (view := base.view(form.codec)) is not None:
        encoded = planes(value, form)
        started = time.perf_counter()
        whole = view(encoded)
        if form.tag is None or value.unread > 1:  # what has come from elsewhere is not held for longer than it is read
            buffers.lend(owner, whole)
    else:
        assert form is not None
        whole = _take(value, form.spec, decoded_dtype(form.codec, form.spec))
        encoded = planes(value, form)
        started = time.perf_counter()  # what was waited for is counted apart
        if whole.is_cpu:
            form.codec.decode(encoded, whole)
        else:
            with deferring(partial(_damaged, value)):
                form.codec.decode(encoded, whole)
        # What is in no pool of buffers is held for the other readers.
        if (value.unread > 1 and whole.nbytes < SMALLEST) or (
            ahead and value.unread and value.live.may_hold(2 * whole.nbytes)
        ):
            value.hold(whole.detach())
    buffers.filled(owner, whole)
    value.account.decode_seconds += time.perf_counter() - started
    value.account.decodes += 1
    return whole


def _damaged(value: Value, flag: Tensor, message: str) -> None:
    """Has an error name the value if it turns out that its planes are damaged."""
    value.live.comparisons.add_damage(flag, partial("{}: {} {}".format, value.key, message, COMPUTED))


def decoded_dtype(codec: Codec, spec: TensorSpec) -> torch.dtype:
    """Returns the dtype of the memory that a tensor is decoded into.

    A bool serves where a mask's stand-ins are 1 and 0, which is what a kernel that computes with floats makes of it.
    """
    if spec.device.type in COPIES_BOOLS or not isinstance(codec, Bitmask):
        return spec.dtype
    mask = codec.mask
    is_bool = (mask.if_set, mask.if_clear) == (1.0, 0.0) and not (mask.ternary or mask.nan)
    return torch.bool if is_bool else spec.dtype


def shared(value: Value) -> Tensor:
    """A value that is made once for all who read it, after everything that it is made from.

    Note: [made once]
        What is made on the way is held for its own readers, and for other values that are yet to be made from it. So a
        chain of costly calls runs once in a backward pass. It runs in a loop, because it may have any length.
    """
    if value.remade is not None:
        return value.remade
    waiting = [value]
    whole: Tensor | None = None
    while waiting:
        latest = waiting[-1]
        if latest.remade is not None and latest is not value:
            waiting.pop()
            continue
        assert latest.recipe is not None
        missing = [leaf for leaf in dict.fromkeys(latest.recipe.leaves) if leaf.shares and leaf.remade is None]
        if missing:
            waiting += missing
            continue
        started = time.perf_counter()
        latest.begin_round()
        assert latest.buffers is not None
        latest.buffers.shrink(latest.buffers.nbytes)  # what nobody awaits: fresh memory is taken now, none of theirs
        whole = remake(latest, fresh=True)
        group = latest.recipe.call.group
        made = [(latest, whole)]
        if group is not None and group.made:  # Note: [saved inside] in repeating.py
            wanted = group.wanted()
            made += [(wanted[number], x) for number, x in group.made.items() if number in wanted]
            group.made = {}
        for each, x in made:
            if each is not latest:
                each.begin_round()
                check_sample(each, x)
            each.hold(x.detach())
            assert each.recipe is not None
            for leaf in each.recipe.leaves:
                if leaf.shares:
                    leaf.let_go()
            each.account.decodes += 1
        latest.account.decode_seconds += time.perf_counter() - started
        waiting.pop()
    assert whole is not None
    return whole


def remake(value: Value, fresh: bool = False) -> Tensor:
    """Computes a value again, in a pooled buffer or in ``fresh`` memory.

    Raises:
        RecomputedDifferentlyError: it has other bits than it had (Note: [samples]).
    """
    recipe, form = value.recipe, value.form
    assert recipe is not None
    encoded = None if form is None else planes(value, form)
    memory = partial(new_memory, recipe.call.spec) if fresh else memory_of(value)
    whole = fused.made(recipe, fetch, memory, encoded)
    if recipe.first_use is not None:
        way = "plain" if value.sample is None or value.sample.differs(whole) else "fused"
        recipe.first_use(way)
        recipe.first_use = None
        if way == "plain":
            value.recipe = recipe = recipe.unfused()
            del whole  # there may be no room for both
            whole = fused.made(recipe, fetch, None, encoded)
    check_sample(value, whole)
    return whole


def memory_of(value: Value) -> Memory:
    """What makes memory in the pool of decode buffers for what a value's recipe makes."""
    assert value.recipe is not None
    spec = value.recipe.call.spec
    return partial(_take, value, spec, spec.dtype)


def _take(value: Value, spec: TensorSpec, dtype: torch.dtype) -> Tensor:
    """Memory from the pool of decode buffers, laid out like ``spec``; its contents are undefined."""
    assert value.buffers is not None
    memory = value.buffers.take(spec, dtype)
    if value.live.watcher is not None:
        value.live.watcher.taken(memory)
    return memory


def release(value: Value) -> None:
    """Frees the decoded or remade tensor. If the remaining readers only need its mask, keeps the mask."""
    buffers = value.buffers
    assert buffers is not None
    if value.shares:
        value.let_go()
        return
    owner: Any = value if value.form is None else value.form
    whole = value.remade if value.remade is not None else buffers.holding(owner)
    if whole is not None and value.unread > 0:
        if value.unread > MANY:
            return
        unread = [member for member in value.saved() if member.round != value.round]
        mask = unread[0].mask if unread else None
        if mask is None:
            return
        codec = Bitmask(mask)
        if (
            any(member.need is not Need.SIGN or member.mask != mask for member in unread)
            or codec.accepts(TensorSpec.of(whole)) is not None
        ):
            return
        stored = value.form is not None and value.form.mask == mask
        if not stored and (value.bits is None or value.bits[0] != mask):
            value.bits = mask, codec, codec.encode(whole)
    if value.unread <= 0:
        value.bits = None
    del whole
    value.hold(None)
    if value.live.watcher is not None:
        whole = buffers.holding(owner)
        if whole is not None:
            value.live.watcher.released(whole)
        del whole
    buffers.release(owner)


MANY = 8
"""Readers to come of which it is not asked whether a mask would be enough for all of them."""


def planes(value: Value, form: Form) -> Encoded:
    """The planes of a value, from wherever they are."""
    if form.tag is None:
        encoded = form.store.get(form.ticket)
    else:
        encoded, seconds = value.live.prefetcher.read(form, value.live.below_peak)
        value.account.stall_seconds += seconds
    if value.live.watcher is not None:
        value.live.watcher.fetched(encoded)
    return form.cut(encoded) if type(form) is DraftedForm and form.cut is not None else encoded


def fetch(leaf: Leaf) -> Tensor:
    """What a recipe begins from."""
    value: Value = leaf.value
    if value.is_dense:
        guard = value.guard
        assert guard is not None
        if guard.dense is None:
            assert guard.modified is not None
            raise SavedTensorModifiedError(modified_message(guard.spec, guard.tensor, guard.modified, guard.version))
        check_version(guard)
        whole = guard.dense
    else:
        whole = dense(value, True, True)
    if whole.shape == leaf.spec.shape and whole.stride() == leaf.spec.stride and whole.storage_offset() == leaf.offset:
        return whole.detach()  # and not the pool's own tensor, which does not tell it that the memory is in use
    return whole.as_strided(leaf.spec.shape, leaf.spec.stride, leaf.offset)


def _same_layout(spec: TensorSpec, other: TensorSpec) -> bool:
    return spec.shape == other.shape and spec.stride == other.stride


def check_version(saved: Saved) -> None:
    """Raises plain PyTorch's error if a tensor that is held by reference was changed since it was saved."""
    held = saved.dense if saved.dense is not None else saved.counter
    if held is not None and held._version != saved.version:
        spec = saved.spec or TensorSpec.of(held)
        raise SavedTensorModifiedError(modified_message(spec, saved.tensor, held._version, saved.version))
    for counter, version in (saved.value.written if saved.value is not None else None) or ():
        if counter._version != version:  # plain PyTorch would have handed out the saved tensor itself
            now = saved.version + counter._version - version
            raise SavedTensorModifiedError(modified_message(saved.spec, saved.tensor, now, saved.version))


def follow_original(saved: Saved) -> None:
    """Follow the program's own tensor where its ``.data`` was assigned: plain PyTorch has saved that very tensor."""
    original = saved.original() if saved.original is not None else None
    dense = saved.dense
    if original is None or dense is None or original.layout is not torch.strided:
        return
    if original.untyped_storage()._cdata != dense.untyped_storage()._cdata:
        saved.dense = original.detach()  # it shares the version, which an assignment does not change
        saved.spec, saved.offset = TensorSpec.of(saved.dense), int(saved.dense.storage_offset())
        saved.value = None
        saved.claimable = False


def modified_message(spec: TensorSpec | None, saved: SavedTensor | None, version: int, expected: int) -> str:
    """What plain PyTorch says of a tensor that was changed in place after an op had saved it."""
    where = f" ({saved.key})" if saved else ""
    return (
        f"one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{spec}]{where} is at version {version}; expected version {expected} instead. Hint: do not change a "
        f"tensor in place after an operation has saved it, or change a clone of it."
    )
