"""The saved tensors that are weights. A weight is held as it is, and no policy ever encodes it.

A weight is recognised when autograd saves it, by what it is: a parameter, a leaf whose gradient is asked for, or a view
of either. The storages that a module's state had when the module was entered are known besides, because a buffer and a
detached parameter cannot be recognised in any other way. They do not suffice: FSDP gathers a weight into a storage of
its own after the module was entered, and ZeRO-3 swaps ``parameter.data``.

Note: [weights held themselves]
    A saved leaf is held itself, as plain PyTorch holds it, and not by a detached alias of it. An alias would keep the
    memory of a gathered weight alive although the program has swapped ``parameter.data`` for an empty tensor, and
    backward would read the alias although the program has written the weight into other memory. A leaf has no
    ``grad_fn``, so holding it keeps no graph alive. A view of a weight has one, so a view is held detached.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from backstash.errors import SavedTensorFreedError
from backstash.saved import PLAIN, TensorSpec
from backstash.stash import wrapped

StorageReference = weakref.ref[torch.UntypedStorage]
"""A weak reference to a storage's Python object, which lives as long as the storage, whoever holds it."""


def is_parameter(x: Tensor) -> bool:
    """Whether ``x`` is a parameter, frozen or not, or a view of one."""
    if type(x) is not Tensor and isinstance(x, nn.Parameter):  # isinstance is slow here
        return True
    base = x._base
    return base is not None and type(base) is not Tensor and isinstance(base, nn.Parameter)


def is_leaf_of_graph(x: Tensor) -> bool:
    """Whether autograd accumulates a gradient for ``x``. Until then its graph holds ``x`` alive."""
    return x.requires_grad and x.is_leaf


def is_pinned(x: Tensor) -> bool:
    """Whether ``x`` is a leaf whose gradient is asked for, or a view of one: it must not be encoded."""
    base = x._base
    return is_leaf_of_graph(x) or (base is not None and is_leaf_of_graph(base))


class HeldParameter(NamedTuple):
    """A saved parameter, held by reference (Note: [weights held themselves]).

    Attributes:
        tensor: the parameter itself, or a detached view of it.
        version: its version when it was saved.
        nbytes: of its elements when it was saved; of a wrapper those of its inner tensor.
    """

    tensor: Tensor
    version: int
    nbytes: int

    @classmethod
    def of(cls, x: Tensor, dense: Tensor) -> HeldParameter:
        """Holds ``x``, whose memory is that of ``dense``."""
        return cls(x if x.is_leaf else x.detach(), x._version, dense.nbytes)

    def check_memory(self) -> None:
        """Raises SavedTensorFreedError if its memory was freed since and is needed now."""
        check_memory(self.tensor, self.nbytes)


def check_memory(x: Tensor, nbytes: int, key: str = "") -> None:
    """Refuses a tensor whose memory was freed after autograd had saved it: a kernel would read what is not there.

    Args:
        x: the tensor as it is now.
        nbytes: of its elements when it was saved.
        key: key of the saved tensor, for the message.

    Raises:
        SavedTensorFreedError: its storage has no bytes, but it had elements.
    """
    dense = wrapped.inner_tensor(x)
    if dense is None or dense.layout is not torch.strided or nbytes == 0:
        return
    if dense.untyped_storage().nbytes() == 0:
        where = f" ({key})" if key else ""
        raise SavedTensorFreedError(
            f"backward asked for a saved tensor, [{TensorSpec.of(dense)}]{where}, which is held by reference because "
            f"the program holds it as well. Its storage has 0 bytes now instead of {nbytes}: the program has freed it "
            f"after the forward pass, as FSDP does with a gathered weight. Run backward through the module whose hooks "
            f"gather the weight again, or do not free it before backward, for example with reshard_after_forward=False."
        )


class ParameterStorages:
    """The storages that hold parameters and buffers.

    Each is known by a weak reference, which keeps the address of a freed storage from being given to another one.

    Note: [no callbacks]
        A Session is a cycle of objects, so what it holds is freed by Python's garbage collector. If the collector was
        off for a while, it may begin when the last reference to the model goes, among the callbacks of weak references
        to it. CPython 3.11 fails there with a segmentation fault if the collector frees some of these references. So a
        Session's references to modules have no callbacks, as those of a WeakKeyDictionary would.
    """

    __slots__ = (
        "__weakref__",
        "_recognised",
        "_roots",
        "_state",
    )

    def __init__(self) -> None:
        self._roots: dict[int, tuple[weakref.ref[nn.Module], dict[int, StorageReference]]] = {}
        self._state: dict[int, StorageReference] = {}
        self._recognised: dict[int, StorageReference] = {}

    def enter(self, root: nn.Module) -> None:
        """Learn the storages of a root module's parameters and buffers, which is about to be called."""
        state = {
            storage._cdata: self._state.get(storage._cdata) or weakref.ref(storage) for storage in _state_storages(root)
        }
        self._roots = {key: known for key, known in self._roots.items() if known[0]() is not None}
        self._roots[id(root)] = weakref.ref(root), state
        self._state = dict(state)
        for _, storages in self._roots.values() if len(self._roots) > 1 else ():
            self._state |= storages
        self._recognised = {cdata: known for cdata, known in self._recognised.items() if known() is not None}

    def include(self, x: Tensor, storage: torch.UntypedStorage) -> bool:
        """Whether ``x``, whose memory is ``storage``, is a parameter, a buffer or a view of one."""
        cdata = storage._cdata
        known = self._state.get(cdata) or self._recognised.get(cdata)
        if known is not None and known() is storage:
            return True
        if not is_parameter(x):
            return False
        self._recognised[cdata] = weakref.ref(storage)
        return True

    def may_be_freed(self, storage: torch.UntypedStorage) -> bool:
        """Whether that parameter's storage was made after its module was entered: what made it may free it."""
        return storage._cdata not in self._state

    def clear(self) -> None:
        """Forget all of them."""
        self._roots.clear()
        self._state.clear()
        self._recognised.clear()


def _state_storages(module: nn.Module) -> Iterator[torch.UntypedStorage]:
    """The storages of all parameters and buffers. ``module.parameters()`` takes ten times as long."""
    modules = [module]
    while modules:
        module = modules.pop()
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            dense = None if tensor is None else wrapped.inner_tensor(tensor)
            if dense is not None and type(dense) in PLAIN and dense.layout is torch.strided:
                yield dense.untyped_storage()
        modules += (child for child in module._modules.values() if child is not None)
