"""Effects of importing the Triton kernels; planes of wrong sizes; fields that share bytes."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor
from triton_checks import DEVICE, launchers, triton_test

from backstash.codecs.narrow.windows.reference import window_bits
from backstash.errors import DamagedPlanesError
from backstash.ops.triton.launching import bytes_per_field, fields_per_byte, number_bits


@triton_test
def test_planes_of_wrong_size_are_refused_on_triton() -> None:
    from backstash.codecs.szp import triton as szp

    def plane(n: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.zeros(n, dtype=dtype, device=DEVICE)

    out = plane(20, torch.float32)
    offsets = plane(1, torch.int64)
    pool2 = (1, [40], [20], [2], [2], [0], [1])
    for size in (0, 2, 4):
        with pytest.raises(DamagedPlanesError, match="'mask'"):
            launchers.bitmask_decode(plane(size), out, 1.0, 0.0)
        with pytest.raises(DamagedPlanesError, match="'mask'"):
            launchers.binary_decode(plane(size), out[:2], out)
        with pytest.raises(DamagedPlanesError, match="'mask'"):
            launchers.zvc_decode(plane(size), offsets, out, out)
        with pytest.raises(DamagedPlanesError, match="'mask'"):
            launchers.szp_decode(plane(size), offsets, offsets.int(), out[:1], out)
        with pytest.raises(DamagedPlanesError, match="'rows'"):
            launchers.csr_decode(plane(3), plane(size + 1, torch.int32), out[:3], out)
        with pytest.raises(DamagedPlanesError, match="'columns'"):
            launchers.csr_decode(plane(size), plane(2, torch.int32), out[:3], out)
        with pytest.raises(DamagedPlanesError, match="'packed'"):
            launchers.fewbit_decode(plane(size), [1.0, 2.0], 1, out)
        with pytest.raises(DamagedPlanesError, match="'codes'"):
            launchers.blockquant_decode(plane(size), out[:4], 1, 16, out)
        with pytest.raises(DamagedPlanesError, match="'packed'"):
            launchers.narrow_decode(plane(size), 1, 0, plane(20, torch.int64))
        with pytest.raises(DamagedPlanesError, match="'packed'"):
            launchers.window_decode(plane(size), *pool2, plane(20, torch.int64))
    with pytest.raises(DamagedPlanesError, match="'codes'"):
        launchers.minifloat_decode(plane(19), "fp8", out)
    with pytest.raises(DamagedPlanesError, match="'scales'"):
        launchers.minifloat_scaled_decode(plane(20), plane(1, torch.float32), "float8_e5m2", 16, out)
    with pytest.raises(DamagedPlanesError, match="at most 20 values in 7 words, got 8"):
        launchers.zvc_minifloat_decode(plane(3), offsets, plane(8, torch.int32), "fp10", out)
    with pytest.raises(DamagedPlanesError, match="'pair'"):
        launchers.binary_decode(plane(3), out[:1], out)
    with pytest.raises(DamagedPlanesError, match="'offsets'"):
        launchers.zvc_decode(plane(3), plane(2, torch.int64), out, out)
    with pytest.raises(DamagedPlanesError, match="at most 20 values"):
        launchers.zvc_decode(plane(3), offsets, plane(21, torch.float32), out)
    with pytest.raises(DamagedPlanesError, match=f"at most {szp.SLOT} words"):
        launchers.szp_decode(plane(3), offsets, plane(szp.SLOT + 1, torch.int32), out[:1], out)
    with pytest.raises(DamagedPlanesError, match="at most 20 values"):
        launchers.csr_decode(plane(21), plane(2, torch.int32), plane(21, torch.float32), out)


def test_fields_and_bytes_that_share_bits() -> None:
    for width in range(1, 33):
        begins = range(0, 8 * width, width)
        bytes_of = [{bit // 8 for bit in range(begin, begin + width)} for begin in begins]
        fields_of = [sum(byte in some for some in bytes_of) for byte in range(width)]
        assert max(map(len, bytes_of)) == bytes_per_field(width)
        assert max(fields_of) == fields_per_byte(width)
        assert window_bits([2**width]) == width


@pytest.mark.slow
@pytest.mark.skipif(launchers is None, reason="Triton is not installed: pip install triton")
def test_importing_the_package_imports_no_triton_and_starts_no_cuda() -> None:
    script = (
        "import sys, torch; before = 'triton' in sys.modules\n"
        "import backstash\n"
        "from backstash.ops import triton\n"
        "assert triton.available()\n"
        "assert before or 'triton' not in sys.modules\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_bits_of_numbers_that_are_equal_but_differ() -> None:
    for _ in range(2):
        assert number_bits(0.0, torch.float32) == 0
        assert number_bits(-0.0, torch.float32) == -(2**31)
        assert number_bits(1.0, torch.float16, torch.float32) == number_bits(1.0, torch.float32) == 0x3F800000
        assert number_bits(1.0, torch.float64) == 0x3FF0 << 48
