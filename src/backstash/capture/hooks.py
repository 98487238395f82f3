"""The only place where anything is installed: saved-tensor hooks, the observer of torch functions, module hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from backstash import interpreter
from backstash.capture import checkpoints, modules, observer, transforms
from backstash.errors import SessionError
from backstash.stash import regions
from backstash.torch_internals import (
    count_function_modes,
    current_function_mode,
    function_modes,
    hooks_are_enabled,
    in_backward,
    pop_function_mode,
    pop_saved_tensor_hooks,
    push_function_mode,
    push_saved_tensor_hooks,
    remove_function_mode,
    remove_saved_tensor_hooks,
    saved_tensor_hooks,
)


class Hooks:
    """What a Session installs on this thread. What was installed in part can be removed, also more than once.

    Args:
        pack, unpack: the saved-tensor hooks.
        of_modules, of_functions: are told which module runs and which torch functions are called; None for nobody.
    """

    def __init__(
        self,
        pack: Callable[[Tensor], Any],
        unpack: Callable[[Any], Tensor],
        of_modules: modules.ModuleListener | None = None,
        of_functions: observer.CallListener | None = None,
    ) -> None:
        self._pack, self._unpack = pack, unpack
        self._observer = None if of_functions is None else observer.Observer(of_functions)
        self._is_observing = False
        self._below: Any = None  # the mode on which the observer was put
        self._modules, self._regions = of_modules, None if of_functions is None else of_functions.ran
        self.stands_in = False  # torch asks the interpreter for hooks

    def install(self) -> None:
        """Install everything; where saved-tensor hooks are switched off, these follow when they are on again."""
        if type(self._pack) is interpreter.Holder and not self.stands_in:
            self.stands_in = True
            interpreter.module.stand_in()
        if hooks_are_enabled():
            self.step_back()
        transforms.admit(self)
        checkpoints.admit(self, self._pack)
        self.observe()
        modules.listen(self._modules)
        regions.listen(self._regions)

    def remove(self, is_here: bool = True) -> None:
        """Take everything away.

        Args:
            is_here: whether this is the thread on which it was installed; else that one has ended.
        """
        if is_here:
            regions.unlisten(self._regions)
            self._stop()
            if self._observer is not None:
                self._observer.end()
            remove_saved_tensor_hooks(self._pack)
        if self.stands_in:
            self.stands_in = False
            interpreter.module.stand_back()
        modules.unlisten(self._modules, is_here)
        checkpoints.dismiss(self)
        transforms.dismiss(self)

    @property
    def are_innermost(self) -> bool:
        """Whether autograd calls these saved-tensor hooks, and not others that were installed later."""
        top = saved_tensor_hooks(True)
        return top is not None and top[0] is self._pack

    def step_aside(self) -> bool:
        """Take the saved-tensor hooks away if they are the innermost; returns whether they were."""
        if not self.are_innermost:
            return False
        pop_saved_tensor_hooks()
        return True

    def step_back(self) -> None:
        """Put the saved-tensor hooks back."""
        push_saved_tensor_hooks(self._pack, self._unpack)

    def observe(self) -> None:
        """Put the observer of torch functions back where it was, unless the program has put a mode of its own there."""
        if self._observer is None or self._is_observing:
            return
        if self._below is not None and current_function_mode() is not self._below:
            return
        self._below = current_function_mode()
        self._is_observing = True
        push_function_mode(self._observer)

    def stop_observing(self) -> None:
        """Take the observer of torch functions away, unless the program has put a mode of its own on top of it."""
        if self._is_observing and current_function_mode() is self._observer:
            self._stop()

    def _stop(self) -> None:
        if not self._is_observing:
            return
        was_there = remove_function_mode(self._observer)
        # A mode below that was left before the observer has taken the observer away instead of itself.
        if not was_there and self._below is not None and current_function_mode() is self._below and not in_backward():
            pop_function_mode()
        self._is_observing = False


def remove_left_observers() -> None:
    """Take away observers that nobody listens to.

    A mode that torch has put aside while it runs comes back when what has interrupted torch there is forgotten. By then
    its Session may have been left.
    """
    if count_function_modes() and not in_backward():
        for mode in function_modes():
            if isinstance(mode, observer.Observer) and mode.is_over:
                remove_function_mode(mode)


def refuse_other_hooks() -> None:
    """Make sure that a Session may be opened here.

    Raises:
        SessionError: another Session or other saved-tensor hooks are active, unless ``only_observes`` marks them.
    """
    if modules.is_active():
        raise SessionError(
            "a Session was opened inside another one, but only the innermost hooks of autograd run, so the outer one "
            "would see nothing. Open one Session around the whole forward pass; for different treatment of parts of "
            "the model use backstash.policies.Rules."
        )
    top = saved_tensor_hooks(True)
    if top is not None and not getattr(top[0], "only_observes", False):
        where = getattr(top[0], "__qualname__", repr(top[0]))
        checkpointed = "checkpoint" in where or "checkpoint" in getattr(top[0], "__module__", "")
        cause = "a checkpointed function" if checkpointed else f"the saved-tensor hooks {where}"
        raise SessionError(
            f"a Session was opened inside {cause}, but only the innermost hooks of autograd run, so it would switch "
            f"them off. Open the Session outside: a checkpoint inside a Session works."
        )
