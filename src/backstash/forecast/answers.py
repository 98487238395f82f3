"""Results that depend on numbers, where tensors have none: every number is taken to be 1, and every mask to be true."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from backstash.forecast.works import each_tensor
from backstash.torch_internals import tree_map_only, unseen_by_modes, with_numbers

READS: frozenset[Any] = frozenset({Tensor.numpy, Tensor.__array__, Tensor.tolist, Tensor.__format__})
"""Methods that hand out all numbers of a tensor."""

_MASKS = (torch.bool, torch.uint8)

# fmt: off
_PASS_ON = frozenset({
    "add", "all", "amax", "any", "bitwise_and", "bitwise_or", "cat", "clone", "detach", "expand", "logical_and",
    "logical_or", "max", "maximum", "mul", "reshape", "select", "squeeze", "stack", "sum", "_to_copy", "unsqueeze",
    "view",
})
# fmt: on
"""Operations that give zero, or false, where all that they are given is that."""


class KnownNumbers:
    """What numbers are that are not simply 1.

    Single integers are computed as a program computes them from others: ``data[i : i + 64]`` has 64 rows. No number is
    infinite or NaN, so what a program or a gradient scaler finds out about that is false.
    """

    def __init__(self) -> None:
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()  # the number in each element

    def of(self, x: Tensor) -> int:
        """The number in each element of a tensor."""
        return int(self._known.get(x, 1))

    def computed(self, operation: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """As :func:`computed`, which it calls; where all tensors are single integers, the result is noted as one."""
        given = list(each_tensor((tuple(args), tuple(kwargs.values()))))
        if not given or not all(map(_is_integer, given)):
            is_zero = _asks_for_infinity(name, args) or (
                name in _PASS_ON and bool(given) and all(self._known.get(each) == 0 for each in given)
            )
            result = computed(operation, name, args, kwargs)
            written = (args[1], result) if name == "_amp_foreach_non_finite_check_and_unscale_" else (result,)
            for each in each_tensor(written):
                self._known.pop(each, None)  # it may have been written to
                if is_zero:
                    self._known[each] = 0
            return result
        numbers, named = tree_map_only(Tensor, self._real, (tuple(args), dict(kwargs)))  # as they are before it
        result = computed(operation, name, args, kwargs)
        if isinstance(result, Tensor) and _is_integer(result):
            with suppress(RuntimeError):  # as of a division by zero
                self._known[result] = unseen_by_modes(lambda: operation(*numbers, **named).item())
        return result

    def item(self, x: Tensor) -> Any:
        """The number in a tensor of one element, where that is not simply 1; else None."""
        known = with_numbers(x)
        if known is not None:
            return unseen_by_modes(known.item)
        number = self._known.get(x)
        return None if number is None else unseen_by_modes(lambda: torch.tensor(number, dtype=x.dtype).item())

    def read(self, function: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """What one of READS returns for a tensor without numbers; of another, its numbers."""
        if with_numbers(x) is x:
            return function(x, *args, **kwargs)
        return unseen_by_modes(lambda: function(self._real(x), *args, **kwargs))

    def _real(self, x: Tensor) -> Tensor:
        """A copy of a tensor, with numbers where it has none."""
        known = with_numbers(x)
        if known is not None:
            return unseen_by_modes(known.clone)
        return unseen_by_modes(lambda: torch.full(x.shape, self.of(x), dtype=x.dtype, requires_grad=x.requires_grad))


class RealNumbers(KnownNumbers):
    """What numbers are where tensors have them."""

    def computed(self, operation: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The result of an ATen operation."""
        return operation(*args, **kwargs)

    def read(self, function: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """What one of READS returns."""
        return function(x, *args, **kwargs)


def _asks_for_infinity(name: str, args: Sequence[Any]) -> bool:
    """Whether an operation tells what is infinite or NaN, which is nothing."""
    if name in ("isnan", "isinf", "isposinf", "isneginf", "_amp_foreach_non_finite_check_and_unscale_"):
        return True
    if name == "ne":
        return args[0] is args[1]
    return name == "eq" and isinstance(args[1], float) and math.isinf(args[1])


def _is_integer(x: Tensor) -> bool:
    return not x.dim() and not (x.dtype.is_floating_point or x.dtype.is_complex or x.dtype is torch.bool)


def selects(name: str, args: Sequence[Any]) -> bool:
    """Whether the shape of an ATen operation's result depends on numbers."""
    return name in _SELECTED or (name in _INDEXED and any(_is_mask(each) for each in args[1]))


def computed(operation: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of an ATen operation, whose masks are true, and other numbers 1 where its shape depends on them."""
    if name in _INDEXED:
        return operation(args[0], _everywhere(args[1]), *args[2:], **kwargs)
    selected = _SELECTED.get(name)
    return operation(*args, **kwargs) if selected is None else selected(*args, **kwargs)


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in _MASKS


def _everywhere(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Indices without masks: each has become the positions of all of its elements."""
    found: list[Tensor | None] = []
    for index in indices:
        if index is not None and _is_mask(index):
            found += [_numbers(index, index.numel()) for _ in index.shape]
        else:
            found.append(index)
    return found


def _numbers(x: Tensor, *shape: int) -> Tensor:
    return x.new_empty(shape, dtype=torch.int64)


def _nonzero(x: Tensor) -> Tensor:
    return _numbers(x, x.numel(), x.dim())


def _masked_select(x: Tensor, mask: Tensor) -> Tensor:
    return x.new_empty(torch.broadcast_shapes(x.shape, mask.shape).numel())


def _unique(x: Tensor, *, dim: int | None, has_inverse: bool, has_counts: bool) -> tuple[Tensor, Tensor, Tensor]:
    number = x.numel() if dim is None else x.shape[dim]
    inverse = x.shape if dim is None else (number,)
    return (
        x.new_empty(number if dim is None else x.shape),
        _numbers(x, *(inverse if has_inverse else (0,))),
        _numbers(x, number if has_counts else 0),
    )


def _unique_values(x: Tensor, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False) -> Any:
    return _unique(x, dim=None, has_inverse=return_inverse, has_counts=return_counts)


def _unique_rows(x: Tensor, dim: int, sorted: bool = True, inverse: bool = False, counts: bool = False) -> Any:
    return _unique(x, dim=dim, has_inverse=inverse, has_counts=counts)


def _unique_consecutive(x: Tensor, inverse: bool = False, counts: bool = False, dim: int | None = None) -> Any:
    return _unique(x, dim=dim, has_inverse=inverse, has_counts=counts)


def _bincount(x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    counted = _numbers(x, max(minlength, 2))
    return counted if weights is None else counted.to(torch.promote_types(weights.dtype, torch.float32))


def _repeat_interleave(repeats: Tensor, *, output_size: int | None = None) -> Tensor:
    return _numbers(repeats, repeats.numel() if output_size is None else output_size)


_INDEXED = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"})

_SELECTED: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "nonzero": _nonzero,
        "masked_select": _masked_select,
        "_unique2": _unique_values,
        "unique_dim": _unique_rows,
        "unique_consecutive": _unique_consecutive,
        "bincount": _bincount,
        "repeat_interleave": _repeat_interleave,
    }
)
