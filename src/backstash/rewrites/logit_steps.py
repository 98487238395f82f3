"""Functions of each logit that programs apply between a head and its loss: scales, biases, soft caps, conversions.

Cohere's models multiply logits by a scale, Granite's divide them, Gemma's cap them (``30 * tanh(logits / 30)``), BART's
add a bias that is no parameter. Each is done to the few rows of logits that exist at a time, and undone for gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
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


@dataclass(frozen=True, eq=False)
class LogitFormula:
    """How a head's logits are computed. It holds no tensor that backward reads: autograd does, as its hooks say.

    Attributes:
        steps: what is done to the logits.
    """

    product: torch.dtype
    steps: tuple[LogitStep, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the logits after all steps."""
        found = self.product
        for step in self.steps:
            found = step.dtype(found)
        return found

    @property
    def precise(self) -> torch.dtype:
        """The dtype in which the logits are reduced: float32, or float64 for float64 logits."""
        return torch.float64 if self.dtype is torch.float64 else torch.float32

    def cast(self, x: Tensor | None) -> Tensor | None:
        """Returns a weight or a bias in the dtype of the product."""
        return None if x is None else x.detach().to(self.product)

    def logits(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, temperature: float = 1.0
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Returns the logits of some rows, over the temperature, [rows, classes], and what their gradient reads.

        They are in the dtype ``precise``, and may be written over.
        """
        assert weight is not None
        results: list[Tensor | None] = []
        found = F.linear(x.to(self.product), weight, bias)
        for step in self.steps:
            found = step.of(found)
            results.append(found if step.kind == "tanh" else None)
        precise = found.to(self.precise)
        if any(precise is result for result in results):
            precise = precise.clone()
        return precise if temperature == 1.0 else precise / temperature, results

    def before(self, results: list[Tensor | None], gradient: Tensor, temperature: float = 1.0) -> Tensor:
        """Returns the gradient of the head's product from that of the logits over the temperature."""
        gradient = gradient if temperature == 1.0 else gradient / temperature
        for step, result in zip(reversed(self.steps), reversed(results), strict=True):
            if step.kind == "times":
                gradient = gradient * step.operand
            elif step.kind == "over":
                gradient = gradient / step.operand
            elif result is not None:
                gradient = gradient * (1.0 - result.to(gradient.dtype).square())
        return gradient.to(self.product)


def step_for(function: Callable[..., Any], arguments: Sequence[Any], classes: int) -> LogitStep | None:
    """Returns the step that a call with logits as the first argument is, or None if it is none of them."""
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
