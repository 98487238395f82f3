"""The accelerator of this process, whichever it is: CUDA, XPU or another one that torch knows.

Code that needs Triton's kernels, or another thing that CUDA alone has, asks for CUDA by name. All other code asks here,
or whether a device is something other than the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def kind() -> str | None:
    """Returns the type of the accelerator that is there, such as ``"cuda"``, or None."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else found.type


def kind_in_use() -> str | None:
    """Returns the type of the accelerator if the process has used it already, or None. Does not start it."""
    found = kind()
    if found is None:
        return None
    is_initialized = getattr(_module(found), "is_initialized", None)
    return found if is_initialized is None or is_initialized() else None


def is_here(device_type: str) -> bool:
    """Whether there are devices of this type: the CPU, or the accelerator."""
    return isinstance(device_type, str) and device_type in ("cpu", kind())


def _module(device_type: str) -> Any:
    return torch.get_device_module(device_type)


def names() -> list[str]:
    """Returns the name of each accelerator of this machine, as its maker calls it, or its type."""
    found = kind()
    if found is None:
        return []
    get_name = getattr(_module(found), "get_device_name", lambda number: found)
    return [str(get_name(number)) for number in range(torch.accelerator.device_count())]


def synchronize(device_type: str) -> None:
    """Waits for everything that was launched, unless the device is the CPU."""
    if device_type != "cpu":
        torch.accelerator.synchronize()


def rng_state(device: torch.device) -> Tensor:
    """Returns the state of a device's default generator."""
    return torch.get_rng_state() if device.type == "cpu" else _module(device.type).get_rng_state(device)


def set_rng_state(state: Tensor, device: torch.device) -> None:
    """Sets the state of a device's default generator."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        _module(device.type).set_rng_state(state, device)


def graph_type(device_type: str) -> Any:
    """Returns the class of a device's graphs, such as ``torch.cuda.CUDAGraph``; None where torch knows none."""
    if device_type == "cpu":
        return None
    module = _module(device_type)
    return next((getattr(module, name) for name in ("CUDAGraph", "XPUGraph", "Graph") if hasattr(module, name)), None)


def begin_graph(graph: Any, pool: Any) -> None:
    """Begins to capture on the current stream. Other threads, such as loaders of data, may do what they like.

    Args:
        graph: made by :func:`graph_type`.
        pool: of another graph, whose memory it may use as well; None for a pool of its own.
    """
    options = {"capture_error_mode": "thread_local"} if hasattr(graph, "register_generator_state") else {}
    graph.capture_begin(*(() if pool is None else (pool,)), **options)


def noted_generators() -> Callable[[], None]:
    """Notes the states of the default generators of the CPU and of all devices in use. Returns what restores them."""
    state, found = torch.get_rng_state(), kind_in_use()
    states = [] if found is None else _module(found).get_rng_state_all()

    def restore() -> None:
        torch.set_rng_state(state)
        if found is not None:
            _module(found).set_rng_state_all(states)

    return restore
