"""Memory for a value that is remade and then held by itself, and not by the pool."""

from __future__ import annotations

import pytest
import torch

from backstash.saved import TensorSpec
from backstash.stash.buffers import held_nbytes, new_memory


@pytest.mark.parametrize("shape", [(0,), (3, 5), (1, 64, 128, 129), (4, 8, 256, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels_last", [False, True])
def test_it_has_the_layout_of_the_value_and_no_more_bytes(
    shape: tuple[int, ...], dtype: torch.dtype, channels_last: bool
) -> None:
    x = torch.ones(shape, dtype=dtype)
    if channels_last and x.dim() == 4:
        x = x.to(memory_format=torch.channels_last)
    before = held_nbytes()
    memory = new_memory(TensorSpec.of(x))
    memory.copy_(x)
    assert TensorSpec.of(memory) == TensorSpec.of(x)
    assert torch.equal(memory, x)
    assert memory.untyped_storage().nbytes() == x.untyped_storage().nbytes()
    assert held_nbytes() == before
