"""Triton's kernels launched by the launcher of our own, once Triton has compiled and launched them."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

from torch import Tensor

from backstash.ops.cuda import launcher

ALIGNED = 16
"""Bytes by whose multiples Triton tells pointers and integers, for which it compiles other code."""

_Launched = tuple[int, tuple[int, ...]]

_known: dict[tuple[Any, ...], _Launched | None] = {}


@cache
def is_asked_for() -> bool:
    """Whether ``BACKSTASH_LAUNCHER=own`` asks for it and it is there. Triton's is the default: ours ran on no GPU."""
    return os.environ.get("BACKSTASH_LAUNCHER") == "own" and launcher.open_launcher() is not None


def run(kernel: Any, programs: int, args: tuple[Any, ...], constants: dict[str, Any], driver: str) -> None:
    """Launches a kernel of Triton on the device of its first argument.

    Triton compiles another kernel for each combination of types, of arguments that are None or 1, and of what is a
    multiple of 16. The first launch of each is Triton's own, and tells which arguments the kernel takes.
    """
    device = args[0].device.index or 0
    key = kernel, device, tuple(constants.items()), tuple([_looks(arg) for arg in args])
    if key not in _known:
        _known[key] = _launched(kernel[(programs,)](*args, **constants), kernel, device, driver)
        return
    known = _known[key]
    if known is None:
        kernel[(programs,)](*args, **constants)
        return
    address, places = known
    opened: Any = launcher.open_launcher(driver)
    opened.launch(address, programs, launcher.stream_of(device), *[args[place] for place in places])


def _looks(arg: Any) -> Any:
    """What Triton compiles other code for."""
    if isinstance(arg, Tensor):
        return arg.dtype, arg.data_ptr() % ALIGNED == 0
    if isinstance(arg, int) and not isinstance(arg, bool):
        return arg == 1, arg % ALIGNED == 0, -(1 << 31) <= arg < 1 << 31, arg < 1 << 63
    return type(arg)


def _launched(compiled: Any, kernel: Any, device: int, driver: str) -> _Launched | None:
    """Loads what Triton has compiled; None where Triton has to launch it, because it needs more than a launch."""
    try:
        address = launcher.load_triton(compiled, device, driver)
    except (ValueError, LookupError):
        return None
    taken = [name for name, kind in compiled.src.signature.items() if kind != "constexpr"]
    return address, tuple([kernel.arg_names.index(name) for name in taken])
