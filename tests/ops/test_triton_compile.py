"""What the launchers would launch, compiled ahead of time for sm_80 and sm_90: Triton brings ptxas, no GPU needed."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from _pytest.mark.structures import ParameterSet

from backstash.ops import triton as launchers
from backstash.ops.formats import FORMATS, SCALED
from backstash.ops.schema import bytes_for, window_bits, zvc_chunks
from backstash.saved import Test

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: pip install triton"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton's interpreter compiles nothing"),
]

Call = tuple[Callable[..., object], tuple[Any, ...]]

N = 4096
HUGE = 2**33
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
POOL_3X3 = (1, [56, 56], [28, 28], [3, 3], [2, 2], [1, 1], [1, 1])
POOL_2X2X2_CHANNELS_LAST = (16, [8, 20, 20], [4, 10, 10], [2, 2, 2], [2, 2, 2], [0, 0, 0], [1, 1, 1])
POOL_5_WIDE = (1, [2**31], [2**31], [5], [1], [2], [1])


def flat(dtype: torch.dtype, n: int = N) -> torch.Tensor:
    """A tensor without memory: a launch is compiled by the dtype, the alignment and the size alone."""
    return torch.empty(n, dtype=dtype, device="meta")


def calls() -> Iterator[Call]:
    """Calls of every launcher that between them make every kind of specialization."""
    for dtype in FLOATS:
        for test in Test:
            yield launchers.bitmask_encode, (flat(dtype), test.code, -1.0, 6.0)
    for dtype in (*FLOATS, torch.bool):
        yield launchers.bitmask_decode, (flat(torch.uint8, bytes_for(N, 1)), flat(dtype), 1.0, 0.0)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        mask, pair, x = flat(torch.uint8, bytes_for(N, 1)), flat(dtype, 2), flat(dtype)
        yield launchers.binary_encode, (x, pair)
        yield launchers.binary_decode, (mask, pair, x)
        yield launchers.zvc_encode_staged, (x,)
        yield launchers.zvc_decode, (mask, flat(torch.int64, 1), flat(dtype, 1000), x)
        yield launchers.csr_counted, (x,)
        yield launchers.csr_compact, (x, flat(torch.int32, 17), flat(torch.uint8, 1000), flat(dtype, 1000))
        yield launchers.csr_decode, (flat(torch.uint8, 1000), flat(torch.int32, 17), flat(dtype, 1000), x)
    for dtype, bits in itertools.product((torch.float32, torch.float16, torch.bfloat16), (1, 3, 4)):
        thresholds, values = [0.5 * i - 1 for i in range(2**bits - 1)], [0.4 * i - 1 for i in range(2**bits)]
        yield launchers.fewbit_encode, (flat(dtype), thresholds, bits)
        yield launchers.fewbit_decode, (flat(torch.uint8, bytes_for(N, bits)), values, bits, flat(dtype))
    for form, dtype in itertools.product(FORMATS.values(), (torch.float32, torch.float16, torch.bfloat16)):
        if form.bits < 8 * dtype.itemsize:
            codes = flat(form.dtype, form.words(N))
            yield launchers.minifloat_encode, (flat(dtype), form.name, dtype == torch.float16)
            yield launchers.minifloat_decode, (codes, form.name, flat(dtype))
            mask, offsets = flat(torch.uint8, bytes_for(N, 1)), flat(torch.int64, 1)
            yield launchers.zvc_minifloat_compact, (flat(dtype), form.name, offsets, codes)
            yield launchers.zvc_minifloat_decode, (mask, offsets, codes, form.name, flat(dtype))
            if form.name in SCALED:
                yield launchers.minifloat_scaled_encode, (flat(dtype), form.name, 256)
                scales = flat(torch.float32, N // 256)
                yield launchers.minifloat_scaled_decode, (flat(form.dtype), scales, form.name, 256, flat(dtype))
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        mask, offsets, words = flat(torch.uint8, bytes_for(N, 1)), flat(torch.int64, 1), flat(torch.int32, 1000)
        yield launchers.szp_range, (flat(dtype),)
        yield launchers.szp_encode_staged, (flat(dtype), flat(torch.float32, 3))
        yield launchers.szp_compact, (flat(torch.int32), offsets, flat(torch.int64, 1), words)
        yield launchers.szp_decode, (mask, offsets, words, flat(torch.float32, 1), flat(dtype))
    table = flat(torch.int16, 9)
    for dtype, axes, low in ((torch.float32, 7, 2), (torch.float16, 2, 0), (torch.bfloat16, 0, 2)):
        x, step, blocks = flat(dtype), (0.2, 0.1), [16, 256, 1024, 65536]
        index, values = flat(torch.int64, 5), flat(dtype, 9)
        stream, places = flat(torch.int16, 999), flat(torch.int16, 9)
        staging = torch.empty((1, N * dtype.itemsize // 2), dtype=torch.int16, device="meta")
        yield launchers.sz_survey, (x, *step, low, blocks, 0.5)
        yield launchers.sz_encode_staged, (x, table, *step, -3, low, axes, blocks)
        yield launchers.sz_collect, (x, *step, blocks, 0.0, staging, index, stream, places, values)
        yield launchers.sz_decode_flagged, (table, stream, index, places, values, 0.2, -3, low, axes, blocks, x)
    for dtype, bits in itertools.product((torch.float32, torch.float16, torch.bfloat16), (1, 2, 4, 8)):
        yield launchers.blockquant_encode, (flat(dtype), bits, 256, bits != 4, 2**32 - 1)
        planes = flat(torch.uint8, bytes_for(N, bits)), flat(dtype, 2 * N // 256)
        yield launchers.blockquant_decode, (*planes, bits, 256, flat(dtype))
    for dtype, bits in ((torch.bool, 1), (torch.uint8, 3), (torch.int32, 16), (torch.int64, 4), (torch.int64, 31)):
        yield launchers.narrow_encode, (flat(dtype), bits, -3)
        yield launchers.narrow_decode, (flat(torch.uint8, bytes_for(N, bits)), bits, -3, flat(dtype))
    for geometry in (POOL_3X3, POOL_2X2X2_CHANNELS_LAST, POOL_5_WIDE):
        yield launchers.window_encode, (flat(torch.int64), *geometry)
        packed = flat(torch.uint8, bytes_for(N, window_bits(geometry[3])))
        yield launchers.window_decode, (packed, *geometry, flat(torch.int64))
    # Odd sizes lose the vector loads, huge ones pass numel as int64.
    for n in (1, N + 1, HUGE):
        yield launchers.bitmask_encode, (flat(torch.float32, n), Test.NOT_LE.code, 0.0, 0.0)
        yield launchers.zvc_encode_staged, (flat(torch.float32, n),)
        planes = flat(torch.uint8, bytes_for(n, 1)), flat(torch.int64, zvc_chunks(n)), flat(torch.float32, n)
        yield launchers.zvc_decode, (*planes, flat(torch.float32, n))
        yield launchers.narrow_encode, (flat(torch.int64, n), 4, 2**40)
        yield launchers.window_encode, (flat(torch.int64, n), *POOL_3X3)
    for n in (1, HUGE):
        blocks = [min(n, 100), min(n, 1000), min(n, 1000), 65000]
        yield launchers.sz_survey, (flat(torch.float32, n), 0.2, 0.1, 0, blocks)
        yield launchers.sz_encode_staged, (flat(torch.float32, n), table, 0.2, 0.1, 1, 1, 3, blocks)
        index = flat(torch.int64, 1 + 4 * -(-n // 65000))
        planes = table, flat(torch.int16, 999), index, flat(torch.int16, 9), flat(torch.float32, 9)
        yield launchers.sz_decode_flagged, (*planes, 0.2, 1, 1, 3, blocks, flat(torch.float32, n))


CALLS = list(calls())


class Recorder:
    """Stands in for the module of kernels: remembers what each would be launched with, and launches nothing."""

    def __init__(self, kernels: ModuleType) -> None:
        self.kernels = kernels
        self.launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> dict[Any, Any]:
        recorder, kernel = self, getattr(self.kernels, name)

        class Launcher(dict[Any, Any]):
            def __missing__(self, grid: tuple[int, ...]) -> Callable[..., None]:
                return lambda *args, **kwargs: recorder.launches.append((kernel, args, kwargs))

        return Launcher()


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Recorder:
    """A recorder in the kernels' place; what is compiled goes to a folder of the test's own, not to the user's."""
    from backstash.ops.triton import kernels

    recorder = Recorder(kernels)
    monkeypatch.setattr(launchers, "_kernels", lambda: recorder)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return recorder


def compiled(kernel: Any, capability: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a launch of ``kernel`` compiles, made by the steps that ``JITFunction.run`` takes on a GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    target = GPUTarget("cuda", capability, 32)
    backend = make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = bind(*args, **kwargs)
    options, signature, constants, attributes = kernel._pack_args(backend, kwargs, bound, specialization, options)
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=target, options=options.__dict__)


def compilations() -> Iterator[ParameterSet]:
    """Every call for both. Not slow: the first call of each launcher for both, and every other call for one in turn."""
    seen: set[Any] = set()
    for i, (op, arguments) in enumerate(CALLS):
        for capability in (80, 90):
            quick = op not in seen or capability == (80, 90)[i % 2]
            marks = [] if quick else [pytest.mark.slow]
            yield pytest.param((op, arguments), capability, id=f"{op.__name__}-{i}-{capability}", marks=marks)
        seen.add(op)


@pytest.mark.parametrize(("call", "capability"), list(compilations()))
def test_compiles(call: Call, capability: int, recorder: Recorder) -> None:
    op, arguments = call
    op(*arguments)
    assert recorder.launches
    for kernel, args, kwargs in recorder.launches:
        binary = compiled(kernel, capability, args, kwargs)
        assert binary.asm["cubin"]
        assert f".target sm_{capability}" in binary.asm["ptx"]
        # A subnormal is not zero: no comparison may flush it.
        assert ".ftz" not in binary.asm["ptx"]


def test_every_kernel_is_compiled(recorder: Recorder) -> None:
    for op, arguments in CALLS:
        op(*arguments)
    launched = {kernel.__name__ for kernel, _, _ in recorder.launches}
    assert launched == {name for name in vars(recorder.kernels) if name.endswith("_kernel")}
