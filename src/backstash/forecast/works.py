"""The work of a call of an ATen operation: bytes, arithmetic and kernels, read off its arguments alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from backstash.forecast.costs import Arithmetic, Work

aten: Any = torch.ops.aten

# fmt: off
FREE = frozenset({
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "lift_fresh", "device",
})
"""Operations that touch no number."""

FILLS = frozenset({
    "zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "zero_", "fill_", "new_zeros", "new_ones",
    "new_full", "arange", "scalar_tensor", "eye",
})
"""Operations that write and read nothing."""

KERNELS = {
    "convolution_backward": 3, "native_batch_norm_backward": 2, "native_layer_norm_backward": 2,
    "native_group_norm": 2, "native_group_norm_backward": 3, "embedding_dense_backward": 3, "nll_loss_backward": 2,
    "_scaled_dot_product_flash_attention_backward": 3, "_scaled_dot_product_efficient_attention_backward": 3,
}
# fmt: on
"""How many kernels an operation launches, where it is not one."""

PER_LAUNCH = 32
"""Tensors that one kernel of a ``_foreach_`` operation works on, about."""

PASSES = {"native_batch_norm": 1.5, "native_group_norm": 1.5, "_log_softmax": 1.5, "_softmax": 1.25}
"""How many times as many bytes cross the memory's bus as the arguments and results have: inputs that are read twice."""


def each_tensor(values: Any) -> Iterator[Tensor]:
    """Yields the tensors of arguments or results, also those in lists; not sparse or nested ones, without a shape."""
    if isinstance(values, Tensor):
        if values.layout is torch.strided and not values.is_nested:
            yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from each_tensor(value)


def aten_name(operation: Any) -> str:
    """Returns an operation's name without its namespace and overload."""
    return str(operation.__name__).partition(".")[0]


def makes_view(operation: Any) -> bool:
    """Whether an operation only looks at its argument's memory in another way."""
    returns = operation._schema.returns
    return bool(returns) and all(each.alias_info is not None and not each.alias_info.is_write for each in returns)


def is_attention(name: str) -> bool:
    """Whether an operation is attention, forward or backward, in one kernel or a few."""
    return name.startswith("_scaled_dot_product_")


def work_of(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Work:
    """Returns what a call asks of a card."""
    name = aten_name(operation)
    if name in FREE or makes_view(operation) or operation.namespace not in ("aten",):
        return Work()
    inputs = list(each_tensor((args, tuple(kwargs.values()))))
    outputs = list(each_tensor(result))
    if not inputs and not outputs:
        return Work()
    if name.startswith("_foreach_"):
        lists = [value for value in (*args, *kwargs.values()) if isinstance(value, (list, tuple)) and value]
        count = len(lists[0]) if lists else 1
        written = outputs or inputs[:count]
        return Work(_nbytes(inputs) + _nbytes(written), kernels=math.ceil(count / PER_LAUNCH))
    written = outputs if outputs else list(inputs[:1])
    read = [] if name in FILLS else inputs
    nbytes = int(_read(name, read, written) * PASSES.get(name, 1.0)) + _nbytes(written)
    flops = _flops(operation, name, args, kwargs, result)
    arithmetic: Arithmetic = "float32"
    aligned = True
    if flops:
        first = next((each for each in inputs if each.is_floating_point()), None)
        if first is not None and first.dtype in (torch.bfloat16, torch.float16):
            arithmetic = "half"
        elif "convolution" in name:
            arithmetic = "tf32"  # torch's default: convolutions may round, products of matrices may not
        if "convolution" not in name and not is_attention(name):
            matrices = [each for each in (*inputs, *outputs) if each.ndim > 1]
            aligned = all(each.shape[-1] * each.element_size() % 16 == 0 for each in matrices)
    return Work(nbytes, flops, arithmetic, KERNELS.get(name, 1), aligned)


def _nbytes(tensors: list[Tensor]) -> int:
    seen: dict[int, int] = {}
    for each in tensors:
        seen[id(each)] = _touched(each)
    return sum(seen.values())


def _touched(x: Tensor) -> int:
    """Returns the bytes of a tensor's memory, in which an expanded dimension counts once."""
    sizes = (size for size, stride in zip(x.shape, x.stride(), strict=True) if stride or size < 2)
    return math.prod(sizes) * x.element_size()


def _read(name: str, inputs: list[Tensor], outputs: list[Tensor]) -> int:
    if name in ("embedding", "index_select", "gather", "index", "nll_loss_forward"):  # of the table some rows alone
        return min(_nbytes(inputs), 2 * _nbytes(outputs) + _nbytes(inputs[1:]))
    if name == "nll_loss_backward":
        return _nbytes(inputs[2:])
    return _nbytes(inputs)


def _flops(operation: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    if is_attention(name):
        return _attention(operation, name, args, kwargs)
    formula: Callable[..., int] | None = flop_registry.get(operation._overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


def _attention(operation: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Returns what attention computes: two products forward, five backward; half of it where later words are hidden."""
    is_backward = "backward" in name
    query, key, value = args[1:4] if is_backward else args[:3]
    scores: int = math.prod(query.shape[:-1]) * key.shape[-2]
    products = (3 * query.shape[-1] + 2 * value.shape[-1]) if is_backward else query.shape[-1] + value.shape[-1]
    given = {argument.name: each for argument, each in zip(operation._schema.arguments, args, strict=False)} | kwargs
    flops: int = 2 * scores * products // (2 if given.get("is_causal") else 1)
    return flops
