"""The link as two queues, the values that it hides, and when they are asked for. Times are a simulated clock's."""

from __future__ import annotations

import random
from itertools import accumulate, combinations

import pytest
import torch
from simulated_clock import Clock

from backstash.codecs import Encoded
from backstash.errors import PlanError
from backstash.planning.measure.hiding import LATE, SPARE, Candidate, hide, stays_after
from backstash.planning.measure.link import of_speed
from backstash.planning.measure.moving import IN_FLIGHT, moved
from backstash.planning.measure.survey import Movable, SurveyedValue
from backstash.planning.measure.timeline import Timeline
from backstash.planning.model.peak import own_seconds
from backstash.planning.model.problem import Choice
from backstash.planning.model.queues import Direction, Move, floor, simulate
from backstash.planning.model.rounding import moved_as
from backstash.saved import Need, SavedTensor, TensorSpec
from backstash.stores import DeviceStore
from bench.link import LinkStore

WAY = Direction(0.0, 0.01)
"""A hundred bytes take a second."""


def executed(
    seconds: list[float], moves: list[Move], way: Direction, first: int, in_flight: int
) -> tuple[float, list[float]]:
    """Returns the time of a step that moves values through a store with a simulated link, and its waits."""
    clock = Clock()
    speed = 1 / way.seconds_per_byte
    store = LinkStore(DeviceStore(), speed, way.latency, in_flight=in_flight, clock=clock, sleep=clock.sleep)
    tickets = {}
    waits = []
    for position, computed in enumerate(seconds):
        began = clock.now
        if position == first:
            store.drain()
        for number, move in enumerate(moves):
            if move.born == position:
                plane = torch.zeros(move.nbytes, dtype=torch.uint8)
                tickets[number] = store.put(Encoded("check", TensorSpec.of(plane), {"codes": plane}))
        asked = [number for number, move in enumerate(moves) if position in move.fetches]
        for number in sorted(asked, key=lambda number: moves[number].reads[0]):
            store.prefetch(tickets[number])
        for number, move in enumerate(moves):
            if position in move.reads:
                store.get(tickets[number])
        waits.append(clock.now - began)
        clock.sleep(computed)
    return clock.now, waits


@pytest.mark.parametrize("seed", range(20))
def test_the_queues_are_those_of_a_store_behind_a_link(seed: int) -> None:
    chance = random.Random(seed)
    first, count = 6, 18
    seconds = [chance.choice([0.0, 0.5, 1.0, 3.0]) for _ in range(count)]
    way = Direction(chance.choice([0.0, 0.3]), 0.01)
    moves = []
    for _ in range(8):
        read = chance.randrange(first, count)
        moves.append(
            Move(chance.randrange(1, 400), chance.randrange(first), (chance.randrange(first, read + 1),), (read,))
        )
    in_flight = chance.choice([200, 500, 10**9])
    found = simulate(seconds, moves, way, way, first, in_flight)
    total, waits = executed(seconds, moves, way, first, in_flight)
    assert found.seconds == pytest.approx(total)
    assert found.waits == pytest.approx(waits)
    assert in_flight < 10**9 or found.seconds >= floor(seconds, moves, way, way, first) - 1e-9


def test_what_shares_the_processor_slows_it_down() -> None:
    half = Direction(0.0, 0.01, slows=0.5)
    found = simulate([1.0] * 4, [Move(100, 0, (2,), (3,))], half, half, 2)
    assert (found.waited, found.added, found.seconds) == (0.0, 1.0, 5.0)


def problem(seed: int, speed: float) -> tuple[list[float], list[Candidate], Direction, int]:
    """A step like a network's: what is born first is read last, more or less."""
    chance = random.Random(seed)
    count = 9
    seconds = [chance.uniform(0.5, 1.5) for _ in range(count)] + [chance.uniform(1.0, 3.0) for _ in range(count + 1)]
    candidates = []
    for number in range(count):
        read = 2 * count - number
        other = chance.randrange(count + 1, 2 * count + 1)
        reads = {read, other} if chance.random() < 0.2 else {read}
        candidates.append(Candidate(chance.randrange(20, 200), number, tuple(sorted(reads))))
    return seconds, candidates, Direction(0.01, 1 / speed), count


def is_on_time(seconds: list[float], chosen: list[Candidate], way: Direction, first: int) -> bool:
    """Whether the values can be moved without a wait if they are asked for when backward begins, in their order."""
    order = sorted(chosen, key=lambda each: each.reads[0])
    moves = [Move(each.nbytes, each.born, (first,), each.reads[:1]) for each in order]
    return simulate(seconds, moves, way, way, first).waited <= LATE * sum(seconds)


@pytest.mark.parametrize("speed", [20.0, 60.0, 200.0])
@pytest.mark.parametrize("seed", range(6))
def test_nothing_waits_and_nearly_all_that_could_hide_is_moved(seed: int, speed: float) -> None:
    seconds, candidates, way, first = problem(seed, speed)
    found = hide(seconds, candidates, way, way, first, spare=0.0)
    assert found.passage.waited <= LATE * sum(seconds)
    assert found.passage.seconds == pytest.approx(sum(seconds), rel=LATE)
    single = [Candidate(each.nbytes, each.born, each.reads[:1]) for each in candidates]
    best = 0
    for count in range(len(candidates) + 1):
        for subset in combinations(single, count):
            nbytes = sum(each.nbytes for each in subset)
            if nbytes > best and is_on_time(seconds, list(subset), way, first):
                best = nbytes
    assert found.nbytes >= 0.75 * best
    refused = [candidate for number, candidate in enumerate(candidates) if number not in found.chosen]
    taken = [single[number] for number in found.chosen]
    if all(len(each.reads) == 1 for each in candidates):
        assert not any(is_on_time(seconds, [*taken, each], way, first) for each in refused)


def test_a_link_that_is_fast_hides_everything_and_a_slow_one_nothing() -> None:
    seconds, candidates, _, first = problem(0, 1.0)
    fast, slow = Direction(0.0, 1e-9), Direction(0.0, 1e3)
    every = hide(seconds, candidates, fast, fast, first)
    assert every.chosen == tuple(range(len(candidates))) and every.passage.waited == 0.0
    none = hide(seconds, candidates, slow, slow, first)
    assert none.chosen == () and none.passage.seconds == pytest.approx(sum(seconds))


def test_so_many_bytes_are_moved_if_that_is_asked_for_and_the_step_is_near_its_floor() -> None:
    seconds, candidates, way, first = problem(1, 50.0)
    for nbytes in (0, 100, 400, 10**6):
        found = hide(seconds, candidates, way, way, first, nbytes=nbytes)
        assert found.nbytes <= nbytes
        assert found.nbytes + max(each.nbytes for each in candidates) > min(
            nbytes, sum(each.nbytes for each in candidates)
        )
    assert found.floor <= found.passage.seconds <= 1.1 * found.floor


def test_values_are_asked_for_as_late_as_they_can_be() -> None:
    seconds = [1.0] * 10
    candidates = [Candidate(100, 0, (9,)), Candidate(200, 1, (8,))]
    found = hide(seconds, candidates, WAY, WAY, 4, spare=0.0)
    # One second for the first, from 8 on; two for the second, from 6 on.
    assert [move.fetches for move in found.moves] == [(8,), (6,)] and not any(found.passage.waits)
    only_then = hide(seconds, candidates, WAY, WAY, 4, asks=[5, 7], spare=0.0)
    assert [move.fetches for move in only_then.moves] == [(7,), (5,)]
    spared = hide(seconds, candidates, WAY, WAY, 4)
    until = [0.0, *accumulate(seconds)]
    for move, candidate in zip(spared.moves, candidates, strict=True):
        assert until[move.fetches[0]] <= until[candidate.reads[0]] - (1 + SPARE) * WAY.busy(candidate.nbytes)


def test_what_is_read_again_soon_stays_and_what_is_read_much_later_comes_twice() -> None:
    seconds = [1.0] * 40
    found = hide(seconds, [Candidate(50, 0, (30, 31)), Candidate(50, 1, (22, 38))], WAY, WAY, 20, spare=0.0)
    assert [move.reads for move in found.moves] == [(30,), (22, 38)]
    assert stays_after(Candidate(50, 0, (30, 31)), found.moves[0]) == {0}
    assert stays_after(Candidate(50, 1, (22, 38)), found.moves[1]) == frozenset()


def test_a_link_has_a_speed() -> None:
    assert of_speed(1e9, 1e-5).directions() == (Direction(1e-5, 1e-9), Direction(1e-5, 1e-9))
    for wrong in ((0.0, 0.0), (1.0, -1.0)):
        with pytest.raises(PlanError, match="a link was asked for"):
            of_speed(*wrong)


@pytest.mark.parametrize("in_flight", [150, 300, 10**9])
@pytest.mark.parametrize("seed", range(4))
def test_no_more_is_on_its_way_out_than_may_be(seed: int, in_flight: int) -> None:
    seconds, candidates, way, first = problem(seed, 100.0)
    found = hide(seconds, candidates, way, way, first, in_flight=in_flight, spare=0.0)
    assert found.passage.backlog_nbytes <= in_flight and found.chosen
    assert found.passage.waited <= LATE * sum(seconds)


@pytest.mark.parametrize("speed", [20e6, 100e6, 1e9])
@pytest.mark.parametrize("seed", range(3))
def test_a_plan_never_waits_more_than_the_prices_of_its_moves_say(seed: int, speed: float) -> None:
    chance = random.Random(seed)
    count = 12
    line = Timeline([], "cuda")
    seconds = [chance.uniform(0.5, 1.5) for _ in range(count)] + [chance.uniform(1.0, 3.0) for _ in range(count + 1)]
    found = {}
    for number in range(count):
        nbytes = chance.randrange(1, 60) << 20
        key = f"{number}/Tanh#0:result"
        spec = TensorSpec.of(torch.empty(nbytes, dtype=torch.uint8, device="meta"))
        facts = SavedTensor(key, "Tanh", "result", str(number), spec, Need.VALUE)
        found[key] = SurveyedValue(facts, nbytes, [Choice.keep(nbytes)], movable=(Movable(nbytes, nbytes),))
        line.born[key] = number
        line.reads[key] = sorted({2 * count - number, *([] if number % 3 else [2 * count - number // 2])})
    link = of_speed(speed, 1e-3)
    out, back = link.directions()
    choices = moved(link, found, line, seconds, count)
    for _ in range(20):
        chosen = [key for key in found if chance.random() < chance.random()]
        ways = {key: chance.choice(choices[key]) for key in chosen}
        prices = sum(own_seconds(way, len(line.reads[key])) for key, way in ways.items())
        moves = [
            Move(found[key].nbytes, line.born[key], way.fetches, tuple(line.reads[key])) for key, way in ways.items()
        ]
        waited = simulate(seconds, moves, out, back, count, IN_FLIGHT).waited
        assert waited <= prices + 1e-6
    free = [key for key in found if own_seconds(choices[key][0], 1) == 0.0]
    assert free or speed < 50e6
    in_turn = [way for each in choices.values() for way in each if way.name == "offload in turn"]
    assert all(moved_as(way.name) == () for way in in_turn) and (in_turn or speed > 50e6)
