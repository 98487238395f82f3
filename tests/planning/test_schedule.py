from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backstash.planning.model.trace import ROLES, Buffer, Role, Trace
from backstash.planning.search.schedule import Sharing, footprint, groups_in_turn, memory_footprint_ratio, offsets

SHARINGS: tuple[Sharing, ...] = ("groups", "offsets", "dynamic", "none")


@st.composite
def some_buffers(draw: st.DrawFn, most: int = 24, largest: int = 50, latest: int = 16) -> list[Buffer]:
    made = []
    for number in range(draw(st.integers(0, most))):
        start = draw(st.integers(0, latest - 1))
        end = draw(st.integers(start + 1, latest))
        made.append(Buffer(str(number), draw(st.sampled_from(ROLES)), draw(st.integers(0, largest)), start, end))
    return made


def trace(buffers: Sequence[Buffer], end: int = 16) -> Trace:
    return Trace("plain", tuple(buffers), (), backward=end // 2, end=end)


def buffers(*facts: tuple[int, int, int], role: Role = "immediate") -> list[Buffer]:
    """Returns buffers made from (bytes, start, end)."""
    return [Buffer(str(number), role, *fact) for number, fact in enumerate(facts)]


def extent(found: Sequence[Buffer], places: Sequence[int]) -> int:
    return max((place + buffer.nbytes for buffer, place in zip(found, places, strict=True)), default=0)


def in_one_place(a: Buffer, at: int, b: Buffer, to: int) -> bool:
    return at < to + b.nbytes and to < at + a.nbytes and a.nbytes > 0 and b.nbytes > 0


def least_extent(found: Sequence[Buffer]) -> int:
    """Returns the least extent of all placements, tried by brute force."""
    least = math.inf
    for order in permutations(found):
        placed: list[tuple[int, Buffer]] = []
        for buffer in order:
            beside = [(at, other) for at, other in placed if other.overlaps(buffer)]
            candidates = [0, *(at + other.nbytes for at, other in beside)]
            place = min(at for at in candidates if not any(in_one_place(buffer, at, b, to) for to, b in beside))
            placed.append((place, buffer))
        least = min(least, max((place + buffer.nbytes for place, buffer in placed), default=0))
    return int(least)


def partitions(numbers: list[int]) -> Iterator[list[list[int]]]:
    if not numbers:
        yield []
        return
    first, *rest = numbers
    for partition in partitions(rest):
        yield [[first], *partition]
        for index, group in enumerate(partition):
            yield [*partition[:index], [first, *group], *partition[index + 1 :]]


def least_groups(found: Sequence[Buffer]) -> int:
    """Returns the least bytes of all ways to share memory in groups, tried by brute force."""
    allowed = (
        partition
        for partition in partitions(list(range(len(found))))
        if not any(found[a].overlaps(found[b]) for group in partition for a in group for b in group if a < b)
    )
    return min(sum(max(found[number].nbytes for number in group) for group in partition) for partition in allowed)


@given(some_buffers())
def test_no_two_buffers_are_in_one_place_at_one_time(found: list[Buffer]) -> None:
    places = offsets(found)
    assert len(places) == len(found) and all(place >= 0 for place in places)
    for number, (a, at) in enumerate(zip(found, places, strict=True)):
        for b, to in zip(found[:number], places[:number], strict=True):
            assert not (a.overlaps(b) and in_one_place(a, at, b, to))


@given(some_buffers())
def test_groups_hold_every_buffer_once_and_none_at_the_same_time(found: list[Buffer]) -> None:
    shared = groups_in_turn(found)
    assert sorted(number for members in shared for number in members) == list(range(len(found)))
    for members in shared:
        assert found[members[0]].nbytes == max(found[number].nbytes for number in members)
        assert not any(found[a].overlaps(found[b]) for a in members for b in members if a < b)


@given(some_buffers(), st.booleans())
def test_bounds(found: list[Buffer], share_stashed: bool) -> None:
    sizes = {sharing: footprint(trace(found), sharing, share_stashed) for sharing in SHARINGS}
    assert sizes["dynamic"] <= sizes["offsets"] <= sizes["none"] == sum(buffer.nbytes for buffer in found)
    assert sizes["dynamic"] <= sizes["groups"] <= sizes["none"]
    if share_stashed:
        assert sizes["dynamic"] == max(trace(found).live())


@given(some_buffers(most=6, largest=12, latest=8))
@settings(max_examples=60, deadline=None)
def test_offsets_against_every_placement(found: list[Buffer]) -> None:
    least = least_extent(found)
    assert max(trace(found).live()) <= least <= extent(found, offsets(found)) <= 1.5 * least


@given(some_buffers(most=6, largest=12, latest=8))
@settings(max_examples=60, deadline=None)
def test_groups_against_every_partition(found: list[Buffer]) -> None:
    least = least_groups(found)
    assert least <= footprint(trace(found), "groups") <= 2 * least


def test_a_pool_of_equal_buffers_is_shared_without_waste() -> None:
    found = buffers(*((10, start, start + 2) for start in range(10)))
    assert footprint(trace(found), "offsets") == footprint(trace(found), "groups") == 20
    assert footprint(trace(found), "none") == 100


def test_a_gap_between_others_is_used() -> None:
    found = buffers((10, 0, 9), (6, 0, 3), (5, 0, 9), (4, 4, 6), (2, 5, 7))
    places = offsets(found)
    assert extent(found, places) == 21
    assert {places[3], places[4]} <= set(range(10, 21))


def test_two_small_ones_after_a_large_one_share_by_offset_only() -> None:
    found = buffers((10, 0, 2), (5, 3, 6), (5, 3, 6))
    assert footprint(trace(found), "groups") == 15  # a group has one member at a time
    assert footprint(trace(found), "offsets") == 10


def test_stashed_maps_that_do_not_share() -> None:
    found = [*buffers((10, 0, 12), (8, 2, 14), role="stashed"), *buffers((9, 12, 13), (7, 14, 15))]
    assert footprint(trace(found), "groups") == 10 + 8  # both follow the first
    assert footprint(trace(found), "groups", share_stashed=False) == 10 + 8 + 9
    assert footprint(trace(found), "groups", share_stashed=False, roles=("stashed",)) == 18


def test_the_ratio() -> None:
    plain = trace(buffers((100, 0, 14), role="stashed"))
    encoded = trace([*buffers((100, 0, 2), (100, 13, 14)), *buffers((25, 1, 14), role="encoded")])
    assert memory_footprint_ratio(plain, encoded) == 100 / 125
    assert memory_footprint_ratio(plain, encoded, roles=("stashed", "encoded")) == 4.0
    nothing = trace([])
    assert memory_footprint_ratio(plain, nothing) == math.inf
    assert memory_footprint_ratio(nothing, nothing) == 1.0


def test_a_way_to_share_that_is_none() -> None:
    with pytest.raises(ValueError, match=r"asked for sharing='best'.*Pass one of groups, offsets, dynamic, none"):
        footprint(trace([]), "best")  # type: ignore[arg-type]


def test_nothing_takes_nothing() -> None:
    assert (groups_in_turn([]), offsets([])) == ((), ())
    assert [footprint(trace([]), sharing) for sharing in SHARINGS] == [0, 0, 0, 0]
