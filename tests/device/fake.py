"""An accelerator for machines without one: the device ``"fake"`` of torch, in host memory.

It shows what a real accelerator would do to a program, in numbers that repeat, and it punishes what only a real one
would punish. Its kernels are the CPU's, so its bits are the CPU's. Times on it mean nothing.

* :func:`counting` counts operations, allocations, waits of the host, events and switches of streams, and finds the
  lines of Python that ask for them.
* :func:`late` runs operations and copies late, by delays from a seed, and spoils memory as soon as it is freed. A
  program that lacks a wait, or a reference to memory that another stream reads, gets wrong bits.
* :func:`idle` allocates outputs and computes nothing, so that a profiler counts the host's instructions alone.
* :func:`capturing` raises where a captured graph would not allow what the program does.
* :class:`Graph` captures a step and replays it, as ``torch.cuda.CUDAGraph`` does. To capture computes nothing that
lasts:
  at its end all memory is as it was before, and the graph's own memory is spoiled.
* :func:`limited` sets the device's memory.

Importing this module builds the device (``fake_device.cpp``; about 20 s, once) and registers it with torch. A process
must do so before its first backward pass, with which autograd starts the threads of all devices, and so before it
imports backstash. In pytest: ``-p tests.device.fake``.
"""

from __future__ import annotations

import ast
import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import subprocess
import sys
import sysconfig
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SOURCE = HERE / "fake_device.cpp"
FLAGS = ("-std=c++20", "-O1", "-g0", "-fPIC", "-fvisibility=hidden", "-shared")
COMPILER = os.environ.get("CXX", "g++")


def _build() -> Path:
    """Returns the extension, which is built unless ``build/`` has one of this source, this torch and this Python."""
    what = hashlib.sha256(repr((torch.__version__, sys.version, FLAGS, COMPILER)).encode())
    what.update(SOURCE.read_bytes())
    folder = ROOT / "build" / "fake-device" / what.hexdigest()[:16]
    library = folder / "fake_device.so"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # test processes begin at the same time
        if not library.exists():
            _compile(folder, library)
    return library


def _compile(folder: Path, library: Path) -> None:
    package = Path(torch.__file__).parent
    include = package / "include"
    paths = (include, include / "torch" / "csrc" / "api" / "include", Path(sysconfig.get_paths()["include"]))
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    unfinished = folder / "unfinished.so"
    libraries = ("-ltorch", "-ltorch_cpu", "-lc10", "-ltorch_python", f"-Wl,-rpath,{package / 'lib'}")
    command: list[Any] = [COMPILER, *FLAGS, abi, *(f"-I{path}" for path in paths), SOURCE, "-o", unfinished]
    if subprocess.run([*command, f"-L{package / 'lib'}", *libraries]).returncode:
        raise RuntimeError("The fake device was to be compiled, but the compiler failed. Its errors are above.")
    unfinished.rename(library)


def _load() -> Any:
    loader = importlib.machinery.ExtensionFileLoader("fake_device", str(_build()))
    spec = importlib.util.spec_from_loader("fake_device", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


torch._C._rename_privateuse1_backend("fake")
_device: Any = _load()
device = torch.device("fake", 0)

# Importing backstash runs a backward pass, with which autograd starts its threads: the device has to be there.
from backstash.codecs.minifloat.formats import FORMATS  # noqa: E402
from backstash.ops import backends  # noqa: E402
from backstash.ops.backends import Kernels  # noqa: E402
from backstash.ops.bits import unpack_fields  # noqa: E402
from backstash.ops.table import TABLE, Kernel  # noqa: E402


def _site() -> str:
    """Returns the innermost line of this project, else autograd's node in backward, else the innermost line at all."""
    frame: types.FrameType | None = sys._getframe()
    other = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if file != __file__ and not file.startswith(_TORCH):
            line = f"{frame.f_lineno} {frame.f_code.co_name}"
            if file.startswith(str(ROOT)) and "site-packages" not in file:
                return f"{Path(file).relative_to(ROOT)}:{line}"
            other = other or f"{Path(file).name}:{line}"
        frame = frame.f_back
    node = torch._C._current_autograd_node()
    return f"autograd: {node.name()}" if node is not None else other or "?"


_TORCH = str(Path(torch.__file__).parent)

_device.set_site(_site)

# What torch, and programs for any accelerator, ask of ``torch.fake``.


def _rng_state(device: Any = None) -> torch.Tensor:
    return torch.frombuffer(bytearray(_device.rng_state()), dtype=torch.uint8)


def _set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    _device.set_rng_state(state.numpy().tobytes())


class Graph:
    """A graph of the device: what was launched between ``capture_begin`` and ``capture_end``, whatever launched it."""

    def __init__(self) -> None:
        self._graph: Any = None

    def capture_begin(self, pool: int | None = None, capture_error_mode: str = "global") -> None:
        """Begins to capture; raises RuntimeError from now on for what a graph cannot hold (see :func:`capturing`)."""
        torch.accelerator.synchronize()
        self._graph = _device.begin_graph(pool)

    def capture_end(self) -> None:
        """Ends it."""
        _device.end_graph()

    def replay(self) -> None:
        """Runs what was captured: one operation."""
        _device.replay(self._graph)

    def pool(self) -> int:
        """Returns the pool that the graph's memory comes from. Graphs with one pool use each other's free memory."""
        return int(self._graph.pool)

    def reset(self) -> None:
        """Forgets what was captured."""
        self._graph = None


def _module() -> types.ModuleType:
    accelerator = torch.accelerator
    module = types.ModuleType("torch.fake")
    module.__dict__.update(
        is_available=lambda: True,
        is_initialized=lambda: True,
        _initialized=True,  # a checkpoint asks for it, and keeps no generator's state without it
        _is_in_bad_fork=lambda: False,
        device_count=lambda: 1,
        current_device=lambda: 0,
        set_device=lambda device: None,
        device=lambda device: nullcontext(),
        synchronize=accelerator.synchronize,
        current_stream=accelerator.current_stream,
        Stream=torch.Stream,
        Event=torch.Event,
        Graph=Graph,
        memory_allocated=accelerator.memory_allocated,
        max_memory_allocated=accelerator.max_memory_allocated,
        reset_peak_memory_stats=accelerator.reset_peak_memory_stats,
        empty_cache=accelerator.empty_cache,
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        manual_seed=_device.manual_seed,
        manual_seed_all=_device.manual_seed,
        initial_seed=_device.initial_seed,
        get_rng_state=_rng_state,
        set_rng_state=_set_rng_state,
        get_rng_state_all=lambda: [_rng_state()],
        set_rng_state_all=lambda states: _set_rng_state(states[0]),
    )
    return module


torch._register_device_module("fake", _module())


@dataclass
class Counts:
    """What the device was asked to do.

    Attributes:
        operations: kernels and copies; one of our own kernels is one operation (see :func:`kernel`).
        allocations: of the device's memory.
        waits: how often the host waited for the device: ``item``, synchronous copies, ``synchronize``, and operations
            whose result has a size that depends on data.
        queries: how often the host asked whether an event or stream has passed.
        events: recorded events.
        blocks: how often a stream was made to wait for an event.
        switches: how often the current stream changed.
        pinned: allocations of pinned memory of the host.
        generators: how often the state of a generator of the device was read or set.
        names: what was counted, by kind and name, such as ``("waits", "item")``.
        sites: how often each line asked for it, by kind, name and line. Only of the kinds asked for.
        peak: the most bytes that were allocated at a time.
    """

    operations: int = 0
    allocations: int = 0
    waits: int = 0
    queries: int = 0
    events: int = 0
    blocks: int = 0
    switches: int = 0
    pinned: int = 0
    generators: int = 0
    names: Counter[tuple[str, str]] = field(default_factory=Counter)
    sites: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    peak: int = 0

    def lines(self, kind: str) -> list[str]:
        """Returns one line of text for each call site of ``kind``, the most frequent first."""
        found = [(count, name, site) for (of, name, site), count in self.sites.most_common() if of == kind]
        return [f"{count:6d} {name} at {site}" for count, name, site in found]


@contextmanager
def counting(sites: Sequence[str] = ("waits",)) -> Iterator[Counts]:
    """Counts what the body asks of the device. The counts are complete when the body has ended.

    Args:
        sites: the kinds of which call sites are noted, named as in :class:`Counts`. Costs microseconds for each.
    """
    counts = Counts()
    _device.listen(set(sites), lambda kind, name: counts.sites.update([(kind, name, _site())]))
    before, names_before = _device.counts(), Counter(_device.names())
    torch.accelerator.reset_peak_memory_stats()
    try:
        yield counts
    finally:
        for kind, number in _device.counts().items():
            setattr(counts, kind, number - before[kind])
        counts.names = Counter(_device.names())
        counts.names.subtract(names_before)
        counts.names = +counts.names
        counts.peak = torch.accelerator.max_memory_allocated()
        _device.listen(set(), None)


@contextmanager
def late(seed: int = 0, delay: float = 8.0, gigabytes_per_second: float = 16.0) -> Iterator[None]:
    """Runs operations late on their streams, and spoils memory when it is freed.

    The time of an operation is virtual: the host's clock goes on by a random step with each launch, every second
    operation is late by a random time, and a copy from or to the host takes as long as the link needs. Nothing depends
    on the machine's speed. An operation whose arguments have shapes that it never had before runs at once, because the
    shapes of its results are found out by running it. So a step should run once before.

    Args:
        seed: of the delays.
        delay: the mean of the delays, in steps of the host; one operation takes one step.
        gigabytes_per_second: of the link to the host, if a step is taken for 10 microseconds.
    """
    _device.set_mode("late", seed, delay, gigabytes_per_second)
    try:
        yield
    finally:
        _device.set_mode("now", 0, 0.0, 1.0)


_idling: list[bool] = []


@contextmanager
def idle() -> Iterator[None]:
    """Allocates outputs, but computes and copies nothing. New memory, and what the host reads, are zeros.

    The body of a kernel does not run either, where it is known without numbers what it returns.
    """
    _device.set_mode("nothing", 0, 0.0, 1.0)
    _idling.append(True)
    try:
        yield
    finally:
        _idling.pop()
        _device.set_mode("now", 0, 0.0, 1.0)


@contextmanager
def capturing() -> Iterator[None]:
    """Raises RuntimeError, with the line, for what a captured graph forbids.

    That is a wait, a query of an event or stream, an allocation of pinned memory, and the state of a generator.
    """
    _device.set_capturing(True)
    try:
        yield
    finally:
        _device.set_capturing(False)


@contextmanager
def limited(nbytes: int) -> Iterator[None]:
    """Raises ``torch.OutOfMemoryError`` where more than ``nbytes`` would be allocated at a time."""
    _device.set_limit(nbytes)
    try:
        yield
    finally:
        _device.set_limit(None)


@contextmanager
def kernel(name: str, waits: int = 0) -> Iterator[None]:
    """Counts the body as one operation, and as many allocations as it leaves behind. Its temporaries are in no peak.

    Args:
        name: what it is counted as.
        waits: how often the host waits in it.
    """
    _device.enter_kernel(name, waits)
    try:
        yield
    finally:
        _device.leave_kernel()


def as_kernel(name: str, function: Callable[..., Any], waits: int = 0) -> Callable[..., Any]:
    """Returns ``function`` as one operation of the device."""

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        with kernel(name, waits):
            result = function(*args, **options)
        if _device.records():
            _record(function, args, options, result)
        return result

    return call


def _record(function: Callable[..., Any], args: Any, options: Any, result: Any) -> None:
    """Has a captured graph call a kernel in each replay, which writes into the memory of its first results."""
    args, options, first = tree_map_only(torch.Tensor, _unowned, (args, options, result))

    def again() -> None:
        results = function(*args, **options)
        for old, new in zip(tree_leaves(first), tree_leaves(results), strict=True):
            if isinstance(old, torch.Tensor):
                old.copy_(new)

    _device.record(again)


def _unowned(tensor: torch.Tensor) -> Any:
    return _device.unowned(tensor.detach()) if tensor.device.type == "fake" else tensor.clone()


def pending() -> int:
    """Returns how many operations have been launched and not run."""
    return int(_device.pending())


class _CountedKernels(Kernels):
    """The reference kernels. One that Triton has as well counts as one operation, with the waits of its launcher."""

    def __init__(self) -> None:
        super().__init__("fake")

    def has(self, name: str) -> bool:
        return "triton" not in TABLE[name].without

    def function(self, row: Kernel) -> Any:
        if not self.has(row.name):
            return row.reference
        body = with_room_to_spare(row.name, row.reference) if row.name in ANNOUNCED else row.reference
        body = body if row.schema is None else _or_outputs_alone(body, row.fake)
        return as_kernel(row.name, body, _waits_of_launcher(row))


def _bits(mask: torch.Tensor, out: torch.Tensor) -> int:
    return int(unpack_fields(mask, 1, out.numel()).sum())


ANNOUNCED: dict[str, tuple[tuple[int, ...], Callable[..., int]]] = {
    "zvc_decode": ((2,), lambda mask, offsets, values, out: _bits(mask, out)),
    "zvc_minifloat_decode": ((2,), lambda mask, offsets, values, name, out: FORMATS[name].words(_bits(mask, out))),
    "exponents_decode": (
        (4,),
        lambda fractions, codes, bases, offsets, escapes, bits, out: int(
            (unpack_fields(codes, bits, out.numel()) == 2**bits - 1).sum()
        ),
    ),
    "csr_decode": ((0, 2), lambda columns, rows, values, out: int(rows[-1])),
}
"""Which arguments of decoders are planes of values, and how many values the other planes announce."""


def with_room_to_spare(name: str, decode: Callable[..., None]) -> Callable[..., None]:
    """Returns a decoder that does not count the values, as Triton's do not: too many do no harm, too few are zeros."""
    places, announced = ANNOUNCED[name]

    def call(*args: Any) -> None:
        given, count = list(args), announced(*args)
        for place in places:
            values = args[place]
            given[place] = torch.cat((values, values.new_zeros(max(0, count - values.numel()))))[:count]
        decode(*given)

    return call


def _or_outputs_alone(function: Callable[..., Any], outputs: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``function``, in whose place an idle device makes its outputs alone."""

    @wraps(function)
    def call(*args: Any) -> Any:
        if _idling:
            with suppress(AttributeError):  # of outputs whose sizes depend on numbers
                return outputs(*args)
        return function(*args)

    return call


def find_source(module: str) -> Path:
    """Returns the file of a module that need not be importable here."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None, module
    return Path(spec.origin)


def _waits_of_launcher(row: Kernel) -> int:
    """Returns how often the function that launches a Triton kernel reads numbers from the device."""
    source = find_source(f"{row.package}.triton")
    launchers = [node for node in ast.parse(source.read_text()).body if isinstance(node, ast.FunctionDef)]
    launcher = next(node for node in launchers if node.name == row.name)
    called = [
        node.func.attr for node in ast.walk(launcher) if isinstance(node, ast.Call) and hasattr(node.func, "attr")
    ]
    return called.count("item") + called.count("tolist")


backends.serve("fake", _CountedKernels())
