"""The seam behind which backward kernels read what is stored, and the core without it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from backstash.saved import TensorSpec

if TYPE_CHECKING:
    from backstash.stash.value import Saved


@dataclass(frozen=True, slots=True)
class Readers:
    """What knows of backward kernels that read planes, or free what they have read early.

    A *claim* stands for a saved tensor until such a kernel takes it.

    Attributes:
        prepare: called before the first Session.
        can_claim: whether what an op saves under a role, with that layout, may ever be claimed.
        frees_early: whether its kernel frees a value of so many bytes earlier than ATen's, also if it is kept.
        claim: a claim for a saved tensor that is being unpacked; None where the tensor itself is as good.
        claim_input: the same for a linear layer's small input, which is held as it is; else that input.
        claim_weight: the same for a linear layer's weight.
        claim_type: the class of claims.
        linear_nodes: the names of the nodes of linear layers.
    """

    prepare: Callable[[], None]
    can_claim: Callable[[str, str, TensorSpec], bool]
    frees_early: Callable[[str, str, TensorSpec, int], bool]
    claim: Callable[[Saved], Tensor | None]
    claim_input: Callable[[Tensor], Tensor]
    claim_weight: Callable[[Tensor], Tensor]
    claim_type: type | None
    linear_nodes: tuple[str, ...]


NO_READERS = Readers(
    prepare=lambda: None,
    can_claim=lambda op, role, spec: False,
    frees_early=lambda op, role, spec, nbytes: False,
    claim=lambda saved: None,
    claim_input=lambda x: x,
    claim_weight=lambda x: x,
    claim_type=None,
    linear_nodes=(),
)
"""Every saved tensor is unpacked as the tensor that it was."""
