"""Gets this package ready: every kernel is known to the claims, and it is measured when a gradient is exclusive.

"Install" is said of this process alone: nothing is registered with torch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

# Importing these registers their kernels (claims.redeems).
from backstash.redeem import convolution, exclusive, factors, linear, norms, pointwise, pooling  # noqa: F401
from backstash.redeem.claims import Claim, Unstashed
from backstash.saved import TensorSpec
from backstash.torch_internals import no_torch_function, saved_tensor_hooks


def prepare() -> None:
    """Measures, on tiny steps, the counts of a gradient that nobody else holds (Note: [exclusive gradients])."""
    if exclusive.is_measured() or saved_tensor_hooks(True) is not None:  # whose tensors cannot be hooked once more
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
