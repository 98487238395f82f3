"""Which saved tensors are unpacked as claims."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

# The kernels register themselves with claims.redeems when they are imported.
from backstash.backward import convolution, exclusive, linear, norms, pointwise, pooling  # noqa: F401
from backstash.backward.claims import Claim
from backstash.codecs.base import Encoded, is_dense
from backstash.saved import TensorSpec
from backstash.torch_internals import no_torch_function

READERS = frozenset(
    {
        ("Addmm", "mat1"),
        ("Convolution", "input"),
        ("Elu", "result"),
        ("Elu", "self"),
        ("Gelu", "self"),
        ("Hardsigmoid", "self"),
        ("Hardtanh", "self"),
        ("LeakyRelu", "result"),
        ("LeakyRelu", "self"),
        ("LogSoftmax", "result"),
        ("MaxPool2DWithIndices", "result1"),
        ("Mm", "self"),
        ("Mul", "other"),
        ("Mul", "self"),
        ("NativeBatchNorm", "input"),
        ("NativeGroupNorm", "input"),
        ("NativeLayerNorm", "input"),
        ("Relu", "result"),
        ("Sigmoid", "result"),
        ("Silu", "self"),
        ("Softmax", "result"),
        ("Softplus", "self"),
        ("Tanh", "result"),
        ("Threshold", "self"),
    }
)
"""Saved tensors that a kernel here reads, by autograd node and by the name that its formula has for them."""

LARGE = 1 << 18
"""Bytes of a value from which it is claimed although its reader needs all of it: the gradient may be written over."""

FREES_EARLY = frozenset({"Convolution", "Addmm", "Mm", "MaxPool2DWithIndices"})
"""Nodes whose kernels free what was decoded before they make a gradient as large."""

NEVER_WHOLE = frozenset({"Mul"})
"""Nodes whose kernel is asked only where it can read codes."""

_once = threading.Lock()


def can_claim(op: str, role: str, spec: TensorSpec) -> bool:
    """Whether that saved tensor of that node may be unpacked as a claim."""
    return (
        (op, role) in READERS
        and spec.device.type == "cpu"
        and not spec.dtype.is_complex  # a formula would conjugate the claim
        and is_dense(spec.shape, spec.stride)
    )


def is_worth_a_claim(op: str, nbytes: int, has_codes: bool) -> bool:
    """Whether a claim gains anything over decoding at once.

    Args:
        op: the node that reads.
        nbytes: of the tensor.
        has_codes: whether it is stored in bits or codes that kernels read directly.
    """
    return has_codes or op in FREES_EARLY or (nbytes >= LARGE and op not in NEVER_WHOLE)


class _Sample:
    """A stashed tensor of the tiny steps by which exclusive gradients are told."""

    overwrites = False

    def __init__(self, x: Tensor) -> None:
        self.x = x.detach()

    def whole(self) -> Tensor:
        return self.x

    def encoded(self) -> tuple[object, Encoded] | None:
        return None

    def release(self) -> None:
        pass

    def adopt(self, dead: Tensor) -> None:
        pass


def prepare() -> None:
    """Find out, on tiny steps, what a gradient looks like that nobody else holds (Note: [exclusive gradients])."""
    with _once, no_torch_function(), torch.inference_mode(False), torch.enable_grad(), _no_autocast():
        x = torch.tensor([[[[0.5, -1.0], [2.0, 7.0]]]], device="cpu", requires_grad=True)
        factor = (x.detach() > 0) * 1.25
        exclusive.measure(
            x,
            {
                "relu": lambda x: _claimed(torch.relu(x), "result"),
                "silu": lambda x: _claimed(torch.nn.functional.silu(x), "self"),
                "group_norm": lambda x: _claimed(torch.nn.functional.group_norm(x, 1), "input"),
                "product": lambda x: _claimed(x * factor, "other"),
            },
        )


def _no_autocast() -> torch.autocast:
    return torch.autocast("cpu", enabled=False)


def _claimed(y: Tensor, role: str) -> Tensor:
    """The tensor, whose node will be given a claim in place of what it saved as ``role``."""
    raw = getattr(y.grad_fn, f"_raw_saved_{role}")
    raw.register_hooks(_Sample, lambda sample: Claim(sample, TensorSpec.of(sample.x)))
    return y
