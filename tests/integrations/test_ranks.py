"""Messages of ranks at the end reach the first of them, and a rank that says nothing holds nobody up."""

from __future__ import annotations

import socket
import threading
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from backstash.integrations.ranks import Rank, gather_ranks


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> TCPStore:
    """A store as torchrun's, and the environment in which torchrun starts a rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    return store


def test_the_rank_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert Rank.here() == Rank(0, 1)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert Rank.here() == Rank(3, 8) and not Rank.here().is_first
    assert Rank.here().own(Path("a/report.json")) == Path("a/report.rank3.json")
    assert Rank(0, 8).own(Path("a/report.json")) == Path("a/report.json")


@pytest.mark.usefixtures("store")
def test_rank_0_hears_the_others() -> None:
    other = threading.Thread(target=gather_ranks, args=(Rank(1, 2), {"peak": 7}))
    other.start()
    assert gather_ranks(Rank(0, 2), {"peak": 5}, 10.0) == {0: {"peak": 5}, 1: {"peak": 7}}
    other.join()


@pytest.mark.usefixtures("store")
def test_a_rank_that_says_nothing_is_waited_for_no_longer_than_allowed() -> None:
    assert gather_ranks(Rank(0, 3), {"peak": 5}, 0.1) == {0: {"peak": 5}}


def test_without_a_store_a_rank_has_its_own_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    assert gather_ranks(Rank(0, 2), {"peak": 5}) == {0: {"peak": 5}}
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert gather_ranks(Rank(0, 1), {"peak": 5}) == {0: {"peak": 5}}
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")  # nobody listens there
    assert gather_ranks(Rank(0, 2), {"peak": 5}, 0.2) == {0: {"peak": 5}}
