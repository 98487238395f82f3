"""The momentum of a layer's weight, in the units of the gradients that backward computes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from backstash.papers.comet.collection import LayerReading, sample_of
from backstash.policies.base import no_torch_function

MOST_PASSES = 256
"""How many passes an optimizer's step is waited for before the first one was seen."""

_NAMES = ("momentum_buffer", "exp_avg")
"""What the optimizers of torch call a momentum in their state: SGD, and Adam with its kind."""

_LEAST, _MOST = 1e-4, 1.01
"""What a momentum takes of a gradient: of Adam's kind one less beta, of SGD all where nothing is dampened."""

_ROUNDINGS = 16
"""How many roundings of its numbers a momentum may be off from what is made of gradient, momentum and weight."""


class Momentum:
    """Reads an optimizer's momenta, and what programs do to gradients between backward and the optimizer's step.

    Note: [gradients on the way to the optimizer]
        An error bound is computed from gradients inside backward, and the wanted error is a share of the momentum. But
        the momentum consists of the gradients that the optimizer got. Between the two a program may clip the gradients
        to a norm, divide them by a loss scale, or add up those of several passes. The errors are changed with the
        gradients, so their share of the momentum is only right if both are measured in the same units. In a ResNet-50
        whose gradients were clipped to a hundredth the bounds were a hundred times too small, which takes six bits
        more for every element. Therefore the optimizer's step is watched after each collection. The mean magnitude of
        a weight's gradient at that time, over its mean magnitude when the latest backward pass had added to it, is what
        the program has multiplied it with. That times the number of passes is the weight's scale, and its momentum is
        divided by the scale: each of several passes may have a smaller error, so that the sum has the wanted one. A
        ratio to the gradients of a single pass, or a call, would not do: those of a critic's real and false images
        almost cancel each other out, and their errors do not.

    Note: [momenta of something else]
        RMSprop's momentum consists of gradients that are divided by their size, and that of transformers' Adafactor of
        whole updates: in the units of gradients they say nothing. So the first step that is watched shows whether a
        weight's momentum is made of its gradient. If not, the gradients themselves serve, as without a momentum.

    Args:
        optimizer: the optimizer, or one around it (with an attribute ``optimizer``). None: no weight has a momentum.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        self._optimizer = optimizer
        self._waiting: Mapping[str, LayerReading] = {}
        self._listening: list[Callable[[], None]] = []  # what ends it
        self._before: list[tuple[nn.Parameter, Tensor]] = []  # and elements of gradient, momentum and weight, [n, 3]
        self._is_of_gradients: MutableMapping[nn.Parameter, bool] = WeakTensorKeyDictionary()
        register = _registration(optimizer)
        self._passes = self._awaited = 0  # since the optimizer's step; and since scales were asked for
        self._most_awaited = 0 if register is None else MOST_PASSES
        if register is not None:
            this = weakref.ref(self)

            def before_step(*_: Any) -> None:
                momentum = this()
                if momentum is not None:
                    momentum._compare()

            def after_step(*_: Any) -> None:
                momentum = this()
                if momentum is not None:
                    momentum._prove()

            for hook, tells in zip(register, (before_step, after_step), strict=True):
                weakref.finalize(self, hook(tells).remove)

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

    def listen(self, reading: LayerReading) -> None:
        """Has backward passes tell the reading what they leave behind, until :meth:`end`."""
        if self._most_awaited:
            self._listening.append(reading.listen())

    def end(self) -> None:
        """The readings are complete."""
        while self._listening:
            self._listening.pop()()

    def mean_of(self, parameter: nn.Parameter) -> Tensor | None:
        """Returns the mean magnitude of the parameter's momentum, without a wait for a device; None without one."""
        momentum = self._momentum_of(parameter)
        if momentum is None or not self._is_of_gradients.get(parameter, True):
            return None
        return momentum.detach().abs().mean(dtype=torch.float32)

    def _momentum_of(self, parameter: nn.Parameter) -> Tensor | None:
        state = self._optimizer.state.get(parameter, {}) if self._optimizer is not None else {}
        return next((state[name] for name in _NAMES if isinstance(state.get(name), Tensor)), None)

    def _compare(self) -> None:
        readings, self._waiting = self._waiting, {}
        passes, self._passes = max(1, self._passes), 0
        self._most_awaited = 2 * passes
        self.end()
        with no_torch_function(), torch.no_grad():
            for reading in readings.values():
                grad = reading.parameter.grad
                # A distributed tensor would wait for other processes, which may not collect in this step.
                if reading.energy is None or type(grad) is not Tensor or grad.is_sparse:
                    continue
                if reading.parameter not in self._is_of_gradients:
                    self._before.append((reading.parameter, self._sides_of(reading.parameter, grad)))
                mean = grad.abs().mean(dtype=torch.float32)
                if reading.accumulated is None:  # the program has put it there itself
                    reading.scale = mean / reading.magnitude
                else:
                    reading.scale = mean / reading.accumulated * passes

    def _sides_of(self, parameter: nn.Parameter, grad: Tensor) -> Tensor:
        """Elements of gradient, momentum and weight, [n, 3]; of a momentum that has other elements zeros."""
        momentum = self._momentum_of(parameter)
        known = momentum if _has_elements_of(momentum, grad) else None
        zeros = torch.zeros_like(grad)
        sides = [sample_of(each).to(grad.device) for each in (grad, zeros if known is None else known, parameter)]
        return torch.stack(sides, 1)

    def _prove(self) -> None:
        """Notes which momenta are made of gradients (Note: [momenta of something else])."""
        before, self._before = self._before, []
        with no_torch_function(), torch.no_grad():
            for parameter, sides in before:
                momentum = self._momentum_of(parameter)
                if momentum is None:
                    continue
                found = False
                if _has_elements_of(momentum, parameter):
                    eps = _ROUNDINGS * torch.finfo(momentum.dtype).eps
                    whole = torch.cat([sides, sample_of(momentum).to(sides.device)[:, None]], 1).double().cpu()
                    found = _is_made_of(whole[:, 3], whole[:, :3], eps)
                self._is_of_gradients[parameter] = found


def _has_elements_of(momentum: Tensor | None, x: Tensor) -> TypeGuard[Tensor]:
    """Whether a momentum has a number for each of a gradient's, and not for a projection, a shard or codes of it."""
    return type(momentum) is Tensor and momentum.is_floating_point() and momentum.shape == x.shape


def _is_made_of(momentum: Tensor, sides: Tensor, eps: float) -> bool:
    """Whether a momentum, [n], is a sum of multiples of gradient, earlier momentum and weight, [n, 3]."""
    if not bool(sides.isfinite().all() and momentum.isfinite().all()):
        return False
    lengths = sides.norm(dim=0).clamp(min=torch.finfo(torch.float64).tiny)
    shares = torch.linalg.lstsq(sides / lengths, momentum[:, None], driver="gelsd").solution[:, 0] / lengths
    off = float((sides @ shares - momentum).norm())
    return off <= eps * float(momentum.norm()) and _LEAST <= abs(float(shares[0])) <= _MOST


def _registration(optimizer: Any) -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Returns what registers hooks before and behind the optimizer's step, or None if the optimizer has no hooks."""
    while optimizer is not None:
        try:
            optimizer.register_step_pre_hook(lambda *_: None).remove()
        except AttributeError:  # a class around an optimizer, which did not initialise what it inherits
            optimizer = getattr(optimizer, "optimizer", None)
        else:
            return optimizer.register_step_pre_hook, optimizer.register_step_post_hook
    return None
