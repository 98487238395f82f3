"""The torch functions that can be called once more to make their result again, and what such a call remembers.

There are two classes. The *cheap* functions (:data:`CHEAP`) take no more than a few passes over memory, so every policy
that recomputes may repeat them. The *repeatable* functions (:func:`is_repeatable`) are all others whose result depends
on their arguments alone: convolutions, products of matrices, attention, embeddings, poolings, copies. Only an action
that asks for any producer repeats these (:class:`backstash.policies.base.Recompute`), because of what they cost.

A function is left out if it draws random numbers that nobody noted, changes its arguments or a state elsewhere, or
returns memory that it has not filled. What is left is still proven on first use (Note: [proven recipes]).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import get_overridable_functions

from backstash import accelerator, graphs
from backstash.saved import PLAIN

# fmt: off
_METHODS = (
    "add", "sub", "mul", "div", "neg", "pow", "square", "sqrt", "rsqrt", "exp", "tanh", "sigmoid", "relu", "softmax",
    "clamp", "where", "to", "float", "half", "bfloat16", "double", "type_as", "contiguous", "clone", "__rsub__",
)
_IN_PLACE_METHODS = ("add_", "sub_", "mul_", "div_", "neg_", "tanh_", "sigmoid_", "relu_", "clamp_", "masked_fill_")
_TORCH = (
    "add", "sub", "mul", "div", "neg", "pow", "square", "sqrt", "rsqrt", "exp", "tanh", "sigmoid", "relu", "relu_",
    "softmax", "clamp", "where", "cat", "stack", "rms_norm", "layer_norm", "group_norm",
)
_FUNCTIONAL = (
    "batch_norm", "layer_norm", "rms_norm", "group_norm", "relu", "relu6", "hardtanh", "leaky_relu", "elu", "selu",
    "celu", "gelu", "silu", "mish", "softplus", "hardswish", "hardsigmoid", "softmax", "tanh", "sigmoid", "dropout",
    "dropout1d", "dropout2d", "dropout3d", "alpha_dropout",
)
# fmt: on


def _functions() -> Iterator[tuple[Any, str]]:
    for space, names in ((Tensor, (*_METHODS, *_IN_PLACE_METHODS)), (torch, _TORCH), (F, _FUNCTIONAL)):
        for name in names:
            yield getattr(space, name), name.strip("_")


CHEAP: dict[Any, str] = dict(_functions())
"""Functions whose result costs no more than a few passes over memory, with their names."""

IN_PLACE = frozenset(getattr(Tensor, name) for name in _IN_PLACE_METHODS) | {torch.relu_}
"""The cheap functions that work in place."""

_DROPOUTS = frozenset(name for name in _FUNCTIONAL if "dropout" in name) | {"feature_dropout", "feature_alpha_dropout"}
_NOISE = frozenset({"rand_like", "randn_like", "bernoulli"})
_RECURRENT = frozenset({"gru", "lstm", "rnn_relu", "rnn_tanh"})

# fmt: off
_ARITHMETIC = frozenset({
    "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__div__", "__rdiv__", "__truediv__",
    "__floordiv__", "__rfloordiv__", "__mod__", "__rmod__", "__pow__", "__rpow__", "__matmul__", "__rmatmul__",
    "__getitem__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__and__", "__or__", "__xor__",
    "__invert__",
})
_UNREPEATABLE = frozenset({
    # They draw numbers, or choose a starting point by them.
    "binomial", "fractional_max_pool2d", "fractional_max_pool3d", "fractional_max_pool2d_with_indices",
    "fractional_max_pool3d_with_indices", "gumbel_softmax", "lobpcg", "multinomial", "native_dropout", "pca_lowrank",
    "poisson", "rrelu", "svd_lowrank",
    # They read or change more than their arguments show.
    "autocast", "backward", "batch_norm", "detach", "embedding_bag", "instance_norm", "miopen_batch_norm",
    "miopen_rnn", "module_load", "multi_head_attention_forward", "native_batch_norm", "pin_memory",
    "triplet_margin_with_distance_loss",
    # Nobody has filled their result, or all of what they save inside.
    "ctc_loss", "empty_like", "new_empty", "new_empty_strided", "resize", "resize_as",
})
# fmt: on
_UNREPEATABLE_PARTS = ("fake_quant", "quantize", "moving_avg", "batch_norm_", "sparse", "storage", "fbgemm")


_FACTORIES = (torch.arange, torch.eye, torch.full, torch.linspace, torch.ones, torch.zeros)


@functools.lru_cache(maxsize=4096)
def is_repeatable(function: Callable[..., Any]) -> bool:
    """Whether the result of a torch function depends on its arguments alone, whatever it costs."""
    if function in CHEAP:
        return True
    name = getattr(function, "__name__", "")
    if function not in _overridable() or (name.startswith("_") and name not in _ARITHMETIC):
        return False
    if name.endswith("_") and not name.endswith("__"):
        return False  # it works in place
    if function is F.instance_norm:
        return True  # if it keeps no statistics, which a call of it tells
    return name not in _UNREPEATABLE and not any(part in name for part in _UNREPEATABLE_PARTS)


@functools.lru_cache(maxsize=4096)
def is_repeatable_operation(operation: Any) -> bool:
    """Whether the result of an ATen operation depends on its arguments alone, and is memory of its own."""
    schema, name = operation._schema, operation.__name__
    if operation.namespace != "aten" or schema.is_mutable or torch.Tag.nondeterministic_seeded in operation.tags:
        return False
    if any(result.alias_info is not None for result in schema.returns):
        return False
    return not any(part in name for part in (*_UNREPEATABLE_PARTS, "empty", "resize", "batch_norm", "bernoulli"))


def function_name(function: Callable[..., Any]) -> str:
    """The name under which reports show a function."""
    known = CHEAP.get(function)
    return known if known is not None else str(getattr(function, "__name__", function)).strip("_")


def draws(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a call draws from the generator of its first argument's device."""
    if not may_draw(function):
        return False
    name = function_name(function)
    if name in _DROPOUTS or name in _NOISE:
        return True
    if name == "scaled_dot_product_attention":
        probability = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
        return type(probability) is not float or probability != 0.0
    return name in _RECURRENT and any(isinstance(arg, float) and arg > 0 for arg in args)  # dropout between layers


@functools.lru_cache(maxsize=4096)
def may_draw(function: Callable[..., Any]) -> bool:
    """Whether any call of a function draws: most never do, which is asked of every call."""
    name = function_name(function)
    return name in _DROPOUTS or name in _NOISE or name in _RECURRENT or name == "scaled_dot_product_attention"


def random_state(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor | None:
    """What has to be noted before ``function`` runs: the generator's state, where it will draw from it."""
    if not draws(function, args, kwargs):
        return None
    given = args[0] if args else kwargs.get("query", kwargs.get("input"))
    if given is None or type(given) not in PLAIN or graphs.capture() is not None:
        return None
    return accelerator.rng_state(given.device)


def may_change_state(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether this call of a repeatable function changes one of its arguments.

    An embedding does that if it limits norms, and an instance norm if it keeps statistics.
    """
    if function is F.instance_norm:
        return any(
            kwargs.get(name, args[at] if len(args) > at else None) is not None
            for at, name in ((1, "running_mean"), (2, "running_var"))
        )
    return (
        function_name(function) == "embedding"
        and kwargs.get("max_norm", args[3] if len(args) > 3 else None) is not None
    )


def list_functions() -> None:
    """Lists now the functions that may be called once more, which torch takes a while for."""
    _overridable()


@functools.cache
def _overridable() -> frozenset[Callable[..., Any]]:
    """Functions that a mode sees and whose arguments are all that a program gives them."""
    spaces = {torch, Tensor, F, torch.linalg, torch.fft, torch.special, torch.functional}
    found: set[Callable[..., Any]] = {torch.rand_like, torch.randn_like, torch.bernoulli, *_FACTORIES}
    for space, functions in get_overridable_functions().items():
        if space in spaces:
            found |= set(functions)
    return frozenset(found)
