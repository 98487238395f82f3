"""Notices of memory from a Session to its watcher."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

import backstash
from backstash.codecs.base import Encoded


class Recorder:
    """Keeps the names of the events, and no tensor."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def storing(self, encoded: Encoded) -> None:
        self.events.append(f"storing {encoded.codec}")

    def fetched(self, encoded: Encoded) -> None:
        self.events.append(f"fetched {encoded.codec}")

    def taken(self, memory: Tensor) -> None:
        self.events.append("taken")

    def released(self, memory: Tensor) -> None:
        self.events.append("released")

    def decided(self, value: Any, whole: Tensor, find_recipe: Any) -> None:
        pass

    def read(self, tensor: Tensor, is_stored: bool, key: str) -> None:
        self.events.append(f"read {'stored' if is_stored else 'held'}")

    def dropped(self, keys: Iterable[str]) -> None:
        self.events.append(f"dropped {' '.join(keys)}")


def step(session: backstash.Session) -> None:
    x = torch.randn(1000, requires_grad=True)
    with session:
        loss = (torch.relu(x) ** 2).sum()
    loss.backward()


def test_a_watcher_is_told_of_each_event_in_its_order() -> None:
    session = backstash.Session(backstash.policies.lossless(recompute=False), min_nbytes=0)
    watcher = Recorder()
    with session.watched_by(watcher):
        step(session)
    decoded = ["taken", "fetched zvc", "read stored"]
    assert watcher.events == ["storing zvc", *decoded, "read stored"]  # relu reads what pow's value was decoded to


def test_a_watcher_is_told_of_a_graph_that_is_dropped() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    session = backstash.Session("keep", min_nbytes=0, model=model)
    watcher = Recorder()
    with session, session.watched_by(watcher):
        model(torch.ones(4, 8)).detach()
        loss = model(torch.ones(4, 8)).sum()
    loss.backward()
    assert [event for event in watcher.events if event.startswith("dropped")] == [
        "dropped 0/Addmm#0:mat1 1/Tanh#0:result"
    ]


def test_outside_of_the_context_nothing_is_told() -> None:
    session = backstash.Session(min_nbytes=0)
    watcher = Recorder()
    with session.watched_by(watcher):
        pass
    step(session)
    assert watcher.events == []


def test_the_watcher_before_is_told_again_afterwards() -> None:
    session = backstash.Session(min_nbytes=0)
    outer, inner = Recorder(), Recorder()
    with session.watched_by(outer):
        with session.watched_by(inner):
            step(session)
        assert outer.events == []
        step(session)
    assert outer.events == inner.events != []


def test_planes_that_are_kept_for_a_second_reader_are_told_of_at_each_reading() -> None:
    policy = backstash.policies.get("offload")
    session = backstash.Session(policy, min_nbytes=0)
    watcher = Recorder()

    def training_step() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
        x = torch.randn(1024, 64)
        with session:
            loss = model(x).sum()
        loss.backward()

    training_step()
    with session.watched_by(watcher):
        training_step()
    fetched = [event for event in watcher.events if event.startswith("fetched")]
    assert len(fetched) == watcher.events.count("read stored") > 0
