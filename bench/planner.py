"""Greedy plans beside the best there are: ``python -m bench.planner [--json FILE] [--large]``.

Networks of known kinds (bench/profiles.py), at budgets between the plain peak and the least peak that the greedy
solver reaches. Reported is what a plan adds to a plain step, and how long the search takes. With ``--large``, the
search is timed on deep networks as well. Times of the search are of the thread, because it has one.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from backstash.errors import PlanError
from backstash.planning.model.budget import restrict
from backstash.planning.model.peak import PeakModel
from backstash.planning.model.problem import StepProfile
from backstash.planning.search.exact import exact
from backstash.planning.search.greedy import frontier
from bench.profiles import mobilenet, resnet, transformer, unet
from bench.results import Results
from bench.rounds import table

FORMAT = 1
"""Version of the JSON's layout."""

SHARES = (0.9, 0.7, 0.5, 0.3, 0.1, 0.03)
"""Budgets: 0 is the least peak that the greedy solver reaches, 1 the plain peak."""
LIMIT = 120.0
"""Seconds after which the exact solver gives up."""
GAP = 1e-3
"""How far from the optimum an exact answer may be, as a share of what the plan adds to the step."""

CASES: Mapping[str, Callable[[], StepProfile]] = {
    "ResNet, 8 blocks": lambda: resnet((2, 2, 2, 2), 64, 8, seed=1),
    "ResNet, 4 blocks": lambda: resnet((1, 1, 1, 1), 32, 2, seed=2),
    "transformer, 3 layers": lambda: transformer(3, 768, seed=3),
    "transformer, 5 layers": lambda: transformer(5, 256, 128, seed=4),
    "U-Net, 3 levels": lambda: unet(3, 32, seed=5),
    "U-Net, 4 levels": lambda: unet(4, 16, 2, seed=6),
    "MobileNet, 4 blocks": lambda: mobilenet(4, seed=7),
    "MobileNet, 6 blocks": lambda: mobilenet(6, 16, 2, seed=8),
}
LARGE: Mapping[str, Callable[[], StepProfile]] = {
    "ResNet-50": lambda: resnet((3, 4, 6, 3)),
    "transformer, 48 layers": lambda: transformer(48),
    "ResNet, 330 blocks": lambda: resnet((40, 80, 170, 40), batch=1),
    "transformer, 840 layers": lambda: transformer(840, 256, 128),
    "ResNet, 1600 blocks": lambda: resnet((200, 400, 800, 200), batch=1, image=64),
}


@dataclass(frozen=True)
class Budget:
    """One budget of one network.

    Attributes:
        share: of the way from the least peak to the plain one.
        nbytes: the budget.
        greedy, exact: time of a step over the plain step's; None where the exact solver did not end in time.
    """

    share: float
    nbytes: int
    greedy: float
    exact: float | None


@dataclass(frozen=True)
class Network:
    """One network.

    Attributes:
        name: its name.
        values, positions: how many there are.
        search_seconds: time of the thread to search the frontier.
        points: plans on the frontier.
        lowest: the least peak of the frontier over the plain one.
        lowest_exact: the least peak there is over the plain one; None where that is not known.
        budgets: the plans for budgets in between.
    """

    name: str
    values: int
    positions: int
    search_seconds: float
    points: int
    lowest: float
    lowest_exact: float | None
    budgets: tuple[Budget, ...]


def measure(name: str, profile: StepProfile, shares: Sequence[float]) -> Network:
    """Searches the frontier of a network and asks the exact solver for some points of it."""
    allowed = restrict(profile, ("lossless", "recompute"))
    started = time.thread_time()
    model = PeakModel(allowed)
    found = frontier(model)
    seconds = time.thread_time() - started
    low, plain = found[0].peak_nbytes, found[-1].peak_nbytes
    least = _exact_peak(model) if shares else None
    budgets = []
    for share in shares:
        nbytes = int(low + share * (plain - low))
        mine = next(each for each in reversed(found) if each.peak_nbytes <= nbytes)
        best = _exact_seconds(model, nbytes)
        budgets.append(
            Budget(share, nbytes, mine.seconds / model.base_seconds, best and best / model.base_seconds),
        )
    counts = len(allowed.values), len(allowed.positions)
    return Network(name, *counts, seconds, len(found), low / plain, least and least / plain, tuple(budgets))


def _exact_peak(model: PeakModel) -> int | None:
    try:
        found = exact(model, None, time_limit=LIMIT, gap=GAP)
    except PlanError:
        return None
    return None if found is None else found.peak_nbytes


def _exact_seconds(model: PeakModel, budget: int) -> float | None:
    try:
        found = exact(model, budget, time_limit=LIMIT, gap=GAP)
    except PlanError:
        return None
    return None if found is None else found.seconds


def rows(networks: Sequence[Network]) -> list[tuple[str, ...]]:
    """The table's rows: what plans add to a step, greedy / exact, by budget."""
    found = []
    for network in networks:
        cells = [
            f"{budget.greedy - 1:.1%} / " + ("?" if budget.exact is None else f"{budget.exact - 1:.1%}")
            for budget in network.budgets
        ]
        cells += ["-"] * (len(SHARES) - len(cells))
        found.append((network.name, str(network.values), f"{network.search_seconds:.1f}", *cells))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """The program."""
    parser = argparse.ArgumentParser(prog="python -m bench.planner", description=(__doc__ or "").strip())
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--large", action="store_true", help="time the search on deep networks too")
    asked = parser.parse_args(arguments)
    results = Results("bench.planner", asked.json, arguments, format=FORMAT, gap=GAP)
    networks: list[Network] = []
    for name, make in CASES.items():
        networks.append(measure(name, make(), SHARES))
        print(rows(networks)[-1], flush=True)
        results.write(networks=networks)
    for name, make in LARGE.items() if asked.large else ():
        networks.append(measure(name, make(), ()))
        print(rows(networks)[-1], flush=True)
        results.write(networks=networks)
    print(table(("network", "values", "search s", *(f"{share:g}" for share in SHARES)), rows(networks)))
    print(results.close())


if __name__ == "__main__":
    main()
