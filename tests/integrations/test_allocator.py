"""Keeping freed memory avoids page faults, and the best allocator that is installed is found and preloaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from backstash.errors import AllocatorError
from backstash.integrations import allocator
from backstash.integrations.allocator import Allocator, ProcessorTime
from studies.allocator import environments

SCRIPT = """
import json, sys, torch
from backstash.integrations.allocator import ProcessorTime, keep_memory
kept = sys.argv[1] == "keep" and keep_memory()
torch.ones(48 << 20, dtype=torch.uint8)
before = ProcessorTime.now()
for _ in range(20):
    torch.ones(48 << 20, dtype=torch.uint8)
print(json.dumps([kept, ProcessorTime.now().since(before).page_faults]))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
def test_kept_memory_is_not_paged_in_again() -> None:
    found = {}
    for how in ("keep", "default"):
        run = subprocess.run([sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, check=True)
        found[how] = json.loads(run.stdout)
    if not found["keep"][0]:
        pytest.skip("this C library has no mallopt")
    assert found["keep"][1] * 4 < found["default"][1]


def test_advice() -> None:
    assert ProcessorTime(9.5, 0.5, 1000).advice() is None
    assert ProcessorTime(0.0, 0.0, 0).advice() is None
    advice = ProcessorTime(8.0, 2.0, 123_456).advice()
    assert advice is not None
    assert advice.startswith("20% of the processor time went to the system, with 123,456 page faults")


def library(folder: Path, name: str) -> str:
    """A file that looks like a shared library."""
    path = folder / name
    path.write_bytes(b"\x7fELF\x02 and so on")
    return str(path)


@pytest.fixture
def no_allocators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A system on which none is installed, no GPU is present, and only one folder is searched."""
    monkeypatch.setattr(allocator, "_listed", dict)
    monkeypatch.setattr(allocator, "_FOLDERS", (str(tmp_path),))
    monkeypatch.setattr(allocator, "_has_gpu", lambda: False)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine="none"))  # no folder of this processor's libraries
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    return tmp_path


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
def test_the_best_allocator_that_is_installed_is_chosen(no_allocators: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = no_allocators
    assert allocator.choose_allocator("auto") is None and "libtcmalloc-minimal4" in str(allocator.allocator_advice())
    library(folder, "libmimalloc.so.2")
    assert allocator.choose_allocator("auto") is None  # it would page every large block in again
    assert allocator.choose_allocator("mimalloc") == Allocator("mimalloc", str(folder / "libmimalloc.so.2"))
    jemalloc = library(folder, "libjemalloc.so.2")
    found = allocator.choose_allocator("auto")
    assert found is not None and (found.name, found.path) == ("jemalloc", jemalloc)
    (folder / "libtcmalloc_minimal.so.4").write_text("no library")
    assert allocator.choose_allocator("auto") == found
    tcmalloc = library(folder, "libtcmalloc.so.4")
    found = allocator.choose_allocator("auto")
    assert found is not None and (found.name, found.path) == ("tcmalloc", tcmalloc)
    assert list(allocator.installed()) == ["tcmalloc", "jemalloc", "mimalloc"]
    assert allocator.choose_allocator("system") is None and allocator.allocator_advice() is None
    monkeypatch.setenv("LD_PRELOAD", "/opt/libjemalloc.so.2")
    assert allocator.preloaded() == "jemalloc" and allocator.choose_allocator("auto") is None
    monkeypatch.delenv("LD_PRELOAD")
    monkeypatch.setattr(allocator, "_has_gpu", lambda: True)
    assert allocator.choose_allocator("auto") is None


def test_the_linker_s_list_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = library(tmp_path, "libtcmalloc_minimal.so.4")
    narrow = tmp_path / "libjemalloc.so.2"
    narrow.write_bytes(b"\x7fELF\x01")  # of another word size
    named = {"libtcmalloc_minimal.so.4": path, "libjemalloc.so.2": narrow, "libz.so.1": path}
    listing = "3 libs found\n" + "".join(f"\t{name} (libc6,x86-64) => {where}\n" for name, where in named.items())
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: SimpleNamespace(stdout=listing))
    assert allocator._listed() == {"libtcmalloc_minimal.so.4": path}


def test_an_allocator_that_is_not_there_is_refused(no_allocators: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AllocatorError, match="this system has no libjemalloc.so.2. Install it .*apt install libjem"):
        allocator.choose_allocator("jemalloc")
    with pytest.raises(AllocatorError, match="that file does not exist. Give one of auto, system, tcmalloc"):
        allocator.choose_allocator("/opt/none.so")
    with pytest.raises(AllocatorError, match="that file is no shared library"):
        allocator.choose_allocator(__file__)


def test_a_library_is_taken_by_its_path(tmp_path: Path) -> None:
    path = library(tmp_path, "libjemalloc-5.so")
    found = allocator.choose_allocator(path)
    assert found is not None and "dirty_decay_ms" in found.settings["MALLOC_CONF"]
    environment = found.environment({"LD_PRELOAD": "/opt/a.so", "MALLOC_CONF": "narenas:1"})
    assert environment == {"LD_PRELOAD": f"{path} /opt/a.so", "MALLOC_CONF": "narenas:1"}


def test_the_benchmark_runs_every_allocator_that_is_installed(no_allocators: Path, tmp_path: Path) -> None:
    path = library(no_allocators, "libtcmalloc.so.4")
    assert environments(None)["tcmalloc"]["LD_PRELOAD"] == path
    given = library(tmp_path, "libjemalloc.so.9")
    found = environments(given)
    assert "tcmalloc" not in found and "dirty_decay_ms" in found["jemalloc"]["MALLOC_CONF"]
    assert found["default"] == {}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
def test_run_starts_again_under_the_allocator_once_and_says_so(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nprint(sys.argv[1:], 'libgomp' in open('/proc/self/maps').read())\n")
    libraries = sorted(Path(torch.__file__).parent.glob("lib/libgomp*.so*"))  # any library can be preloaded
    if not libraries:
        pytest.skip("this torch brings no libgomp")
    path = libraries[0]
    command = [sys.executable, "-m", "backstash", "run", "--allocator", str(path), str(script), "--a", "b c"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("['--a', 'b c'] True\n")
    (line,) = [line for line in done.stderr.splitlines() if "starting under" in line]
    assert line.endswith(f"({path.resolve()}); --allocator system does not")
