"""``gradients_equal``: a policy leaves the bits of a step's loss and gradients as they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from backstash import accelerator
from backstash.bits import equal_bits
from backstash.policies.base import Policy
from backstash.saved import TensorSpec
from backstash.session import Session
from backstash.stash.ledger import Report
from backstash.testing.failures import fail


@dataclass(frozen=True)
class GradientsEqual:
    """The gradients that :func:`gradients_equal` has found equal.

    Attributes:
        compared: names of the tensors whose gradients are equal.
        report: the accounts of the step under the policy. They tell whether anything was stashed at all.
    """

    compared: tuple[str, ...]
    report: Report


def gradients_equal(
    forward: Callable[[], Tensor],
    model: nn.Module | Mapping[str, Tensor],
    policy: str | Policy = "lossless",
    *,
    min_nbytes: int = 0,
) -> GradientsEqual:
    """Compares the loss and the gradients of a plain step with those of the same step under a policy, bit for bit.

    Both steps start from the same parameters, buffers and random states of torch. Afterwards parameters, buffers,
    gradients and random states are as before.

    Args:
        forward: computes the loss, a tensor of one element. The check runs the backward pass.
        model: the module whose parameters' gradients are compared, or leaf tensors by name.
        policy: as for a Session.
        min_nbytes: as for a Session, in bytes.

    Returns:
        The names of the tensors that were compared, and the report of the step under the policy.

    Raises:
        AssertionError: the loss or a gradient differs. The message names the first difference.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout())
        >>> gradients_equal(lambda: model(torch.ones(4, 8)).sum(), model).compared
        ('0.weight', '0.bias')
    """
    module = model if isinstance(model, nn.Module) else None
    named: Mapping[str, Tensor] = dict(module.named_parameters()) if module else model  # type: ignore[assignment]
    leaves = {name: leaf for name, leaf in named.items() if leaf.requires_grad}
    session = Session(policy, model=module, min_nbytes=min_nbytes)
    with _restored([*leaves.values(), *(module.buffers() if module else ())]) as restore:
        plain = _step(forward, leaves, nullcontext())
        restore()
        under_policy = _step(forward, leaves, session)
        restore()
        different = _first_difference(plain, under_policy)
        if different is not None:
            unsteady = _first_difference(plain, _step(forward, leaves, nullcontext())) is not None
            fail(
                f"gradients_equal asked for the bits of a plain step under {session.policy!r}",
                f"another {different}",
                "Two plain steps differ as well: make the step deterministic first (torch.use_deterministic_algorithms)"
                if unsteady
                else "Look at session.report() for what was stashed on the way there, and check those codecs",
            )
    return GradientsEqual(tuple(leaves), session.report())


_Step = tuple[Tensor, dict[str, Tensor | None]]
"""Loss and gradients of a step."""


def _step(
    forward: Callable[[], Tensor], leaves: Mapping[str, Tensor], context: AbstractContextManager[object]
) -> _Step:
    for leaf in leaves.values():
        leaf.grad = None
    with context:
        loss = forward()
    loss.backward()
    return loss.detach().clone(), {name: leaf.grad for name, leaf in leaves.items()}


def _first_difference(a: _Step, b: _Step) -> str | None:
    if not equal_bits(a[0], b[0]):
        return f"loss: {a[0].item()!r} plain, {b[0].item()!r} under the policy"
    for name, plain in a[1].items():
        other = b[1][name]
        if plain is None or other is None:
            if plain is not other:
                return f"gradient of {name}: there is one only {'plain' if other is None else 'under the policy'}"
        elif not equal_bits(plain, other):
            far = float((plain.double() - other.double()).abs().max()) if plain.shape == other.shape else math.nan
            return f"gradient of {name} ({TensorSpec.of(plain)}): it differs by up to {far:.3g}"
    return None


@contextmanager
def _restored(tensors: list[Tensor]) -> Iterator[Callable[[], None]]:
    """Yields a function that restores contents and random states. Leaving the context also restores gradients."""
    contents = [tensor.detach().clone() for tensor in tensors]
    gradients = [tensor.grad for tensor in tensors]
    restore_generators = accelerator.noted_generators()

    def restore() -> None:
        with torch.no_grad():
            for tensor, content in zip(tensors, contents, strict=True):
                tensor.copy_(content)
        restore_generators()

    try:
        yield restore
    finally:
        restore()
        for tensor, gradient in zip(tensors, gradients, strict=True):
            tensor.grad = gradient
