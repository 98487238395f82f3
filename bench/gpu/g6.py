"""Compiled models: plain, under torch's budget, and treated by us. Bits, peaks, sizes, throughput, and kernels' text.

The bits are compared with compiled plain's. Where they differ, the text says which kernels of the forward graph differ:
those are the suspects.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config as functorch

import backstash as bs
from bench.cases import SEED
from bench.gpu import g2
from bench.gpu.networks import NETWORKS, Training
from bench.gpu.parts import Run
from bench.gpu.ways import AGAIN, PLAIN, WAYS, Maker, Way

CHOSEN = ("gpt2", "resnet50")
TORCHS_BUDGET = 0.5
"""torch's ``activation_memory_budget``, a share of what a graph saves."""

OUR_BUDGET = "60%"
"""Ours, a share of compiled plain's peak."""

TRIALS = 3
"""Sizes that are tried for each way after the first ones: each is compiled anew."""


@dataclass(eq=False)
class Compiled(Way):
    """A compiled forward pass.

    Attributes:
        settings: of AOTAutograd, while it is compiled.
    """

    settings: Mapping[str, Any] | None = None

    def step(self, seed: int | None = SEED) -> None:
        """As in Way; a batch of another size is compiled anew."""
        with functorch.patch(dict(self.settings)) if self.settings else nullcontext():
            super().step(seed)


def _compile(
    run: Run, training: Training, settings: Mapping[str, Any] | None = None, mode: str | None = None, **ours: Any
) -> Way:
    def loss() -> Tensor:
        return training.loss()

    # Dynamo finds compiled code by the code object: each way needs one of its own.
    loss.__code__ = loss.__code__.replace()
    if run.device.backend != "inductor":
        small: dict[str, Any] = {"min_nbytes": training.min_nbytes}
        of_torch = run.device.partitioning if settings else run.device.backend
        backend: Any = bs.compile_backend(**ours, **small) if ours else of_torch
        compiled = torch.compile(loss, backend=backend, dynamic=False)
    else:
        options = bs.compile_options(**ours) if ours else None
        compiled = torch.compile(loss, options=options, mode=mode, dynamic=False)
    return Compiled(training, loss=compiled, settings=settings, is_compiled=True)


def makers(run: Run) -> dict[str, Maker]:
    """Returns the ways by name. The first is compiled plain."""
    torchs = {"activation_memory_budget": TORCHS_BUDGET}
    return {
        PLAIN: partial(_compile, run),
        AGAIN: partial(_compile, run),
        f"activation_memory_budget {TORCHS_BUDGET}": lambda training: _inexact(_compile(run, training, torchs)),
        "lossless": partial(_compile, run, policy="lossless"),
        f"lossless, budget {OUR_BUDGET}": partial(_compile, run, policy="lossless", budget=OUR_BUDGET),
        "reduce-overhead": lambda training: _inexact(_compile(run, training, mode="reduce-overhead")),
        "eager": lambda training: _inexact(Way(training)),
        "eager, checkpoint": lambda training: _inexact(WAYS["checkpoint"](training)),
    }


def _inexact(way: Way) -> Way:
    way.is_exact = False
    return way


def measure(run: Run) -> None:
    """Measures the networks."""
    for name in CHOSEN:
        if find_spec(NETWORKS[name].needs) is not None:
            for work in (_network, _filling):
                work(run, name)
                torch.compiler.reset()
                run.device.clean()


def _network(run: Run, name: str) -> None:
    @cache
    def training() -> Training:
        return Training(NETWORKS[name], run.device, run.small)

    ways = makers(run)
    g2.compare(run, f"{name}/steps", training, ways)
    if run.device.backend == "inductor":
        run.part(f"{name}/text", lambda: _texts(run, name, training(), ways))


def _filling(run: Run, name: str) -> None:
    ways = {of: make for of, make in makers(run).items() if of not in (AGAIN, "reduce-overhead")}
    g2.fill(run, f"{name}/filling", g2.small_training(run, name), ways, TRIALS)


# -- the text of the kernels -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Text:
    """The kernels that Inductor has written for a step.

    Attributes:
        kernels: how many.
        other: how many of them compiled plain has not; those of a backward graph are expected to differ.
        files: where the whole code is; empty where nothing is written.
    """

    kernels: int
    other: int
    files: tuple[str, ...] = ()


def _texts(run: Run, name: str, training: Training, ways: Mapping[str, Maker]) -> dict[str, Text]:
    from torch._inductor.utils import run_and_get_code

    found: dict[str, Text] = {}
    plain: set[str] = set()
    for of in (PLAIN, "lossless", f"lossless, budget {OUR_BUDGET}"):
        torch.compiler.reset()
        way = ways[of](training)
        codes = run_and_get_code(way.step)[1]
        kernels = {kernel for code in codes for kernel in bodies(code)}
        plain = plain or kernels
        files = [run.write(f"{name}-{of}-{number}.py", code) for number, code in enumerate(codes)]
        found[of] = Text(len(kernels), len(kernels - plain), tuple(str(path) for path in files if path is not None))
    return found


def bodies(code: str) -> list[str]:
    """Returns the kernels in a module that Inductor has written, without their names, which count through the graph."""
    kernels = re.findall(r"^@triton\.jit\n(def .*?)^'''", code, re.DOTALL | re.MULTILINE)
    return [re.sub(r"^def \w+", "def kernel", kernel) for kernel in kernels]
