"""The tensor that backward is given for a packed one: the tensor itself, a decoded or remade one, or a claim."""

from __future__ import annotations

import torch
from torch import Tensor

from backstash.codecs.masks.codec import Bitmask
from backstash.codecs.shape import stand_in
from backstash.errors import SavedTensorModifiedError
from backstash.redeem import accumulation, claims, linear, table
from backstash.stash import held
from backstash.stash.decode import (
    StashedTensor,
    check_version,
    decode,
    follow_original,
    has_direct,
    modified_message,
)
from backstash.stash.live import Live
from backstash.stash.parameters import HeldParameter, check_memory
from backstash.stash.value import Saved, Value
from backstash.torch_internals import in_backward, running_node


def unpack(packed: held.Packed, live: Live, min_nbytes: int) -> Tensor:
    """The tensor that was packed, of which a watcher is told: a parameter with its memory, a wrapper around its tensor.

    Args:
        packed: what the pack hook returned.
        live: the Session's running totals.
        min_nbytes: tensors smaller than this are not claimed.

    Raises:
        SavedTensorModifiedError: the program has changed it in place since.
        SavedTensorFreedError: its memory was freed since.
    """
    if type(packed) is Saved and packed.origin.wrapping is None and packed.dense is None and live.watcher is None:
        return _inner(packed, live)
    tensor = _unpacked(packed, live, min_nbytes)
    if live.watcher is not None:
        saved = packed if isinstance(packed, Saved) else None
        key = saved.value.key if saved is not None and saved.value is not None else ""
        live.watcher.read(tensor, saved is not None and saved.dense is None, key)
    return tensor


def _unpacked(packed: held.Packed, live: Live, min_nbytes: int) -> Tensor:
    if type(packed) is tuple:
        tensor = held.read(packed)  # type: ignore[arg-type]  # no HeldParameter, which is another type of tuple
        return linear.claim_input(tensor) if tensor.dim() == 2 else tensor
    if type(packed) is HeldParameter:
        parameter = packed.tensor
        if parameter._version != packed.version:
            held.read((parameter, packed.version, None))  # raises
        if parameter.nbytes >= min_nbytes:
            parameter = linear.claim_weight(parameter)
        if in_backward():  # and not a look at grad_fn._saved_*
            packed.check_memory()
        return parameter
    assert isinstance(packed, Saved)
    wrapping = packed.origin.wrapping
    if wrapping is not None:
        wrapping.check_version()
    tensor = _inner(packed, live)
    if packed.dense is not None and packed.spec is not None and type(tensor) is not claims.Claim and in_backward():
        check_memory(tensor, packed.spec.nbytes, packed.tensor.key if packed.tensor else "")
    return tensor if wrapping is None else wrapping.wrap(tensor)


def _inner(saved: Saved, live: Live) -> Tensor:
    if saved.tensor is not None and not live.prefetcher.idle:
        with live.lock:
            if live.prefetcher.fetches is not None:
                live.prefetcher.reach(saved.tensor.key if saved.value is None else saved.value.key)
            elif not saved.is_moved:
                live.prefetcher.passed(saved.tensor.key, live.below_peak)
    check_version(saved)
    if saved.dense is not None:
        follow_original(saved)
        if live.read_with_graph is not None and torch.is_grad_enabled() and in_backward():
            _note_graph(saved, live)
        if saved.claimable and _is_claimed(saved, saved.dense.nbytes, None):
            claim = _claim(saved)
            return saved.dense if claim is None else claim
        if live.monitor is not None and live.monitor.is_measuring and not saved.builtin:
            return saved.dense.clone()
        return saved.dense
    if saved.origin.modified is not None:
        raise SavedTensorModifiedError(
            modified_message(saved.spec, saved.tensor, saved.origin.modified, saved.origin.version)
        )
    assert saved.spec is not None
    value = saved.value
    if value is None:
        return stand_in(saved.spec)
    if saved.claimable and _is_claimed(saved, saved.spec.nbytes, value):
        claim = _claim(saved)
        if claim is not None:
            return claim
    with live.lock:
        return decode(saved, saved.spec, value)


def _note_graph(saved: Saved, live: Live) -> None:
    """Notes that a backward pass with a graph reads a tensor that is held dense (Note: [backward with a graph])."""
    value = saved.value
    is_decided = value is not None and value.waiting.storage is None and value.waiting.address is None
    if value is not None and is_decided and value.is_dense and not value.state.errors and live.monitor is None:
        assert live.read_with_graph is not None and saved.dense is not None
        with live.lock:
            live.read_with_graph(value, saved.dense)


def _is_claimed(saved: Saved, nbytes: int, value: Value | None) -> bool:
    """Whether a kernel of this package gains by a claim for a saved tensor, dense or encoded in a ``value``."""
    op = "" if saved.tensor is None else saved.tensor.op
    is_direct = value is not None and has_direct(value, table.FORMS.get(op))
    has_room = saved.live.has_room
    is_faster = op in table.FASTER and nbytes >= table.CHEAP_CLAIM
    if saved.value is not None and saved.value.reads.has_room and not is_direct and not is_faster:
        return accumulation.awaits_large_weight()
    if is_direct and not _is_mask(value):
        return True
    return table.is_worth_a_claim(op, nbytes, is_direct, has_room) or accumulation.awaits_large_weight()


def _is_mask(value: Value | None) -> bool:
    """Whether a value is stored as a mask that the package itself decodes: what others do for it is not known."""
    return (
        value is not None
        and value.reads.bits is None
        and value.state.form is not None
        and type(value.state.form.codec) is Bitmask
    )


def _claim(saved: Saved) -> Tensor | None:
    """A claim for a saved tensor, where a kernel of the package redeem is going to read it."""
    if torch.is_grad_enabled() or saved.node is None or saved.spec is None or saved.value is None:
        return None
    if saved.spec.device.type != "cpu":
        is_direct = has_direct(saved.value, table.FORMS.get("" if saved.tensor is None else saved.tensor.op))
        if not table.is_worth_a_claim_elsewhere(saved.spec.nbytes, is_direct):
            return None
    stashed = StashedTensor(saved, saved.spec, saved.value)
    claim = claims.claim(stashed, saved.spec, saved.node)
    if claim is not None and type(running_node()).__name__ in accumulation.LINEAR:
        linear.begin(stashed, saved.node)
    return claim
