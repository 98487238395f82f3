"""Drawn cases: the command that draws more of them for as long as it is told to."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import torch

Case = TypeVar("Case")


def run_for_a_while(about: str | None, draw: Callable[[int], Case], check: Callable[[Case], str | None]) -> None:
    """Checks cases until the time of the command line is up; prints those that fail, and what became of the others.

    Args:
        about: what the command says of itself.
        draw: makes the case of a seed.
        check: returns what became of a case if there is more to say than that it passed, and raises where it fails.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--first", type=int, default=1000, help="the first seed")
    given = parser.parse_args()
    torch.set_num_threads(1)
    end, seed, found = time.monotonic() + given.seconds, given.first, Counter[str]()
    while time.monotonic() < end:
        case = draw(seed)
        try:
            found[check(case) or "passed"] += 1
        except Exception as error:
            found["failed"] += 1
            print(f"{case}: {type(error).__name__}: {error}", flush=True)
        seed += 1
    print(f"{seed - given.first} cases: {', '.join(f'{count} {what}' for what, count in sorted(found.items()))}")
