"""Numbers of a sample, on CUDA."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from backstash.ops.bits import bits_of
from backstash.ops.triton.launching import launch


@triton.jit
def sample_numbers_kernel(x_ptr, numbers_ptr, numel, run, step: tl.int64, BLOCK: tl.constexpr):
    """Stores the four numbers of a sample of up to ``BLOCK`` elements. ``x_ptr`` points to integers."""
    lane = tl.arange(0, BLOCK)
    valid = lane < numel
    first = tl.load(x_ptr).to(tl.int64)
    x = tl.load(x_ptr + (lane // run) * step + lane % run, mask=valid, other=0).to(tl.int64)
    least = tl.min(tl.where(valid, x, first))
    most = tl.max(tl.where(valid, x, first))
    between = valid & (x != least) & (x != most)
    tl.store(numbers_ptr, tl.sum((valid & (x != 0)).to(tl.int64)))
    tl.store(numbers_ptr + 1, tl.sum(between.to(tl.int64)))
    tl.store(numbers_ptr + 2, least)
    tl.store(numbers_ptr + 3, most)


def sample_numbers(x: Tensor, runs: int, run: int, step: int) -> Tensor:
    if not runs * run:
        return x.new_zeros(4, dtype=torch.int64)
    numbers = x.new_empty(4, dtype=torch.int64)
    block = triton.next_power_of_2(runs * run)
    launch(sample_numbers_kernel, 1, bits_of(x), numbers, runs * run, run, step, BLOCK=block)
    return numbers
