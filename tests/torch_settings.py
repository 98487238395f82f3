"""Settings of torch that are others inside a with, and afterwards what they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


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
