"""Settings of torch that are others inside a with, and afterwards what they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


@contextmanager
def setting(get: Callable[[], Any], put: Callable[[Any], Any], value: Any) -> Iterator[None]:
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """``torch.set_float32_matmul_precision``, which leaves the newer settings changed when it is set back."""
    matmuls = torch.backends.mkldnn.matmul, torch.backends.cuda.matmul
    legacy, newer = torch.get_float32_matmul_precision(), [matmul.fp32_precision for matmul in matmuls]
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(legacy)
        for matmul, value in zip(matmuls, newer, strict=True):
            matmul.fp32_precision = value


def flushed() -> AbstractContextManager[Any]:
    return setting(lambda: False, torch.set_flush_denormal, True)


def deterministic() -> AbstractContextManager[Any]:
    put = partial(torch.use_deterministic_algorithms, warn_only=True)
    return setting(torch.are_deterministic_algorithms_enabled, put, True)


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "math attention": lambda: sdpa_kernel(SDPBackend.MATH),
    "flash attention": lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION),
    "default dtype": lambda: setting(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "flushed": flushed,
    "precision": lambda: matmul_precision("medium"),
    "no oneDNN": lambda: setting(torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled, False),
    "deterministic": deterministic,
    "threads": lambda: setting(torch.get_num_threads, torch.set_num_threads, 2),
}

OPT_EINSUM = """
import sys, types

def contract_path(equation, *operands, optimize):
    return [(1, 2), (0, 1)] if optimize == "auto" else [(0, 2), (0, 1)], None

sys.modules["opt_einsum"] = types.SimpleNamespace(contract_path=contract_path)
"""
"""The beginning of a program for which the package of that name is installed: another one stands for it."""
