"""A network too deep for its memory, each way to train it in a process of its own; :mod:`studies.layrub` runs this.

A run builds the network, its gradients and the optimizer's momenta, then trains: SGD with momentum 0.9 and weight decay
1e-4, as Layrub's configuration has it, with a smaller learning rate as there are few steps. Where a run is limited, its
address space may grow from there on by ``budget_nbytes`` and no more (``RLIMIT_AS``): what a step allocates, freed
memory that the process keeps, transfer buffers, and the program's own objects. All runs see the same images, and a run
says its losses and a checksum of all weights as bits, which the runs can be compared by.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

import backstash
from backstash import Session, policies
from backstash.integrations import allocator
from backstash.report import meter
from backstash.stores import DiskStore, HostStore, TierStore
from bench.cases import SEED, image_batch
from bench.link import PCIE, FarStore, LinkStore
from bench.machine import ROOT
from bench.step_table import uncollected
from tests import networks

Way = Literal["plain", "lossless", "layrub", "link", "counted", "disk", "layrub_counted"]
"""How to train. ``link``: offload to a host's memory over a simulated link. ``disk``: offload to a host's memory of 64
MiB, and from there to a disk. Both with one value ahead. ``counted``: as ``link``, to memory that is not counted."""

WAYS = get_args(Way)

MAPPED_FROM = 1 << 20
"""Bytes of an allocation from which a limited run gives its memory back to the system at once. In a heap that is kept,
small things settle in the holes that large tensors leave, so that the next large ones do not fit there."""

HOST_NBYTES = 64 << 20


@dataclass(frozen=True)
class Deep:
    """A ResNet of bottleneck blocks, and what it is trained on.

    Attributes:
        name: what it is called.
        blocks: of each stage.
        width: channels of the first stage; the published one is 64.
        batch, size: images per step, their height and width.
        budget_nbytes: by which a limited run may grow.
    """

    name: str
    blocks: tuple[int, ...]
    width: int
    batch: int
    size: int
    budget_nbytes: int

    @property
    def layers(self) -> int:
        """Layers with weights: three in a block, the first convolution and the classifier; projections do not count."""
        return 3 * sum(self.blocks) + 2


RESNET1517 = Deep("resnet1517", (3, 83, 416, 3), 64, 32, 96, 1 << 30)
"""Layrub's deepest network, at its batch; images of 224 would take 5.4 times as much of everything."""

RESNET15170 = Deep("resnet15170", (30, 830, 4160, 36), 16, 8, 64, 3 << 29)
"""Ten times its layers. A quarter of its width: at full width the weights alone are 20 GB."""

QUICK = Deep("resnet68", (3, 8, 8, 3), 16, 48, 160, 448 << 20)


@dataclass(frozen=True)
class Asked:
    """A run.

    Attributes:
        deep: the network.
        way: how to train.
        steps: how many.
        limited: whether the address space is limited.
    """

    deep: Deep
    way: Way
    steps: int
    limited: bool = False


@dataclass(frozen=True)
class Run:
    """What became of it.

    Attributes:
        way, limited, steps: what was asked for.
        failure: why it ended early; empty where it did not.
        losses: of each step, in hexadecimal: every bit.
        weights: SHA-256 of all weights after the last step, in the order of ``parameters()``.
        seconds: forward and backward of each step; the first one proves and learns.
        peak_nbytes: counted peak of one more forward and backward, above what was there; 0 where it was not counted.
        parameter_nbytes: of the weights; gradients and momenta take as many each.
        values: values that the Session stored in a step, whatever their form.
        saved_nbytes, stash_nbytes, moved_nbytes: of them, as its report has them.
        out_nbytes, back_nbytes: that crossed the link in the last step.
        stall_seconds: that the last step waited for a store.
        virtual_nbytes: address space before the first step; ``limit_nbytes`` is what it was limited to, None without.
        virtual_peak_nbytes, resident_peak_nbytes: the most that the process ever had.
    """

    way: str
    limited: bool
    steps: int
    failure: str = ""
    losses: tuple[str, ...] = ()
    weights: str = ""
    seconds: tuple[float, ...] = ()
    peak_nbytes: int = 0
    parameter_nbytes: int = 0
    values: int = 0
    saved_nbytes: int = 0
    stash_nbytes: int = 0
    moved_nbytes: int = 0
    out_nbytes: int = 0
    back_nbytes: int = 0
    stall_seconds: float = 0.0
    virtual_nbytes: int = 0
    limit_nbytes: int | None = None
    virtual_peak_nbytes: int = 0
    resident_peak_nbytes: int = 0

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Run:
        """What JSON made of it."""
        return cls(**{**fields, **{key: tuple(fields[key]) for key in ("losses", "seconds")}})


def run(asked: Asked, folder: Path | None = None) -> Run:
    """Run it in a process of its own.

    Args:
        asked: the run.
        folder: where a disk store's file goes; None: the system's folder for temporary files.
    """
    paths = [str(ROOT), str(Path(backstash.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "MALLOC_ARENA_MAX": "1",  # every other arena takes 64 MiB of address space
    }
    if asked.limited:
        environment["MALLOC_MMAP_THRESHOLD_"] = str(MAPPED_FROM)
    command = [sys.executable, "-m", "studies.deep", json.dumps(asdict(asked))]
    command += ["--threads", str(torch.get_num_threads())]
    with tempfile.TemporaryDirectory(dir=folder) as disk:
        ended = subprocess.run(
            [*command, "--folder", disk], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
    found = ended.stdout.splitlines()[-1:] if ended.returncode == 0 else []
    if not found:
        last = " ".join(ended.stderr.splitlines()[-1:])
        return Run(asked.way, asked.limited, asked.steps, failure=f"it ended with {ended.returncode}: {last}")
    return Run.of(json.loads(found[0]))


# -- in that process ---------------------------------------------------------------------------------------------------


def _train(asked: Asked, folder: Path) -> Run:
    if not asked.limited:
        allocator.keep_memory()  # as the allocators of devices do
    deep = asked.deep
    torch.manual_seed(SEED)
    model = networks.resnet(deep.blocks, width=deep.width).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, weight_decay=1e-4)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # so that the momenta are there
    data = [image_batch(deep.batch, deep.size, start=deep.batch * step) for step in range(asked.steps + 1)]
    batches = [(images.contiguous(memory_format=torch.channels_last), labels) for _, images, labels in data]
    with ExitStack() as stack:
        stack.enter_context(uncollected())
        session, link = _session(asked.way, model, folder, stack)
        _warm_up(session is not None)
        gc.collect()
        before = _virtual("VmSize")
        limit = before + deep.budget_nbytes if asked.limited else None
        unlimited = resource.getrlimit(resource.RLIMIT_AS)
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_AS, (limit, unlimited[1]))
        losses: list[str] = []
        seconds: list[float] = []
        failure, peak = "", 0
        sent = (0, 0)
        try:
            for images, labels in batches[:-1]:
                sent = (link.out_nbytes, link.back_nbytes) if link is not None else sent
                optimizer.zero_grad(set_to_none=False)
                gc.collect()
                started = time.perf_counter()
                loss = _step(model, session, images, labels)
                seconds.append(time.perf_counter() - started)
                losses.append(float(loss).hex())
                optimizer.step()
            weights = _checksum(model)
            if not asked.limited and asked.way not in ("link", "disk"):
                with meter.CountedPeak() as counter:
                    _step(model, session, *batches[-1])
                peak = counter.peak_nbytes
        except (MemoryError, RuntimeError) as error:
            resource.setrlimit(resource.RLIMIT_AS, unlimited)
            failure = f"step {len(losses) + 1}: {_short(error)}"
            weights = ""
        report = session.report() if session is not None else None
        return Run(
            asked.way,
            asked.limited,
            asked.steps,
            failure,
            tuple(losses),
            weights,
            tuple(seconds),
            peak,
            sum(parameter.nbytes for parameter in model.parameters()),
            0 if report is None else len(report.rows),
            0 if report is None else report.saved_nbytes,
            0 if report is None else report.stash_nbytes,
            0 if report is None else report.moved_nbytes,
            0 if link is None else link.out_nbytes - sent[0],
            0 if link is None else link.back_nbytes - sent[1],
            0.0 if report is None else report.stall_seconds,
            before,
            limit,
            _virtual("VmPeak"),
            _virtual("VmHWM"),
        )


def _session(way: Way, model: nn.Module, folder: Path, stack: ExitStack) -> tuple[Session | None, LinkStore | None]:
    if way == "plain":
        return None, None
    if way == "lossless":
        return Session("lossless", model=model), None
    if way == "disk":
        tiers = TierStore([HostStore(HOST_NBYTES), stack.enter_context(DiskStore(folder))])
        return Session(policies.offload(ahead=1), model=model, stores={"host": tiers}), None
    if way not in WAYS:
        raise ValueError(f"studies.deep was asked for the way {way!r}, but there are {', '.join(WAYS)}.")
    link = LinkStore(FarStore() if way.endswith("counted") else HostStore(), PCIE)
    policy = policies.layrub() if way.startswith("layrub") else policies.offload(ahead=1)
    return Session(policy, model=model, stores={"host": link}), link


def _step(model: nn.Module, session: Session | None, images: Tensor, labels: Tensor) -> Tensor:
    with session or nullcontext():
        loss = functional.cross_entropy(model(images), labels)
    torch.autograd.backward([loss])
    return loss.detach()


def _warm_up(stashes: bool) -> None:
    """Start the threads and load the kernels that a step takes, on a network of a few layers."""
    model = networks.resnet((1, 1), num_classes=10, width=16).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    session = Session(policies.offload(), model=model, min_nbytes=0) if stashes else None
    for _ in range(2):
        _step(model, session, torch.ones(8, 3, 64, 64).contiguous(memory_format=torch.channels_last), torch.arange(8))


def _checksum(model: nn.Module) -> str:
    found = hashlib.sha256()
    for parameter in model.parameters():
        flat = parameter.detach().as_strided((parameter.numel(),), (1,))
        found.update(flat.numpy().data)
    return found.hexdigest()


def _short(error: BaseException) -> str:
    text = re.sub(r"\s+", " ", str(error)) or "no message"
    return f"{type(error).__name__}: {text[:300]}"


def _virtual(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    return 0


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what is asked for in JSON, and prints what became of it."""
    parser = argparse.ArgumentParser(prog="python -m studies.deep", description="One run; studies.layrub asks.")
    parser.add_argument("asked", help="a run, as JSON")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="of a disk store's file")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="that torch computes with")
    given = parser.parse_args(arguments)
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    asked: dict[str, Any] = json.loads(given.asked)
    deep = asked.pop("deep")
    with _threads(given.threads):
        found = _train(Asked(Deep(**{**deep, "blocks": tuple(deep["blocks"])}), **asked), given.folder)
    print(json.dumps(asdict(found)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
