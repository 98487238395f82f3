"""Values that a backward graph computes again or decodes: each waits for the gradient before its reader."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from backstash.integrations.compile import waiting

after = torch.ops.backstash_graph.after.default


def step(saved: Tensor, other: Tensor, small: Tensor, tangents_1: Tensor) -> list[Tensor]:
    first = tangents_1 @ torch.relu(saved)  # computed before any product: it need not wait
    second = first @ torch.tanh(other)
    return [second @ torch.cos(saved), second * small.sin()]


def test_what_is_read_after_a_product_waits_for_it_and_results_are_the_same() -> None:
    inputs = torch.randn(128, 128), torch.randn(128, 128), torch.randn(128), torch.randn(128, 128)
    module = make_fx(step, tracing_mode="fake")(*inputs)
    expected = step(*inputs)
    assert waiting.wait_for_gradients(module.graph) == 2
    module.graph.lint()
    module.recompile()
    assert all(map(torch.equal, module(*inputs), expected))
    products = module.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    views = module.graph.find_nodes(op="call_function", target=after)
    read = [(view.args[0].name, view.args[1]) for view in views]
    assert read == [("other_1", products[0]), ("saved_1", products[1])]


def test_a_view_shares_the_memory_of_what_waits() -> None:
    x, gradient = torch.randn(4, 6).t(), torch.randn(3)
    view = torch.ops.backstash_graph.after(x, gradient)
    assert view.data_ptr() == x.data_ptr()
    assert (view.shape, view.stride()) == (x.shape, x.stride())
