"""The launcher of CUDA kernels against a stub of the driver, and what nvcc and Triton compile for it, without a GPU."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from backstash.ops.cuda import launcher
from backstash.ops.onepass.cuda import KERNELS

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "native" / "onepass" / "kernels.cu"

STUB = r"""
#include <cstring>
extern "C" {
static void* current = nullptr;
static char context;
struct Seen {
    unsigned grid[3], block[3], shared, attribute;
    void* stream;
    unsigned long long params[16];
    int launches, sets;
} seen;
int count = 0, fail = 0;
int cuDeviceGet(int* device, int ordinal) { *device = ordinal; return 0; }
int cuDevicePrimaryCtxRetain(void** found, int) { *found = &context; return 0; }
int cuCtxGetCurrent(void** found) { *found = current; return 0; }
int cuCtxSetCurrent(void* wanted) { current = wanted; ++seen.sets; return 0; }
int cuModuleLoadData(void** module, const void* image) { *module = const_cast<void*>(image); return 0; }
int cuModuleGetFunction(void** function, void*, const char* name) {
    *function = const_cast<char*>(name);
    return std::strcmp(name, "absent") == 0 ? 500 : 0;
}
int cuFuncSetAttribute(void*, int attribute, int value) { seen.attribute = attribute == 8 ? value : 0; return 0; }
int cuLaunchKernel(void*, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                   void* stream, void** params, void**) {
    if (fail != 0) return fail;
    const unsigned grid[] = {x, y, z}, block[] = {bx, by, bz};
    std::memcpy(seen.grid, grid, sizeof grid);
    std::memcpy(seen.block, block, sizeof block);
    seen.shared = shared, seen.stream = stream, ++seen.launches;
    for (int i = 0; i < count; ++i) std::memcpy(&seen.params[i], params[i], 8);
    return 0;
}
int cuGetErrorName(int code, const char** name) {
    *name = code == 500 ? "CUDA_ERROR_NOT_FOUND" : "CUDA_ERROR";
    return 0;
}
}
"""


class Seen(ctypes.Structure):
    """What the stub was asked for last."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("attribute", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("params", ctypes.c_ulonglong * 16),
        ("launches", ctypes.c_int),
        ("sets", ctypes.c_int),
    ]


class Stub:
    """A libcuda that launches nothing and remembers what it was asked for."""

    def __init__(self, path: Path) -> None:
        self.path, self.library = str(path), ctypes.CDLL(str(path))
        self.seen = Seen.in_dll(self.library, "seen")

    def number(self, name: str, value: int) -> None:
        ctypes.c_int.in_dll(self.library, name).value = value


needs_launcher = pytest.mark.skipif(launcher.compiled_launcher() is None, reason="the launcher is not built")
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stub]:
    if shutil.which("g++") is None:
        pytest.skip("a C++ compiler makes the stub")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "stub.cpp").write_text(STUB)
    path = folder / "libcuda_stub.so"
    subprocess.run(["g++", "-O1", "-shared", "-fPIC", str(folder / "stub.cpp"), "-o", str(path)], check=True)
    yield Stub(path)
    launcher.open_launcher.cache_clear()  # so that nobody else gets a stub


@needs_launcher
def test_a_launch_hands_over_what_it_was_given(stub: Stub) -> None:
    module = launcher.open_launcher(stub.path)
    assert module is not None
    kernel = launcher.load(b"image", "kernel", 0, 256, 0, "ppilfd0", stub.path)
    stub.number("count", 7)
    x = torch.zeros(4)
    module.launch(kernel, 12, 0x77, x, None, -5, 1 << 40, 1.5, 2.5)
    seen = stub.seen
    assert [*seen.grid, *seen.block] == [12, 1, 1, 256, 1, 1]
    assert (seen.shared, seen.stream, seen.attribute) == (0, 0x77, 0)
    words = [struct.pack("Q", word) for word in seen.params[:7]]
    assert struct.unpack("Q", words[0])[0] == x.data_ptr() and seen.params[1] == 0
    assert struct.unpack("i", words[2][:4]) == (-5,) and struct.unpack("q", words[3]) == (1 << 40,)
    assert struct.unpack("f", words[4][:4]) == (1.5,) and struct.unpack("d", words[5]) == (2.5,)
    assert seen.params[6] == 0
    launches = seen.launches
    module.launch(kernel, 0, 0, x, None, 0, 0, 0.0, 0.0)  # nothing to do, which the driver would refuse
    assert seen.launches == launches


@needs_launcher
def test_a_kernel_runs_in_the_primary_context_and_may_ask_for_shared_memory(stub: Stub) -> None:
    module = launcher.open_launcher(stub.path)
    assert module is not None
    stub.library.cuCtxSetCurrent(None)
    stub.number("count", 1)
    kernel = launcher.load(b"image", "kernel", 0, 128, 100 << 10, "p", stub.path)
    assert stub.seen.attribute == 100 << 10
    stub.library.cuCtxSetCurrent(ctypes.c_void_p(8))  # another library's
    sets = stub.seen.sets
    module.launch(kernel, 1, 0, torch.zeros(1))
    assert stub.seen.sets == sets + 2, "made current, and the other one again"
    context = ctypes.c_void_p()
    stub.library.cuCtxGetCurrent(ctypes.byref(context))
    assert context.value == 8


@needs_launcher
def test_what_the_driver_refuses_is_an_error(stub: Stub) -> None:
    module = launcher.open_launcher(stub.path)
    assert module is not None
    with pytest.raises(RuntimeError, match="the kernel, got error 500 .CUDA_ERROR_NOT_FOUND"):
        launcher.load(b"image", "absent", 0, 32, 0, "p", stub.path)
    with pytest.raises(ValueError, match="kinds x"):
        launcher.load(b"image", "kernel", 0, 32, 0, "x", stub.path)
    kernel = launcher.load(b"image", "kernel", 0, 32, 0, "pi", stub.path)
    for given, message in (((torch.zeros(1),), "too few"), ((torch.zeros(1), 1, 2), "too many")):
        with pytest.raises(TypeError, match=message):
            module.launch(kernel, 1, 0, *given)
    for given in ((torch.zeros(1), "1"), (object(), 1)):
        with pytest.raises((TypeError, AttributeError)):
            module.launch(kernel, 1, 0, *given)
    stub.number("fail", 701)
    try:
        with pytest.raises(RuntimeError, match="the launch of a kernel, got error 701"):
            module.launch(kernel, 1, 0, torch.zeros(1), 1)
    finally:
        stub.number("fail", 0)


def test_without_a_driver_there_is_no_launcher() -> None:
    assert launcher.open_launcher("/nonexistent/libcuda.so.1") is None
    with pytest.raises(RuntimeError, match="no compiled launcher or no /nonexistent"):
        launcher.load(b"", "kernel", 0, 32, 0, "", "/nonexistent/libcuda.so.1")


COUNTED = """
import sys
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader

loader = ExtensionFileLoader("_launch", sys.argv[1])
module = module_from_spec(spec_from_loader("_launch", loader))
module.open_driver(sys.argv[2])


class Pointer(int):  # in the place of a tensor, because torch takes minutes to be imported under valgrind
    __slots__ = ()
    data_ptr = int.bit_length  # which takes no arguments and makes an integer, as a tensor's does


kernel = module.load_kernel(b"image", "kernel", 0, 256, 0, "pppppppllii")
a, launch = Pointer(64), module.launch
for _ in range(int(sys.argv[3])):
    launch(kernel, 100, 0, a, a, a, a, a, a, a, 1048576, 1024, 3, 0)
"""


@needs_launcher
@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind counts the instructions")
def test_a_launch_takes_few_instructions(stub: Stub) -> None:
    module = launcher.compiled_launcher()
    assert module is not None
    command = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null"]
    command += ["--toggle-collect=(anonymous namespace)::launch*", sys.executable, "-SE", "-c", COUNTED]
    run = subprocess.run([*command, module.__file__, stub.path, "1000"], capture_output=True, text=True, check=True)
    found = re.search(r"Collected\s*:\s*(\d+)", run.stderr)
    assert found is not None
    per_launch = int(found[1]) / 1000
    # A processor of 3 GHz that finishes two instructions in a cycle runs 6,000 in a microsecond.
    assert 500 < per_launch < 6000, per_launch


# -- what is compiled --------------------------------------------------------------------------------------------------


@needs_nvcc
@pytest.mark.slow
def test_the_kernels_take_what_they_are_given(tmp_path: Path) -> None:
    path = tmp_path / "kernels.ptx"
    command = ["nvcc", "-ptx", "-O1", "-std=c++17", "-fmad=false", "-arch=compute_80", str(SOURCE), "-o", str(path)]
    subprocess.run(command, check=True)
    ptx = path.read_text()
    assert set(re.findall(r"\.entry\s+(\w+)", ptx)) == set(KERNELS)
    for name, kinds in KERNELS.items():
        found = launcher.ptx_kinds(ptx, name)
        assert len(found) == len(kinds) and all(kind in each for kind, each in zip(kinds, found, strict=True)), name
    assert not re.search(r"\bmad\.\w*\.?f32", ptx), "products and sums are rounded one by one"


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("architecture", launcher.ARCHITECTURES)
def test_the_kernels_compile_for_every_architecture(architecture: int, tmp_path: Path) -> None:
    command = ["nvcc", "-cubin", "-O3", "-std=c++17", "-fmad=false", f"-arch=sm_{architecture}", str(SOURCE)]
    subprocess.run([*command, "-o", str(tmp_path / "kernels.cubin")], check=True)
    assert (tmp_path / "kernels.cubin").stat().st_size


def test_the_fatbin_has_the_architectures_that_are_asked_for() -> None:
    listed = re.search(r"^ARCHITECTURES = \((.*)\)", (ROOT / "setup.py").read_text(), re.MULTILINE)
    assert listed is not None
    assert tuple(map(int, listed[1].split(", "))) == launcher.ARCHITECTURES


@needs_launcher
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton's interpreter compiles nothing")
def test_tritons_cubins_are_launched(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    from test_triton_compile import compiled

    from backstash.ops.norms.triton import affine_kernel
    from backstash.ops.triton import relaunching

    def flat(n: int = 4096) -> torch.Tensor:
        return torch.empty(n, device="meta")

    tensors = (flat(), flat(4), flat(4), None, None, None, None, None, None, None, None, flat(), None)
    numbers = (4096, 4, 16, 0.0, 6.0, 0, 1, 0, 4)
    constants = {"ACTIVATION": 1, "ROUNDING": 0, "WIDE": False, "BLOCK": 1024, "enable_fp_fusion": False}
    found: Any = compiled(affine_kernel, 90, (*tensors, *numbers), constants)
    kernel = launcher.load_triton(found, 0, stub.path)
    kinds = launcher.triton_kinds(found.src.signature)
    assert kinds.count("p") == 4 and "f" in kinds
    given = [torch.zeros(1) if kind == "p" else 1.0 if kind in "fd" else 1 for kind in kinds]
    module = launcher.open_launcher(stub.path)
    assert module is not None
    stub.number("count", len(kinds))
    module.launch(kernel, 4, 0, *given)
    assert stub.seen.block[0] == found.metadata.num_warps * 32 and stub.seen.shared == found.metadata.shared
    launches, first = stub.seen.launches, []

    class Kernel:
        """Triton's function, whose own launch is noted."""

        arg_names = affine_kernel.arg_names

        def __getitem__(self, grid: tuple[int]) -> Any:
            return lambda *args, **constants: first.append(grid) or found

    monkeypatch.setattr(launcher, "stream_of", lambda device: 5)
    real = tuple(None if x is None else torch.zeros(4) for x in tensors)
    twice = Kernel()
    for programs in (7, 8, 9):
        relaunching.run(twice, programs, (*real, *numbers), constants, stub.path)
    assert first == [(7,)] and stub.seen.launches == launches + 2 and stub.seen.grid[0] == 9
    assert stub.seen.stream == 5 and stub.seen.params[0] == real[0].data_ptr()
    with pytest.raises(ValueError, match=r"arguments of the types \['fp16'\]"):
        launcher.triton_kinds({"x": "fp16"})
