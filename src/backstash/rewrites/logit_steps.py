"""Functions of each logit that programs apply between a head and its loss: scales, biases, soft caps, conversions.

Cohere's models multiply logits by a scale, Granite's divide them, Gemma's cap them (``30 * tanh(logits / 30)``), BART's
add a bias that is no parameter. Each is done to the few rows of logits that exist at a time, and undone for gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class LogitStep:
    """One function of each logit.

    Attributes:
        kind: whether logits are multiplied by the operand, divided by it, added to it, converted to it, or capped.
        operand: a number; for ``"plus"`` a tensor [classes] without a gradient; for ``"as"`` a dtype; else None.
    """

    kind: Literal["times", "over", "plus", "as", "tanh"]
    operand: Any = None

    def of(self, logits: Tensor) -> Tensor:
        """Returns the function of logits, [..., classes]."""
        if self.kind == "times":
            return logits.mul(self.operand)
        if self.kind == "over":
            return logits.div(self.operand)
        if self.kind == "plus":
            return logits.add(self.operand)
        return logits.tanh() if self.kind == "tanh" else logits.to(self.operand)

    def dtype(self, before: torch.dtype) -> torch.dtype:
        """Returns the dtype of the result for logits of the dtype ``before``."""
        if self.kind == "plus":
            return torch.promote_types(before, self.operand.dtype)
        found: torch.dtype = self.operand if self.kind == "as" else before
        return found


def apply_steps(steps: Sequence[LogitStep], logits: Tensor) -> tuple[Tensor, list[Tensor | None]]:
    """Returns logits after all steps, and what :func:`gradient_before` reads of them."""
    results: list[Tensor | None] = []
    for step in steps:
        logits = step.of(logits)
        results.append(logits if step.kind == "tanh" else None)
    return logits, results


def gradient_before(steps: Sequence[LogitStep], results: Sequence[Tensor | None], gradient: Tensor) -> Tensor:
    """Returns the gradient of logits before all steps, from that of the logits after them."""
    for step, result in zip(reversed(steps), reversed(results), strict=True):
        if step.kind == "times":
            gradient = gradient * step.operand
        elif step.kind == "over":
            gradient = gradient / step.operand
        elif result is not None:
            gradient = gradient * (1.0 - result.to(gradient.dtype).square())
    return gradient


def step_for(function: Callable[..., Any], arguments: Sequence[Any], classes: int) -> LogitStep | None:
    """Returns the step that a call with logits as the first argument is, or None if it is none of them.

    Args:
        function: what is called.
        arguments: what is passed beside the logits.
        classes: how many there are.
    """
    kind = _KINDS.get(function)
    if kind is None or len(arguments) != (0 if kind == "tanh" else 1):
        return None
    if kind == "tanh":
        return LogitStep(kind)
    operand = arguments[0]
    if kind == "plus":
        is_bias = type(operand) is Tensor and operand.shape[-1:] == (classes,) and operand.numel() == classes
        plain = is_bias and operand.is_floating_point() and not operand.requires_grad
        return LogitStep(kind, operand.reshape(classes)) if plain else None
    return LogitStep(kind, operand) if type(operand) in (int, float) else None


_KINDS: dict[Any, Literal["times", "over", "plus", "tanh"]] = {
    Tensor.mul: "times",
    Tensor.__mul__: "times",
    Tensor.__rmul__: "times",
    torch.mul: "times",
    Tensor.div: "over",
    Tensor.__truediv__: "over",
    torch.div: "over",
    Tensor.add: "plus",
    Tensor.__add__: "plus",
    torch.add: "plus",
    Tensor.tanh: "tanh",
    torch.tanh: "tanh",
}
