"""A program, or a thread, that ends while a step is recorded ends as it would without a budget."""

from __future__ import annotations

import pytest
from fresh import run_fresh

RECORDS = """
import threading, torch
from backstash.planning.measure.recording import Recording
recording = Recording()
def records():
    assert recording.start()
    recording.begin_step()
    torch.ones(8, requires_grad=True).sum().backward()
"""

ENDS = {
    "program": "records()",
    "dropped": "records(); del recording",
    "thread": "t = threading.Thread(target=records); t.start(); t.join()",
    "another after it": "t = threading.Thread(target=records); t.start(); t.join(); recording = Recording(); records()",
}

TRAINS = """
import sys, torch, warnings
import backstash as bs
from torch import nn
warnings.simplefilter("ignore")
model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))
session = bs.Budgeted("80%", min_nbytes=64)
from backstash.planning.measure.events import Thread
for _ in range(40):
    with session:
        loss = model(torch.ones(8, 16)).sum()
    loss.backward()
    if Thread.current().running is not None:
        print("recorded")
        break
"""


@pytest.mark.parametrize("end", ENDS)
def test_a_program_that_ends_in_a_record_ends_well(end: str) -> None:
    ran = run_fresh(RECORDS + ENDS[end])
    assert ran.returncode == 0, ran.stderr


def test_a_training_that_ends_in_a_recorded_step_ends_well() -> None:
    ran = run_fresh(TRAINS)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "recorded\n"


IN_FUNCTIONS = """
import sys, torch, warnings
import backstash as bs
from torch import nn
warnings.simplefilter("ignore")
model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))
model.session = bs.Budgeted("80%", min_nbytes=64)
kept = []
def train(steps):
    for _ in range(steps):
        with model.session:
            loss = model(torch.ones(8, 16)).sum()
        kept[:] = [loss]
        loss.backward()
class Last:
    def __init__(self):  # a module that something else holds is emptied before the program's own names are gone
        self.modules = [vars(sys.modules[name]) for name in NAMES]
        self.model = model
    def __del__(self):
        for names in self.modules:
            for name in names:
                names[name] = None
        self.model.session.__del__()
NAMES = sorted(name for name in sys.modules if name.startswith("backstash.planning"))
train(int(sys.argv[1]))
last = Last()
"""


@pytest.mark.parametrize("steps", [0, 1, 4, 12, 40])
def test_a_budget_that_is_dropped_when_its_modules_are_empty_says_nothing(steps: int) -> None:
    ran = run_fresh(IN_FUNCTIONS, str(steps))
    assert ran.returncode == 0 and ran.stderr == ""
