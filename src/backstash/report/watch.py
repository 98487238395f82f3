"""Measures an unchanged training script: its steps, losses and peaks. ``backstash compare`` runs it as a child process.

A step ends when ``optimizer.step()`` returns. What is measured of a step depends on its number:

1. The first step warms up: the optimizer's state exists afterwards.
2. The second step is counted: a profiler counts every byte that torch allocates, and the Session's report is taken.
3. The third and all later steps are timed, and the resident high-water mark is read.

So a script needs three steps for every number. If there are several optimizers, a step of any of them counts. A loss is
a tensor of one element whose ``backward()`` is called.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from backstash.integrations.launcher import execute
from backstash.ops import backends
from backstash.report.meter import CountedPeak, reset_resident_peak, resident_nbytes, resident_peak_nbytes
from backstash.session import Session
from backstash.torch_internals import no_torch_function

PLAIN = "plain"
"""The name of a run without a Session."""

COUNTED = 2
"""Number of the step whose bytes are counted."""


@dataclass(frozen=True)
class Observed:
    """The measurements of one run of a script.

    Attributes:
        policy: the policy's name, or ``"plain"``.
        device: type of the parameters' device.
        kernels: name of the kernels of backstash that serve this device.
        steps: number of steps.
        step_seconds: seconds of each step after the counted step; on CUDA between events of the current stream.
        losses: each loss as ``float.hex``, which is exact.
        weights: SHA-256 of all parameters after the last step.
        peak_nbytes: the most bytes of tensors alive at once in the counted step, above those alive at its start.
        resident_nbytes: on CPU, the most bytes that the process held in the steps after the counted step, above those
            that it held when a module was first called to train. They hold more than tensors: the C library keeps freed
            memory, glibc in blocks below 32 MiB, unless MALLOC_MMAP_THRESHOLD_ is set.
        report: the Session's report on the counted step, from ``Report.to_json``; None without a Session.
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


class Watch:
    """Observes all training inside the ``with``. Leaving it removes every hook.

    Args:
        policy: name of the run.
        session: the Session that the script runs under, or None.
    """

    def __init__(self, policy: str = PLAIN, session: Session | None = None) -> None:
        self._policy, self._session = policy, session
        self._device = "cpu"
        self._steps = 0
        self._begun: Any = None
        self._timed: list[tuple[Any, Any]] = []
        self._losses: list[Tensor] = []
        self._inside_backward = False
        self._optimizers: dict[int, Optimizer] = {}
        self._counter: CountedPeak | None = None
        self._peak: int | None = None
        self._cuda_at_start = 0
        self._resident_at_start: int | None = None
        self._resident_peak: int | None = None
        self._report: dict[str, Any] | None = None

    def __enter__(self) -> Watch:
        self._first_call = nn.modules.module.register_module_forward_pre_hook(self._begin_training)
        self._step_hook = register_optimizer_step_post_hook(self._end_step)
        self._backward = Tensor.backward
        Tensor.backward = self._recording(self._backward)  # type: ignore[method-assign]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        Tensor.backward = self._backward  # type: ignore[method-assign]
        self._step_hook.remove()
        self._first_call.remove()
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
            steps=self._steps,
            step_seconds=[_seconds(begun, ended) for begun, ended in self._timed],
            losses=[float(loss).hex() for loss in self._losses],
            weights=_digest(self._optimizers.values()),
            peak_nbytes=self._peak,
            resident_nbytes=grown,
            report=self._report,
        )

    # -- hooks ---------------------------------------------------------------------------------------------------

    def _begin_training(self, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():
            self._first_call.remove()
            self._resident_at_start = resident_nbytes()

    def _recording(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
            # Under a Session torch calls Tensor.backward, this function, a second time from inside the first call.
            outermost, self._inside_backward = not self._inside_backward, True
            try:
                if outermost and loss.numel() == 1 and loss.is_floating_point():
                    with no_torch_function():
                        self._losses.append(loss.detach().clone())  # a copy, because a script may change its loss later
                original(loss, *args, **kwargs)
            finally:
                self._inside_backward = not outermost

        return backward

    def _end_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        ended = self._mark()
        self._steps += 1
        self._optimizers[id(optimizer)] = optimizer  # held, so that no other optimizer gets the same id
        if self._steps == 1:
            self._device = optimizer.param_groups[0]["params"][0].device.type
        if self._steps == COUNTED:
            self._end_count()
            self._report = json.loads(self._session.report().to_json()) if self._session else None
            self._resident_possible = self._device == "cpu" and reset_resident_peak()
        if self._steps > COUNTED:
            self._timed.append((self._begun, ended))
            self._resident_peak = resident_peak_nbytes() if self._resident_possible else None
        if self._steps == COUNTED - 1:
            self._begin_count()
        self._begun = self._mark()

    def _begin_count(self) -> None:
        if self._device == "cpu":
            self._counter = CountedPeak()
            self._counter.__enter__()
        elif self._device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self._cuda_at_start = torch.cuda.memory_allocated()

    def _end_count(self) -> None:
        if self._counter is not None:
            self._counter.__exit__(None, None, None)
            self._peak, self._counter = self._counter.peak_nbytes, None
        elif self._device == "cuda":
            self._peak = torch.cuda.max_memory_allocated() - self._cuda_at_start

    def _mark(self) -> Any:
        """The current time: of the host's clock in seconds, or an event on the CUDA stream, without waiting for it."""
        if self._device != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _seconds(begun: Any, ended: Any) -> float:
    if isinstance(ended, float):
        return float(ended - begun)
    ended.synchronize()
    return float(begun.elapsed_time(ended)) / 1e3


def _digest(optimizers: Any) -> str:
    """SHA-256 of the bytes of every parameter, in the optimizers' order."""
    digest = hashlib.sha256()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                content = parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                digest.update(memoryview(content.numpy()))
    return digest.hexdigest()


def main() -> None:
    """``python -m backstash.report.watch POLICY RESULT SCRIPT [ARGS...]`` runs a script and writes what it measured."""
    policy, result, script, *args = sys.argv[1:]
    session = None if policy == PLAIN else Session(policy)
    with session or nullcontext(), Watch(policy, session) as watch:
        exit_code = execute(script, args)
    if exit_code == 0:
        Path(result).write_text(json.dumps(asdict(watch.observed())))
    sys.exit(exit_code)


if __name__ == "__main__":
    main()
