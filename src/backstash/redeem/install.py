"""Gets this package ready and plugs it in: its kernels, when a gradient is exclusive, and what is worth a claim.

"Install" is said of this process alone: nothing is registered with torch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from backstash.codecs.masks.codec import Bitmask

# Importing these registers their kernels (claims.redeems).
from backstash.redeem import (  # noqa: F401
    accumulation,
    claims,
    convolution,
    exclusive,
    factors,
    linear,
    norms,
    pointwise,
    pooling,
    table,
)
from backstash.redeem.claims import Claim, Unstashed
from backstash.saved import TensorSpec
from backstash.stash import seams
from backstash.stash.decode import StashedTensor, has_direct
from backstash.stash.seams import Readers
from backstash.stash.value import Saved, Value
from backstash.torch_internals import (
    dispatch_mode,
    hide_from_dynamo,
    no_torch_function,
    running_node,
    saved_tensor_hooks,
)


def prepare() -> None:
    """Measures, on tiny steps, the counts of a gradient that nobody else holds (Note: [exclusive gradients])."""
    # Tensors of other hooks cannot be hooked once more, and a mode of the program would see operations that are not its
    # own, and may do something else in their place. A later Session measures then.
    if exclusive.is_measured() or saved_tensor_hooks(True) is not None or dispatch_mode() is not None:
        return
    no_autocast = torch.autocast("cpu", enabled=False)
    with no_torch_function(), torch.inference_mode(False), torch.enable_grad(), no_autocast:
        x = torch.tensor([[[[0.5, -1.0], [2.0, 7.0]]]], device="cpu", requires_grad=True)
        factor = (x.detach() > 0) * 1.25
        exclusive.measure_uses(
            x,
            {
                "relu": _claiming(torch.relu, "result"),
                "silu": _claiming(functional.silu, "self"),
                "group_norm": _claiming(lambda x: functional.group_norm(x, 1), "input"),
                "product": _claiming(lambda x: x * factor, "other"),
            },
        )


def _claiming(function: Callable[[Tensor], Tensor], role: str) -> Callable[[Tensor], Tensor]:
    """The function, whose node is given a claim in place of what it has saved as ``role``."""

    def claiming(x: Tensor) -> Tensor:
        y = function(x)
        saved = getattr(y.grad_fn, f"_raw_saved_{role}")
        saved.register_hooks(_detached, lambda tensor: Claim(Unstashed(tensor), TensorSpec.of(tensor)))
        return y

    return claiming


def _detached(x: Tensor) -> Tensor:
    """What is held in place of a saved tensor: not that tensor itself, which would hold its own graph."""
    return x.detach()


def claim_saved(saved: Saved) -> Tensor | None:
    """A claim for a saved tensor that is being unpacked, where a kernel of this package gains by it."""
    value = saved.value if saved.dense is None else None
    read = saved.spec if saved.dense is None else saved.dense
    if read is None or not _is_gained_by(saved, read.nbytes, value):
        return None
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


def _is_gained_by(saved: Saved, nbytes: int, value: Value | None) -> bool:
    """Whether a claim gains anything for a saved tensor of so many bytes, dense or encoded in a ``value``."""
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


for _function in (linear.claim_input, linear.claim_weight):
    hide_from_dynamo(_function, and_all_below=True)

seams.readers = Readers(
    prepare=prepare,
    can_claim=table.can_claim,
    frees_early=table.frees_early,
    claim=claim_saved,
    claim_input=linear.claim_input,
    claim_weight=linear.claim_weight,
    claim_type=Claim,
    linear_nodes=accumulation.LINEAR,
)
