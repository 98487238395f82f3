"""The table of saved tensors that are unpacked as claims, and the reading of the stash for their kernels."""

from __future__ import annotations

from collections.abc import Callable

from backstash import graphs
from backstash.codecs.base import is_dense
from backstash.codecs.direct import Direct, MaskBits, Slices
from backstash.formulas import FORMULAS
from backstash.saved import TensorSpec
from backstash.stash.decode import ROOM

CLAIMED = {key: formula.claimed_as for key, formula in FORMULAS.items() if formula.claimed_as is not None}
"""Saved tensors that a kernel of this package reads, by the autograd node and its formula's name, and in which form."""

FORMS: dict[str, type[Direct]] = {op: form for (op, _), form in CLAIMED.items() if issubclass(form, Direct)}
"""The form in which a node's kernel reads planes without decoding them; the other nodes' kernels read the whole."""

ELSEWHERE = frozenset(op for op, form in FORMS.items() if form is not Slices)
"""Nodes whose kernels read planes on an accelerator too. Gradients of slices of a convolution may be others there."""

LARGE = 1 << 18
"""Bytes of a value from which it is claimed although its reader needs all of it.

Its kernel then frees the decoded value before it allocates a gradient, or writes over a gradient. For a smaller value
that is no peak, and a claim would cost more time than it saves.
"""

CHEAP_CLAIM = 8 << 20
"""Bytes of a value from which it is claimed whenever its reader needs all of it.

A claim costs some 100 us of Python, which is nothing beside the reader's own time then. A smaller value is claimed only
where there is no :data:`~backstash.stash.decode.ROOM`.
"""

FASTER = frozenset({"NativeBatchNorm"})
"""Nodes whose kernel here is faster than ATen's by more than a claim costs, from :data:`CHEAP_CLAIM` bytes on."""

NEVER_WHOLE = frozenset({"Mul"})
"""Nodes whose kernel is asked only where it can read planes directly."""


MASKED = frozenset(op for op, form in FORMS.items() if form is MaskBits)
"""Nodes whose kernel reads a mask's bits.

A claim takes several times as long as decoding the bits of a small value to numbers. So these are decoded below
:data:`TINY`, and below :data:`LARGE` where there is room.
"""

TINY = 1 << 16
"""Bytes of a value below which it makes no difference to any peak whether it is decoded."""


def can_claim(op: str, role: str, spec: TensorSpec) -> bool:
    """Whether that saved tensor of that node may be unpacked as a claim.

    On an accelerator only what is read without being decoded is: to split a convolution's backward, or to write over
    gradients of softmax and norms, might choose other kernels of the device's library there.
    """
    return (
        (op, role) in CLAIMED
        and (spec.device.type == "cpu" or op in ELSEWHERE)
        and not spec.dtype.is_complex  # a formula would conjugate the claim
        and is_dense(spec.shape, spec.stride)
    )


def frees_early(op: str, role: str, spec: TensorSpec, nbytes: int) -> bool:
    """Whether a kernel may free a value, or write over a gradient, earlier than ATen's, also if the value is kept.

    Args:
        op, role, spec: of the saved tensor.
        nbytes: of its storage.
    """
    is_on_cpu = spec.device.type == "cpu"
    return is_on_cpu and nbytes >= LARGE and op not in NEVER_WHOLE and can_claim(op, role, spec)


def is_worth_a_claim_elsewhere(nbytes: int, is_direct: bool) -> bool:
    """Whether a claim gains anything on an accelerator, beside what :func:`is_worth_a_claim` says.

    It spares the decoded value, a byte written and read for each element, and costs the host some 100 us. While a step
    is captured the host's time counts for nothing.

    Args:
        nbytes, is_direct: as there.
    """
    return is_direct and (nbytes >= CHEAP_CLAIM or graphs.capture() is not None)


def is_worth_a_claim(op: str, nbytes: int, is_direct: bool, has_room: Callable[[int], bool]) -> bool:
    """Whether a claim gains anything over decoding at once.

    Args:
        op: the node that reads.
        nbytes: bytes of the tensor.
        is_direct: whether it is stored in the form of :data:`FORMS` that the node's kernel reads directly.
        has_room: whether so many bytes more would take no more than backward has freed.
    """
    if is_direct:
        return op not in MASKED or nbytes >= LARGE or (nbytes >= TINY and not has_room(ROOM * nbytes))
    if nbytes < LARGE or op in NEVER_WHOLE:
        return False
    return nbytes >= CHEAP_CLAIM or not has_room(ROOM * nbytes)


def is_claimed_as_kept(op: str, role: str, nbytes: int, freed_nbytes: int) -> bool:
    """Whether a value on CPU that is kept is claimed when backward has freed so many bytes of others.

    Args:
        op, role: the node that reads, and its name for the value.
        nbytes, freed_nbytes: bytes of the value, and of what was freed.
    """
    return (op, role) in CLAIMED and is_worth_a_claim(op, nbytes, False, lambda more: more <= freed_nbytes)
