"""A store in another process's memory: it keeps the contract, and a Session's gradients have the bits of plain ones."""

from __future__ import annotations

import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.processes import network, run_together
from torch import Tensor

import backstash as bs
from backstash.bits import equal_bits
from backstash.codecs import get
from backstash.errors import StoreError, StoreFullError
from backstash.stores import HostStore, PeerStore, TierStore
from backstash.testing import check_store


def gradients(session: bs.Session | None) -> list[Tensor]:
    model = network()
    x = torch.randn(36, 48, generator=torch.Generator().manual_seed(dist.get_rank()))
    if session is None:
        model(x).square().mean().backward()
    else:
        with session:
            loss = model(x).square().mean()
        loss.backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def serving(peers: list[int]) -> dict[str, Any]:
    store = PeerStore(peers[dist.get_rank()])
    check_store(store)
    plain = gradients(None)
    session = bs.Session("offload", stores={"host": store}, min_nbytes=0)
    same = [equal_bits(*pair) for _ in range(2) for pair in zip(plain, gradients(session), strict=True)]
    held = store.usage()
    dist.barrier()
    store.close()
    store.close()
    said = ""
    try:
        store.put(get("raw").encode(torch.ones(3)))
    except StoreError as error:
        said = str(error)
    return {"same": all(same), "held": (held.count, held.nbytes), "most": held.peak_nbytes > 10_000, "said": said}


def refused() -> list[str]:
    said = []
    for peer in (dist.get_rank(), 7):
        try:
            PeerStore(peer)
        except StoreError as error:
            said.append(str(error))
    small = PeerStore(1 - dist.get_rank(), capacity=4096)
    tiers = TierStore([small, HostStore()])
    tickets = [tiers.put(get("raw").encode(torch.full((600,), float(n)))) for n in range(4)]
    said += [str(bool((tiers.get(ticket).planes["values"] == n).all())) for n, ticket in enumerate(tickets)]
    try:
        small.put(get("raw").encode(torch.ones(600)))
    except StoreFullError as error:
        said.append(str(error)[:28])
    dist.barrier()
    small.close()
    return said


@pytest.mark.slow
@pytest.mark.parametrize("peers", [[1, 0], [1, 2, 3, 0], [1, 0, 0, 0]], ids=["pair", "ring", "one serves three"])
def test_values_are_held_by_another_process(tmp_path: Path, peers: list[int]) -> None:
    for found in run_together(tmp_path, serving, peers, world=len(peers)):
        assert found["same"] and found["most"] and found["held"] == (0, 0), found
        assert "but it was closed. Make another one, on all ranks." in found["said"]


@pytest.mark.slow
def test_what_does_not_fit_goes_to_the_next_store_and_wrong_peers_are_refused(tmp_path: Path) -> None:
    for rank, said in enumerate(run_together(tmp_path, refused)):
        assert said[0].startswith(f"PeerStore was asked for peer={rank} on rank {rank} of 2, but rank 0 named no other")
        assert said[1].startswith("PeerStore was asked for peer=7") and said[2:6] == ["True"] * 4
        assert said[6] == "PeerStore was asked to hold "


def test_without_a_process_group_there_is_no_peer() -> None:
    with pytest.raises(StoreError, match=r"no process group\. Call torch\.distributed\.init_process_group"):
        PeerStore(0)


def swapping() -> int:
    """How many values are wrong where one rank reads while the other one puts, and each holds the other's."""
    store, rank, raw = PeerStore(1 - dist.get_rank()), dist.get_rank(), get("raw")
    expected = [1000.0 * (rank + 1) + number for number in range(200)]
    tickets: list[Any] = []
    wrong = 0
    for turn in (0, 1, 2):  # rank 0 reads in the turn in which rank 1 puts
        if turn == rank:
            tickets = [store.put(raw.encode(torch.full((1000,), number))) for number in expected]
        elif turn > rank:
            found = [store.get(ticket).planes["values"] for ticket in tickets]
            wrong += sum(not bool((x == number).all()) for x, number in zip(found, expected, strict=True))
        dist.barrier()
    store.close()
    return wrong


def resting() -> bool:
    """Whether a value is held after a rest that is longer than groups wait by default."""
    before = dist.distributed_c10d.default_pg_timeout
    dist.distributed_c10d.default_pg_timeout = timedelta(seconds=1)
    try:
        store = PeerStore(1 - dist.get_rank())
    finally:
        dist.distributed_c10d.default_pg_timeout = before
    ticket = store.put(get("raw").encode(torch.ones(1000)))
    time.sleep(3)
    other = store.put(get("raw").encode(torch.full((1000,), 2.0)))
    values = [store.get(each).planes["values"] for each in (ticket, other)]
    dist.barrier()
    store.close()
    return all(bool((x == number).all()) for x, number in zip(values, (1.0, 2.0), strict=True))


@pytest.mark.slow
def test_two_ranks_hold_each_others_values(tmp_path: Path) -> None:
    assert run_together(tmp_path, swapping) == [0, 0]


@pytest.mark.slow
def test_a_peer_waits_for_requests_as_long_as_there_are_none(tmp_path: Path) -> None:
    assert run_together(tmp_path, resting) == [True, True]


RANK = """
import sys
import torch
import torch.distributed as dist
from backstash.codecs import get
from backstash.stores import PeerStore

rank, ending = int(sys.argv[1]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
store = PeerStore(1 - rank)
store.get(store.put(get("raw").encode(torch.ones(1000))))
dist.barrier()
if ending != "well":
    try:
        if rank == 1:
            raise ValueError("rank 1 fails")
        dist.barrier()
    finally:
        if ending == "closed":
            store.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("ending", "code"), [("well", 0), ("open", 1), ("closed", 1)])
def test_ranks_end_as_they_do_without_a_store(tmp_path: Path, ending: str, code: int) -> None:
    """Without ``close``, and where an error ends one of them while the other waits for it."""
    program = tmp_path / "rank.py"
    program.write_text(RANK)
    meeting = str(tmp_path / "meeting")
    ranks = [
        subprocess.Popen([sys.executable, str(program), str(rank), meeting, ending], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=300)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [code, code], said
    assert code == 0 or "ValueError: rank 1 fails" in said[1]
    assert "terminate called" not in "".join(said)
