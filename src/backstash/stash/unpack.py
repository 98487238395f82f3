"""The tensor that backward is given for a packed one: the tensor itself, a decoded or remade one, or a claim."""

from __future__ import annotations

import torch
from torch import Tensor

from backstash import codecs
from backstash.errors import SavedTensorModifiedError
from backstash.stash import held, seams
from backstash.stash.decode import check_version, decode, follow_original, hand_over, modified_message
from backstash.stash.live import Live
from backstash.stash.parameters import HeldParameter, check_memory
from backstash.stash.value import Saved
from backstash.torch_internals import in_backward


def unpack(packed: held.Packed, live: Live) -> Tensor:
    """The tensor that was packed, of which a watcher is told: a parameter with its memory, a wrapper around its tensor.

    Args:
        packed: what the pack hook returned.
        live: the Session's running totals.

    Raises:
        SavedTensorModifiedError: the program has changed it in place since.
        SavedTensorFreedError: its memory was freed since.
    """
    if type(packed) is Saved and packed.origin.wrapping is None and packed.dense is None and live.watcher is None:
        return _inner(packed, live)
    tensor = _unpacked(packed, live)
    if live.watcher is not None:
        saved = packed if isinstance(packed, Saved) else None
        key = saved.value.key if saved is not None and saved.value is not None else ""
        live.watcher.read(tensor, saved is not None and saved.dense is None, key)
    return tensor


def _unpacked(packed: held.Packed, live: Live) -> Tensor:
    if type(packed) is tuple:
        tensor = held.read(packed)  # type: ignore[arg-type]  # no HeldParameter, which is another type of tuple
        return seams.readers.claim_input(tensor) if tensor.dim() == 2 else tensor
    if type(packed) is HeldParameter:
        parameter = packed.tensor
        if parameter._version != packed.version:
            held.read((parameter, packed.version, None))  # raises
        if parameter.nbytes >= live.min_nbytes:
            parameter = seams.readers.claim_weight(parameter)
        if in_backward():  # and not a look at grad_fn._saved_*
            packed.check_memory()
        return parameter
    assert isinstance(packed, Saved)
    wrapping = packed.origin.wrapping
    if wrapping is not None:
        wrapping.check_version()
    tensor = _inner(packed, live)
    is_whole = packed.dense is not None and type(tensor) is not seams.readers.claim_type
    if is_whole and packed.spec is not None and in_backward():
        check_memory(tensor, packed.spec.nbytes, packed.tensor.key if packed.tensor else "")
    return tensor if wrapping is None else wrapping.wrap(tensor)


def _inner(saved: Saved, live: Live) -> Tensor:
    if saved.tensor is not None and not live.prefetcher.idle:
        with live.lock:
            live.prefetcher.reach(saved.tensor.key if saved.value is None else saved.value.key)
            if not saved.is_moved:
                live.prefetcher.passed(saved.tensor.key, live.below_peak)
    check_version(saved)
    if saved.dense is not None:
        follow_original(saved)
        if live.read_with_graph is not None and torch.is_grad_enabled() and in_backward():
            _note_graph(saved, live)
        if saved.claimable and (claim := seams.readers.claim(saved)) is not None:
            return claim
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
        return codecs.shape.stand_in(saved.spec)
    if saved.claimable and (claim := seams.readers.claim(saved)) is not None:
        return claim
    with live.lock:
        tensor = decode(saved, saved.spec, value)
        hand_over(saved, tensor)
        return tensor


def _note_graph(saved: Saved, live: Live) -> None:
    """Notes that a backward pass with a graph reads a tensor that is held dense (Note: [backward with a graph])."""
    value = saved.value
    is_decided = value is not None and value.waiting.storage is None and value.waiting.address is None
    if value is not None and is_decided and value.is_dense and not value.state.errors and live.monitor is None:
        assert live.read_with_graph is not None and saved.dense is not None
        with live.lock:
            live.read_with_graph(value, saved.dense)
