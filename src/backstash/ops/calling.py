"""Kernels as codecs call them: at once, or through torch's dispatcher where somebody listens to it.

An operation that is written in Python takes torch's dispatcher 10 us and more, which is as long as many a kernel. What
the dispatcher adds are fakes for a tensor without data, a node in a graph that is being traced, and a line in a
profile. So where there is none of these the function behind the op is called, with the same checks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from backstash.ops.registration import behind
from backstash.torch_internals import (
    count_dispatch_modes,
    functorch_level,
    is_dynamo_compiling,
    is_jit_tracing,
    profiler_runs,
)


def _is_heard(x: Tensor) -> bool:
    """Whether somebody has to hear of an operation on ``x``, or it has no data to compute with."""
    return (
        is_dynamo_compiling()  # first: what follows is not for Dynamo
        or type(x) is not Tensor
        or x.is_meta
        or count_dispatch_modes() > 0
        or profiler_runs()
        or functorch_level() is not None
        or is_jit_tracing()
    )


class Ops:
    """``torch.ops.backstash``, whose functions spare an operation that nobody hears of the dispatcher."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        op, function = getattr(torch.ops.backstash, name), behind(name)

        def call(x: Tensor, *rest: Any) -> Any:
            return op(x, *rest) if _is_heard(x) else function(x, *rest)

        setattr(self, name, call)  # found at once from now on
        return call


ops = Ops()
