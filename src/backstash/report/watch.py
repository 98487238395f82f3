"""Measures an unchanged training script: its steps, losses and peaks. ``backstash compare`` runs it as a child process.

Where a step ends is told in report/steps.py. What is measured of a step depends on its number:

1. The first step warms up: the optimizers' state exists afterwards.
2. The second step is counted: a profiler counts every byte that torch allocates, and the Session's report is taken.
3. The third and all later steps are timed, and the resident high-water mark is read.

So a script needs three steps for every number. A loss is a tensor of one element from which a backward pass begins.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from backstash import policies
from backstash.capture import passes
from backstash.integrations.launcher import execute
from backstash.ops import backends
from backstash.report.meter import CountedPeak, reset_resident_peak, resident_nbytes, resident_peak_nbytes
from backstash.report.steps import Steps
from backstash.session import Session
from backstash.torch_internals import (
    ignore_global_hooks_of_compiled_modules,
    in_backward,
    no_torch_function,
    nodes_behind,
)

PLAIN = "plain"
"""The name of a run without a Session."""

COUNTED = 2
"""Number of the step whose bytes are counted."""


@dataclass(frozen=True)
class Observed:
    """The measurements of one run of a script.

    Attributes:
        policy: the policy's name, or ``"plain"``.
        kernels: name of the kernels of backstash that serve this device.
        step_seconds: seconds of each step after the counted step; on CUDA between events of the current stream.
        losses: each loss as ``float.hex``, which is exact.
        weights: SHA-256 of all parameters after the last step.
        peak_nbytes: the most bytes of tensors alive at once in the counted step, above those alive at its start.
        resident_nbytes: on CPU, the most bytes that the process held in the steps after the counted step, above those
            that it held when a module was first called to train. They hold more than tensors: the C library keeps freed
            memory, glibc in blocks below 32 MiB, unless MALLOC_MMAP_THRESHOLD_ is set.
        report: the Session's report on the counted step, from ``Report.to_json``; None without a Session.
        allocator: name of the allocator that the process was started with.
    """

    policy: str
    device: str
    kernels: str
    steps: int
    step_seconds: list[float]
    losses: list[str]
    weights: str
    peak_nbytes: int | None
    resident_nbytes: int | None
    report: dict[str, Any] | None
    allocator: str = "system"


class Watch:
    """Observes all training inside the ``with``. Leaving it removes every hook.

    Args:
        is_finished: is called when a step has been timed; when it returns True, the script is ended by SystemExit.
    """

    def __init__(
        self,
        policy: str = PLAIN,
        session: Session | None = None,
        is_finished: Callable[[int], bool] = lambda steps: False,
    ) -> None:
        self._policy, self._session, self._is_finished = policy, session, is_finished
        self._device = "cpu"
        self._steps = Steps(self._end_update, self._end_step, self._forget)
        self._begun: Any = None
        self._updated: Any = None
        self._timed: list[tuple[Any, Any]] = []
        self._losses: list[Tensor] = []
        self._inside_optimizer = False
        self._leaves: dict[int, Tensor] = {}
        self._counter: CountedPeak | None = None
        self._mark: int | None = None  # of the counter: the last update
        self._first_mark: int | None = None  # where the counted step begins
        self._peak: int | None = None
        self._at_start = 0
        self._resident_at_start: int | None = None
        self._resident_peak: int | None = None
        self._resident_possible = False
        self._report: dict[str, Any] | None = None

    def __enter__(self) -> Watch:
        ignore_global_hooks_of_compiled_modules()
        self._module_hook = nn.modules.module.register_module_forward_pre_hook(self._enter_module)
        self._pre_step_hook = register_optimizer_step_pre_hook(self._enter_optimizer)
        self._step_hook = register_optimizer_step_post_hook(self._optimized)
        self._stop_listening = passes.listen(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_listening()
        self._pre_step_hook.remove()
        self._step_hook.remove()
        self._module_hook.remove()
        self._is_finished = lambda steps: False  # it is over anyway
        if error is None:
            self._steps.finish()
        if self._counter is not None:  # the script ended before the counted step did
            self._counter.__exit__(kind, error, trace)
            self._counter = None

    def observed(self) -> Observed:
        """The measurements. Losses and times are converted here, so that the script never waits for a device."""
        grown = None
        if self._resident_at_start is not None and self._resident_peak is not None:
            grown = self._resident_peak - self._resident_at_start
        return Observed(
            policy=self._policy,
            device=self._device,
            kernels=backends.name(self._device),
            steps=self._steps.count,
            step_seconds=[_seconds(begun, ended) for begun, ended in self._timed],
            losses=[float(loss).hex() for loss in self._losses],
            weights=_digest(self._parameters()),
            peak_nbytes=self._peak,
            resident_nbytes=grown,
            report=self._report,
        )

    # -- hooks ---------------------------------------------------------------------------------------------------

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled() and not in_backward():  # a checkpoint calls modules again in backward
            if self._resident_at_start is None:
                self._resident_at_start = resident_nbytes()
            self._steps.forward()

    def begin_backward(self, tensors: Any) -> None:
        """A backward pass begins."""
        with no_torch_function():
            self._steps.forward()
            self._note_losses((tensors,) if isinstance(tensors, Tensor) else tuple(tensors))

    def end_backward(self) -> None:
        """A backward pass has ended."""
        # Here, and not again where an optimizer calls a closure (Note: [profiler's scopes]).
        if self._steps.count == 0 and (self._counter is None or not self._inside_optimizer):
            self._begin_count()
        self._steps.went_backward()

    def fail_backward(self) -> None:
        """A backward pass has raised, which is no step."""

    def _note_losses(self, tensors: Sequence[Tensor]) -> None:
        for loss in tensors:
            if loss.numel() == 1 and loss.is_floating_point():
                self._losses.append(loss.detach().clone())  # a copy, because a script may change its loss later
        if not self._steps.optimizers and self._steps.count < COUNTED:
            self._leaves |= {id(leaf): leaf for leaf in _leaves(tensors)}
            self._device = next((leaf.device.type for leaf in self._leaves.values()), self._device)

    def _enter_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._inside_optimizer = True

    def _optimized(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._inside_optimizer = False
        if not self._steps.optimizers:
            self._device = optimizer.param_groups[0]["params"][0].device.type
        self._steps.optimized(optimizer)

    # -- steps ---------------------------------------------------------------------------------------------------

    def _end_update(self, is_complete: bool) -> None:
        """An optimizer has stepped. If it is the last one of a step, that is known only later."""
        self._updated = self._now()
        is_counted = self._steps.count == COUNTED - 1
        if self._counter is not None:
            self._mark = self._counter.mark()
        elif self._device != "cpu" and is_counted:
            self._peak = torch.accelerator.max_memory_allocated() - self._at_start
        elif self._device != "cpu" and self._steps.count < COUNTED - 1:
            self._begin_count()
        if is_counted and self._session is not None and (is_complete or not in_backward()):
            self._keep_larger(json.loads(self._session.report().to_json()))

    def _end_step(self) -> None:
        number = self._steps.count
        if number == COUNTED - 1:
            if self._device == "cpu" and self._counter is None:
                self._begin_count()
            # The step begins with the forward pass that this is called in: what came before may be an evaluation.
            self._first_mark = self._counter.mark() if self._counter is not None else None
        elif number == COUNTED:
            counter = self._stop_count()
            if counter is not None:
                self._peak = counter.peak_between(self._first_mark, self._mark)
            self._resident_possible = self._device == "cpu" and reset_resident_peak()
        else:
            self._timed.append((self._begun, self._updated))
            self._resident_peak = resident_peak_nbytes() if self._resident_possible else None
        self._begun = self._updated
        if number > COUNTED and self._is_finished(number):
            raise SystemExit(0)

    def _forget(self) -> None:
        self._peak = self._report = self._resident_peak = None
        self._timed.clear()

    def _keep_larger(self, report: dict[str, Any]) -> None:
        """If several backward passes make a step, its report is that of the one that saved the most."""
        if self._report is None or report["saved_nbytes"] > self._report["saved_nbytes"]:
            self._report = report
        self._report["gradient_error"] = report["gradient_error"]

    def _begin_count(self) -> None:
        self._stop_count()
        if self._device == "cpu":
            self._counter, self._mark = CountedPeak(), None
            self._counter.__enter__()
        else:
            torch.accelerator.reset_peak_memory_stats()
            self._at_start = torch.accelerator.memory_allocated()

    def _stop_count(self) -> CountedPeak | None:
        counter, self._counter = self._counter, None
        if counter is not None:
            counter.__exit__(None, None, None)
        return counter

    def _now(self) -> Any:
        """The current time: seconds of the host's clock, or an event on the current stream, without waiting for it."""
        if self._device == "cpu":
            return time.perf_counter()
        event = torch.Event(enable_timing=True)
        event.record()
        return event

    def _parameters(self) -> list[Tensor]:
        """The parameters of all optimizers, in their order; without any, the leaves that have got gradients."""
        if not self._steps.optimizers:
            return list(self._leaves.values())
        groups = (group for optimizer in self._steps.optimizers for group in optimizer.param_groups)
        return [parameter for group in groups for parameter in group["params"]]


def _seconds(begun: Any, ended: Any) -> float:
    if isinstance(ended, float):
        return float(ended - begun)
    ended.synchronize()
    return float(begun.elapsed_time(ended)) / 1e3


def _leaves(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The leaves for which a backward pass from these tensors computes gradients, in the order of the graph."""
    nodes = nodes_behind(tensor.grad_fn for tensor in tensors)
    return [node.variable for node in nodes if hasattr(node, "variable")]


def _digest(parameters: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    for parameter in parameters:
        content = parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(memoryview(content.numpy()))
    return digest.hexdigest()


@dataclass(frozen=True)
class MeasureRequest:
    """What a child process is asked to measure.

    Attributes:
        policy: name of the policy, or ``"plain"``.
        allocator: name of the allocator that it is started with.
        min_nbytes: the Session's.
        steps: the program is ended after this many timed steps; None to let it run to its end.
    """

    script: str
    args: list[str]
    policy: str
    result: str
    is_module: bool = False
    allocator: str = "system"
    min_nbytes: int | None = None
    steps: int | None = None


def carry_out(order: MeasureRequest) -> int:
    """Runs a program, writes what was measured of it, and returns its exit code."""
    session = None
    if order.policy != PLAIN:
        # The first step of a policy that changes gradients is checked: two more backward passes tell by how much.
        check = 0 if policies.describe(order.policy).is_exact else 1
        session = Session(order.policy, min_nbytes=order.min_nbytes, check=check, check_limit=float("inf"))
    enough = COUNTED + order.steps if order.steps is not None else None
    with (
        session or nullcontext(),
        Watch(order.policy, session, lambda steps: enough is not None and steps >= enough) as watch,
    ):
        exit_code = execute(order.script, order.args, is_module=order.is_module)
    if exit_code == 0:
        measured = asdict(watch.observed()) | {"allocator": order.allocator}
        Path(order.result).write_text(json.dumps(measured))
    return exit_code


if __name__ == "__main__":
    # As a module of its own name, so that what it hands out is what others import.
    from backstash.report import watch

    sys.exit(watch.carry_out(watch.MeasureRequest(**json.loads(sys.argv[1]))))
