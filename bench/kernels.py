"""Every kernel's speed as a share of the copy bandwidth: ``python -m bench.kernels [--device cpu] [--json FILE]``.

A round runs everything once: a copy, then each kernel on the same number of input bytes, each round beginning with
another one. A speed is bytes read plus written, every plane counted once, over seconds; a share is that speed over the
copy's of the same round, so that a busy neighbour slows both. All buffers have been touched before, are larger than the
caches, and on CPU lie in huge pages where the system gives them. csr works on 90 % zeros, whatever ``--zeros`` says,
because it is for such tensors. The exceptions are the encoders, which allocate their planes in every call, as they do
in training, and ``clone``, torch's own copy to new memory. ``zvc_encode, warm planes`` leaves the allocation out, to
tell the kernel from the page faults.

Two threads that wait for each other measure the scheduler where something else computes as well. So on Linux a round in
which other processes took more than a tenth of a core does not count and is run again, for as long as ``--seconds``
allows; the table says how many rounds were quiet.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backstash.codecs import Szp
from backstash.codecs.fewbit.table import TABLE
from backstash.codecs.minifloat.formats import FORMATS, SCALED
from backstash.ops import backends
from backstash.ops.backends import Kernels
from backstash.ops.cpu import library
from backstash.ops.layout import Activation, ComputedCurve, NormOrder
from backstash.saved import Test
from bench.results import Results
from bench.rounds import Deadline, Effort, Summary, interleave, spread, summarise, table

FORMAT = 1
"""Version of the JSON's layout."""

COPY = "copy"
"""The name of the task that the others are measured against."""

SPARSE = 0.9
"""The share of zeros for csr: below 0.89 zvc is smaller."""

GOAL = (
    *("bitmask_encode", "bitmask_decode", "zvc_encode", "zvc_encode, warm planes", "zvc_decode", "csr_decode"),
    *(
        f"{op}_{way}, {name}"
        for op in ("minifloat", "zvc_minifloat")
        for way in ("encode", "decode")
        for name in FORMATS
    ),
)
"""The kernels that should reach 60 % of the copy bandwidth."""


@dataclass(frozen=True)
class Task:
    """Something to time.

    Attributes:
        run: does it once.
        nbytes: bytes that it reads plus bytes that it writes.
    """

    run: Callable[[], object]
    nbytes: int


@dataclass(frozen=True)
class Row:
    """What was measured of one kernel.

    Attributes:
        kernel: its name.
        dtype: element type of its dense side.
        nbytes: bytes read plus written by one call.
        gb_per_second: 1e9 of these bytes per second.
        share_of_copy: of the copy's speed in the same round.
        seconds: of every round that counts.
        quiet: whether only rounds count in which no other process computed; False where there were fewer than three.
    """

    kernel: str
    dtype: str
    nbytes: int
    gb_per_second: Summary
    share_of_copy: Summary
    seconds: tuple[float, ...]
    quiet: bool


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints a table per dtype, writes the JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description="Measures every kernel.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--mib", type=int, default=128, help="size of the dense side (default: 128)")
    parser.add_argument("--zeros", type=float, default=0.5, help="share of zeros (default: 0.5)")
    parser.add_argument("--rounds", type=int, default=30, help="rounds to count (default: 30)")
    parser.add_argument("--seconds", type=float, default=60, help="to find so many quiet ones, per dtype (default: 60)")
    parser.add_argument("--json", type=Path, help="file to write")
    asked = parser.parse_args(arguments)
    if asked.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda was asked for; torch finds no CUDA device; use --device cpu")
    isa, sizes = _isa(asked.device), {"nbytes": asked.mib << 20, "zeros": asked.zeros}
    results = Results("bench.kernels", asked.json, arguments, format=FORMAT, device=asked.device, isa=isa, **sizes)
    print(f"instruction set {isa}", flush=True)
    print(f"{asked.mib} MiB, {asked.zeros:.0%} zeros, {asked.rounds} rounds: median [quartiles]")
    rows: list[Row] = []
    for dtype in (torch.float32, torch.bfloat16):
        tasks = float_tasks(dtype, asked.mib << 20, asked.zeros, asked.device)
        rows += _report(dtype, tasks, asked)
        del tasks
    rows += _report(torch.int64, integer_tasks(asked.mib << 20, asked.device), asked)
    results.write(rows=rows)
    return 0


def float_tasks(dtype: torch.dtype, nbytes: int, zeros: float, device: str) -> dict[str, Task]:
    """The copy and the kernels on floats, ``nbytes`` of them, by name."""
    ops, n = backends.serving(device), nbytes // dtype.itemsize
    x, out = _warm(n, dtype, device), _warm(n, dtype, device)
    generator = torch.Generator(device).manual_seed(0)
    x.normal_(generator=generator)
    x.masked_fill_(torch.rand(n, device=device, generator=generator) < zeros, 0)
    pair = torch.tensor([0.0, 2.0], dtype=dtype, device=device)
    two = torch.where(x != 0, pair[1], pair[0])
    mask, offsets, values = ops.zvc_encode(x)
    masked, stashed = nbytes + mask.nbytes, nbytes + mask.nbytes + offsets.nbytes + values.nbytes
    tasks = {
        COPY: Task(lambda: out.copy_(x), 2 * nbytes),
        "clone": Task(x.clone, 2 * nbytes),
        "bitmask_encode": Task(lambda: ops.bitmask_encode(x, Test.NOT_LE.code, 0.0, 0.0), masked),
        "bitmask_decode": Task(lambda: ops.bitmask_decode(mask, out, 1.0, 0.0), masked),
        "binary_encode": Task(lambda: ops.binary_encode(two, pair), masked),
        "binary_decode": Task(lambda: ops.binary_decode(mask, pair, out), masked),
        "zvc_encode": Task(lambda: ops.zvc_encode(x), stashed),
        "zvc_decode": Task(lambda: ops.zvc_decode(mask, offsets, values, out), stashed),
    }
    kept = (1 - SPARSE) / max(1 - zeros, 1 - SPARSE)
    sparse = x.masked_fill(torch.rand(n, device=device, generator=generator) >= kept, 0)
    columns, rows, packed = ops.csr_encode(sparse)
    thin = nbytes + columns.nbytes + rows.nbytes + packed.nbytes
    tasks["csr_encode"] = Task(lambda: ops.csr_encode(sparse), thin)
    tasks["csr_decode"] = Task(lambda: ops.csr_decode(columns, rows, packed, out), thin)
    for bits in (3, 4):
        thresholds, stand_ins = (list(numbers) for numbers in TABLE["gelu", bits])
        codes = ops.fewbit_encode(x, thresholds, bits)[0]
        coded = nbytes + codes.nbytes
        tasks[f"fewbit_encode, {bits} bits"] = Task(partial(ops.fewbit_encode, x, thresholds, bits), coded)
        tasks[f"fewbit_decode, {bits} bits"] = Task(partial(ops.fewbit_decode, codes, stand_ins, bits, out), coded)
    tasks |= _minifloat_tasks(ops, x, out)
    tasks |= _bounded_tasks(ops, x, out)
    if ops.has("row_norm"):
        tasks |= _one_pass_tasks(ops, x, out)
    if ops.backend == "native":
        tasks["zvc_encode, warm planes"] = Task(_warm_zvc_encode(x, mask, offsets, values), stashed)
    return tasks


def _minifloat_tasks(ops: Kernels, x: Tensor, out: Tensor) -> dict[str, Task]:
    """Small formats, alone, with a scale per 256 elements, and behind zero-value compression; ``out`` is written to."""
    tasks = {}
    for name, form in FORMATS.items():
        if form.bits >= 8 * x.element_size():
            continue
        codes, zvc = ops.minifloat_encode(x, name, False), ops.zvc_minifloat_encode(x, name)
        total, zvc_total = x.nbytes + codes.nbytes, x.nbytes + sum(plane.nbytes for plane in zvc)
        tasks[f"minifloat_encode, {name}"] = Task(partial(ops.minifloat_encode, x, name, False), total)
        tasks[f"minifloat_decode, {name}"] = Task(partial(ops.minifloat_decode, codes, name, out), total)
        tasks[f"zvc_minifloat_encode, {name}"] = Task(partial(ops.zvc_minifloat_encode, x, name), zvc_total)
        tasks[f"zvc_minifloat_decode, {name}"] = Task(partial(ops.zvc_minifloat_decode, *zvc, name, out), zvc_total)
    for name in SCALED:
        codes, scales = ops.minifloat_scaled_encode(x, name, 256)
        total = x.nbytes + codes.nbytes + scales.nbytes
        encode = partial(ops.minifloat_scaled_encode, x, name, 256)
        decode = partial(ops.minifloat_scaled_decode, codes, scales, name, 256, out)
        tasks[f"minifloat_scaled_encode, {name}"] = Task(encode, total)
        tasks[f"minifloat_scaled_decode, {name}"] = Task(decode, total)
    return tasks


def _bounded_tasks(ops: Kernels, x: Tensor, out: Tensor) -> dict[str, Task]:
    """What keeps to an error bound, and the transform that does not; ``out`` is written to."""
    tasks = {}
    for error in (1e-1, 1e-2, 1e-3):
        grid = Szp(error).grid(x)
        planes = ops.szp_encode(x, grid)
        total = x.nbytes + sum(plane.nbytes for plane in planes)
        tasks[f"szp_encode, {error:g}"] = Task(partial(ops.szp_encode, x, grid), total)
        tasks[f"szp_decode, {error:g}"] = Task(partial(ops.szp_decode, *planes, grid[1:2].clone(), out), total)
    tasks["szp_range"] = Task(partial(ops.szp_range, x), x.nbytes)
    for bits in (1, 2, 4, 8):
        codes, ranges, _ = ops.blockquant_encode(x, bits, 256, True, 0)
        total = x.nbytes + codes.nbytes + ranges.nbytes
        for way, stochastic in (("stochastic", True), ("nearest", False)):
            encode = partial(ops.blockquant_encode, x, bits, 256, stochastic, 0)
            tasks[f"blockquant_encode, {bits} bits, {way}"] = Task(encode, total)
        tasks[f"blockquant_decode, {bits} bits"] = Task(
            partial(ops.blockquant_decode, codes, ranges, bits, 256, out), total
        )
    return tasks


def _one_pass_tasks(ops: Kernels, x: Tensor, out: Tensor) -> dict[str, Task]:
    """Norms, curves and dropout; ``out`` is written to. What the bytes are is said in the rows of the table."""
    width = 64
    n = x.numel() // width * width
    source, result = x[:n], out[:n]
    other, second = torch.ones_like(source), torch.empty_like(source)
    rows = n // width, width
    statistic = torch.ones(n // width, device=x.device)
    vector = torch.ones(width, device=x.device)
    whole = None
    if x.element_size() == 2:
        whole = torch.arange(1 << 16, dtype=torch.int32, device=x.device).to(torch.int16)
    table = whole, None, 0, 0, 0
    mask = torch.full((-(-n // 8),), 0x5A, dtype=torch.uint8, device=x.device)
    a_row, moved = (source.view(rows), result.view(rows)), 2 * source.nbytes

    def norm(order: NormOrder, residual: Tensor | None) -> Callable[[], object]:
        mean = None if order is NormOrder.ROUNDED else statistic
        return partial(ops.row_norm, a_row[0], residual, mean, statistic, vector, vector, order, 0, a_row[1])

    layouts: dict[str, Callable[[Tensor], Tensor]] = {
        "contiguous": lambda flat: flat.view(1, width, 1, n // width),
        "channels_last": lambda flat: flat.view(1, 1, n // width, width).permute(0, 3, 1, 2),
    }
    tasks = {
        "row_norm, layer norm": Task(norm(NormOrder.NORMALIZED, None), moved + statistic.nbytes * 2),
        "row_norm, residual": Task(norm(NormOrder.NORMALIZED, other.view(rows)), moved * 3 // 2 + statistic.nbytes * 2),
        "row_norm, RMS norm": Task(norm(NormOrder.ROUNDED, None), moved + statistic.nbytes),
        "gated": Task(partial(ops.gated, source, other, *table, 0, result, None), moved * 3 // 2),
        "gated, both results": Task(partial(ops.gated, source, other, *table, 0, result, second), moved * 2),
        "curve, gelu": Task(partial(ops.curve, source, ComputedCurve.GELU, *table, result), moved),
        "dropout_bits": Task(partial(ops.dropout_bits, source, mask, 2.0, 0, result), moved + mask.nbytes),
    }
    groups = torch.ones(1, 8, device=x.device)
    for name, laid_out in layouts.items():
        pictures = laid_out(source), laid_out(result)
        sizes = (n // width, 1) if name == "channels_last" else (1, n // width)
        given = pictures[0], groups, groups, vector, vector, 8, ComputedCurve.SILU, *table
        tasks[f"grouped_norm, silu, {name}"] = Task(partial(ops.grouped_norm, *given, pictures[1], None), moved)
        held = pictures[0], vector, vector, vector, vector, laid_out(other), Activation.CLAMP, 0.0, 6.0
        tasks[f"channel_norm, {name}"] = Task(partial(ops.channel_norm, *held, *sizes, 0, pictures[1]), moved * 3 // 2)
    return tasks


def integer_tasks(nbytes: int, device: str) -> dict[str, Task]:
    """The copy and the kernels on integers: int64 of ``nbytes`` in 4 and in 5 bits, and the indices of a pooling."""
    ops, n = backends.serving(device), nbytes // 8
    generator = torch.Generator(device).manual_seed(0)
    x, out = _warm(n, torch.int64, device), _warm(n, torch.int64, device)
    x.random_(0, 16, generator=generator)
    tasks = {COPY: Task(lambda: out.copy_(x), 2 * nbytes)}
    for bits in (4, 5):
        packed = ops.narrow_encode(x, bits, 0)
        total = nbytes + packed.nbytes
        tasks[f"narrow_encode, {bits} bits"] = Task(partial(ops.narrow_encode, x, bits, 0), total)
        tasks[f"narrow_decode, {bits} bits"] = Task(partial(ops.narrow_decode, packed, bits, 0, out), total)
    for size, layout in ((2, "contiguous"), (3, "contiguous"), (3, "channels_last")):
        tasks |= _window_tasks(ops, nbytes, size, layout, out)
    return tasks


def _window_tasks(ops: Kernels, nbytes: int, size: int, layout: str, out: Tensor) -> dict[str, Task]:
    """Pooling with a stride of 2 from 112 to 56, as in ResNet and VGG; ``out`` is written to."""
    channels, side = 64, 112
    planes = nbytes // 8 // (side // 2) ** 2
    x = torch.rand(planes // channels, channels, side, side, device=out.device)
    padding = (size - 1) // 2
    args = [size] * 2, [2] * 2, [padding] * 2, [1] * 2
    _, indices = torch.ops.aten.max_pool2d_with_indices(x, *args)
    geometry = [side] * 2, list(indices.shape[2:]), *args
    inner = channels if layout == "channels_last" else 1
    flat = (indices.movedim(1, -1) if inner > 1 else indices).flatten().clone()
    packed, bad = ops.window_encode(flat, inner, *geometry)
    assert int(bad) == 0
    total, name = flat.nbytes + packed.nbytes, f"{size}x{size} {layout}"
    return {
        f"window_encode, {name}": Task(lambda: ops.window_encode(flat, inner, *geometry), total),
        f"window_decode, {name}": Task(lambda: ops.window_decode(packed, inner, *geometry, out[: flat.numel()]), total),
    }


def _warm_zvc_encode(x: Tensor, mask: Tensor, offsets: Tensor, values: Tensor) -> Callable[[], object]:
    """ZVC encode into planes that exist: what ``zvc_encode`` does, without the page faults of new planes."""
    lib = library.load()
    assert lib is not None
    n, width, threads = x.numel(), x.element_size(), torch.get_num_threads()
    planes = [_warm(plane.numel(), plane.dtype, "cpu") for plane in (mask, offsets, values)]
    a, b, c = (plane.data_ptr() for plane in planes)

    def run() -> object:
        stored = lib.bs_zvc_mark(x.data_ptr(), n, width, a, b, threads)
        lib.bs_zvc_gather(x.data_ptr(), n, width, a, b, c, stored, threads)
        return planes

    return run


def _warm(n: int, dtype: torch.dtype, device: str) -> Tensor:
    x = torch.empty(n, dtype=dtype, device=device)
    backends.advise_huge(x)
    return x.zero_()


def _isa(device: str) -> str:
    return library.isa() if backends.name(device) == "native" else "none"


def _report(dtype: torch.dtype, tasks: dict[str, Task], asked: argparse.Namespace) -> list[Row]:
    rows = measure(dtype, tasks, asked.rounds, Deadline.after(asked.seconds), asked.device == "cuda")
    header = ("kernel", "GB/s read + written", "share of copy", "")
    count = f"{rows[0].share_of_copy.count} {'quiet rounds' if rows[0].quiet else 'rounds, DISTURBED'}"
    print(f"\n{str(dtype).removeprefix('torch.')}, {count}\n{table(header, map(_line, rows))}", flush=True)
    return rows


def measure(dtype: torch.dtype, tasks: dict[str, Task], rounds: int, deadline: Deadline, cuda: bool) -> list[Row]:
    """Runs the tasks in interleaved rounds, after one that does not count."""
    for task in tasks.values():
        task.run()
    timers = {name: partial(_seconds, task.run, cuda) for name, task in tasks.items()}
    times: list[dict[str, float]] = []
    quiet_times: list[dict[str, float]] = []
    while len(quiet_times) < rounds and (len(times) < 3 or deadline.left() > 0):
        others, started = _others_seconds() or 0.0, time.perf_counter()
        times.append({name: results[0] for name, results in interleave(timers, Effort(1)).items()})
        timers = dict([*timers.items()][1:] + [*timers.items()][:1])  # the next round begins with another one
        if (_others_seconds() or 0.0) - others < 0.1 * (time.perf_counter() - started) + TICK:
            quiet_times.append(times[-1])
    quiet = len(quiet_times) >= 3
    counted = quiet_times if quiet else times
    copies = [tasks[COPY].nbytes / one[COPY] for one in counted]
    rows = []
    for name, task in tasks.items():
        speeds = [task.nbytes / one[name] for one in counted]
        rows.append(
            Row(
                kernel=name,
                dtype=str(dtype).removeprefix("torch."),
                nbytes=task.nbytes,
                gb_per_second=summarise([speed / 1e9 for speed in speeds]),
                share_of_copy=summarise([speed / copy for speed, copy in zip(speeds, copies, strict=True)]),
                seconds=tuple(one[name] for one in counted),
                quiet=quiet,
            )
        )
    return rows


TICK = 0.01
"""Seconds: the resolution of ``/proc/stat``."""


def _others_seconds() -> float | None:
    """Processor time that other processes have used so far, in seconds; None where the system does not tell."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return None
    fields = [int(field) for field in stat.read_text().splitlines()[0].split()[1:]]
    busy = (sum(fields[:8]) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")  # all but idle and waiting for disks
    own = os.times()
    return busy - own.user - own.system


def _seconds(run: Callable[[], Any], cuda: bool) -> float:
    if cuda:
        torch.cuda.synchronize()
    started = time.perf_counter()
    result = run()
    if cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    del result  # giving memory back is not part of it
    return seconds


def _line(row: Row) -> tuple[str, ...]:
    missed = row.kernel in GOAL and row.share_of_copy.median < 0.6
    return row.kernel, spread(row.gb_per_second, digits=1), spread(row.share_of_copy), "< 0.60" if missed else ""


if __name__ == "__main__":
    raise SystemExit(main())
