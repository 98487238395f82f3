"""Gradients of every differentiable op in torch's own database, and of every module, are bit-equal on a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from gradient_checks import Everything, differences
from test_op_db import MODULES, Forward, gradients, module_forwards, op_forwards
from torch.testing._internal import common_utils
from torch.testing._internal.common_methods_invocations import op_db

from backstash import Policy, Session, policies

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")

SAMPLES = 6
"""How many samples of each op and module are tested."""

POLICIES: dict[str, Callable[[], Policy]] = {
    "lossless": policies.lossless,
    "everything": Everything,
    "cdma": policies.cdma,
}

OPS = [op for op in op_db if op.supports_autograd and torch.float32 in op.supported_backward_dtypes("cuda")]


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where torch has a kernel that computes the same twice, it is used."""
    monkeypatch.setattr(common_utils, "extract_test_fn", lambda: None)
    monkeypatch.setitem(os.environ, "CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def check(name: str, forwards: Iterable[Forward]) -> int:
    """Compares gradients, and returns how often: what plain PyTorch computes differently a second time is left out."""
    compared = 0
    for number, forward in enumerate(forwards):
        for drop in (True, False):
            try:
                expected = gradients(forward, None, drop)
            except RuntimeError:  # some samples have no derivative
                continue
            for policy, make in POLICIES.items():
                got = gradients(forward, Session(make(), min_nbytes=0), drop)
                found = differences(expected, got)
                if found and any(differences(expected, gradients(forward, None, drop)) for _ in range(8)):
                    continue  # atomic additions come in another order each time
                assert not found, f"{name}, sample {number}, {policy}, inputs {'dropped' if drop else 'held'}"
                compared += 1
    return compared


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS, ids=[op.formatted_name for op in OPS])
def test_op_on_a_gpu(op: Any) -> None:
    check(op.formatted_name, op_forwards(op, SAMPLES, "cuda"))


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("info", MODULES, ids=[info.name for info in MODULES])
def test_module_on_a_gpu(info: Any) -> None:
    check(info.name, list(module_forwards(info, True, "cuda"))[:SAMPLES])


def test_the_comparison_compares() -> None:
    """On the CPU, so that it is tested everywhere: an op, and a module."""
    relu = next(op for op in op_db if op.formatted_name == "nn_functional_relu")
    linear = next(info for info in MODULES if info.name == "nn.Linear")
    assert check("relu", op_forwards(relu, 2)) == 12
    assert check("linear", list(module_forwards(linear, True))[:2]) == 12
