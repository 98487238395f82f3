"""Formulas that have the bits of the device's own kernels, what repeats itself, and the speed of each kernel of ours.

A value that is computed again by a kernel of ours has to get the bits that torch's kernel gave it. There are several
ways to round a norm; each is tried in every dtype and layout, and the elements are counted that differ. A product and a
sum are rounded once where the formula says ``fma``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from backstash.ops.norms.reference import fused as fma
from bench import kernels
from bench.gpu.parts import Run
from bench.rounds import Deadline, Effort, Summary, interleave, summarise
from bench.step_table import same_bits

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
REPEATS = 3
EPSILON = 1e-5
SECONDS = 45.0
"""For the speed of the kernels of one dtype."""


@dataclass(frozen=True)
class Bits:
    """Elements that have other bits than torch's kernel gives them.

    Attributes:
        numel: elements in all.
        differing: by formula, how many differ; for ``again`` from a second call of the kernel itself.
        kernel: the autograd node of the kernel.
    """

    numel: int
    differing: dict[str, int]
    kernel: str


def _normed(x: Tensor, mean: Tensor, rstd: Tensor, w: Tensor, b: Tensor) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Yields the formulas of a norm, in float32: x, its mean, one over its standard deviation, weight and bias."""
    scale = rstd * w
    yield "(x - mean) * rstd * w + b", lambda: (x - mean) * rstd * w + b
    yield "(x - mean) * (rstd * w) + b", lambda: (x - mean) * scale + b
    yield "fma((x - mean) * rstd, w, b)", lambda: _fma((x - mean) * rstd, w, b)
    yield "fma(x - mean, rstd * w, b)", lambda: _fma(x - mean, scale, b)
    yield "fma((x - mean) * w, rstd, b)", lambda: _fma((x - mean) * w, rstd, b)
    yield "x * (rstd * w) + (b - mean * (rstd * w))", lambda: x * scale + (b - mean * scale)
    yield "fma(x, rstd * w, b - mean * (rstd * w))", lambda: _fma(x, scale, b - mean * scale)
    yield "fma(x, rstd * w, fma(-mean, rstd * w, b))", lambda: _fma(x, scale, _fma(-mean, scale, b))
    yield "fma(fma(x, rstd, -mean * rstd), w, b)", lambda: _fma(_fma(x, rstd, -mean * rstd), w, b)


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return fma(*torch.broadcast_tensors(a, b, c))


def _count(own: Tensor, expected: Tensor) -> int:
    integers = {2: torch.int16, 4: torch.int32}[expected.element_size()]
    own = own.to(expected.dtype)
    return int((own.contiguous().view(integers) != expected.contiguous().view(integers)).sum())


def _images(run: Run, dtype: torch.dtype, layout: torch.memory_format, scale: int = 1) -> Tensor:
    shape = (2, 8, 9, 7) if run.small else (16, 64 * scale, 57, 55)
    x = torch.randn(shape, device=run.device.kind) * 3 + 1
    return x.to(dtype).contiguous(memory_format=layout)


def _weights(x: Tensor, channels: int) -> tuple[Tensor, Tensor]:
    return torch.randn(channels, device=x.device) + 1, torch.randn(channels, device=x.device)


def _saved(node: Any, names: tuple[str, ...]) -> Tensor:
    """Returns the statistics that a node has saved: nodes of different libraries call them differently."""
    for name in names:
        found = getattr(node, f"_saved_{name}", None)
        if isinstance(found, Tensor) and found.numel():
            return found
    raise LookupError(f"{node.name()} saves none of {', '.join(names)}")


def batch_norm(run: Run, dtype: torch.dtype, layout: torch.memory_format) -> Bits:
    """Compares the formulas of a batch norm with torch's kernel, which is cuDNN's where torch takes that one."""
    x = _images(run, dtype, layout).requires_grad_()
    w, b = (part.requires_grad_() for part in _weights(x, x.shape[1]))

    def call() -> Tensor:
        return functional.batch_norm(x, None, None, w, b, True, 0.1, EPSILON)

    y = call()
    node: Any = y.grad_fn
    mean, rstd = _saved(node, ("result1", "save_mean")), _saved(node, ("result2", "save_invstd", "save_var"))
    return _compared(y, call, x, mean[:, None, None], rstd[:, None, None], w[:, None, None], b[:, None, None])


def layer_norm(run: Run, dtype: torch.dtype) -> Bits:
    """Compares the formulas of a layer norm with ATen's kernel."""
    rows, width = (6, 40) if run.small else (4096, 1024)
    x = (torch.randn(rows, width, device=run.device.kind) * 3 + 1).to(dtype).requires_grad_()
    w, b = (part.to(dtype) for part in _weights(x, width))
    y, mean, rstd = torch.native_layer_norm(x, (width,), w, b, EPSILON)

    def call() -> Tensor:
        return torch.native_layer_norm(x, (width,), w, b, EPSILON)[0]

    return _compared(y, call, x, mean, rstd, w, b)


def group_norm(run: Run, dtype: torch.dtype, layout: torch.memory_format) -> Bits:
    """Compares the formulas of a group norm with ATen's kernel."""
    x = _images(run, dtype, layout).requires_grad_()
    n, channels, height, width = x.shape
    w, b = (part.to(dtype) for part in _weights(x, channels))
    groups = channels // 4

    def whole() -> tuple[Tensor, Tensor, Tensor]:
        found = torch.native_group_norm(x, w, b, n, channels, height * width, groups, EPSILON)
        return found[0], found[1], found[2]

    y, mean, rstd = whole()
    statistics = (part.repeat_interleave(channels // groups, 1)[:, :, None, None] for part in (mean, rstd))
    return _compared(y, lambda: whole()[0], x, *statistics, w[:, None, None], b[:, None, None])


def _compared(y: Tensor, call: Callable[[], Tensor], x: Tensor, *parts: Tensor) -> Bits:
    with torch.no_grad():
        differing = {"again": _count(call(), y)}
        formulas = _normed(x.float(), *(part.float() for part in parts))
        differing |= {name: _count(formula(), y) for name, formula in formulas}
    return Bits(y.numel(), differing, "" if y.grad_fn is None else y.grad_fn.name())


def pointwise(run: Run, dtype: torch.dtype) -> dict[str, Bits]:
    """Compares functions of low precision with the same functions in float32, rounded at the end."""
    x, y = (_images(run, dtype, torch.contiguous_format) for _ in range(2))
    functions: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "relu": lambda x, y: functional.relu(x),
        "gelu": lambda x, y: functional.gelu(x),
        "gelu, tanh": lambda x, y: functional.gelu(x, approximate="tanh"),
        "silu": lambda x, y: functional.silu(x),
        "silu * y": lambda x, y: functional.silu(x) * y,
        "sigmoid": lambda x, y: torch.sigmoid(x),
        "x + y": lambda x, y: x + y,
        "softmax": lambda x, y: functional.softmax(x, -1),
    }
    found = {}
    for name, function in functions.items():
        expected = function(x, y)
        again, wide = _count(function(x, y), expected), _count(function(x.float(), y.float()), expected)
        found[name] = Bits(expected.numel(), {"again": again, "in float32, rounded once": wide}, "")
    return found


# -- what repeats itself -----------------------------------------------------------------------------------------------

SETTINGS: Mapping[str, dict[str, bool]] = {
    "TF32 off, benchmark off": {"tf32": False, "benchmark": False},
    "TF32 on, benchmark off": {"tf32": True, "benchmark": False},
    "TF32 off, benchmark on": {"tf32": False, "benchmark": True},
    "TF32 on, benchmark on": {"tf32": True, "benchmark": True},
}


@contextmanager
def _set(tf32: bool, benchmark: bool) -> Iterator[None]:
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=benchmark, deterministic=False, allow_tf32=tf32):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)


def repeats(run: Run, dtype: torch.dtype) -> dict[str, dict[str, int]]:
    """Returns by setting and function how many of some repeats have other bits than the first call."""
    x = _images(run, dtype, torch.contiguous_format).requires_grad_()
    channels = x.shape[1]
    kernel = torch.randn(channels, channels, 3, 3, device=x.device, dtype=dtype, requires_grad=True)
    side = 32 if run.small else 1024
    a, b = (torch.randn(side, side, device=x.device, dtype=dtype) for _ in range(2))
    q = torch.randn(2, 4, side // 4, 32, device=x.device, dtype=dtype, requires_grad=True)

    def gradients(y: Tensor, *of: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(y.float().square().mean(), of)

    functions: dict[str, Callable[[], tuple[Tensor, ...]]] = {
        "convolution": lambda: (functional.conv2d(x, kernel, padding=1).detach(),),
        "convolution's gradients": lambda: gradients(functional.conv2d(x, kernel, padding=1), x, kernel),
        "matmul": lambda: (a @ b,),
        "attention": lambda: (functional.scaled_dot_product_attention(q, q, q, is_causal=True).detach(),),
        "attention's gradients": lambda: gradients(functional.scaled_dot_product_attention(q, q, q, is_causal=True), q),
    }
    found: dict[str, dict[str, int]] = {}
    for setting, options in SETTINGS.items():
        with _set(**options):
            found[setting] = {name: _other_bits(function) for name, function in functions.items()}
    return found


def _other_bits(function: Callable[[], tuple[Tensor, ...]]) -> int:
    first = function()
    return sum(not all(map(same_bits, function(), first)) for _ in range(REPEATS))


# -- speed -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Speed:
    """The speed of a kernel.

    Attributes:
        gb_per_second: 1e9 bytes read plus written, per second.
        share_of_copy: of the copy's speed in the same round.
    """

    gb_per_second: Summary
    share_of_copy: Summary


def speed(run: Run, tasks: dict[str, kernels.Task], calls: int) -> dict[str, Speed]:
    """Times all kernels in interleaved rounds, some calls between two waits."""
    for task in tasks.values():
        task.run()
    timers = {name: partial(run.device.seconds, task.run, calls) for name, task in tasks.items()}
    seconds = interleave(timers, Effort(run.rounds, Deadline.after(SECONDS)))
    speeds = {name: [tasks[name].nbytes / each / 1e9 for each in rows] for name, rows in seconds.items()}
    copies = speeds[kernels.COPY]
    return {
        name: Speed(summarise(own), summarise([one / copy for one, copy in zip(own, copies, strict=True)]))
        for name, own in speeds.items()
    }


def measure(run: Run) -> None:
    """Measures everything."""
    for name, dtype in DTYPES.items():
        for layout, form in LAYOUTS.items():
            run.part(f"bits/batch norm/{name}/{layout}", partial(batch_norm, run, dtype, form))
        run.part(f"bits/group norm/{name}/contiguous", partial(group_norm, run, dtype, torch.contiguous_format))
        run.part(f"bits/layer norm/{name}", partial(layer_norm, run, dtype))
        run.part(f"bits/pointwise/{name}", partial(pointwise, run, dtype))
        run.part(f"repeats/{name}", partial(repeats, run, dtype))
    nbytes, calls = (1 << 16, 1) if run.small else (128 << 20, 4)
    kind = run.device.kind
    for name in ("float32", "bfloat16"):
        tasks = partial(kernels.float_tasks, DTYPES[name], nbytes, 0.5, kind)
        run.part(f"speed/{name}", lambda tasks=tasks: speed(run, tasks(), calls))  # type: ignore[misc]
    run.part("speed/int64", lambda: speed(run, kernels.integer_tasks(nbytes * (32 if run.small else 1), kind), calls))
