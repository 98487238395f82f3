"""Whole steps of random programs: with the compiled functions everything is as with their references in Python.

What a program can observe is compared elsewhere. Here it is what a Session says of each value: its name, its form and
the reason for it, how often it was read, and how much was recognised from earlier steps.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from backstash import Session
from backstash.stash import compiled
from backstash.stash.accounts import Account
from backstash.stash.calls import Call
from backstash.stash.recipes import Recipe
from backstash.stash.value import Saved, Value
from tests.fuzz.execute import _run, compile_program
from tests.fuzz.generate import POLICIES, SMALL, generate
from tests.fuzz.program import Program

pytestmark = pytest.mark.skipif(
    compiled.functions is None, reason="nothing is compiled: run 'python setup.py build_native'"
)

ROOT = Path(__file__).parents[2]
LARGE = (4, 8, 32, 96)
PROGRAMS = {"repeating": 24, "changing": 24, "large": 6}


def programs(kind: str) -> Iterator[Program]:
    for seed in range(PROGRAMS[kind]):
        policy = POLICIES[seed % len(POLICIES)] if seed % 3 else "lossless"
        if kind == "large":
            yield generate(7000 + seed, shape=LARGE, length=10, changing=False, policy=policy)
        else:
            yield generate(9000 + seed, shape=SMALL, changing=kind == "changing", policy=policy)


def told(program: Program) -> list[str]:
    """What the Sessions of a program say after each of their steps, and the type of the error that ends it, if any."""
    sessions: list[Session] = []
    said: list[str] = []

    @contextmanager
    def session() -> Iterator[Session]:
        if program.sessions == "each" or not sessions:
            sessions.append(Session(program.policy, min_nbytes=program.min_nbytes))
        elif sessions[-1]._hooks is None:
            said.extend(lines(sessions[-1]))
        with sessions[-1] as entered:
            yield entered

    outcome = _run(compile_program(program), session)
    for each in sessions:
        said += lines(each)
    return [*said, type(outcome.error).__name__]


def lines(session: Session) -> list[str]:
    report = session.report()
    rows = [
        f"{row.key} {row.need} {row.spec} {row.saved_nbytes} {row.stash_nbytes} {row.codec} {row.store} {row.reason} "
        f"{row.shared_by} {row.decodes}"
        for row in report.rows
        if row.need  # small ones are told apart by addresses, of which some are given away again
    ]
    return [*rows, f"{report.named} {report.recognised} {report.peak_stash_nbytes} {report.parameter_nbytes}"]


@pytest.mark.slow
def test_sessions_say_the_same() -> None:
    said = []
    for choice in ("auto", "reference"):
        command = [sys.executable, "-c", "from tests.gradients.test_compiled_steps import main; main()"]
        environment = {**os.environ, "BACKSTASH_KERNELS": choice, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=ROOT)
        said.append(done.stdout.splitlines())
    assert len(said[0]) > 5 * sum(PROGRAMS.values())
    assert said[0] == said[1]


def main() -> None:
    for kind in PROGRAMS:
        for number, program in enumerate(programs(kind)):
            for line in told(program):
                print(kind, number, line.replace("\n", " "))


def tracked() -> int:
    """How many objects that are held for backward the garbage collector looks at."""
    gc.collect()
    return sum(type(each) in (Saved, Value, Account, Call, Recipe) for each in gc.get_objects())


def test_the_garbage_collector_does_not_look_at_what_is_held() -> None:
    layers = [layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())]
    model, x, session = nn.Sequential(*layers), torch.randn(32, 64), Session(min_nbytes=0)
    for _ in range(4):
        with session:
            loss = model(x).sum()
        loss.backward()
    before = tracked()
    with session:
        loss = model(x).sum()
    assert len(session._forward.step.accounts) > len(layers)
    assert tracked() == before
    loss.backward()
