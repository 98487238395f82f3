"""The momentum of a layer's weight, in the units of the gradients that backward computes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from backstash.papers.comet.collection import LayerReading
from backstash.policies.base import no_torch_function

MOST_PASSES = 256
"""How many passes an optimizer's step is waited for before the first one was seen."""

_NAMES = ("momentum_buffer", "exp_avg")
"""What the optimizers of torch call a momentum in their state: SGD, and Adam with its kind."""


class Momentum:
    """Reads an optimizer's momenta, and what programs do to gradients between backward and the optimizer's step.

    Note: [gradients on the way to the optimizer]
        An error bound is computed from gradients inside backward, and the wanted error is a share of the momentum. But
        the momentum consists of the gradients that the optimizer got. Between the two a program may clip the gradients
        to a norm, divide them by a loss scale, or add up those of several passes. The errors are changed with the
        gradients, so their share of the momentum is only right if both are measured in the same units. In a ResNet-50
        whose gradients were clipped to a hundredth the bounds were a hundred times too small, which takes six bits
        more for every element. Therefore the optimizer's step is watched after each collection. The mean magnitude of
        a weight's gradient at that time, over its mean magnitude in backward, is the weight's scale, and its momentum
        is divided by the scale. If several passes are added up, each pass may have a smaller error then, so that the
        sum has the wanted error.

    Args:
        optimizer: the optimizer, or one around it (with an attribute ``optimizer``). None: no weight has a momentum.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        self._optimizer = optimizer
        self._waiting: Mapping[str, LayerReading] = {}
        register = _registration(optimizer)
        self._passes = self._awaited = 0  # since the optimizer's step; and since scales were asked for
        self._most_awaited = 0 if register is None else MOST_PASSES
        if register is not None:
            this = weakref.ref(self)

            def before_step(*_: Any) -> None:
                momentum = this()
                if momentum is not None:
                    momentum._compare()

            weakref.finalize(self, register(before_step).remove)

    @property
    def is_awaited(self) -> bool:
        """Whether scales were asked for, and the optimizer's step has yet to tell them.

        A step that was left out, as that of an overflow, is not waited for.
        """
        return bool(self._waiting) and self._awaited < self._most_awaited

    def begin_pass(self) -> None:
        """A forward pass begins."""
        self._passes += 1
        self._awaited += 1

    def watch(self, readings: Mapping[str, LayerReading]) -> None:
        """Notes the scales of these readings at the optimizer's next step."""
        self._waiting, self._awaited = readings, 0

    def of(self, parameter: nn.Parameter) -> float | None:
        """Returns the mean magnitude of the parameter's momentum as the optimizer has it, or None without one."""
        mean = self.mean_of(parameter)
        return None if mean is None else float(mean)

    def mean_of(self, parameter: nn.Parameter) -> Tensor | None:
        """As :meth:`of`, without a wait for a device."""
        state = self._optimizer.state.get(parameter, {}) if self._optimizer is not None else {}
        momentum = next((state[name] for name in _NAMES if isinstance(state.get(name), Tensor)), None)
        return None if momentum is None else momentum.detach().abs().mean(dtype=torch.float32)

    def _compare(self) -> None:
        readings, self._waiting = self._waiting, {}
        self._most_awaited, self._passes = 2 * max(1, self._passes), 0
        with no_torch_function(), torch.no_grad():
            for reading in readings.values():
                grad = reading.parameter.grad
                # A distributed tensor would wait for other processes, which may not collect in this step.
                if reading.energy is not None and type(grad) is Tensor and not grad.is_sparse:
                    reading.scale = grad.abs().mean(dtype=torch.float32) / reading.magnitude


def _registration(optimizer: Any) -> Callable[[Callable[..., None]], Any] | None:
    """Returns the function that registers a hook before the optimizer's step, or None if the optimizer has no hooks."""
    while optimizer is not None:
        try:
            optimizer.register_step_pre_hook(lambda *_: None).remove()
        except AttributeError:  # a class around an optimizer, which did not initialise what it inherits
            optimizer = getattr(optimizer, "optimizer", None)
        else:
            register: Callable[[Callable[..., None]], Any] = optimizer.register_step_pre_hook
            return register
    return None
