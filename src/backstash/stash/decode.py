"""The way back of a value that is not held dense: decoded, or remade by its recipe."""

from __future__ import annotations

import time
import weakref
from functools import partial

import torch
from torch import Tensor

from backstash import codecs
from backstash.codecs import base
from backstash.codecs.base import Codec, Encoded
from backstash.codecs.direct import Direct, MaskBits, Readable
from backstash.errors import SavedTensorModifiedError
from backstash.policies.base import Stash
from backstash.saved import Need, SavedTensor, TensorSpec
from backstash.stash.buffers import LARGE, SMALLEST
from backstash.stash.comparing import COMPUTED
from backstash.stash.drafts import DraftedForm, make_certain
from backstash.stash.place import Place
from backstash.stash.value import DENSE, Dense, Form, Saved, Value, guard_with, version_of, with_version_of
from backstash.torch_internals import in_backward, keeps_graph, without_gradients

COPIES_BOOLS = frozenset({"cpu"})
"""Types of devices whose backward kernels make a floating copy of a bool first (see Bitmask.decode)."""


class StashedTensor:
    """A saved tensor as the package redeem sees it."""

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
            if value.reads.bits is not None and value.reads.bits[0] == saved.mask:
                _, codec, encoded = value.reads.bits
                read = base.direct(codec, form) if _same_layout(encoded.spec, self.spec) else None
                found = None if read is None else read(encoded)
            else:
                stored = value.state.form
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
    form, recipe = value.state.form, value.state.recipe
    make_certain(form)
    spec = None if form is None else form.spec
    is_whole = form is None or Need.VALUE in form.codec.preserves
    whole = dense(value, False, False).detach()
    value.hold(None)
    value.live.buffers.part_with(whole)
    value.take(whole.untyped_storage().nbytes())
    account = value.account
    account.codec, account.reason = "kept", "a backward pass that has a graph of its own holds it"
    hold_dense(value, whole)
    if not is_whole or value.state.errors:
        value.content = None
    if value.live.read_with_graph is None or (spec is not None and spec.dtype is not whole.dtype):
        return
    if value.state.errors:  # its numbers must not be rounded again
        if recipe is not None or form is None or form.tag is not None or not base.repeats(form.codec):
            return
        assert isinstance(value.state, Dense)
        value.state.otherwise = Stash(form.codec)
    value.live.read_with_graph(value, whole)


def hold_dense(value: Value, whole: Tensor) -> None:
    """Has the saved tensors of a value hold its data, of which no other form is left."""
    if value.state.errors:
        errors, value.state = value.state.errors, Dense()
        value.state.errors = errors
    else:
        value.state = DENSE
    reads = value.reads
    reads.round, reads.unread, reads.bits = 0, 0, None
    counters = (saved.origin.counter for saved in value.saved())
    counter = next((counter for counter in counters if counter is not None), None)
    if counter is not None:
        whole = with_version_of(counter, whole)
    for saved in value.saved():
        saved.round = 0
        if saved.origin.modified is None:  # else it raises when it is read
            _hold(saved, whole)
    if value.dependents.height:  # others are remade from it
        guard_with(value, whole)
        assert value.dependents.guard is not None and value.facts is not None
        value.dependents.guard.place = Place(value.facts)


def _hold(saved: Saved, whole: Tensor) -> None:
    """Has a saved tensor hold the data of its storage."""
    assert saved.view is not None
    # A view would hold `whole` as well, and the storage would have a use that is no saved tensor's.
    spec, offset = saved.view
    saved.dense = whole.as_strided(spec.shape, spec.stride, offset).detach()
    saved.origin.version, saved.origin.tensor = saved.dense._version, None


def _decode(saved: Saved, spec: TensorSpec, value: Value, borrows: bool) -> Tensor:
    exact = _exact(value)
    if exact is not None:
        exact = exact.as_strided(spec.shape, spec.stride, saved.offset)
        return exact if saved.builtin else exact.clone()  # others may write into it
    whole = dense(value, False, borrows)
    saved.has_read()
    value.let_go()
    if value.reads.unread and _is_read_again(value, whole):
        _keep_mask(value, whole)
    if not saved.builtin:  # may write into it (Note: [reader that writes] in hazards.md)
        value.hold(None)
        value.live.buffers.part_with(whole)
        if value.live.monitor is None or not value.live.monitor.is_measuring:
            if saved.origin.counter is not None:  # who reads the shape alone knows of no value, but of that version
                whole = with_version_of(saved.origin.counter, whole)
            value.reads.written = [*(value.reads.written or ()), (version_of(whole), whole._version)]
    if whole.shape == spec.shape and whole.stride() == spec.stride:
        return whole.detach()
    return whole.as_strided(spec.shape, spec.stride, saved.offset)


def hand_over(saved: Saved, read: Tensor) -> None:
    """Has a saved tensor hold what it was decoded to, and frees the planes, if nobody reads these after it.

    Note: [last readings]
        A node computes gradients while it holds what it reads. Were the planes still there, a step whose largest value
        is read then would take more than plain PyTorch does. So would one whose values are read by a single node, which
        decodes all of them before it runs: that of a custom Function, or of a model that is compiled as a whole. After
        the last reading in a pass that frees its graph the planes are of no use: readers hold what they have read until
        their nodes have run, as in plain PyTorch, and those who only need a mask get one of their own. Planes that are
        almost as large as the value go whoever reads it later. A recipe that begins from the value keeps it, with its
        planes. Where backward has freed so much already that no peak is near, nothing of this is done. Kernels that
        redeem claims free what was decoded themselves, before they allocate a gradient.

    Args:
        saved: it was decoded for a node.
        read: what it was decoded to.
    """
    value = saved.value
    form = None if value is None else value.state.form
    if value is None or form is None or form.tag is not None or Need.VALUE not in form.codec.preserves or keeps_graph():
        return
    live, reads = value.live, value.reads
    if live.monitor is not None or live.watcher is not None or live.buffers.is_planned:
        return
    if base.view(form.codec) is not None or live.has_room(ROOM * form.spec.nbytes):
        return
    members = list(value.saved())
    waiting = [each for each in members if each.round != reads.round]
    whole = read.as_strided(form.spec.shape, form.spec.stride, 0)
    if waiting and DENSER * value.held_nbytes >= (DENSER - 1) * form.spec.nbytes:
        waiting = []
    if waiting:
        if not _keep_mask(value, whole):
            return
        mask = waiting[0].mask
        assert mask is not None
        _, codec, encoded = reads.bits or (mask, codecs.Bitmask(mask), codecs.Bitmask(mask).encode(whole))
        rest = Value(whole.untyped_storage(), value.account, live, value.place)
        rest.waiting.storage, rest.facts, rest.members = None, value.facts, [weakref.ref(each) for each in waiting]
        rest.state = Form(codec, mask, form.spec, form.store, form.store.put(encoded))
        rest.held_nbytes, rest.reads.written = encoded.nbytes, reads.written
        live.add(encoded.nbytes)
        for each in waiting:
            each.value, each.round = rest, 0
    value.members = []
    for each in members:
        if each.value is value:
            _hold(each, whole)
            each.value = None  # last: without either it would be taken for one of which the shape alone is read


DENSER = 4
"""Planes that are smaller than what they are decoded to by less than one in so many bytes are not held beside that."""

ROOM = 8
"""There is room for a decoded value if backward has freed this many times its bytes already.

Then the decoded value and the reader's gradients, one of which may be several times larger, together take less than
what backward has freed. So the peak lies elsewhere, and nothing is gained by freeing anything early.
"""


def has_direct(value: Value, form: type[Direct] | None) -> bool:
    """Whether a value is stored by a codec whose planes a backward kernel can read in that form."""
    if form is None:
        return False
    if value.reads.bits is not None and base.direct(value.reads.bits[1], form) is not None:
        return True
    return value.state.form is not None and base.direct(value.state.form.codec, form) is not None


def _exact(value: Value) -> Tensor | None:
    """The exact data of a value that is stored with an error, while the gradient's error is measured."""
    monitor = value.live.monitor
    return monitor.exact.get(value) if monitor is not None and monitor.is_exact else None


def dense(value: Value, ahead: bool, borrows: bool) -> Tensor:
    """Returns the whole of a value that is not held dense, by decoding or remaking it.

    What was stored as it is need not be copied for a reader that ``borrows`` it: one that does not write into it.

    Note: [made ahead]
        What is made as the beginning of something else (``ahead``) will be read by nodes of its own soon, and is held
        for them as long as there is room in what backward has freed already; else it is made once more then. So a chain
        of recomputed values never takes more than storing would.
    """
    state = value.state
    if state.recipe is not None:
        assert value.live.remake is not None
        return value.live.remake(value, ahead)
    whole = state.made if state.made is not None else value.live.buffers.holding(state)
    if whole is not None:
        return whole
    assert isinstance(state, Form)
    return _decoded(value, state, ahead, borrows)


def _decoded(value: Value, form: Form, ahead: bool, borrows: bool) -> Tensor:
    """The whole of a value, of which nothing is there that was decoded before; see :func:`dense`."""
    buffers, reads = value.live.buffers, value.reads
    make_certain(form)
    value.begin_round()
    if borrows and (view := base.view(form.codec)) is not None:
        encoded = planes(value, form)
        started = time.perf_counter()
        whole = view(encoded)
        if form.tag is None or reads.unread > 1:  # what has come from elsewhere is held until it is read
            buffers.lend(form, whole)
    else:
        whole = take_memory(value, form.spec, decoded_dtype(form.codec, form.spec))
        encoded = planes(value, form)
        started = time.perf_counter()  # what was waited for is counted apart
        if whole.is_cpu:
            form.codec.decode(encoded, whole)
        else:
            with codecs.numbers.deferring(partial(_damaged, value)):
                form.codec.decode(encoded, whole)
        if _is_held(value, whole) or (ahead and reads.unread and value.live.has_room(2 * whole.nbytes)):
            value.hold(whole.detach())
    buffers.filled(form, whole)
    value.account.decode_seconds += time.perf_counter() - started
    value.account.decodes += 1
    return whole


def _is_held(value: Value, whole: Tensor) -> bool:
    """Whether what was decoded into memory of its own is held for the readers to come, beside the planes."""
    unread, nbytes, buffers = value.reads.unread, whole.nbytes, value.live.buffers
    if unread <= 1 or nbytes >= (LARGE if whole.is_cpu and not buffers.is_planned else SMALLEST):
        return False
    if unread > FEW or not whole.is_cpu:
        return nbytes < SMALLEST or not value.live.has_room(nbytes)
    return nbytes < SMALLEST and value.live.has_room(nbytes)


FEW = 2
"""A value that no more read than that is decoded for each of them on CPU where there is no room to hold it."""


def _damaged(value: Value, flag: Tensor, message: str) -> None:
    """Has an error name the value if it turns out that its planes are damaged."""
    value.live.comparisons.add_damage(flag, partial("{}: {} {}".format, value.key, message, COMPUTED))


def decoded_dtype(codec: Codec, spec: TensorSpec) -> torch.dtype:
    """Returns the dtype of the memory that a tensor is decoded into.

    A bool serves where a mask's stand-ins are 1 and 0, which is what a kernel that computes with floats makes of it.
    """
    if spec.device.type in COPIES_BOOLS or not isinstance(codec, codecs.Bitmask):
        return spec.dtype
    mask = codec.mask
    is_bool = (mask.if_set, mask.if_clear) == (1.0, 0.0) and not (mask.ternary or mask.nan)
    return torch.bool if is_bool else spec.dtype


def take_memory(value: Value, spec: TensorSpec, dtype: torch.dtype) -> Tensor:
    """Memory from the pool of decode buffers, laid out like ``spec``; its contents are undefined."""
    nbytes = spec.numel * dtype.itemsize
    memory = value.live.buffers.take(spec, dtype, nbytes >= LARGE or value.live.has_room(nbytes))
    if value.live.watcher is not None:
        value.live.watcher.taken(memory)
    return memory


def release(value: Value) -> None:
    """Frees the decoded or remade tensor. If the remaining readers only need its mask, keeps the mask."""
    state, reads, buffers = value.state, value.reads, value.live.buffers
    if state.shares:
        value.let_go()
        return
    whole = state.made if state.made is not None else buffers.holding(state)
    if whole is not None and reads.unread > 0 and not _keep_mask(value, whole):
        return
    if reads.unread <= 0:
        reads.bits = None
    del whole
    value.hold(None)
    if value.live.watcher is not None:
        whole = buffers.holding(state)
        if whole is not None:
            value.live.watcher.released(whole)
        del whole
    buffers.release(state)


def _is_read_again(value: Value, whole: Tensor) -> bool:
    """Whether a small value on CPU is decoded once more for its next reader."""
    live = value.live
    is_small = isinstance(value.state, Form) and whole.is_cpu and whole.nbytes < LARGE and not live.buffers.is_planned
    return is_small and value.state.made is None and live.buffers.holding(value.state) is None


def _keep_mask(value: Value, whole: Tensor) -> bool:
    """Whether the readers to come need the mask of a decoded or remade tensor and no more; then that is kept."""
    reads = value.reads
    if reads.unread > MANY:
        return False
    unread = [member for member in value.saved() if member.round != reads.round]
    mask = unread[0].mask if unread else None
    if mask is None or any(member.need is not Need.SIGN or member.mask != mask for member in unread):
        return False
    codec = codecs.Bitmask(mask)
    if codec.accepts(TensorSpec.of(whole)) is not None:
        return False
    form = value.state.form
    if (form is None or form.mask != mask) and (reads.bits is None or reads.bits[0] != mask):
        reads.bits = mask, codec, codec.encode(whole)
    return True


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


def _same_layout(spec: TensorSpec, other: TensorSpec) -> bool:
    return spec.shape == other.shape and spec.stride == other.stride


def check_version(saved: Saved) -> None:
    """Raises plain PyTorch's error if a tensor that is held by reference was changed since it was saved."""
    held = saved.dense if saved.dense is not None else saved.origin.counter
    if held is not None and held._version != saved.origin.version:
        spec = saved.spec or TensorSpec.of(held)
        raise SavedTensorModifiedError(modified_message(spec, saved.tensor, held._version, saved.origin.version))
    for counter, version in (saved.value.reads.written if saved.value is not None else None) or ():
        if counter._version != version:  # plain PyTorch would have handed out the saved tensor itself
            now = saved.origin.version + counter._version - version
            raise SavedTensorModifiedError(modified_message(saved.spec, saved.tensor, now, saved.origin.version))


def follow_original(saved: Saved) -> None:
    """Follow the program's own tensor where its ``.data`` was assigned: plain PyTorch has saved that very tensor."""
    original = saved.origin.tensor() if saved.origin.tensor is not None else None
    dense = saved.dense
    if original is None or dense is None or original.layout is not torch.strided:
        return
    if original.untyped_storage()._cdata != dense.untyped_storage()._cdata:
        saved.dense = original.detach()  # it shares the version, which an assignment does not change
        saved.view = TensorSpec.of(saved.dense), int(saved.dense.storage_offset())
        saved.value = None


def modified_message(spec: TensorSpec | None, saved: SavedTensor | None, version: int, expected: int) -> str:
    """What plain PyTorch says of a tensor that was changed in place after an op had saved it."""
    where = f" ({saved.key})" if saved else ""
    return (
        f"one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{spec}]{where} is at version {version}; expected version {expected} instead. Hint: do not change a "
        f"tensor in place after an operation has saved it, or change a clone of it."
    )
