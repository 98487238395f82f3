"""Saved tensors that are held as they are, without a further look: small ones, and all of a Session that is idle."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from backstash.errors import SavedTensorFreedError, SavedTensorModifiedError
from backstash.saved import TensorSpec
from backstash.stash.decode import modified_message
from backstash.stash.parameters import HeldParameter
from backstash.stash.value import Saved
from backstash.torch_internals import in_backward

AsItIs = tuple[Tensor, int, weakref.ref[Tensor] | None]
"""The tensor, its version, and the program's own tensor where that is another object.

It is a plain tuple because this is the most frequent object of all. The tensor is detached, unless it is a leaf: what a
hook returns must not hold the graph that holds it.
"""


Packed = Saved | HeldParameter | AsItIs
"""What a Session's pack hook returns."""


def hold(x: Tensor) -> AsItIs:
    """Holds a tensor with its version."""
    if x.requires_grad and x.is_leaf:
        return x, x._version, None
    return x.detach(), x._version, weakref.ref(x)


def read(packed: AsItIs) -> Tensor:
    """The tensor that is held.

    Raises:
        SavedTensorModifiedError: the program has changed it in place since.
        SavedTensorFreedError: the program has freed its memory since.
    """
    held, version, reference = packed
    if held._version != version:
        raise SavedTensorModifiedError(modified_message(TensorSpec.of(held), None, held._version, version))
    if type(held) is not Tensor or held.layout is not torch.strided:
        return held
    storage = held.untyped_storage()
    original = None if reference is None else reference()
    if original is not None and original.layout is torch.strided and original.untyped_storage() is not storage:
        return original.detach()  # its ``.data`` was assigned: plain PyTorch holds that very tensor
    if not storage.nbytes() and held.numel() and in_backward():  # and not a look at grad_fn._saved_*
        raise SavedTensorFreedError(
            f"backward asked for a saved tensor, [{TensorSpec.of(held)}], which is held by reference because the "
            f"program holds it as well. Its storage has 0 bytes now: the program has freed it after the forward pass."
        )
    return held
