"""The common part of watched runs and of runs without savers: what is replaced, which module runs, and gradients."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Self

from torch import Tensor, nn

from backstash.capture import passes
from backstash.capture.naming import tensors_within
from backstash.torch_internals import (
    function_apply,
    hook_pushing,
    ignore_global_hooks_of_compiled_modules,
    is_dynamo_compiling,
    is_traced,
    replace_function_apply,
    replace_hook_pushing,
)
from backstash.verifying.checksum import Checksum, checksum, numbers_of, why_unchecked
from backstash.verifying.gradients import gradient_copies, gradient_sums
from backstash.verifying.paths import ModulePaths, Stacks
from backstash.verifying.runlog import RunLog


class ObservedRun:
    """Inside the ``with``, a program is observed; ``log`` then has what was found.

    Args:
        recomputing: names of custom autograd functions that recompute.
        keep_pass: number of the backward pass whose gradients are kept, and not only their checksums.

    Attributes:
        gradients: those of that pass, by name.
        log: the record of the run.
        paths: the modules that the program calls outermost, and the names of all in them.
    """

    def __init__(self, recomputing: Collection[str], keep_pass: int | None) -> None:
        self.log, self.paths = RunLog(), ModulePaths()
        self.gradients: dict[str, Tensor] = {}
        self._recomputing, self._keep_pass = frozenset(recomputing), keep_pass
        self._here = Stacks()

    def __enter__(self) -> Self:
        ignore_global_hooks_of_compiled_modules()
        self._before = hook_pushing()
        with ExitStack() as undo:
            undo.callback(replace_hook_pushing, *self._before)
            replace_hook_pushing(self._push, self._pop)
            undo.callback(replace_function_apply, function_apply)
            replace_function_apply(classmethod(self._apply))
            for hook in (
                nn.modules.module.register_module_forward_pre_hook(self._enter_module),
                nn.modules.module.register_module_forward_hook(self._leave_module, always_call=True),
            ):
                undo.callback(hook.remove)
            undo.callback(passes.listen(self, of_grad=True))
            self._install(undo)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._undo.close()
        error = raised[1]
        if error is not None:
            self.log.error = f"{type(error).__name__}: {error}"

    def _install(self, undo: ExitStack) -> None:
        """Replaces what this kind of run replaces besides."""
        raise NotImplementedError

    def _push(self, pack: Any, unpack: Any) -> None:
        raise NotImplementedError

    def _pop(self) -> None:
        raise NotImplementedError

    def _apply(self, cls: Any, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        if not is_compiling():
            self.paths.enter(module)
            self._entered(module, args)

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        if not is_compiling():
            self._leaving(module, output)
            self.paths.leave()

    def _entered(self, module: nn.Module, args: Any) -> None:
        raise NotImplementedError

    def _leaving(self, module: nn.Module, output: Any) -> None:
        raise NotImplementedError

    def begin_backward(self, tensors: Any) -> None:
        """A backward pass begins."""
        self.log.results.append(numbers_of(sums_of(tensors)))
        self.log.passes += 1
        self.paths.note_leaves(tensors)

    def end_backward(self) -> None:
        """A backward pass has ended."""
        self.log.gradients.append(gradient_sums(self.paths))
        if self._keep_pass == self.log.passes - 1:
            self.gradients = gradient_copies(self.paths)

    def fail_backward(self) -> None:
        """A backward pass has raised."""


def is_compiling() -> bool:
    """Whether a compiler or an exporter runs the program, and not the program itself."""
    return is_dynamo_compiling() or is_traced()


def sums_of(given: Any) -> list[Checksum]:
    """Returns the checksums of the tensors in a structure."""
    return [checksum(x) for x in tensors_within(given) if why_unchecked(x) is None]


def name_of_class(cls: Any) -> str:
    """Returns a class's name with its module, if that is not the program itself."""
    return f"{cls.__module__}.{cls.__qualname__}" if cls.__module__ != "__main__" else cls.__qualname__


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, an attribute has another value."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
