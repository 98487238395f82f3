"""Logs that all integrations write, and questions that they ask before they open a Session."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import backstash as bs
from backstash.errors import IntegrationError
from backstash.integrations.attaching import figures, is_training, peak_nbytes, session_for
from backstash.policies.base import Stash


def step(session: bs.Session) -> torch.Tensor:
    """A training step in which 64 KiB are saved, most of which are zero."""
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))
    with session:
        loss: torch.Tensor = model(torch.ones(64, 64)).sum()
    loss.backward()
    return loss


def test_nothing_is_logged_before_something_was_saved() -> None:
    assert figures(bs.Session()) == {}


def test_figures_are_those_of_the_report() -> None:
    session = bs.Session("lossless", min_nbytes=0)
    step(session)
    found, report = figures(session), session.report()
    assert found["backstash/stash_mib"] == report.stash_nbytes / 2**20
    assert found["backstash/ratio"] == report.saved_nbytes / report.stash_nbytes
    assert found["backstash/peak_mib"] == pytest.approx(peak_nbytes() / 2**20, rel=0.1)


def test_what_was_moved_is_not_on_the_device() -> None:
    session = bs.Session("offload", min_nbytes=0)
    step(session)
    report = session.report()
    assert report.moved_nbytes > 0
    found = figures(session)
    assert found["backstash/stash_mib"] == (report.stash_nbytes - report.moved_nbytes) / 2**20


def test_a_device_that_holds_nothing_has_no_ratio() -> None:
    """Loggers that write JSON do not know infinity."""

    class Everything(bs.Policy):
        def decide(self, saved: object) -> bs.Stash:
            return Stash(bs.codecs.get("raw"), store="host")

    session = bs.Session(Everything(), min_nbytes=0)
    x = torch.ones(64, 64, requires_grad=True)
    with session:
        loss = (x * 2).exp().sum()
    loss.backward()
    found = figures(session)
    assert found["backstash/stash_mib"] == 0
    assert set(found) == {"backstash/stash_mib", "backstash/peak_mib"}


def test_the_peak_is_that_of_the_process() -> None:
    assert 2**20 < peak_nbytes() < 2**50


def test_training_is_a_matter_of_the_mode_and_of_the_surroundings() -> None:
    model = nn.Linear(2, 2)
    assert is_training(model)
    with torch.no_grad():
        assert not is_training(model)
    with bs.Session():
        assert not is_training(model)
    assert not is_training(model.eval())


def test_in_a_backward_pass_nothing_is_opened() -> None:
    seen, model = [], nn.Linear(2, 2)
    x = torch.ones(1, 2, requires_grad=True)
    y = model(x)
    y.register_hook(lambda gradient: seen.append(is_training(model)))
    y.sum().backward()
    assert seen == [False]


def test_a_budget_excludes_another_policy() -> None:
    with pytest.raises(IntegrationError, match=r"budget='6GiB' was asked for.*Leave policy= out"):
        session_for("keep", "6GiB")
