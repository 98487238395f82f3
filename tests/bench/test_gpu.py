"""The programs for a GPU, as far as they need no device: the search for a size, pages, traces, the command line.

``tests/device/test_gpu_programs.py`` runs them on the fake accelerator.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import device_instructions
from bench.gpu import __main__ as command
from bench.gpu import filling, pages
from bench.gpu.g5 import overlap
from bench.gpu.g6 import bodies

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("capacity", [1, 2, 3, 10, 57, 64, 1000, 12345])
@pytest.mark.parametrize("share", [0.01, 0.3, 0.95, 1.0, 1.05, 1.5, 40.0])
def test_a_search_finds_the_largest_size_that_fits(capacity: int, share: float) -> None:
    asked: list[int] = []

    def fits(size: int) -> bool:
        asked.append(size)
        return size <= capacity

    found = filling.search(fits, low=1, guess=int(share * capacity), trials=200)
    assert found.size <= capacity and found.tried == tuple(asked)
    assert found.failed is not None and found.failed > capacity
    assert found.failed - found.size <= max(1, filling.NEAR * found.size)
    assert len(set(asked)) == len(asked)


@pytest.mark.parametrize("capacity", [57, 64, 1000, 12345])
@pytest.mark.parametrize("share", [0.97, 1.0, 1.03])
def test_a_good_guess_needs_few_trials(capacity: int, share: float) -> None:
    found = filling.search(lambda size: size <= capacity, low=2, guess=int(share * capacity))
    assert 0.96 * capacity <= found.size <= capacity
    assert len(found.tried) <= filling.TRIALS


def test_a_trace_tells_how_long_kernels_and_copies_ran_together() -> None:
    def event(category: str, begin: float, seconds: float, name: str = "") -> dict[str, Any]:
        return {"cat": category, "ts": begin * 1e6, "dur": seconds * 1e6, "name": name}

    found = overlap(
        [
            event("kernel", 0, 2),
            event("kernel", 1, 2),  # beside the one before, on another stream
            event("kernel", 5, 1),
            event("gpu_memcpy", 2, 4, "Memcpy DtoH (Device -> Pinned)"),
            event("gpu_memcpy", 0, 9, "Memcpy DtoD (Device -> Device)"),  # crosses no link
            event("cpu_op", 0, 9),
            {"cat": "ac2g", "ts": 0},
        ]
    )
    assert (found.kernels, found.copies, found.both) == pytest.approx((4.0, 4.0, 2.0))


def test_kernels_of_a_compiled_graph_are_compared_without_their_names() -> None:
    code = "x = async_compile.triton('''\n@triton.jit\ndef triton_poi_{}(a):\n    y = a + {}\n''', device_str='cuda')\n"
    first, second, other = (bodies(code.format(*numbers)) for numbers in ((0, 1), (7, 1), (0, 2)))
    assert first == second != other and len(first) == 1


def test_instructions_are_read_from_what_callgrind_writes(tmp_path: Path) -> None:
    head = "version: 1\ndesc: Trigger: Client Request: resnet50/plain\n\nevents: Ir\nsummary: 600\n"
    text = f"{head}\nfn=(1)\n0 975\n\ntotals: 975\n"
    assert device_instructions.dumped(text) == ("resnet50/plain", 975)
    assert device_instructions.dumped("desc: Trigger: Program termination\ntotals: 5\n") == (None, 5)
    for number, instructions in enumerate((975, 971, 990)):
        (tmp_path / f"callgrind.out.{number}").write_text(text.replace("975", str(instructions)))
    (tmp_path / "callgrind.out.3").write_text(text.replace("plain", "keep"))
    row = device_instructions.read(tmp_path, "resnet50/plain", operations=400)
    assert row == device_instructions.Row("plain", 975, 971, 990, 400)


def test_without_valgrind_nothing_is_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    assert device_instructions.main([]) == 0
    assert "valgrind is not there" in capsys.readouterr().out


def _summary(median: float, count: int = 7) -> dict[str, Any]:
    return {"median": median, "q1": median, "q3": median, "low": median, "count": count}


def _row(**other: Any) -> dict[str, Any]:
    return {"result": {"peak_nbytes": 1 << 20, "is_exact": True, "differing": [], **other}}


def test_a_page_names_the_ways_that_have_other_bits_but_for_those_of_plain_itself() -> None:
    parts = {
        "net/steps/plain": _row(),
        "net/steps/plain again": _row(differing=[3]),
        "net/steps/lossless": _row(differing=[3]),
        "net/steps/offload": _row(differing=[3, 4]),
        "net/steps/rounded": _row(is_exact=False, differing=[1, 2]),
        "net/steps/broken": {"error": "RuntimeError: no"},
        "net/steps/times": {"result": {"plain": {"seconds": _summary(0.002), "times_plain": _summary(1.0, 3)}}},
    }
    found = {"parts": parts, "device": "cuda", "machine": {"gpu": "a card"}}
    wrong = "\n".join(pages.wrong("g2", found))
    assert "offload: 1 gradients" in wrong and "broken" in wrong
    assert "lossless" not in wrong and "rounded" not in wrong and "plain again" not in wrong
    page = pages.text("g2", found)
    assert "a card" in page and "2.00 [2.00 2.00]" in page and "3 rounds" in page
    assert "1 gradients differ" in page and "not compared" in page


def test_pages_need_no_package() -> None:
    """Docs take their tables, on machines that have nothing but Python."""
    code = "import sys; import bench.gpu.pages; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_an_accelerator_has_to_be_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["g1"])
    assert "torch finds none here; --device fake --small shows that everything runs" in capsys.readouterr().err
