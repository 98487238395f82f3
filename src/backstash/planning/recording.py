"""Records steps of a running program with torch's profiler, which may only be started and stopped at certain places.

Note: [safe places]
    The hooks of an optimizer run inside a scope of torch's profiler, and so does a closure that an optimizer calls. A
    profiler that is started or stopped inside such a scope makes torch print an internal error, or crash.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from backstash.planning.events import memory_profiler, note, roots_of
from backstash.planning.timeline import Timeline
from backstash.torch_internals import profiler_runs


class Recording:
    """The profiler's record of some steps.

    Attributes:
        is_inside: whether an optimizer's step runs now (Note: [safe places]).
    """

    def __init__(self) -> None:
        self.is_inside = False
        self._profiler: Any = None
        self._hooks: list[Any] = []

    @property
    def is_running(self) -> bool:
        """Whether it was started."""
        return self._profiler is not None

    def listen(self) -> None:
        """Notes from now on when optimizers step."""
        if not self._hooks:
            self._hooks = [
                register_optimizer_step_pre_hook(self._enter),
                register_optimizer_step_post_hook(self._leave),
            ]

    def start(self) -> bool:
        """Starts the profiler. Returns False if another one runs."""
        if profiler_runs():
            return False
        profiler = memory_profiler()
        profiler.__enter__()
        self._profiler = profiler
        return True

    def stop(self, device: str) -> Timeline:
        """Stops the profiler and returns the last step on that type of device."""
        profiler, self._profiler = self._profiler, None
        profiler.__exit__(None, None, None)
        return Timeline(roots_of(profiler), device)

    def close(self) -> None:
        """Stops whatever runs, and forgets it."""
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.__exit__(None, None, None)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.is_inside = False

    def note(self, event: str) -> None:
        """Writes an event into the record."""
        note(event)

    def _enter(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.is_inside = True

    def _leave(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.is_inside = False
