"""A model that holds its Session can be copied, pickled and saved; the copy has a Session of its own."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backstash import Budgeted, Session, policies
from backstash.errors import SessionError
from backstash.stores import DiskStore


class Model(nn.Module):
    def __init__(self, make: Callable[[Model], Any]) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        self.session = make(self)

    def forward(self, x: Tensor) -> Tensor:
        with self.session:
            result: Tensor = self.layers(x).square().mean()
        return result


def pickled(model: Model) -> Model:
    copied: Model = pickle.loads(pickle.dumps(model))
    return copied


def saved(model: Model) -> Model:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copied: Model = torch.load(file, weights_only=False)
    return copied


WAYS: dict[str, Callable[[Model], Model]] = {"deepcopy": copy.deepcopy, "pickle": pickled, "torch.save": saved}

SESSIONS: dict[str, Callable[[Model], Any]] = {
    "lossless": lambda model: Session("lossless", min_nbytes=0),
    "with the model": lambda model: Session("lossless", model=model, min_nbytes=0, check="full"),
    "a policy object": lambda model: Session(policies.lossless(min_saving=0.1), min_nbytes=0, stop_if_useless=False),
    "quantized": lambda model: Session("quantized", min_nbytes=0),
    "a budget": lambda model: Budgeted("1MiB", min_nbytes=0),
}


@pytest.mark.parametrize("in_use", [False, True])
@pytest.mark.parametrize("session", SESSIONS)
@pytest.mark.parametrize("way", WAYS)
def test_a_copy_trains_as_the_model_does(way: str, session: str, in_use: bool) -> None:
    torch.manual_seed(0)
    model = Model(SESSIONS[session])
    batches = [torch.randn(4, 8) for _ in range(12)]
    for x in batches[:4] if in_use else ():
        model(x).backward()
    model.zero_grad()
    copied = WAYS[way](model)
    assert copied.session is not model.session and type(copied.session) is type(model.session)
    if session == "with the model":
        assert copied.session._names.model is copied
    for x in batches:
        losses = model(x), copied(x)
        for loss in losses:
            loss.backward()
        assert torch.equal(*losses)
    for own, other in zip(model.parameters(), copied.parameters(), strict=True):
        assert own.grad is not None and other.grad is not None and torch.equal(own.grad, other.grad)


def test_a_shallow_copy_shares_no_state() -> None:
    session = Session("lossless", min_nbytes=0)
    copied = copy.copy(session)
    with session:
        loss = nn.Linear(8, 8)(torch.randn(4, 8)).relu().sum()
    loss.backward()
    assert session.report().steps == 1 and copied.report().steps == 0
    assert copied.min_nbytes == session.min_nbytes == 0


def test_a_session_with_stores_is_copied_with_them_and_not_pickled(tmp_path: Path) -> None:
    with DiskStore(tmp_path) as store:
        session = Session(policies.offload(store="file"), stores={"file": store}, min_nbytes=0)
        assert copy.deepcopy(session).stores["file"] is store
        with pytest.raises(SessionError, match="asked to be pickled, but it has stores.*Leave the Session out"):
            pickle.dumps(session)
