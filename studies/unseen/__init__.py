"""Networks and training programs on which no plan was tried while the planner was built.

They are what `studies.heldout_plans` judges plans by: each is small, and has parts that the planner's own networks
lack. None of them knows of backstash.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from studies.unseen import dense, language, training, vision
from studies.unseen.program import Program

__all__ = ["PROGRAMS", "Program", "build"]

PROGRAMS: dict[str, Callable[[], Program]] = {
    **vision.PROGRAMS,
    **dense.PROGRAMS,
    **language.PROGRAMS,
    **training.PROGRAMS,
}

SEED = 7
"""Of weights and batches."""


def build(name: str) -> Program:
    """Makes a program; the same weights and numbers at every call.

    Raises:
        ValueError: no program of that name.
    """
    if name not in PROGRAMS:
        raise ValueError(f"the program {name!r} was asked for; there is none; use one of {', '.join(PROGRAMS)}")
    torch.manual_seed(SEED)
    return PROGRAMS[name]()
