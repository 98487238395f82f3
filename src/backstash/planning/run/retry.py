"""A forward pass whose allocation failed: what is restored before it runs once more, and what is said otherwise."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, nn

from backstash.bits import equal_bits
from backstash.errors import BudgetError
from backstash.rewrites.state import Generators

LARGEST_BUFFERS = 256 << 20
"""Bytes of a model's buffers above which they are not copied before each forward pass, so it is not repeated."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that torch could not allocate memory, on a GPU or on CPU."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    if isinstance(error, BudgetError):  # which no leaner plan mends
        return False
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)


def is_of_collective(error: BaseException) -> bool:
    """Whether an error may say that another process is gone, or that a collective has failed."""
    if torch.distributed.is_available() and isinstance(error, torch.distributed.DistError):
        return True
    return isinstance(error, RuntimeError) and "gloo" in str(error)  # whose errors have no class of their own


def advise(error: BaseException, budget: str, did: str) -> None:
    """Adds to an error what was asked for, what became of it, and what to do.

    Args:
        error: the error, which keeps its type and its message.
    """
    error.add_note(
        f"backstash: training within {budget} was asked for, but this allocation failed{did}. Ask for a smaller "
        f"budget, allow more (offload, bounded), or train on smaller batches; other programs may hold memory as well."
    )


class Before:
    """Inside the ``with``, what a forward pass of a model changes beside its results can be restored.

    That is the generators' states and the model's buffers. All buffers are copied before the first pass, and from then
    on those that a pass has changed. That is told by their bits, because the kernels of batch norm write new statistics
    without a new version. If a buffer gets a new version that was not copied, nothing can be restored. Between two
    passes nothing refers to a buffer: torch swaps no tensor to which there is a reference.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._changing: set[str] | None = None  # names of buffers that forward passes change
        self._versions: dict[str, tuple[Tensor, int]] = {}
        self._copies: dict[str, tuple[Tensor, Tensor]] = {}
        self._states: Generators | None = None

    def __enter__(self) -> None:
        """Notes everything before a forward pass."""
        model = self._model()
        assert model is not None
        strided = ((name, x) for name, x in model.named_buffers() if x.layout is torch.strided)
        buffers = {name: x for name, x in strided if not x.is_inference()}  # which cannot change outside that mode
        self._versions = {name: (x, x._version) for name, x in buffers.items()}
        copied = buffers if self._changing is None else {n: x for n, x in buffers.items() if n in self._changing}
        if sum(x.nbytes for x in copied.values()) > LARGEST_BUFFERS:
            return
        self._copies = {name: (x, x.detach().clone()) for name, x in copied.items()}
        self._states = Generators()

    def restore(self) -> bool:
        """Restores everything. Returns False if that is not possible, because another buffer has changed."""
        model = self._model()
        if model is None or self._states is None:
            return False
        for name, x in model.named_buffers():
            known = self._versions.get(name)
            if name not in self._copies and known is not None and (known[0] is not x or known[1] != x._version):
                return False
        with torch.no_grad():
            for x, copy in self._copies.values():
                x.copy_(copy)
        self._states.restore()
        return True

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        """Notes which buffers the pass has changed, and lets go of them all."""
        if kind is None:
            newer = {name for name, (x, version) in self._versions.items() if x._version != version}
            if self._changing is None:
                newer |= self._versions.keys() - {name for name, pair in self._copies.items() if equal_bits(*pair)}
            self._changing = newer | (self._changing or set())
        self._versions, self._copies, self._states = {}, {}, None
