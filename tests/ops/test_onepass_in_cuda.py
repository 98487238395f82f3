"""The kernels in CUDA C++ have the reference's bits: the tests of those in C++ run with them.

On a GPU; and everywhere as g++ compiles their source, one thread after the other.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_norms
import test_onepass as of_cpp
import torch
from native_checks import SMALL_FLOATS
from torch import Tensor

from backstash.ops import backends
from backstash.ops.layout import Activation, ComputedCurve, NormOrder, Rounding
from backstash.ops.norms import cuda as norms
from backstash.ops.onepass import cuda

SOURCE = Path(__file__).parents[2] / "native" / "onepass" / "kernels.cu"
COMPILER = shutil.which(os.environ.get("CXX", "g++"))

PLACES = """
#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
struct Place { unsigned x; };
static Place blockIdx, threadIdx;
extern "C" void place(unsigned block, unsigned thread) { blockIdx.x = block; threadIdx.x = thread; }
"""
"""What CUDA has and C++ has not."""

C_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int, "l": ctypes.c_int64, "f": ctypes.c_float}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernels as functions of one thread."""
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "places.h").write_text(PLACES)
    command = [COMPILER, "-x", "c++", "-std=c++17", "-O2", "-ffp-contract=off", "-fPIC", "-shared"]
    subprocess.run(
        [*command, "-include", str(folder / "places.h"), str(SOURCE), "-o", str(folder / "kernels.so")], check=True
    )
    return ctypes.CDLL(str(folder / "kernels.so"))


def one_by_one(library: ctypes.CDLL) -> Callable[..., None]:
    """Returns what launches a kernel: each of its threads in turn."""

    def launch(name: str, x: Tensor, *args: Any) -> None:
        function = getattr(library, name)
        function.argtypes = [C_TYPES[kind] for kind in cuda.KERNELS[name]]
        given = [each.data_ptr() if isinstance(each, Tensor) else each for each in args]
        for place in range(-(-x.numel() // cuda.PACK)):
            library.place(*divmod(place, cuda.THREADS))
            function(*given)

    return launch


class OnGpu:
    """Runs a kernel on the GPU, on copies of its tensors, whose contents come back into the caller's."""

    def __getattr__(self, name: str) -> Any:
        def run(*given: Any) -> None:
            moved = [each.cuda() if isinstance(each, Tensor) else each for each in given]
            getattr(backends.serving("cuda"), name)(*moved)
            for own, copy in zip(given, moved, strict=True):
                if isinstance(own, Tensor):
                    own.copy_(copy)

        return run


HAS_GPU = torch.cuda.is_available()
ON_GPU = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="no CUDA GPU")])


@pytest.fixture(params=["g++", ON_GPU], autouse=True)
def _instead_of_cpp(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "cuda":
        assert backends.has_own_kernel("row_norm", "cuda"), "the kernels were not built, or do not serve this GPU"
        monkeypatch.setattr(of_cpp, "cpu", OnGpu())
        return
    launch = one_by_one(request.getfixturevalue("compiled"))
    monkeypatch.setattr(cuda, "launch", launch)
    monkeypatch.setattr(norms, "launch", launch)
    monkeypatch.setattr(of_cpp, "cpu", cuda)


@pytest.mark.parametrize("dtype", SMALL_FLOATS)
@pytest.mark.parametrize("order", NormOrder)
def test_norms_of_rows(order: NormOrder, dtype: torch.dtype) -> None:
    of_cpp.test_norms_of_rows("", order, dtype)


@pytest.mark.parametrize("dtype", SMALL_FLOATS)
@pytest.mark.parametrize("curve", ComputedCurve)
def test_norms_of_groups(curve: ComputedCurve, dtype: torch.dtype) -> None:
    of_cpp.test_norms_of_groups("", curve, dtype)


@pytest.mark.parametrize("dtype", SMALL_FLOATS)
@pytest.mark.parametrize("activation", Activation)
def test_norms_of_channels(activation: Activation, dtype: torch.dtype) -> None:
    of_cpp.test_norms_of_channels("", activation, dtype)


@pytest.mark.parametrize("dtype", SMALL_FLOATS)
def test_curves_gates_and_dropout_at_every_length(dtype: torch.dtype) -> None:
    of_cpp.check_curves_gates_and_dropout(dtype, has_tails=False)


def test_dropout_is_a_product_with_the_mask() -> None:
    of_cpp.test_dropout_is_a_product_with_the_mask()


def test_computed_curves_are_the_same_at_special_numbers() -> None:
    of_cpp.test_computed_curves_are_the_same_at_special_numbers()


def test_norms_of_odd_numbers() -> None:
    of_cpp.test_norms_of_odd_numbers()


@pytest.mark.parametrize("rounding", Rounding)
def test_affine(rounding: Rounding, request: pytest.FixtureRequest) -> None:
    test_norms.check_affine(norms, "cuda" if "cuda" in request.node.callspec.id else "cpu", rounding)


def test_a_mask_of_another_size_is_refused() -> None:
    test_norms.check_mask_of_another_size(norms, "cpu")


@pytest.mark.parametrize("dtype", SMALL_FLOATS[1:])
def test_a_table_has_an_entry_for_every_code(dtype: torch.dtype) -> None:
    """Those of signalling NaN are no others than those of quiet ones, and their entries are copied as they are."""
    codes = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    table = codes[torch.randperm(1 << 16, generator=torch.Generator().manual_seed(0))].clone()
    out = torch.empty_like(codes)
    of_cpp.cpu.curve(codes.view(dtype), 0, table, None, 0, 0, 0, out.view(dtype))
    assert torch.equal(out, table)
    other = torch.ones_like(codes).view(dtype)
    inner = torch.empty_like(codes)
    of_cpp.cpu.gated(codes.view(dtype), other, table, table, 0, 0, 0, 0, out.view(dtype), inner.view(dtype))
    assert torch.equal(inner, table)


@pytest.mark.skipif(not HAS_GPU, reason="no CUDA GPU")
@pytest.mark.gpu
def test_the_kernels_serve_this_gpu() -> None:
    assert cuda.available()
