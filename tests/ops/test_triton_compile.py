"""Triton kernels compiled ahead of time for sm_80 and sm_90, as the launchers launch them: no GPU is needed."""

from __future__ import annotations

import importlib
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from _pytest.mark.structures import ParameterSet

from backstash.codecs.minifloat.formats import FORMATS, SCALED
from backstash.codecs.narrow.windows.reference import window_bits
from backstash.ops.layout import Rounding, bytes_for, zvc_chunks
from backstash.ops.table import TABLE
from backstash.ops.triton import launching
from backstash.saved import Test

if find_spec("triton") is not None:
    from backstash.codecs.blockquant import triton as blockquant
    from backstash.codecs.csr import triton as csr
    from backstash.codecs.exponents import triton as exponents
    from backstash.codecs.fewbit import triton as fewbit
    from backstash.codecs.masks import triton as masks
    from backstash.codecs.minifloat import triton as minifloat
    from backstash.codecs.narrow import triton as narrow
    from backstash.codecs.narrow.windows import triton as windows
    from backstash.codecs.sz import triton as sz
    from backstash.codecs.szp import triton as szp
    from backstash.codecs.upcast import triton as upcast
    from backstash.codecs.zvc import triton as zvc
    from backstash.ops.norms import triton as norms
    from backstash.ops.samples import triton as samples

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
            yield masks.bitmask_encode, (flat(dtype), test.code, -1.0, 6.0)
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.bool):
        yield samples.sample_numbers, (flat(dtype), 1, N, 1)
        yield samples.sample_numbers, (flat(dtype, HUGE), 32, 32, HUGE // 32)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        yield masks.mask_select, (flat(dtype), flat(torch.uint8, bytes_for(N, 1)), flat(dtype))
    for dtype in (*FLOATS, torch.bool):
        yield masks.bitmask_decode, (flat(torch.uint8, bytes_for(N, 1)), flat(dtype), 1.0, 0.0)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        mask, pair, x = flat(torch.uint8, bytes_for(N, 1)), flat(dtype, 2), flat(dtype)
        yield masks.binary_encode, (x, pair)
        yield masks.binary_decode, (mask, pair, x)
        yield zvc.zvc_encode_within, (x, 1000)
        yield zvc.zvc_decode, (mask, flat(torch.int64, 1), flat(dtype, 1000), x)
        yield csr.csr_counted, (x,)
        yield csr.csr_compact, (x, flat(torch.int32, 17), flat(torch.uint8, 1000), flat(dtype, 1000))
        yield csr.csr_decode, (flat(torch.uint8, 1000), flat(torch.int32, 17), flat(dtype, 1000), x)
    for dtype, bits in itertools.product((torch.float32, torch.bfloat16), (3, 4)):
        yield exponents.exponents_encode_within, (flat(dtype), bits, 1000)
        fractions, codes = flat(torch.uint8, (dtype.itemsize - 1) * N), flat(torch.uint8, bytes_for(N, bits))
        bases, offsets, escapes = flat(torch.uint8, N // 512), flat(torch.int64, 1), flat(torch.uint8, 1000)
        yield exponents.exponents_decode, (fractions, codes, bases, offsets, escapes, bits, flat(dtype))
    yield upcast.upcast_encode, (flat(torch.float32),)
    for dtype, bits in itertools.product((torch.float32, torch.float16, torch.bfloat16), (1, 3, 4)):
        thresholds, values = [0.5 * i - 1 for i in range(2**bits - 1)], [0.4 * i - 1 for i in range(2**bits)]
        yield fewbit.fewbit_encode, (flat(dtype), thresholds, bits)
        yield fewbit.fewbit_decode, (flat(torch.uint8, bytes_for(N, bits)), values, bits, flat(dtype))
        if bits <= 4:
            packed = flat(torch.uint8, bytes_for(N, bits))
            yield fewbit.scale_by_codes, (flat(dtype), packed, flat(dtype, 1 << bits), flat(dtype))
    for form, dtype in itertools.product(FORMATS.values(), (torch.float32, torch.float16, torch.bfloat16)):
        if form.bits < 8 * dtype.itemsize:
            codes = flat(form.dtype, form.words(N))
            yield minifloat.minifloat_encode, (flat(dtype), form.name, dtype == torch.float16)
            yield minifloat.minifloat_decode, (codes, form.name, flat(dtype))
            mask, offsets = flat(torch.uint8, bytes_for(N, 1)), flat(torch.int64, 1)
            yield zvc.zvc_minifloat_compact, (flat(dtype), form.name, offsets, codes, 1000)
            yield zvc.zvc_minifloat_decode, (mask, offsets, codes, form.name, flat(dtype))
            if form.name in SCALED:
                yield minifloat.minifloat_scaled_encode, (flat(dtype), form.name, 256)
                scales = flat(torch.float32, N // 256)
                yield minifloat.minifloat_scaled_decode, (flat(form.dtype), scales, form.name, 256, flat(dtype))
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        mask, offsets, words = flat(torch.uint8, bytes_for(N, 1)), flat(torch.int64, 1), flat(torch.int32, 1000)
        yield szp.szp_range, (flat(dtype),)
        yield szp.szp_encode_staged, (flat(dtype), flat(torch.float32, 3))
        yield szp.szp_compact, (flat(torch.int32), offsets, flat(torch.int64, 1), words)
        yield szp.szp_decode, (mask, offsets, words, flat(torch.float32, 1), flat(dtype))
    table = flat(torch.int16, 9)
    for dtype, axes, low in ((torch.float32, 7, 2), (torch.float16, 2, 0), (torch.bfloat16, 0, 2)):
        x, step, blocks = flat(dtype), (0.2, 0.1), [16, 256, 1024, 65536]
        index, values = flat(torch.int64, 5), flat(dtype, 9)
        stream, places = flat(torch.int16, 999), flat(torch.int16, 9)
        staging = torch.empty((1, N * dtype.itemsize // 2), dtype=torch.int16, device="meta")
        yield sz.sz_survey, (x, *step, low, blocks, 0.5)
        yield sz.sz_encode_staged, (x, table, *step, [-3, low, axes], blocks)
        yield sz.sz_collect, (x, *step, blocks, 0.0, staging, index, stream, places, values)
        yield sz.sz_decode_flagged, (table, stream, index, places, values, 0.2, [-3, low, axes], blocks, x)
    for dtype, bits in itertools.product((torch.float32, torch.float16, torch.bfloat16), (1, 2, 4, 8)):
        yield blockquant.blockquant_encode, (flat(dtype), bits, 256, bits != 4, 2**32 - 1)
        planes = flat(torch.uint8, bytes_for(N, bits)), flat(dtype, 2 * N // 256)
        yield blockquant.blockquant_decode, (*planes, bits, 256, flat(dtype))
    for dtype, bits in ((torch.bool, 1), (torch.uint8, 3), (torch.int32, 16), (torch.int64, 4), (torch.int64, 31)):
        yield narrow.narrow_encode, (flat(dtype), bits, -3)
        yield narrow.narrow_decode, (flat(torch.uint8, bytes_for(N, bits)), bits, -3, flat(dtype))
    for geometry in (POOL_3X3, POOL_2X2X2_CHANNELS_LAST, POOL_5_WIDE):
        yield windows.window_encode, (flat(torch.int64), *geometry)
        packed = flat(torch.uint8, bytes_for(N, window_bits(geometry[3])))
        yield windows.window_decode, (packed, *geometry, flat(torch.int64))
        for dtype in (torch.float32, torch.float64):
            yield windows.window_scatter, (packed, *geometry, flat(dtype), flat(dtype, 4 * N))
    x, vector = torch.empty(4, 16, 8, 8, device="meta"), flat(torch.float32, 16)
    mask, picked = flat(torch.uint8, bytes_for(N, 1)), flat(torch.float32, 64)
    for rounding in Rounding:
        yield norms.affine, (x, *[vector] * 4, x, 1, 0.0, 6.0, 4, 64, x, None, rounding, picked, 3, 64, *[vector] * 4)
        yield norms.affine, (x, *[vector] * 2, None, None, None, 2, 0.1, 0.0, 4, 64, x, mask, rounding)
    x = torch.empty(2, 2**30, 2, device="meta")
    yield norms.affine, (x, *[flat(torch.float32, 2**30)] * 4, None, 0, 0.0, 0.0, 2, 2, x)
    # Odd sizes lose the vector loads, huge ones pass numel as int64.
    for n in (1, N + 1, HUGE):
        yield masks.bitmask_encode, (flat(torch.float32, n), Test.NOT_LE.code, 0.0, 0.0)
        yield zvc.zvc_encode_within, (flat(torch.float32, n), n)
        planes = flat(torch.uint8, bytes_for(n, 1)), flat(torch.int64, zvc_chunks(n)), flat(torch.float32, n)
        yield zvc.zvc_decode, (*planes, flat(torch.float32, n))
        yield narrow.narrow_encode, (flat(torch.int64, n), 4, 2**40)
        yield windows.window_encode, (flat(torch.int64, n), *POOL_3X3)
    for n in (1, HUGE):
        blocks = [min(n, 100), min(n, 1000), min(n, 1000), 65000]
        yield sz.sz_survey, (flat(torch.float32, n), 0.2, 0.1, 0, blocks)
        yield sz.sz_encode_staged, (flat(torch.float32, n), table, 0.2, 0.1, [1, 1, 3], blocks)
        index = flat(torch.int64, 1 + 4 * -(-n // 65000))
        planes = table, flat(torch.int16, 999), index, flat(torch.int16, 9), flat(torch.float32, 9)
        yield sz.sz_decode_flagged, (*planes, 0.2, [1, 1, 3], blocks, flat(torch.float32, n))


CALLS = list(calls()) if find_spec("triton") is not None else []


class Recorder:
    """Remembers what would be launched, and launches nothing."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def record(self, kernel: Any, programs: int, args: tuple[Any, ...], constants: dict[str, Any]) -> None:
        self.launches.append((kernel, args, constants))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Recorder:
    """A recorder in place of launches; what is compiled goes to a folder of the test's own, not to the user's."""
    recorder = Recorder()
    monkeypatch.setattr(launching, "_run", recorder.record)
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
    """Yields every call for both; not slow: the calls of each launcher for one in turn, and an only call for both."""
    calls: Counter[Any] = Counter(op for op, _ in CALLS)
    seen: Counter[Any] = Counter()
    for i, (op, arguments) in enumerate(CALLS):
        for capability in (80, 90):
            quick = calls[op] == 1 or capability == (80, 90)[seen[op] % 2]
            marks = [] if quick else [pytest.mark.slow]
            yield pytest.param((op, arguments), capability, id=f"{op.__name__}-{i}-{capability}", marks=marks)
        seen[op] += 1


@pytest.mark.cases(20)
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
    families = {row.package for row in TABLE.values() if "triton" not in row.without}
    modules = [importlib.import_module(f"{family}.triton") for family in families]
    assert launched == {name for module in modules for name in vars(module) if name.endswith("_kernel")}
