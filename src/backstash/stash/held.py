"""Saved tensors that are held as they are, without a further look: small ones, and all of a Session that is idle.

``Holding.hold`` and ``Reading.read`` say what is done. Where the interpreter in C++ is there it does the common case of
both (Note: [interpreter] in interpreter/), and calls these for every other one.

Note: [held in C++]
    While an idle Session is entered, torch asks an engine in C++ for hooks, as in known calls (Note: [saved in known
    calls] in replay/replaying.py). Where the pack hook of an idle Session is the innermost, that gives hooks which hold
    and read the tensor without Python: nothing is made for it but what autograd holds, and Python's lock is not taken.
    A tensor that is not common is held as Python's hook holds it, and backward's first reader, and who reads a matrix,
    are told what Python's hook tells them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor

from backstash import interpreter
from backstash.errors import SavedTensorFreedError, SavedTensorModifiedError
from backstash.interpreter import is_traced
from backstash.saved import TensorSpec
from backstash.stash.decode import modified_message
from backstash.stash.parameters import HeldParameter
from backstash.stash.value import Saved
from backstash.torch_internals import hide_from_dynamo, in_backward, is_jit_tracing, no_torch_function, running_node

AsItIs = tuple[Tensor, int, weakref.ref[Tensor] | None]
"""The tensor, its version, and the program's own tensor where that is another object.

It is a plain tuple because this is the most frequent object of all. The tensor is detached, unless it is a leaf: what a
hook returns must not hold the graph that holds it.
"""


Packed = Saved | HeldParameter | AsItIs
"""What a Session's pack hook returns."""


def is_as_it_is(packed: object) -> TypeGuard[AsItIs]:
    """Whether a Session's hook has packed this, and not one of the program, which may return tuples of its own."""
    return (
        type(packed) is tuple
        and [type(part) for part in packed[1:]] in ([int, weakref.ref], [int, type(None)])
        and isinstance(packed[0], Tensor)
    )


def hold(x: Tensor) -> AsItIs:
    """Holds a tensor with its version."""
    if x.requires_grad and x.is_leaf:
        return x, x._version, None
    return x.detach(), x._version, weakref.ref(x)


def hold_traced(x: Tensor) -> AsItIs:
    """As :func:`hold`, where operations are transformed or written down: torch.jit.trace would write the detach."""
    return (x, x._version, None) if is_jit_tracing() else hold(x)


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
        # Its ``.data`` was assigned. Plain PyTorch holds that very tensor, or an alias for the node that has made it.
        return held if original.grad_fn is running_node() else original.detach()
    if not storage.nbytes() and held.numel() and in_backward():  # and not a look at grad_fn._saved_*
        raise SavedTensorFreedError(
            f"backward asked for a saved tensor, [{TensorSpec.of(held)}], which is held by reference because the "
            f"program holds it as well. Its storage has 0 bytes now: the program has freed it after the forward pass."
        )
    return held


class Holding:
    """What an idle Session's pack hook knows.

    Attributes:
        counted: how many tensors were held in this step, and their bytes, once ``count`` has added the latest.
        before: what is called before a tensor is held, because a step may begin with it; None for nothing.
        native: the hook in C++; None where there is none.
    """

    __slots__ = ("before", "counted", "native")

    def __init__(self, counted: list[int], before: Callable[[], None]) -> None:
        self.counted = counted
        self.native: Any = None
        self.before: Callable[[], None] | None = before

    def tell(self, reading: Reading) -> None:
        """Tells the hook in C++ what it has to leave to Python now."""
        if self.native is not None:
            self.native.tell(self.before is None, reading.is_simple)

    def count(self) -> None:
        """Adds what the interpreter has held since."""
        if self.native is not None:
            number, nbytes = self.native.held_since()
            self.counted[0] += number
            self.counted[1] += nbytes

    def hold(self, x: Tensor) -> AsItIs:
        """Counts a tensor and holds it with its version, unseen by torch function modes."""
        if self.before is not None:
            self.before()
        with no_torch_function():
            if is_traced():  # Note: [transforms] in transforms.py
                return hold_traced(x)
            counted = self.counted
            counted[0] += 1
            if x.layout is torch.strided:
                counted[1] += x.nbytes
            return hold(x)


class Reading:
    """What an idle Session's unpack hook knows.

    Attributes:
        otherwise: unpacks where that is not as simple as here.
        is_simple: whether all that there is to do about a held tensor is to read it.
        of_matrix: makes what the reader of a matrix is given of it.
        of_nodes: the names of the nodes for which that has to be asked. The interpreter asks where the weight is large.
    """

    __slots__ = ("is_simple", "of_matrix", "of_nodes", "otherwise")

    def __init__(
        self,
        otherwise: Callable[[Packed], Tensor],
        of_matrix: Callable[[Tensor], Tensor],
        of_nodes: tuple[str, ...],
    ) -> None:
        self.otherwise, self.of_matrix, self.of_nodes = otherwise, of_matrix, of_nodes
        self.is_simple = False

    def read(self, packed: Packed) -> Tensor:
        """What the reader of a saved tensor is given, as by :func:`read` where that is simple."""
        if not self.is_simple or type(packed) is not tuple:
            return self.otherwise(packed)
        with no_torch_function():
            tensor = read(packed)  # type: ignore[arg-type]  # no HeldParameter, which is another type of tuple
            if tensor.dim() != 2 or type(running_node()).__name__ not in self.of_nodes:
                return tensor
            return self.of_matrix(tensor)


def hooks_of(holding: Holding, reading: Reading) -> tuple[Callable[[Tensor], AsItIs], Callable[[Packed], Tensor]]:
    """The hooks of an idle Session, in C++ where the interpreter is there (Note: [held in C++])."""
    if interpreter.module is None:
        return holding.hold, reading.read
    unpack = partial(interpreter.module.read, reading)
    holding.native = pack = interpreter.module.Holder(holding, unpack)
    return pack, unpack


if interpreter.module is not None:
    interpreter.module.configure_holding(Holding.hold, Reading.read)


for _function in (hold, hold_traced, read, Holding.hold, Reading.read):
    hide_from_dynamo(_function, and_all_below=True)
