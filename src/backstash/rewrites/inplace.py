"""Rewrites of a model that change no bit of its step, proven on that step, and undone on leaving.

An activation that runs in place writes its output over its input. That is one buffer less: always for a moment, and
where its backward can read the output instead of the input (LeakyReLU, RReLU), for the whole time between forward and
backward. It is right only where nobody reads the input afterwards, and nothing but running the step can tell: so each
switch is tried on a real step and kept where every bit stays.

Counted peak of a step of four 3x3 convolutions (16, 16, 32, 32 channels) over float32 [16, 3, 64, 64], plain PyTorch:
with LeakyReLU 64.1 to 48.1 MiB, with ReLU 48.1 before and after, as its peak lies in backward.

Note: [other numbers]
    One step proves one set of numbers. ``relu(x) + x`` is the same with the ReLU in place while ``x`` is never
    negative, and a Hardtanh changes nothing while its input is small. Each set of switches is therefore tried twice:
    in place, and beside its inputs, with other numbers written over the inputs as soon as the activations have run.
    Whoever reads an input afterwards, in forward or backward, shows in the gradients whatever the batch was.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from backstash.errors import RewriteError
from backstash.saved import PLAIN
from backstash.session import Session
from backstash.testing.bits import equal_bits

OVERWRITING = (
    nn.ReLU,
    nn.LeakyReLU,
    nn.ELU,
    nn.CELU,
    nn.SELU,
    nn.RReLU,
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
)
"""Activations whose output takes the place of their input."""

COPYING = (
    nn.Hardtanh,
    nn.Threshold,
    nn.SiLU,
    nn.Mish,
    nn.Hardswish,
    nn.Hardsigmoid,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)
"""Activations (ReLU6 is a Hardtanh) of which torch copies the input, or the output, also when they run in place."""

_NOT_CALLED = "the step did not call it, so nothing could be proven"
_NOT_A_TENSOR = "its input is no plain dense tensor"
_COPIES = "torch makes a copy also when it runs in place, so it would save nothing"
_HELD = "its input is still held when the step is over, and its holder would find other numbers there"
_READ = "its input is read after it has run: with other numbers written there, {difference}"

_Numbers = dict[str, Tensor | None]


class Inplace:
    """What :func:`inplace` did to a model. As a context manager it undoes that on leaving.

    Attributes:
        switched: paths of the activations that run in place since.
        refused: why not, by the paths of the others.
        already: paths of the activations that ran in place before; nobody looked at them.
        steps: how many steps the proof took.
    """

    def __init__(
        self, switched: Mapping[str, nn.Module], refused: Mapping[str, str], already: Sequence[str], steps: int
    ) -> None:
        self.switched = tuple(switched)
        self.refused = dict(refused)
        self.already = tuple(already)
        self.steps = steps
        self._modules = list(switched.values())
        _switch(self._modules, True)

    def undo(self) -> None:
        """Let the switched activations make a new tensor again. Doing it twice does no harm."""
        _switch(self._modules, False)
        self._modules.clear()

    def __enter__(self) -> Inplace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()

    def __str__(self) -> str:
        lines = [
            f"{len(self.switched)} activations switched to run in place, {len(self.refused)} refused, "
            f"{len(self.already)} ran in place before; proven in {self.steps} steps"
        ]
        lines += [f"  switched {path or '(the model)'}" for path in self.switched]
        lines += [f"  refused  {path or '(the model)'}: {reason}" for path, reason in self.refused.items()]
        return "\n".join(lines)


def inplace(model: nn.Module, step: Callable[[], object], *, session: Session | None = None) -> Inplace:
    """Let the activations of a model run in place where that changes no bit of a step.

    All that can run in place are switched together, then in halves where that fails, until each is switched or
    refused. What the step returns, the gradients of parameters and of the model's inputs, and buffers are compared bit
    for bit with those of the step as it was; what is left switched at the end was proven together (Note: [other
    numbers]). Before each trial parameters, buffers, gradients, training flags and the random states of Python, numpy
    and torch are put back, and at the end too, also after an error. Other state of the step is not known here: let it
    compute the same each time.

    Only modules with an ``inplace`` flag are switched (``OVERWRITING``). Functional activations (``F.relu(x)``) are
    not touched: write ``F.relu_(x)`` where you know better. An activation that runs in place already is left so.

    A proof holds for the step it was made with: another path through the model, ``retain_graph``, or a hook that keeps
    activations can forbid what this step allows. torch raises an error for most of that, not for all.

    Args:
        model: the model; all its modules are looked at.
        step: one forward and backward pass over ``model``, without the optimizer's step; it leaves the parameters'
            ``.grad`` behind. What it returns (the loss) is compared as well. It must not open ``session`` itself.
        session: the Session that the model will be trained under, or one like it: the trials run inside, and its
            report then shows the last of them. What is legal differs: saved shapes forbid nothing there, so an
            activation may overwrite what plain PyTorch keeps.

    Returns:
        What was switched, and what was refused and why.

    Raises:
        RewriteError: there is no activation to switch; the step leaves no gradients, changes parameters, or computes
            something else each time.

    The proof takes 4 steps where all is legal, up to about ``2 * log2(n)`` more for each of few refused among n
    activations, and memory for two more copies of the gradients and one of parameters and buffers.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(), nn.Linear(64, 1), nn.Sigmoid(), nn.Dropout())
        >>> with inplace(model, lambda: model(torch.ones(8, 64)).sum().backward()) as rewrite:
        ...     rewrite.switched, list(rewrite.refused)
        (('1',), ['4'])
        >>> model[1].inplace
        False
    """
    candidates, refused, already = _survey(model)
    if not candidates:
        return Inplace({}, refused, already, 0)
    trials = _Trials(model, step, session)
    try:
        refused |= trials.refuse(candidates)
        switched = {path: module for path, module in candidates.items() if path not in refused}
    finally:
        trials.close()
    order = [path for path, _ in model.named_modules() if path in refused]
    return Inplace(switched, {path: refused[path] for path in order}, already, trials.steps)


def _survey(model: nn.Module) -> tuple[dict[str, nn.Module], dict[str, str], list[str]]:
    """The activations to try, those refused unseen with the reason, and those that run in place already, by path."""
    candidates: dict[str, nn.Module] = {}
    refused: dict[str, str] = {}
    already: list[str] = []
    for path, module in model.named_modules():
        if not isinstance(module, OVERWRITING + COPYING):
            continue
        if module.inplace:
            already.append(path)
        elif isinstance(module, COPYING):
            refused[path] = _COPIES
        else:
            candidates[path] = module
    if not (candidates or refused or already):
        names = ", ".join(kind.__name__ for kind in OVERWRITING)
        raise RewriteError(
            f"inplace was asked to switch the activations of {type(model).__name__}, but there is none among its "
            f"{sum(1 for _ in model.modules())} modules. It switches {names}; a functional activation has to be made "
            f"a module first."
        )
    return candidates, refused, already


def _switch(modules: Iterable[nn.Module], on: bool) -> None:
    for module in modules:
        module.inplace = on  # type: ignore[assignment]


# -- trials ----------------------------------------------------------------------------------------------------------


class _Trials:
    """Runs the step again and again from the same state."""

    def __init__(self, model: nn.Module, step: Callable[[], object], session: Session | None) -> None:
        self.model, self.step, self.session = model, step, session
        self.state = _State(model)
        self.plain: _Numbers = {}
        self.steps = 0

    def close(self) -> None:
        """Put everything back."""
        self.state.restore()
        self.state.restore_gradients()

    def refuse(self, candidates: Mapping[str, nn.Module]) -> dict[str, str]:
        """The reasons, by path, against those of the candidates that may not run in place."""
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

    def _observe(self, candidates: Mapping[str, nn.Module]) -> dict[str, str]:
        """Run the step as it is, twice; the reasons that this alone gives."""
        self.plain = self._run(())
        changed = self.state.changed_parameters()
        if changed:
            raise RewriteError(
                f"inplace was asked to try a step of {type(self.model).__name__}, but the step changes parameters "
                f"({_some(changed)}). They have been put back, not so what the optimizer remembers: pass a step that "
                f"ends with backward()."
            )
        if not any(name.startswith("the gradient") for name, numbers in self.plain.items() if numbers is not None):
            raise RewriteError(
                f"inplace was asked to try a step of {type(self.model).__name__}, but it leaves no parameter of the "
                f"model a gradient. Pass a step that runs forward and backward and does not zero the gradients after."
            )
        storages: dict[str, list[StorageWeakRef | None]] = {path: [] for path in candidates}
        with ExitStack() as hooks:
            for path, module in candidates.items():
                hooks.callback(module.register_forward_pre_hook(_note(storages[path]), with_kwargs=True).remove)
            difference = _first_difference(self.plain, self._run(()))
        if difference is not None:
            raise RewriteError(
                f"inplace was asked to compare steps of {type(self.model).__name__}, but two plain ones differ: "
                f"{difference}. Pass a step that computes the same each time: on one batch, with random numbers from "
                f"the global generators (torch.use_deterministic_algorithms helps)."
            )
        gc.collect()  # what a cycle holds, nobody will look at
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
        """Why these modules may not run in place together; None where they may."""
        if not modules:
            return None
        _switch(modules, True)
        try:
            reason = self._difference(())
            if reason is not None:
                return f"in place, {reason}"
            reason = self._difference(modules)
            return None if reason is None else _READ.format(difference=reason)
        finally:
            _switch(modules, False)

    def _difference(self, beside: Sequence[nn.Module]) -> str | None:
        try:
            return _first_difference(self.plain, self._run(beside))
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except RuntimeError as error:  # autograd's refusals; an error of another cause is quoted in the report as well
            return f"the step raises {type(error).__name__}: {str(error).partition(chr(10))[0]}"

    def _run(self, beside: Sequence[nn.Module]) -> _Numbers:
        """One step from the original state, with ``beside`` overwriting a copy of their inputs instead of them."""
        self.steps += 1
        self.state.restore()
        for parameter in self.model.parameters():
            parameter.grad = None
        inputs = _Inputs()
        with ExitStack() as hooks:
            hooks.callback(inputs.close)
            hooks.callback(self.model.register_forward_pre_hook(inputs, with_kwargs=True).remove)
            for module in beside:
                aside = _Aside()
                hooks.callback(module.register_forward_pre_hook(aside.copy, with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(aside.overwrite, prepend=True).remove)
            with self.session or nullcontext():
                numbers = _numbers("what the step returns", self.step())
            for path, parameter in self.model.named_parameters():
                numbers[f"the gradient of {path}"] = None if parameter.grad is None else _copy(parameter.grad)
            for number, gradient in enumerate(inputs.gradients):
                numbers[f"the gradient of the model's input {number}"] = gradient
            for path, buffer in self.model.named_buffers():
                numbers[f"the buffer {path}"] = _copy(buffer)
        return numbers


class _State:
    """What a step may change in a model and in the random generators, and what is put back."""

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
        """Paths of the parameters that hold other bits now."""
        known = [(path, *self.contents[id(x)]) for path, x in self.parameters.items() if id(x) in self.contents]
        return [path for path, parameter, content in known if not equal_bits(parameter, content)]

    def restore(self) -> None:
        """Put back all but the gradients."""
        for table, original in self.tables:
            if table.keys() != original.keys() or any(table[name] is not x for name, x in original.items()):
                table.clear()
                table.update(original)  # type: ignore[arg-type]
        with torch.no_grad():
            for tensor, content in self.contents.values():
                if not equal_bits(tensor, content):  # else its version would go up for nothing
                    tensor.copy_(content)
        for module, training in self.training:
            module.training = training
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)

    def restore_gradients(self) -> None:
        """Put back the gradients, the tensors themselves."""
        for parameter, gradient in self.gradients:
            parameter.grad = gradient


class _Inputs:
    """Sees the model's inputs that require gradients (a forward pre-hook), and their gradients."""

    def __init__(self) -> None:
        self.gradients: list[Tensor | None] = []
        self.leaves: dict[int, tuple[Tensor, Tensor | None]] = {}
        self.handles = ExitStack()

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        for _, tensor in _leaves("", (args, kwargs)):
            if not isinstance(tensor, Tensor) or not tensor.requires_grad:
                continue
            if tensor.is_leaf and id(tensor) not in self.leaves:
                self.leaves[id(tensor)] = (tensor, tensor.grad)
                tensor.grad = None  # else backward would add to the program's own
            self.handles.callback(tensor.register_hook(self._take(len(self.gradients))).remove)
            self.gradients.append(None)

    def _take(self, number: int) -> Callable[[Tensor], None]:
        def take(gradient: Tensor) -> None:
            self.gradients[number] = _copy(gradient)

        return take

    def close(self) -> None:
        self.handles.close()
        for tensor, gradient in self.leaves.values():
            tensor.grad = gradient
        self.leaves.clear()


class _Aside:
    """Gives a module a copy of its input to overwrite, and writes other numbers over the input itself afterwards."""

    def __init__(self) -> None:
        self.inputs: list[Tensor] = []

    def copy(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        x = _input(args, kwargs)
        assert x is not None  # or it had been refused
        self.inputs.append(x)
        copy = x.clone()
        return (
            tuple(copy if value is x else value for value in args),
            {name: copy if value is x else value for name, value in kwargs.items()},
        )

    def overwrite(self, module: nn.Module, args: Any, output: Any) -> None:
        with (
            torch.no_grad()
        ):  # finite, or a step that looks for NaNs would stop; of the other sign, or a mask would stay
            self.inputs.pop().mul_(-2).sub_(1)


def _note(storages: list[StorageWeakRef | None]) -> Callable[[nn.Module, Any, Any], None]:
    """A forward pre-hook that notes the storage of each input."""

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        x = _input(args, kwargs)
        storages.append(None if x is None else StorageWeakRef(x.untyped_storage()))

    return note


def _input(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """What an activation was called with, where it is a plain tensor."""
    x = args[0] if args else kwargs.get("input")
    return x if isinstance(x, Tensor) and type(x) in PLAIN and x.layout is torch.strided else None


# -- comparing -------------------------------------------------------------------------------------------------------


def _leaves(name: str, value: object) -> Iterator[tuple[str, object]]:
    """What nested tuples, lists and mappings hold, named."""
    if isinstance(value, (tuple, list)):
        for position, item in enumerate(value):
            yield from _leaves(f"{name}[{position}]", item)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(f"{name}[{key!r}]", item)
    else:
        yield name, value


def _numbers(name: str, value: object) -> _Numbers:
    """Copies of every tensor and number in nested tuples, lists and mappings."""
    numbers: _Numbers = {}
    for path, leaf in _leaves(name, value):
        if isinstance(leaf, Tensor):
            numbers[path] = _copy(leaf)
        elif isinstance(leaf, (bool, int, float)):
            numbers[path] = torch.tensor(leaf, dtype=torch.float64)
    return numbers


def _copy(x: Tensor) -> Tensor:
    """``x`` in memory of its own, without its graph, sparse or not."""
    x = x.detach()
    return x.clone() if x.layout is torch.strided else x.to_dense()


def _first_difference(plain: _Numbers, other: _Numbers) -> str | None:
    if plain.keys() != other.keys():
        return f"the step gives other results: {_some(sorted(plain.keys() ^ other.keys()))}"
    for name, expected in plain.items():
        got = other[name]
        if (expected is None) != (got is None):
            return f"{name} is {'there' if expected is None else 'missing'}"
        if expected is not None and got is not None and not equal_bits(expected, got):
            return f"{name} differs{_how_far(expected, got)}"
    return None


def _how_far(a: Tensor, b: Tensor) -> str:
    if a.shape != b.shape or a.dtype != b.dtype or not a.dtype.is_floating_point:
        return ""
    return f" by up to {float((a.double() - b.double()).abs().max()):.3g}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
