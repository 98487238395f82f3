"""The kernels and measurements that work on this machine: the findings of ``backstash doctor``."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from backstash import accelerator, codecs, interpreter, testing
from backstash.integrations import allocator
from backstash.ops import backends
from backstash.report import machine, meter
from backstash.saved import TensorSpec

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@dataclass(frozen=True)
class Diagnosis:
    """One finding, which is one line of output.

    Attributes:
        ok: whether nothing is wrong. A slow way that works is not wrong.
    """

    subject: str
    text: str
    ok: bool = True


def examine() -> Iterator[Diagnosis]:
    """Yields all findings. The checks of the codecs take a few seconds."""
    here = machine.describe_machine()
    yield Diagnosis("machine", f"{here.cpu}, {here.cores} cores, {here.threads} torch threads, {platform.system()}")
    commit = f" ({here.commit})" if here.commit else ""
    yield Diagnosis("versions", f"backstash {here.backstash}{commit}, torch {here.torch}, Python {here.python}")
    yield _kernels("cpu")
    kind = accelerator.kind()
    if kind is not None:
        yield Diagnosis("GPU", here.gpu or kind)
        yield _kernels(kind)
    else:
        yield Diagnosis("GPU", f"no accelerator; Triton is {'' if _installed('triton') else 'not '}installed")
    yield Diagnosis("replay", _replay())
    yield Diagnosis("compiler", _compiler())
    yield Diagnosis("huge pages", _huge_pages())
    yield Diagnosis("allocator", _allocator())
    yield Diagnosis("resident peak", _resident_peak())
    for device in ("cpu", *(() if kind is None else (kind,))):
        for name in codecs.names():
            yield _codec(name, device)


def _kernels(device: str) -> Diagnosis:
    subject = f"kernels on {device}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning of slow kernels, which has a finding of its own
        try:
            serving = backends.name(device)
        except (ValueError, OSError) as error:  # a wrong setting, or a library that does not load
            return Diagnosis(subject, str(error), ok=False)
    if serving == "native":
        from backstash.ops import cpu

        built = cpu.build_info()
        return Diagnosis(subject, f"native C++, {built['isa']}, {'with' if built['openmp'] else 'without'} OpenMP")
    if serving == "reference":
        asked = os.environ.get("BACKSTASH_KERNELS") == "reference"
        why = "BACKSTASH_KERNELS asks for it" if asked else "no faster ones are built"
        return Diagnosis(subject, f"reference: plain torch, exact but slow ({why})")
    return Diagnosis(subject, serving)


def _replay() -> str:
    if interpreter.module is not None:
        return f"steps that repeat themselves are replayed; built for torch {interpreter.module.TORCH}"
    how = "install backstash beside this torch with --no-build-isolation"
    return f"no step is replayed: nothing is built for torch {torch.__version__} ({how})"


def _compiler() -> str:
    for command in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        if command and shutil.which(command):
            done = subprocess.run([command, "--version"], capture_output=True, text=True, check=False)
            return done.stdout.partition("\n")[0] or command
    return "none; building the native kernels needs one"


def _huge_pages() -> str:
    if not _HUGE_PAGES.exists():
        return "this system has no such setting"
    setting = _HUGE_PAGES.read_text().partition("[")[2].partition("]")[0]
    note = "" if setting in ("always", "madvise") else "; decoding into fresh memory is slower without them"
    return f"{setting}{note}"


def _allocator() -> str:
    started_with = allocator.preloaded()
    if started_with is not None:
        return f"{started_with}, which this process was started with"
    found = [f"{one.name} ({one.path})" for one in allocator.installed().values()]
    advice = allocator.allocator_advice()
    if not found:
        return advice or "the system's"
    return f"{', '.join(found)}; backstash run uses the first on CPU" if advice is None else f"{found[0]}; {advice}"


def _resident_peak() -> str:
    if meter.resident_peak_nbytes() is None:
        return "cannot be measured: /proc/self/status does not tell"
    if not meter.reset_resident_peak():
        return "cannot be measured: /proc/self/clear_refs is not writable"
    return "can be measured"


def _codec(name: str, device: str) -> Diagnosis:
    subject = f"codec {name} on {device}"
    codec = codecs.get(name)
    refusals = [codec.accepts(TensorSpec.of(x)) for x in testing.probes(device)]
    if all(refusals):
        return Diagnosis(subject, f"takes nothing here: {refusals[0]}")
    try:
        checked = testing.check_codec(codec, testing.probes(device))
    except Exception as error:  # a broken kernel may raise anything, and the finding says so
        return Diagnosis(subject, f"{type(error).__name__}: {error}", ok=False)
    return Diagnosis(subject, f"{checked.encoded} tensors encoded and decoded as promised")


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
