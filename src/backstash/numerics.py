"""Settings of the process on which the bits of a result depend.

Note: [settings]
    A program may change them between the passes: ``sdpa_kernel`` around the forward pass alone, another default dtype,
    oneDNN switched off for one layer. A call that is repeated in the backward pass has to run under the settings under
    which it ran first, and everything else there under those of the program. So each call that is noted remembers its
    settings, all equal ones by one object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from backstash.torch_internals import deterministic, deterministic_warns, find, set_deterministic

Settings = tuple[object, ...]
"""The values of all settings for one type of device, in the order of their table."""


class _Setting(NamedTuple):
    """A setting; ``keep`` returns what puts it back, where to write what was read may do something else."""

    read: Callable[[], Any]
    write: Callable[[Any], object]
    keep: Callable[[], Callable[[], object]] | None = None


_SMALLEST, _ONE = 5e-324, 1.0


def _flushes() -> bool:
    """Whether results that are too small for the normal format become zero; torch has no function that tells."""
    return _SMALLEST * _ONE == 0.0


def _flag(name: str) -> _Setting:
    return _Setting(find(f"_C._get_{name}"), find(f"_C._set_{name}"))


def _attention(name: str) -> _Setting:
    return _Setting(find(f"_C._get_{name}_sdp_enabled"), find(f"_C._set_sdp_use_{name}"))


def _pair(name: str) -> _Setting:
    """A flag that newer versions of torch give with a second one."""
    flag = _flag(name)
    return _Setting(flag.read, lambda value: flag.write(*value) if isinstance(value, tuple) else flag.write(value))


_precision_of = find("_C._get_fp32_precision_getter")


def _precision(backend: str, operation: str) -> _Setting:
    """Of products of float32. ``torch.get_float32_matmul_precision`` raises where a program has used the newer API."""
    read, set_all = partial(_precision_of, backend, operation), find("_C._set_fp32_precision_setter")
    set_to = partial(set_all, backend, operation)

    def write(value: str) -> None:
        set_to(value)
        if read() != value:  # "none" leaves it to the levels above, which say something now
            set_to("ieee")  # which computes as "none" does

    def keep() -> Callable[[], object]:
        above = []
        try:
            # Torch tells what is set for an operation itself only where nothing is set for all of them.
            for level in ("generic", "all"), (backend, "all"):
                above.append((level, _precision_of(*level)))
                set_all(*level, "none")
            return partial(set_to, read())
        finally:
            for level, value in above:
                set_all(*level, value)

    return _Setting(read, write, keep)


def matmul_precision() -> str:
    """Returns what is set for products of float32 on CPU: ``"none"``, ``"ieee"``, ``"tf32"`` or ``"bf16"``."""
    precision: str = _precision_of("mkldnn", "matmul")
    return precision


def rounds_products() -> bool:
    """Returns whether the program has asked products of float32 on CPU to be computed of bfloat16 numbers.

    By ``torch.backends.mkldnn.matmul.fp32_precision = "bf16"`` or ``torch.set_float32_matmul_precision("medium")``.
    Processors without instructions for bfloat16 compute as ever.
    """
    return matmul_precision() == "bf16"


def _contraction(module: Any) -> _Setting:
    """By which order torch.einsum contracts more than two tensors.

    Its flags are attributes of ``torch.backends.opt_einsum`` where a program has assigned them, and of the module below
    where it has called ``flags``. To read them as attributes takes 600 ns.
    """
    own, below = vars(module), vars(module.m)
    names = ("enabled", "strategy")

    def write(values: tuple[Any, ...]) -> None:
        for name, value in zip(names, values, strict=True):
            (own if name in own else below)[name] = value

    return _Setting(lambda: tuple([own[name] if name in own else below[name] for name in names]), write)


_opt_einsum = find("backends.opt_einsum")

CHOOSES_ORDER: bool = _opt_einsum.is_available()
"""Whether a package chooses the order in which torch.einsum contracts more than two tensors."""

_COMMON = (
    *((_contraction(_opt_einsum),) if CHOOSES_ORDER else ()),
    _Setting(torch.get_default_dtype, torch.set_default_dtype),
    _Setting(deterministic, lambda value: set_deterministic(value, warn_only=deterministic_warns())),
    _attention("flash"),
    _attention("mem_efficient"),
    _attention("math"),
    _flag("math_sdp_allow_fp16_bf16_reduction"),
)
_OF_CPU = (
    *_COMMON,
    _Setting(torch.get_num_threads, torch.set_num_threads),
    _Setting(_flushes, torch.set_flush_denormal),
    _precision("mkldnn", "matmul"),
    _precision("mkldnn", "conv"),
    _precision("mkldnn", "rnn"),
    _flag("mkldnn_enabled"),
    _flag("mkldnn_deterministic"),
    _flag("nnpack_enabled"),
    _flag("cpu_allow_fp16_reduced_precision_reduction"),
)
_priorities = find("_C._get_sdp_priority_order")
_set_priorities = find("_C._set_sdp_priority_order")
_OF_OTHERS = (
    *_COMMON,
    _attention("cudnn"),
    _precision("cuda", "matmul"),
    _precision("cuda", "conv"),
    _precision("cuda", "rnn"),
    _flag("cudnn_enabled"),
    _flag("cudnn_deterministic"),
    _flag("cudnn_benchmark"),
    _pair("cublas_allow_fp16_reduced_precision_reduction"),
    _pair("cublas_allow_bf16_reduced_precision_reduction"),
    _flag("cublas_allow_fp16_accumulation"),
    _Setting(lambda: tuple(_priorities()), lambda value: _set_priorities(list(value))),  # of kernels for attention
)
READERS = {"cpu": tuple(each.read for each in _OF_CPU), "": tuple(each.read for each in _OF_OTHERS)}
"""The functions that return the settings for results on a CPU, and for results on any other device."""

_known: dict[Settings, Settings] = {}
_latest: dict[str, Settings] = {}


def settings(device_type: str) -> Settings:
    """The settings now, for results on that type of device. Equal ones are the same object.

    Torch's private getters take 30 to 500 ns each, its public properties 1.5 us.
    """
    readers = READERS["cpu" if device_type == "cpu" else ""]
    latest = _latest.get(device_type)
    now = tuple([read() for read in readers])
    if now == latest:
        return latest
    _latest[device_type] = known = _known.setdefault(now, now)
    return known


@contextmanager
def under(wanted: Settings, device_type: str) -> Iterator[None]:
    """Inside, the settings for that type of device are these; afterwards they are what they were."""
    table = _OF_CPU if device_type == "cpu" else _OF_OTHERS
    before = settings(device_type)
    kept: list[Callable[[], object]] = []
    try:
        for setting, value in _differing(table, before, wanted):
            if setting.keep is not None:
                kept.append(setting.keep())
            setting.write(value)
        yield
    finally:
        for put_back in kept:
            put_back()
        for setting, value in _differing(table, settings(device_type), before):
            setting.write(value)


def _differing(table: tuple[_Setting, ...], now: Settings, wanted: Settings) -> list[tuple[_Setting, object]]:
    return [(each, value) for each, old, value in zip(table, now, wanted, strict=True) if old != value]
