"""A report explains itself if there is nothing to account for."""

from __future__ import annotations

import threading

import torch
from torch import nn

from backstash import Session
from backstash.stash.summary import NOTHING_REMADE, holdings


def test_a_session_in_which_nothing_was_saved_says_so() -> None:
    session = Session()
    model = nn.Linear(64, 64)
    with session, torch.no_grad():
        model(torch.randn(64, 64))
    report = session.report()
    assert any("nothing was saved" in note for note in report.notes)
    assert "nothing was saved" in str(report) and "nothing was saved" in report.to_json()


def test_a_forward_on_another_thread_is_told_of() -> None:
    session = Session(min_nbytes=0)
    model = nn.Linear(64, 64)
    with session:
        thread = threading.Thread(target=lambda: model(torch.randn(64, 64)).sum().backward())
        thread.start()
        thread.join()
    assert any("another thread" in note for note in session.report().notes)
    with session:
        model(torch.randn(64, 64)).tanh().sum().backward()
    assert session.report().notes == ()


def test_a_session_that_remakes_nothing_is_not_said_to_know_no_origins() -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256))
    session = Session()
    for _ in range(3):
        with session:
            loss = model(torch.randn(512, 256)).sum()
        loss.backward()
    report = session.report()
    assert any(NOTHING_REMADE in note for note in report.notes)
    assert {one.why for one in holdings(report)} <= {"dense", "in use", "too small"}
