"""Trials of a step: it runs again and again from the same state, as it is or with parts of the model switched."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from backstash.errors import RewriteError
from backstash.rewrites.differences import StepNumbers, dense_copy, first_difference, leaves, numbers_in, some_of
from backstash.rewrites.state import StepState
from backstash.rewrites.step_dtypes import StepDtypes
from backstash.saved import PLAIN
from backstash.session import Session
from backstash.torch_internals import gradient_of

_NOT_CALLED = "the step did not call it, so nothing could be proven"
_NOT_A_TENSOR = "its input is no plain dense tensor"
_HELD = "its input is still held when the step is over, and its holder would find other numbers there"
_READ = "its input is read after it has run: with other numbers written there, {difference}"


def switch(modules: Iterable[nn.Module], on: bool) -> None:
    """Lets activations run in place, or no longer."""
    for module in modules:
        module.inplace = on  # type: ignore[assignment]


class Undoable:
    """A rewrite of a model, which is undone on leaving where it is used as a context manager."""

    def undo(self) -> None:
        """Restores the model. A second call does nothing."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.undo()


class Trials:
    """Runs a step again and again from the same state.

    Args:
        step: the step. It leaves gradients behind and changes no parameter.

    Attributes:
        plain: the numbers of the first step.
        computed: the coarsest dtype in which the first step computed.
    """

    def __init__(
        self, model: nn.Module, step: Callable[[], object], session: Session | None, name: str = "inplace"
    ) -> None:
        self.model, self.step, self.session, self.name = model, step, session, name
        self._all = StepState(step, [model], moves_weights=True)
        self.state = self._all.states[0]
        self._all.__enter__()
        self.plain: StepNumbers = {}
        self.steps = 0
        self.computed: torch.dtype | None = None

    def close(self) -> None:
        """Restores the state in which the model was, and all else that the step has changed."""
        self._all.__exit__(None, None, None)

    def refuse(self, candidates: Mapping[str, nn.Module]) -> dict[str, str]:
        """Returns the candidates that may not run in place, by path, with the reason against each."""
        refused = self._observe(candidates)
        accepted: list[nn.Module] = []
        groups = [[path for path in candidates if path not in refused]]
        while groups:
            group = groups.pop()
            modules = [candidates[path] for path in group]
            reason = self._against([*accepted, *modules])
            if reason is None:
                accepted += modules
            elif len(group) == 1:
                refused[group[0]] = reason
            else:
                half = len(group) // 2
                groups += [group[half:], group[:half]]
        return refused

    def establish(self) -> None:
        """Runs the original step, with which the others are compared.

        Raises:
            RewriteError: the step changes parameters, or leaves no gradients.
        """
        dtypes = StepDtypes()
        with dtypes.noting():
            self.plain = self.run(dtypes=dtypes)
        self.computed = dtypes.coarsest
        changed = self.state.changed_parameters()
        if changed:
            raise RewriteError(
                f"{self.name} was asked to try a step of {type(self.model).__name__}, but the step changes parameters "
                f"({some_of(changed)}). They have been put back, and so has what the optimizer remembers. Pass a step "
                f"that ends with backward()."
            )
        if not any(name.startswith("the gradient") for name, numbers in self.plain.items() if numbers is not None):
            raise RewriteError(
                f"{self.name} was asked to try a step of {type(self.model).__name__}, but it leaves no parameter of "
                f"the model a gradient. Pass a step that runs forward and backward and keeps the gradients."
            )

    def repeat(self) -> None:
        """Runs the original step once more.

        Raises:
            RewriteError: the step does not compute the same again.
        """
        difference = first_difference(self.plain, self.run())
        if difference is not None:
            raise RewriteError(
                f"{self.name} was asked to compare steps of {type(self.model).__name__}, but two plain ones differ: "
                f"{difference}. Pass a step that computes the same each time: on one batch, with random numbers from "
                f"the global generators (torch.use_deterministic_algorithms helps)."
            )

    def _observe(self, candidates: Mapping[str, nn.Module]) -> dict[str, str]:
        """Runs the original step twice. Returns the candidates that may not run in place whatever the trials show."""
        self.establish()
        storages: dict[str, list[StorageWeakRef | None]] = {path: [] for path in candidates}
        with ExitStack() as hooks:
            for path, module in candidates.items():
                hooks.callback(module.register_forward_pre_hook(_note(storages[path]), with_kwargs=True).remove)
            self.repeat()
        gc.collect()  # nobody will read what a garbage cycle holds
        refused = {}
        for path, seen in storages.items():
            if not seen:
                refused[path] = _NOT_CALLED
            elif any(storage is None for storage in seen):
                refused[path] = _NOT_A_TENSOR
            elif any(storage is not None and not storage.expired() for storage in seen):
                refused[path] = _HELD
        return refused

    def _against(self, modules: Sequence[nn.Module]) -> str | None:
        """Returns why these modules may not run in place together, or None if they may."""
        if not modules:
            return None
        switch(modules, True)
        try:
            reason = self._difference(())
            if reason is not None:
                return f"in place, {reason}"
            reason = self._difference(modules)
            return None if reason is None else _READ.format(difference=reason)
        finally:
            switch(modules, False)

    def _difference(self, beside: Sequence[nn.Module]) -> str | None:
        try:
            return first_difference(self.plain, self.run(beside))
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except RuntimeError as error:  # autograd refuses it; the report quotes an error of any other cause as well
            return f"the step raises {type(error).__name__}: {str(error).partition(chr(10))[0]}"

    def run(self, beside: Sequence[nn.Module] = (), dtypes: StepDtypes | None = None) -> StepNumbers:
        """Runs one step from the original state.

        Args:
            beside: modules that overwrite copies of their inputs.
            dtypes: is told when the model is called.
        """
        self.steps += 1
        self.state.restore()
        for parameter in self.model.parameters():
            parameter.grad = None
        inputs = _Inputs(dtypes)
        with ExitStack() as hooks:
            hooks.callback(inputs.close)
            hooks.callback(self.model.register_forward_pre_hook(inputs, with_kwargs=True).remove)
            for module in beside:
                aside = _Aside()
                hooks.callback(module.register_forward_pre_hook(aside.copy, with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(aside.overwrite, prepend=True).remove)
            with self.session or nullcontext():
                numbers = numbers_in("what the step returns", self.step())
            for path, parameter in self.model.named_parameters():
                gradient = gradient_of(parameter)
                numbers[f"the gradient of {path}"] = None if gradient is None else dense_copy(gradient)
            for number, gradient in enumerate(inputs.gradients):
                numbers[f"the gradient of the model's input {number}"] = gradient
            for path, buffer in self.model.named_buffers():
                numbers[f"the buffer {path}"] = dense_copy(buffer)
        return numbers


class _Inputs:
    """A forward pre-hook that collects the gradients of the model's inputs that require gradients."""

    def __init__(self, dtypes: StepDtypes | None) -> None:
        self.dtypes = dtypes
        self.gradients: list[Tensor | None] = []
        self.leaves: dict[int, tuple[Tensor, Tensor | None]] = {}
        self.handles = ExitStack()

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.dtypes is not None:
            for device in {parameter.device.type for parameter in module.parameters()} - {"meta"}:
                self.dtypes.note_autocast(device)
        for _, tensor in leaves("", (args, kwargs)):
            if not isinstance(tensor, Tensor) or not tensor.requires_grad:
                continue
            if tensor.is_leaf and id(tensor) not in self.leaves:
                self.leaves[id(tensor)] = (tensor, tensor.grad)
                tensor.grad = None  # or backward would add to the program's own gradient
            self.handles.callback(tensor.register_hook(self._take(len(self.gradients))).remove)
            self.gradients.append(None)

    def _take(self, number: int) -> Callable[[Tensor], None]:
        def take(gradient: Tensor) -> None:
            self.gradients[number] = dense_copy(gradient)

        return take

    def close(self) -> None:
        """Removes the hooks, and restores the gradients that the inputs had."""
        self.handles.close()
        for tensor, gradient in self.leaves.values():
            tensor.grad = gradient
        self.leaves.clear()


class _Aside:
    """Hooks that give a module a copy of its input, and then write other numbers over the input itself."""

    def __init__(self) -> None:
        self.inputs: list[Tensor] = []

    def copy(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        x = _input(args, kwargs)
        assert x is not None  # a module with any other input was refused before
        self.inputs.append(x)
        copy = x.clone()
        return (
            tuple(copy if value is x else value for value in args),
            {name: copy if value is x else value for name, value in kwargs.items()},
        )

    def overwrite(self, module: nn.Module, args: Any, output: Any) -> None:
        # The numbers are finite, as a step may look for NaNs, and of the other sign, so that every mask changes.
        with torch.no_grad():
            self.inputs.pop().mul_(-2).sub_(1)


def _note(storages: list[StorageWeakRef | None]) -> Callable[[nn.Module, Any, Any], None]:
    """Returns a forward pre-hook that adds the storage of each input to ``storages``."""

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        x = _input(args, kwargs)
        storages.append(None if x is None else StorageWeakRef(x.untyped_storage()))

    return note


def _input(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The tensor that an activation was called with, or None if it is no plain dense tensor."""
    x = args[0] if args else kwargs.get("input")
    return x if isinstance(x, Tensor) and type(x) in PLAIN and x.layout is torch.strided else None
