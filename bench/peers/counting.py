"""Counts what a forward pass leaves saved where nobody else does."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from backstash import Session
from backstash.stash.ledger import Report
from bench.cases import SEED


def count_saved(model: nn.Module, forward: Callable[[], Tensor]) -> Report:
    """The accounts of one more forward pass, in which a Session keeps everything as it is."""
    torch.manual_seed(SEED)
    with Session("keep", model=model) as session:
        loss = forward()
    report = session.report()
    del loss  # until here: without it the graph, and what it saved, would be gone before it was counted
    return report
