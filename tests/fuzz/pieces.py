"""Functions and modules of rendered programs. A standalone program contains the source of those that it names."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

DECLARATIONS = {
    "linear": "linear = nn.Linear({W}, {W})",
    "head": "head = nn.Linear({W}, {W})",
    "frozen": "frozen = nn.Linear({W}, {W}).requires_grad_(False)",
    "conv": "conv = nn.Conv2d({C}, {C}, 3, padding=1)",
    "norm": "norm = nn.BatchNorm2d({C})",
    "layer_norm": "layer_norm = nn.LayerNorm({W})",
    "group_norm": "group_norm = nn.GroupNorm(2, {C})",
    "statistics": "statistics = Statistics({C})",
    "scale": "scale = nn.Parameter(torch.rand({C}, 1, 1) + 0.5)",
    "block": "block = nn.Sequential(nn.Linear({W}, {W}), nn.ReLU())",
    "dropping": "dropping = nn.Dropout(0.3)",
    "leaky": "leaky = nn.LeakyReLU(0.1)",
}
"""Layers and parameters that a program may name, and how to make them."""


class Interrupted(Exception):  # noqa: N818
    """Ends a training step in the middle of its forward pass; the program goes on with the next step."""


class Statistics(torch.nn.Module):
    """Running buffers that the forward pass reads and updates."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(channels, 1, 1))
        self.register_buffer("factor", torch.ones(channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) * self.factor


class Cube(torch.autograd.Function):
    """The third power, with two saved tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        square = x * x
        ctx.save_for_backward(x, square)
        return x * square

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, square = ctx.saved_tensors
        return gradient * square * 3 + 0 * x


class Overwrites(torch.autograd.Function):
    """The square, whose backward computes in the memory of what it saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        # Detached: else plain torch rebinds the program's own tensor in grad mode, which no hook hands out.
        return x.detach().mul_(2).mul_(gradient)


class KeepsGradient(torch.autograd.Function):
    """Passes on a gradient of which it keeps a view."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: list[Any]) -> Tensor:
        ctx.kept = kept
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient * 2.0
        ctx.kept.append(gradient.view(-1))
        return gradient, None


class FromNumpy(torch.autograd.Function):
    """Passes on a gradient whose memory is a numpy array, which it keeps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: list[Any]) -> Tensor:
        ctx.kept = kept
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        array = gradient.detach().float().numpy() * 2
        ctx.kept.append(array)
        return torch.from_numpy(array), None


class Wrapped(Tensor):
    """A tensor that holds another one and runs every op on it."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, held.size(), held.stride(), dtype=held.dtype)

    def __init__(self, held: Tensor) -> None:
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Wrapped, lambda wrapped: wrapped.held, (args, kwargs or {}))
        return tree_map_only(Tensor, cls, cls.compute(func, args, kwargs))

    @classmethod
    def compute(cls, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)


class Doubled(Wrapped):
    """Computes matrix products in double precision."""

    @classmethod
    def compute(cls, func: Any, args: Any, kwargs: Any) -> Any:
        if func is torch.ops.aten.mm.default:
            return torch.mm(args[0].double(), args[1].double()).to(args[0].dtype)
        return func(*args, **kwargs)


class Wrap(torch.autograd.Function):
    """Turns a tensor into a Wrapped one, whose gradient is Wrapped too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: type[Wrapped]) -> Tensor:
        return kind(x.detach())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Counting(Tensor):
    """A subclass that sees every torch function and changes nothing."""

    calls = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls += 1
        return super().__torch_function__(func, types, args, kwargs or {})


class Box:
    """No tensor, but torch functions of it are functions of the tensor inside."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Box, lambda box: box.read(), (args, kwargs or {}))
        return func(*args, **kwargs)

    def read(self) -> Tensor:
        return self.tensor


class HalfBox(Box):
    """Torch functions of it are functions of half of the tensor inside."""

    def read(self) -> Tensor:
        return self.tensor * 0.5


class QuietBox(Box):
    """Its torch functions are seen by no mode."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return super().__torch_function__(func, types, args, kwargs)


class DispatchMode(TorchDispatchMode):
    """A mode that sees every op and changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class DoublingMode(TorchDispatchMode):
    """A mode that computes matrix products in double precision."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            return func(args[0].double(), args[1].double()).to(args[0].dtype)
        return func(*args, **(kwargs or {}))


class FunctionMode(TorchFunctionMode):
    """A mode that sees every torch function and changes nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Settings:
    """Settings of the process, which are others inside if ``differ``."""

    def __init__(self, differ: bool) -> None:
        self.differ = differ
        self.before: Any = None

    def __enter__(self) -> None:
        self.before = torch._C._get_mkldnn_enabled(), torch.are_deterministic_algorithms_enabled()
        if self.differ:
            torch._C._set_mkldnn_enabled(not self.before[0])
            torch.use_deterministic_algorithms(not self.before[1], warn_only=True)

    def __exit__(self, *error: object) -> None:
        torch._C._set_mkldnn_enabled(self.before[0])
        torch.use_deterministic_algorithms(self.before[1], warn_only=True)


def doubled(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Each gradient times two."""
    return tuple(None if gradient is None else gradient * 2 for gradient in gradients)


def derivative(value: Tensor, x: Tensor) -> Tensor:
    """The gradient of a value's sum by ``x``, with a graph of its own; zeros where it does not depend on ``x``."""
    if not (value.requires_grad and torch.is_grad_enabled()):
        return torch.zeros_like(x)
    (found,) = torch.autograd.grad(value.sum(), [x], create_graph=True, allow_unused=True)
    return torch.zeros_like(x) if found is None else found


def hessian_product(loss: Tensor, x: Tensor, retain: bool) -> tuple[Tensor | None, ...]:
    """The product of a loss's second derivatives by ``x`` with a vector of ones."""
    slope = derivative(loss, x)
    if not slope.requires_grad:
        return ()
    return torch.autograd.grad(slope, [x], torch.ones_like(slope), retain_graph=retain, allow_unused=True)


def updated_loss(loss: Tensor, x: Tensor, layer: torch.nn.Module) -> Tensor:
    """A loss, and what a layer makes of ``x`` after an update of its weights that is itself differentiated."""
    weights = dict(layer.named_parameters())
    slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True, allow_unused=True)
    updated = {
        name: weight if slope is None else weight - 0.1 * slope
        for (name, weight), slope in zip(weights.items(), slopes, strict=True)
    }
    return loss + torch.func.functional_call(layer, updated, (x,)).square().mean()


def storages(gradients: tuple[Tensor | None, ...]) -> list[torch.UntypedStorage]:
    """The storages of the gradients that are there."""
    return [gradient.untyped_storage() for gradient in gradients if gradient is not None]


def accumulating_node(parameter: Tensor) -> Any:
    """The node that adds to the parameter's gradient."""
    return parameter.view_as(parameter).grad_fn.next_functions[0][0]


def in_thread(function: Callable[[], Any]) -> None:
    """Call the function on another thread, and raise here what it raises there."""
    errors: list[BaseException] = []

    def call() -> None:
        torch.get_num_threads()  # or a convolution on a new thread would use all of them until another op has run
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    if errors:
        raise errors.pop()


def snapshot(value: Any) -> Any:
    """Type, layout and bytes of a tensor, a storage or an array as they are now."""
    value = getattr(value, "held", value)
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, torch.UntypedStorage):
        return "storage", torch.empty(0, dtype=torch.uint8).set_(value).numpy().tobytes()
    if not isinstance(value, Tensor):
        return repr(value)
    plain = value.detach().as_subclass(Tensor)
    data = plain.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    gradient = snapshot(value.grad) if value.retains_grad else None
    return str(plain.dtype), tuple(plain.shape), plain.stride(), data, gradient


def attempt(program: Any, session: Any) -> tuple[list[Any], str]:
    """What a program saw, and the error with which it ended."""
    seen: list[Any] = []
    try:
        program(session, seen)
    except Exception as error:
        return seen, f"{type(error).__name__}: {error}"
    return seen, ""
