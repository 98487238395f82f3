"""The state of a step, which is restored after a trial: of models, of the random generators, of whatever it changes.

Everybody who runs a program's step for a trial restores it by this module: profiles, rewrites, repeated forward passes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from backstash import accelerator
from backstash.bits import equal_bits
from backstash.rewrites.reached import Reached, restore_memory
from backstash.saved import PLAIN
from backstash.torch_internals import gradient_of, no_torch_function


class Generators:
    """The states of all global generators: Python's, NumPy's and torch's."""

    def __init__(self) -> None:
        self._python, self._numpy = random.getstate(), np.random.get_state()
        self._restore = accelerator.noted_generators()

    def restore(self) -> None:
        """Restores them."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        self._restore()


class State:
    """The state of a model and of the random generators, which a step may change and which is restored."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self.tables = [(table, dict(table)) for module in modules for table in (module._parameters, module._buffers)]
        held = [tensor for _, table in self.tables for tensor in table.values()]
        dense = [x for x in held if x is not None and x.layout is torch.strided]
        self.contents = {id(x): (x, x.detach().clone()) for x in dense}
        self._memory = [(x, x.data) for x in dense if type(x) in PLAIN]  # no views of them
        self.parameters = dict(model.named_parameters())
        self.gradients = [(parameter, gradient_of(parameter)) for parameter in self.parameters.values()]
        self._asks = [(parameter, parameter.requires_grad) for parameter in self.parameters.values()]
        self.training = [(module, module.training) for module in modules]
        self._generators = Generators()

    def changed_parameters(self) -> list[str]:
        """Paths of the parameters whose bits have changed."""
        known = [(path, *self.contents[id(x)]) for path, x in self.parameters.items() if id(x) in self.contents]
        return [path for path, parameter, content in known if not equal_bits(parameter, content)]

    def restore(self) -> None:
        """Restores everything but the gradients."""
        for table, original in self.tables:
            if not isinstance(table, dict):  # of a scripted module, whose tables cannot be changed
                continue
            if table.keys() != original.keys() or any(table[name] is not x for name, x in original.items()):
                table.clear()
                table.update(original)  # type: ignore[arg-type]
        for tensor, memory in self._memory:
            if tensor.shape != memory.shape:  # the step has given it its size
                restore_memory(tensor, memory)
        with torch.no_grad():
            for tensor, content in self.contents.values():
                if not equal_bits(tensor, content):  # copying would raise the version for nothing
                    tensor.copy_(content)
        for parameter, asks in self._asks:
            if parameter.requires_grad != asks:
                parameter.requires_grad_(asks)
        for module, training in self.training:
            module.training = training
        self._generators.restore()

    def restore_memory(self) -> None:
        """Has parameters and buffers lie again where they were, if they were given other memory since."""
        for tensor, memory in self._memory:
            restore_memory(tensor, memory)

    def set_gradients_aside(self) -> None:
        """Has a step make gradients of its own, which restore_gradients() drops again."""
        for parameter, _ in self.gradients:
            parameter.grad = None

    def restore_gradients(self) -> None:
        """Restores the gradients, with the tensors that they were."""
        for parameter, gradient in self.gradients:
            parameter.grad = gradient


class StepState:
    """Inside the ``with``, a step may run, and everything that it changes is restored at the end.

    That is the state of models, and all else that the step's code reaches (Note: [what a step reaches] in reached.py).
    What an optimizer remembers is copied when it steps for the first time.

    Args:
        moves_weights: whether the models' weights may lie elsewhere at the end, as after a change of their layout.

    Attributes:
        states: those of the models.
    """

    def __init__(
        self, step: Callable[[], object], models: Sequence[nn.Module] = (), moves_weights: bool = False
    ) -> None:
        self._moves_weights = moves_weights
        self.states = [State(model) for model in models]
        known: list[Tensor] = [x for state in self.states for x, _ in state.contents.values()]
        self._generators = Generators()
        self._reached = Reached((step, *models), known)

    def __enter__(self) -> StepState:
        self._hook = register_optimizer_step_pre_hook(self._before_step)
        for state in self.states:
            state.set_gradients_aside()
        self._reached.set_gradients_aside()
        return self

    def __exit__(self, *raised: object) -> None:
        self._hook.remove()
        self._reached.undo()
        for state in self.states:
            if not self._moves_weights:
                state.restore_memory()
            state.restore()
            state.restore_gradients()
        self._generators.restore()

    def rewind(self) -> None:
        """Has the next step begin like the last one, but for models' states (see Reached.rewind)."""
        self._reached.rewind()

    def lost(self) -> list[str]:
        """How the step reaches what it has changed and nobody can restore."""
        return self._reached.lost()

    def consumed(self) -> list[str]:
        """How the step reaches iterators from which it has taken something, as far as they tell."""
        return self._reached.consumed()

    def filled(self) -> list[str]:
        """How the step reaches caches of functions to which it has added something, where there was something."""
        return self._reached.filled()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: object, options: object) -> None:
        with no_torch_function():
            self._reached.before_step_of(optimizer)
