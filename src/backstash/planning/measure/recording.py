"""Records steps of a running program with torch's profiler, which may only be started and stopped at certain places.

Note: [safe places]
    The hooks of an optimizer run inside a scope of torch's profiler, and so does a closure that an optimizer calls. A
    profiler that is started or stopped inside such a scope makes torch print an internal error, or crash, where it
    records annotations (Note: [operators alone] in events.py).

Note: [one thread]
    A profiler sees the thread on which it was started, and can only be stopped there. If the program's passes move to
    another thread, the record is worthless. The profiler is stopped when they come back to the first thread, and until
    then no other one is started, because torch crashes if the first one is stopped later. If that thread has ended, so
    has the profiler (Note: [end of a thread] in events.py).
"""

from __future__ import annotations

import weakref
from contextlib import suppress
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from backstash.planning.measure.events import Event, MemoryProfiler, Thread, memory_profiler, note, others, roots_of
from backstash.torch_internals import profiler_runs, record_operators


class Recording:
    """The profiler's record of some steps.

    Attributes:
        is_inside: whether an optimizer's step runs now (Note: [safe places]).
        gave_way: whether the last record ended because the program began to profile or forked (Note: [one profiler] in
            events.py).
    """

    def __init__(self) -> None:
        self.is_inside = self.gave_way = False
        self._profiler: MemoryProfiler | None = None
        self._lost: MemoryProfiler | None = None  # started on a thread that the passes have left
        self._records_operators = False
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

    @property
    def is_here(self) -> bool:
        """Whether the profiler was started, or can be, on the thread that asks (Note: [one thread])."""
        if self._profiler is not None:
            return self._profiler.thread() is Thread.current()
        return self._lost is None or self._lost.thread() in (None, Thread.current())

    def meet(self) -> None:
        """Is told of each pass, on its thread (Note: [one thread])."""
        if not self.is_here:
            self._lose()
        elif self._lost is not None:
            if self._lost.thread() is not None:
                with suppress(RuntimeError):
                    self._lost.stop()
            self._lost = None

    def start(self, insists: bool = False) -> bool:
        """Starts the profiler, which records memory alone. Returns False if another one runs, or is ready to.

        Args:
            insists: whether another Recording gives way: its loop may have been left in the middle of a record.
        """
        if insists and not others.is_busy:
            others.give_way()
        if profiler_runs() or others.is_busy:
            return False
        mine = weakref.ref(self)
        others.give_way = lambda: None if (running := mine()) is None else running.give_way()
        self.gave_way = False
        self._profiler = profiler = memory_profiler()  # Note: [interrupted profiler] in events.py
        try:
            profiler.__enter__()
            self._records_operators = True
            self._record_operators(False)
        except BaseException:
            self._take()
            raise
        return True

    def stop(self) -> list[Event] | None:
        """Stops the profiler and returns the outermost events of its record; None if there is none."""
        profiler = self._take()
        return None if profiler is None else roots_of(profiler)

    def give_way(self) -> None:
        """Stops the profiler and forgets its record, because the program is about to profile or to fork."""
        if self._profiler is not None and self.is_here:
            self._take()
            self.gave_way = True

    def close(self) -> None:
        """Stops whatever runs, and forgets it."""
        self.meet()
        self._take()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.is_inside = False

    def note_pass(self, is_backward: bool) -> None:
        """Notes that a backward pass begins, or has ended, where operators would not tell."""
        if self.is_running and self.is_here and not self._records_operators:
            self._record_operators(True)
            note("pass", is_backward=is_backward)
            self._record_operators(False)

    def begin_step(self) -> None:
        """Notes that the next step begins, and records its operators as well."""
        self._record_operators(True)
        note("step")

    def note_forward(self) -> None:
        """Notes that a forward pass is about to begin."""
        if self.is_running and self.is_here and self._records_operators:
            note("forward")

    def begin_plain(self) -> None:
        """Notes that the step is over, and that a plain one begins, whose operators are recorded as well."""
        note("plain")

    def end_step(self) -> None:
        """Notes that the step is over. What follows until the profiler stops is nobody's."""
        note("over")
        self._record_operators(False)

    def _record_operators(self, is_wanted: bool) -> None:
        if self._profiler is None:
            return  # it gave way in the middle of a step
        if self._records_operators != is_wanted:  # torch would record them twice, and go on after the profiler's end
            self._records_operators = is_wanted
            record_operators(is_wanted)

    def _take(self) -> MemoryProfiler | None:
        """The profiler, which is stopped; None if it was not started, or on another thread."""
        if not self.is_here:
            self._lose()
        profiler = self._profiler
        if profiler is not None:
            profiler.stop()
            self._profiler = None
        return profiler

    def _lose(self) -> None:
        if self._profiler is not None:
            self._lost, self._profiler = self._profiler, None
            self._lost.let_go()

    def _enter(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.is_inside = True

    def _leave(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.is_inside = False
