"""Operations, allocations and waits that a step asks of an accelerator, counted on the fake device of the tests.

    python -m bench.device_counts --json docs/results/device-DATE.json

Counts do not depend on the machine. Networks have the graphs of large ones and are narrow, so their peaks mean nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tests.device import fake  # registers the device, and so comes before backstash
from tests.device.networks import MIN_NBYTES, NETWORKS, Training

# isort: split
import backstash as bs
from backstash import policies
from backstash.planning.search.planner import Planner
from bench.results import Results
from bench.rounds import UNTIL_SETTLED

FORMAT = 1
WARMUP = UNTIL_SETTLED
STEPS = 20
"""Steps that are counted: more than the period of whatever is looked at again every few steps."""

ALLOW = ("lossless", "recompute", "offload")


@dataclass(frozen=True)
class Row:
    """What the steps under one policy ask of the device.

    Attributes:
        way: the policy, as a user names it.
        operations, most_operations: operations of a step, the median and the most. One kernel of ours is one operation.
        allocations, most_allocations: the same of allocations of the device's memory.
        waits, most_waits: the same of waits of the host for the device.
        events: recorded events in a step, the median.
        waits_at: lines that wait in the last step, with how often.
    """

    way: str
    operations: int
    most_operations: int
    allocations: int
    most_allocations: int
    waits: int
    most_waits: int
    events: int
    waits_at: tuple[str, ...]


def _planned(training: Training) -> bs.Session:
    profile = bs.profile(training.step, training.model, allow=ALLOW, device="fake", min_nbytes=MIN_NBYTES)
    return training.session(bs.plan(profile, "50%", ALLOW))


def _planned_to_encode(training: Training) -> bs.Session:
    allow = ("lossless", "bounded")
    profile = bs.profile(training.step, training.model, allow=allow, device="fake", min_nbytes=MIN_NBYTES)
    planner = Planner(profile, allow, error_limit=0.05)
    return training.session(planner.plan(int(1.25 * planner.at_most(0).peak_nbytes)))


WAYS: dict[str, Callable[[Training], Any]] = {
    "plain": lambda training: None,
    "lossless": lambda training: training.session("lossless"),
    "lossless_stored": lambda training: training.session("lossless_stored"),
    "offload": lambda training: training.session("offload"),
    "cdma": lambda training: training.session("cdma"),
    "gist_fp8": lambda training: training.session("gist_fp8"),
    "quantized, 8 bits": lambda training: training.session(policies.quantized(bits=8)),
    "quantized, 4 bits": lambda training: training.session(policies.quantized(bits=4)),
    "comet, szp": lambda training: training.comet("szp"),
    "comet, sz": lambda training: training.comet("sz"),
    "plan, 50%": _planned,
    "plan that encodes": _planned_to_encode,
}


def count(network: str, way: str) -> Row:
    """Trains a network in one way and returns what its steps ask of the device."""
    training = NETWORKS[network]().to("fake")
    training.step()
    session = WAYS[way](training)
    training.count(session, WARMUP)
    found = training.count(session, STEPS)
    middle = {
        name: int(median(getattr(each, name) for each in found)) for name in ("operations", "allocations", "waits")
    }
    most = {f"most_{name}": max(getattr(each, name) for each in found) for name in middle}
    events = int(median(each.events for each in found))
    return Row(way, **middle, **most, events=events, waits_at=tuple(found[-1].lines("waits")))


def main(arguments: Sequence[str] | None = None) -> None:
    """Counts, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="the file to write")
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    options = parser.parse_args(arguments)
    results = Results("bench.device_counts", options.json, arguments, format=FORMAT, warmup=WARMUP, steps=STEPS)
    counted: dict[str, list[Any]] = {}
    for network in options.networks:
        for way in options.ways:
            try:
                row = count(network, way)
            except bs.BackstashError as error:  # no plan fits, say
                print(f"{network}, {way}: {error}", flush=True)
                continue
            print(f"{network}: {row}", flush=True)
            counted.setdefault(network, []).append(asdict(row))
            results.write(networks=counted, device_of_counts=str(fake.device))
    print(results.close())


if __name__ == "__main__":
    main()
