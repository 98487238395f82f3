"""The state of a model and of the random generators, which a step changes and which is restored after a trial."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import nn

from backstash.testing.bits import equal_bits


class State:
    """The state of a model and of the random generators, which a step may change and which is restored."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self.tables = [(table, dict(table)) for module in modules for table in (module._parameters, module._buffers)]
        held = [tensor for _, table in self.tables for tensor in table.values()]
        self.contents = {id(x): (x, x.detach().clone()) for x in held if x is not None and x.layout is torch.strided}
        self.parameters = dict(model.named_parameters())
        self.gradients = [(parameter, parameter.grad) for parameter in self.parameters.values()]
        self.training = [(module, module.training) for module in modules]
        self.python, self.numpy, self.torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

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
        with torch.no_grad():
            for tensor, content in self.contents.values():
                if not equal_bits(tensor, content):  # copying would raise the version for nothing
                    tensor.copy_(content)
        for module, training in self.training:
            module.training = training
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)

    def set_gradients_aside(self) -> None:
        """Has a step make gradients of its own, which restore_gradients() drops again."""
        for parameter, _ in self.gradients:
            parameter.grad = None

    def restore_gradients(self) -> None:
        """Restores the gradients, with the tensors that they were."""
        for parameter, gradient in self.gradients:
            parameter.grad = gradient
