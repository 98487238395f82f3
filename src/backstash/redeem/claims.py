"""A claim: what a saved tensor is unpacked as when a backward kernel of this package is going to read it.

Autograd unpacks a saved tensor before its node's formula begins, and holds it until the formula is over. So a
convolution's decoded input would lie beside both of its gradients, and a relu's mask would be written out as floats to
be read once. A claim is unpacked instead: a tensor with a layout and no memory. The formula hands the claim to its
backward op, torch's dispatcher hands that op to the claim, and the kernel that is registered for the op here takes what
it needs from the stash when it needs it. The graph stays autograd's own, and nothing is registered with torch: an op
that was not given a claim never gets here.

Note: [claims]
    A claim has no memory, so nobody can read it by mistake: there are no zeros behind it. Whatever else is asked of it
    through torch - a cast by autocast, a formula or a tensor subclass that computes by itself, an op that no kernel is
    registered for - runs on the decoded tensor, and its data pointer is an error. So a claim is right everywhere. Where
    no kernel of this package would be asked (grad mode, dispatch modes, functorch), the tensor is decoded at once
    because that is cheaper. So it is where a hook looks at ``grad_fn._saved_self``: a node is said to run while its
    hooks do, and what the program sees is an ordinary tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from backstash.codecs.direct import Readable
from backstash.redeem import exclusive
from backstash.saved import TensorSpec
from backstash.torch_internals import (
    asked_by_engine,
    dispatch_mode,
    functorch_level,
    hide_from_dynamo,
    no_torch_function,
    running_node,
    tree_map_only,
)

_detach = torch.ops.aten.detach.default
_transpose = torch.ops.aten.t.default


class Stashed(Protocol):
    """A saved tensor as a backward kernel sees it."""

    overwrites: bool
    """Whether gradients may be overwritten at all."""

    def whole(self) -> Tensor:
        """The tensor in its original layout, decoded or remade."""

    def direct(self, form: type[Readable]) -> Readable | None:
        """The planes of exactly what the reader needs, in that form; None where they are not stored in it."""

    def release(self) -> None:
        """The reader has what it needed: free what was decoded for it."""

    def adopt(self, dead: Tensor) -> None:
        """Decode into that memory from now on: nobody will read the tensor any more."""


class Unstashed:
    """A tensor that is at hand, in the place of a stashed one."""

    __slots__ = ("overwrites", "tensor")

    def __init__(self, tensor: Tensor, overwrites: bool = False) -> None:
        self.tensor, self.overwrites = tensor, overwrites

    def whole(self) -> Tensor:
        """The tensor."""
        return self.tensor

    def direct(self, form: type[Readable]) -> Readable | None:
        """Nothing: there are no planes."""
        return None

    def release(self) -> None:
        """Frees nothing: somebody else holds the tensor as well."""

    def adopt(self, dead: Tensor) -> None:
        """Takes nothing: there is nothing to decode."""


Result = Any
"""What an op returns: a tensor, or a tuple of tensors and None."""

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Of input, weight and bias."""

ClaimKernel = Callable[["Claim", Callable[..., Any], tuple[Any, ...], Mapping[str, Any], bool], Result]
"""Runs an op for a claim: the claim, the op, its arguments, and whether nobody else holds the first of these."""


class Claim(Tensor):
    """A tensor whose data is in the stash (Note: [claims]).

    Attributes:
        stashed: the saved tensor that it stands for.
        spec: the layout of that.
        transposed: whether a formula has transposed it since, [rows, columns] to [columns, rows].
        is_new: whether the engine has yet to detach it. The engine does that at once, and nobody else knows the claim
            then, so the engine is given the claim itself.
    """

    stashed: Stashed
    spec: TensorSpec
    transposed: bool
    is_new: bool

    @staticmethod
    def __new__(cls, stashed: Stashed, spec: TensorSpec, transposed: bool = False, is_new: bool = False) -> Claim:
        """A claim for the tensor with that layout, or for its transpose."""
        shape, stride = (spec.shape[::-1], spec.stride[::-1]) if transposed else (spec.shape, spec.stride)
        claim: Claim = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, shape, strides=stride, dtype=spec.dtype, device=spec.device
        )
        claim.stashed, claim.spec, claim.transposed, claim.is_new = stashed, spec, transposed, is_new
        return claim

    def whole(self) -> Tensor:
        """The tensor that it stands for."""
        whole = self.stashed.whole()
        return whole.t() if self.transposed else whole

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Python code looks at it, for a pointer or an array perhaps, and gets the decoded tensor's."""
        with no_torch_function():
            args, kwargs = tree_map_only(Claim, Claim.whole, (args, kwargs or {}))
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Result:
        if func is _detach:  # the engine detaches whatever it unpacks
            if args[0].is_new:
                args[0].is_new = False
                return args[0]
            return Claim(args[0].stashed, args[0].spec, args[0].transposed)
        if func is _transpose:
            return Claim(args[0].stashed, args[0].spec, not args[0].transposed)
        with no_torch_function():
            entry = _kernels.get(func)
            if entry is not None and len(types) == 1:
                call, counts = entry.call, None
                if call is not None and type(args[0]) is Tensor and args[0].layout is torch.strided:
                    counts = exclusive.count(args[0])
                claims = [arg for arg in args if type(arg) is Claim]
                if len(claims) == 1 and (entry.position is None or args[entry.position] is claims[0]):
                    claim, alone = claims[0], False
                    if call is not None and counts is not None and claim.stashed.overwrites:
                        alone = exclusive.is_alone(args[0], counts, call)
                    return entry.kernel(claim, func, args, kwargs or {}, alone)
            args, kwargs = tree_map_only(Claim, Claim.whole, (args, kwargs or {}))
            return func(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class _Entry:
    """A kernel, and how its op is called.

    Attributes:
        kernel: runs the op.
        position: of the claim among the op's arguments; None for any.
        call: how the formula calls the op, one of :data:`exclusive.CALLS`; None where the kernel overwrites nothing.
    """

    kernel: ClaimKernel
    position: int | None
    call: str | None


_kernels: dict[Callable[..., Any], _Entry] = {}


def redeems(
    op: Callable[..., Any], position: int | None = 1, call: str | None = "relu"
) -> Callable[[ClaimKernel], ClaimKernel]:
    """Registers the decorated kernel for an op's overload; ``position`` and ``call`` as in :class:`_Entry`."""

    def register(kernel: ClaimKernel) -> ClaimKernel:
        _kernels[op] = _Entry(kernel, position, call)
        return kernel

    return register


def claim(stashed: Stashed, spec: TensorSpec, node: int) -> Claim | None:
    """A claim for a saved tensor whose node runs; None where decoding at once is as good or better.

    Args:
        stashed: the saved tensor.
        spec: its layout.
        node: the sequence number of the node that saved it.
    """
    if torch.is_grad_enabled() or dispatch_mode() is not None:
        return None
    if functorch_level() is not None:
        return None
    running = running_node()
    if running is None or running._sequence_nr() != node or not asked_by_engine():
        return None
    return Claim(stashed, spec, is_new=True)


for _function in (vars(Claim)["__torch_function__"], vars(Claim)["__torch_dispatch__"]):
    hide_from_dynamo(_function.__func__, and_all_below=True)
