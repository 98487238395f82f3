"""COMET between two collections is replayed, and its gradients, bounds and records are those of the long way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from backstash import Session
from backstash.papers.comet import Comet
from backstash.papers.comet.controller import CODECS
from backstash.stash import seams
from tests.networks.resnet import resnet

EVERY, STEPS = 14, 45


class Trained:
    """A network that trains under COMET, with or without scripts."""

    def __init__(self, codec: str, replays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        torch.manual_seed(0)
        self.model = resnet((1, 1), num_classes=10, width=16)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.policy = Comet("conv", every=EVERY, codec=codec, optimizer=self.optimizer)
        with monkeypatch.context() as changed:
            if not replays:
                changed.setattr(seams, "replays", None)
            self.session = Session(self.policy, model=self.model, min_nbytes=4096, stop_if_useless=False)
        self.replayed = 0

    def step(self, number: int) -> list[Tensor]:
        """A step; returns the gradients."""
        x = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(number))
        self.optimizer.zero_grad()
        with self.session:
            loss = self.model(x).logsumexp(1).mean()
        loss.backward()
        self.replayed += self.session._is_replayed
        gradients = [p.grad.clone() for p in self.model.parameters() if p.grad is not None]
        self.optimizer.step()
        return gradients


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_comet_is_replayed_between_collections(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = [Trained(codec, replays, monkeypatch) for replays in (True, False)]
    codecs: list[Any] = []
    for number in range(STEPS):
        replayed, expected = (each.step(number) for each in trained)
        assert all(a.equal(b) for a, b in zip(replayed, expected, strict=True)), number
        codecs = [[(row.key, row.codec, row.stash_nbytes) for row in each.session.report().rows] for each in trained]
        assert codecs[0] == codecs[1], number
    assert trained[0].replayed > STEPS // 2 and trained[1].replayed == 0
    assert trained[0].policy.bounds == trained[1].policy.bounds != {}
    assert list(trained[0].policy.history) == list(trained[1].policy.history)
    assert any(name.startswith("sz") for _, name, _ in codecs[0])  # within a bound


def test_a_collecting_step_goes_the_long_way(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = Trained(sorted(CODECS)[0], True, monkeypatch)
    collecting = []
    for number in range(STEPS):
        trained.step(number)
        if trained.policy._collecting:
            collecting.append(number)
            assert not trained.session._is_replayed
    assert trained.replayed > STEPS // 2
    assert max(collecting) > EVERY, "no step collected after the first ones"
