"""Requests of the programs to a device beside tensors: to wait, to count, to limit its memory."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from backstash import accelerator

LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch")
COPIES = ("cudaMemcpyAsync", "cudaMemsetAsync", "cudaMemcpy2DAsync")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
"""Calls of CUDA, as its profiler names them."""


@dataclass(frozen=True)
class Counts:
    """What a step asks of the device. None: it cannot be counted on this kind of device.

    Attributes:
        launches: kernels; on the fake device kernels and copies.
        copies: copies and fills that the host asks for; on the fake device they are among the launches.
        waits: how often the host waits for the device.
        allocations: of the device's memory.
    """

    launches: int | None = None
    copies: int | None = None
    waits: int | None = None
    allocations: int | None = None


class Device:
    """An accelerator, by torch's interface for all of them. What only some have is left out here.

    Attributes:
        kind: its type, such as ``"cuda"``.
        backend: the backend of torch.compile that serves it.
        partitioning: the backend that knows torch's ``activation_memory_budget``.
    """

    backend = partitioning = "inductor"

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def wait(self) -> None:
        """Waits for everything that was launched."""
        accelerator.synchronize(self.kind)

    def clean(self) -> None:
        """Gives back all memory that nobody holds."""
        gc.collect()
        torch.accelerator.empty_cache()

    def seconds(self, work: Callable[[], object], times: int = 1) -> float:
        """Returns the seconds of a call, of some calls between two waits."""
        self.wait()
        started = time.perf_counter()
        for _ in range(times):
            work()
        self.wait()
        return (time.perf_counter() - started) / times

    def peaks(self, work: Callable[[], object]) -> int:
        """Returns the most bytes that were allocated during a call, above those that were before it."""
        self.clean()
        self.wait()
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        work()
        self.wait()
        return torch.accelerator.max_memory_allocated() - before

    def reserved_nbytes(self) -> int | None:
        """Returns the bytes that torch holds of the device, those that nobody uses included."""
        return None

    def count(self, step: Callable[[], object]) -> Counts:
        """Returns what a step asks of the device."""
        return Counts()

    @contextmanager
    def limited(self, nbytes: int | None) -> Iterator[None]:
        """Lets torch allocate so many bytes at most; None: as many as there are."""
        if nbytes is not None:
            raise SystemExit(f"--memory was asked for, but it limits CUDA and the fake device, and not {self.kind}.")
        yield

    def room(self) -> int | None:
        """Returns how many bytes torch could hold in all, those that it holds included; None if that is not known."""
        information: Any = getattr(torch.accelerator, "get_memory_info", None)
        if information is None:
            return None
        return int(information()[0]) + torch.accelerator.memory_reserved()


class Cuda(Device):
    """CUDA."""

    def __init__(self) -> None:
        super().__init__("cuda")
        self._limit: int | None = None

    def reserved_nbytes(self) -> int:
        """As in Device."""
        return torch.cuda.memory_reserved()

    def count(self, step: Callable[[], object]) -> Counts:
        """As in Device. The profiler's own calls are those of a step that does nothing."""
        found, none = self._calls(step), self._calls(lambda: None)
        calls = [sum(found.get(name, 0) - none.get(name, 0) for name in names) for names in (LAUNCHES, COPIES, WAITS)]
        before = self._allocations()
        step()
        return Counts(calls[0], calls[1], calls[2], self._allocations() - before)

    def _calls(self, step: Callable[[], object]) -> dict[str, int]:
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        self.wait()
        with torch.profiler.profile(activities=activities) as profiler:
            step()
        self.wait()
        return {event.key: event.count for event in profiler.key_averages()}

    def _allocations(self) -> int:
        return int(torch.cuda.memory_stats()["allocation.all.allocated"])

    @contextmanager
    def limited(self, nbytes: int | None) -> Iterator[None]:
        """As in Device."""
        if nbytes is None:
            yield
            return
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, nbytes / total))
        self._limit = nbytes
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
            self._limit = None

    def room(self) -> int:
        """As in Device."""
        there = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
        return there if self._limit is None else min(there, self._limit)


class Fake(Device):
    """The fake accelerator of the tests. Times on it mean nothing."""

    backend, partitioning = "aot_eager", "aot_eager_decomp_partition"

    def __init__(self) -> None:
        super().__init__("fake")
        from tests.device import fake

        self._fake: Any = fake
        self._limit: int | None = None

    def count(self, step: Callable[[], object]) -> Counts:
        """As in Device."""
        with self._fake.counting() as found:
            step()
        return Counts(found.operations, None, found.waits, found.allocations)

    @contextmanager
    def limited(self, nbytes: int | None) -> Iterator[None]:
        """As in Device."""
        if nbytes is None:
            yield
            return
        self._limit = nbytes
        try:
            with self._fake.limited(nbytes):
                yield
        finally:
            self._limit = None

    def room(self) -> int | None:
        """As in Device."""
        return self._limit


def find(kind: str) -> Device:
    """Returns the device of that type."""
    return {"cuda": Cuda, "fake": Fake}[kind]() if kind in ("cuda", "fake") else Device(kind)


@contextmanager
def deterministic() -> Iterator[None]:
    """Inside, torch computes the same twice, as far as it can. cuBLAS needs a setting of the environment for it.

    cuDNN's attention does not repeat itself in backward, whatever is asked for, so another one is taken.
    """
    was = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # it takes time
    with_cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(with_cudnn)
        torch.use_deterministic_algorithms(was[0], warn_only=was[1])
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]


def survives(work: Callable[[], object]) -> bool:
    """Runs something that may need more memory than there is. Returns whether it had enough.

    Nothing of the error is held when it returns, as a traceback would hold the tensors of its frames.
    """
    try:
        work()
    except torch.OutOfMemoryError:
        return False
    return True
