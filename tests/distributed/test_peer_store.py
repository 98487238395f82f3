"""A store in another process's memory: it keeps the contract, and a Session's gradients have the bits of plain ones."""

from __future__ import annotations

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
