"""The peak model: its rules one by one, and the search that keeps it up to date."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from step_problems import drawn_profile

from backstash.errors import PlanError
from backstash.ops.cpu import library
from backstash.planning.model.peak import PeakModel, evaluate
from backstash.planning.model.problem import Choice, PlannedValue, Position, StepProfile
from backstash.planning.search import greedy
from backstash.planning.search.changes import ReferenceSearch, Search
from backstash.planning.search.moves import Moves, exponential
from backstash.planning.search.native import NativeMoves, NativeSearch, moves_from_kept, search_from_kept

FORWARD, BACKWARD = 4, 6


needs_kernels = pytest.mark.skipif(not library.available(), reason="there are no native kernels")


def value(key: str, born: int, reads: tuple[int, ...], *choices: Choice, nbytes: int = 100) -> PlannedValue:
    return PlannedValue(key, "", "Relu", "float32", nbytes, born, reads, (Choice.keep(nbytes), *choices))


def step(*values: PlannedValue) -> StepProfile:
    count = FORWARD + BACKWARD
    positions = tuple(Position(f"op{n}", "", n >= FORWARD, 1.0) for n in range(count))
    return StepProfile(positions, (0,) * count, values, 0)


def live(profile: StepProfile, *choices: int) -> list[int]:
    return [int(nbytes) for nbytes in evaluate(profile, choices).live]


def test_a_kept_value_lives_from_its_birth_through_its_last_read() -> None:
    assert live(step(value("a", 1, (5, 7))), 0) == [0, *[100] * 7, 0, 0]


def test_an_encoded_value_is_dense_while_it_is_encoded_and_at_each_read() -> None:
    codec = Choice("zvc", "encode", 40, 100, 90, 0.5, 0.25)
    profile = step(value("a", 1, (5, 7), codec))
    assert live(profile, 1) == [0, 140, 40, 40, 40, 130, 40, 130, 0, 0]
    assert evaluate(profile, [1]).seconds == FORWARD + BACKWARD + 0.5 + 2 * 0.25


def test_a_moved_value_holds_nothing_in_between() -> None:
    moved = Choice("offload", "offload", 0, 10, 100, 0.5, 0.25)
    assert live(step(value("a", 1, (5,), moved)), 1) == [0, 10, 0, 0, 0, 100, 0, 0, 0, 0]


def remake(*parents: int, workspace: int = 0, seconds: float = 1.0) -> Choice:
    return Choice("recompute", "recompute", 0, parents=parents, workspace_nbytes=workspace, seconds=seconds)


def test_a_remade_value_is_made_once_and_lives_from_its_first_read() -> None:
    profile = step(value("a", 1, (5, 7), remake(workspace=30)))
    assert live(profile, 1) == [0, 0, 0, 0, 0, 130, 100, 100, 0, 0]
    assert evaluate(profile, [1]).seconds == FORWARD + BACKWARD + 1


def test_a_parent_is_held_until_its_child_is_made() -> None:
    profile = step(value("a", 0, (4,)), value("b", 1, (6,), remake(0), nbytes=10))
    assert live(profile, 0, 1) == [100, 100, 100, 100, 100, 100, 110, 0, 0, 0]


def test_an_encoded_parent_is_decoded_for_its_child_as_well() -> None:
    codec = Choice("zvc", "encode", 40, 0, 90, 0.5, 0.25)
    profile = step(value("a", 0, (7,), codec), value("b", 1, (5,), remake(0), nbytes=10))
    assert live(profile, 1, 1) == [40, 40, 40, 40, 40, 140, 40, 130, 0, 0]
    assert evaluate(profile, [1, 1]).seconds == FORWARD + BACKWARD + 0.5 + 2 * 0.25 + 1
    together = step(value("a", 0, (5,), codec), value("b", 1, (5,), remake(0), nbytes=10))
    assert evaluate(together, [1, 1]).seconds == FORWARD + BACKWARD + 0.5 + 0.25 + 1  # one decoding serves both


def test_a_chain_is_made_at_one_position_and_held_for_later_readers() -> None:
    chain = step(
        value("a", 0, (8,), nbytes=1),
        value("b", 1, (7,), remake(0), nbytes=10),
        value("c", 2, (5,), remake(1), nbytes=100),
    )
    assert live(chain, 0, 1, 1) == [1, 1, 1, 1, 1, 111, 11, 11, 1, 0]
    assert live(chain, 0, 0, 1) == [1, 11, 11, 11, 11, 111, 11, 11, 1, 0]


def test_choices_that_are_not_there_are_refused() -> None:
    profile = step(value("a", 1, (5,)))
    for wrong in ([], [1], [-1], [0, 0]):
        with pytest.raises(PlanError, match="was to be evaluated for the choices .* has 1 values. Pass for each"):
            evaluate(profile, wrong)


def slow_live(profile: StepProfile, choices: list[int]) -> tuple[list[int], float]:
    """The rules of peak.py, written down a second time, position by position and without any array."""
    chosen = [v.choices[c] for v, c in zip(profile.values, choices, strict=True)]
    needs = [set(v.reads) for v in profile.values]
    for _ in profile.values:  # as often as the longest chain could be
        needs = [
            set(v.reads) | {min(needs[child]) for child, other in enumerate(chosen) if number in other.parents}
            for number, v in enumerate(profile.values)
        ]
    total = list(profile.base_nbytes)
    seconds = profile.seconds
    for v, c, need in zip(profile.values, chosen, needs, strict=True):
        remade = c.kind == "recompute"
        first = min(need) if remade else v.born
        for position in range(first, max(need) + 1):
            total[position] += v.nbytes if remade else c.held_nbytes
        total[first] += c.encode_nbytes + c.workspace_nbytes
        for position in need:
            total[position] += c.decode_nbytes
        for at, read in zip(c.fetches, v.reads, strict=False):
            for position in range(at, read):
                total[position] += c.decode_nbytes
        seconds += c.encode_seconds + c.seconds + c.decode_seconds * len(need)
    return total, seconds


@pytest.mark.cases(80)
@pytest.mark.parametrize("kind", [ReferenceSearch, search_from_kept])
@pytest.mark.parametrize("seed", range(40))
def test_the_arrays_say_what_the_rules_say(seed: int, kind: Callable[[PeakModel], Search]) -> None:
    profile, draw = drawn_profile(seed), random.Random(seed)
    model, search = PeakModel(profile), kind(PeakModel(profile))
    for _ in range(15):
        number = draw.randrange(len(profile.values))
        search.set(number, int(model.first[number]) + draw.randrange(len(profile.values[number].choices)))
        found = model.evaluate(search.choices)
        expected, seconds = slow_live(profile, list(search.choices))
        assert found.live.tolist() == search.live.tolist() == expected
        assert found.peak_nbytes == max(expected)
        assert found.seconds == pytest.approx(seconds) and search.seconds == pytest.approx(seconds)
    search.load(model.first[:-1])
    assert search.live.tolist() == model.evaluate([0] * len(profile.values)).live.tolist()
    assert search.error == pytest.approx(0.0)


@needs_kernels
@pytest.mark.parametrize("seed", range(60))
def test_the_search_in_another_language_has_the_same_bits(seed: int) -> None:
    profile, draw = drawn_profile(seed), random.Random(seed)
    one, other = ReferenceSearch(PeakModel(profile)), NativeSearch(PeakModel(profile))
    model = one.model
    for _ in range(100):
        number = draw.randrange(len(profile.values))
        row = int(model.first[number]) + draw.randrange(len(profile.values[number].choices))
        assert one.set(number, row) == other.set(number, row)
        for name in ("rows", "live", "makes", "last"):
            assert getattr(one, name).tolist() == getattr(other, name).tolist(), name
        assert (one.seconds, one.error, one.conflicts) == (other.seconds, other.error, other.conflicts)


def reference_moves(model: PeakModel, limit: float) -> Moves:
    return Moves(ReferenceSearch(model), limit)


@needs_kernels
@pytest.mark.parametrize("seed", range(40))
def test_the_moves_in_another_language_have_the_same_bits(seed: int) -> None:
    """Lowering, relaxing, drawing anew and loading, with prices of errors, batches of changes and ends of effort."""
    profile, draw = drawn_profile(seed, 40), random.Random(seed)
    limit = draw.choice([float("inf"), 0.05, 0.0])
    model = PeakModel(profile)
    pair = reference_moves(model, limit), moves_from_kept(model, limit)
    assert isinstance(pair[1], NativeMoves)
    for each in pair:
        each.price = 3.0 if limit else 0.0
    kept = [pair[0].search.rows.copy()]

    def both(move: Callable[[Moves], object]) -> None:
        one, other = map(move, pair)
        assert one == other
        one_, other_ = pair[0].search, pair[1].search
        for name in ("rows", "live", "makes", "last"):
            assert getattr(one_, name).tolist() == getattr(other_, name).tolist(), name
        assert (one_.seconds, one_.error, one_.conflicts) == (other_.seconds, other_.error, other_.conflicts)
        assert pair[0].work == pair[1].work

    for _ in range(12):
        level = int(draw.uniform(0.3, 1.0) * pair[0].search.live.max())
        tau, batch = draw.choice([1.0, 0.01 * level + 1, 0.1 * level + 1]), draw.choice([1, 3])
        end = pair[0].work + draw.choice([5.0, 1e3, 1e9])
        pair[0].end = pair[1].end = end
        both(lambda moves, level=level, tau=tau, batch=batch: moves.lower(level, tau, batch))  # type: ignore[misc]
        both(lambda moves, level=level: moves.relax(level + level // 10))  # type: ignore[misc]
        kept.append(pair[0].search.rows.copy())
        values = draw.choices(range(len(profile.values)), k=5)
        rows = [int(model.first[v]) + draw.randrange(len(profile.values[v].choices)) for v in values]
        both(lambda moves, values=values, rows=rows: moves.set_all(values, rows))  # type: ignore[misc]
        loaded = draw.choice(kept)
        both(lambda moves, loaded=loaded: moves.search.load(loaded))  # type: ignore[misc]
    both(lambda moves: moves.keep_all())


@needs_kernels
def test_a_frontier_is_the_same_in_either_language(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greedy, "DESCENT", 20_000)
    monkeypatch.setattr(greedy, "EFFORT", 100)
    for seed in range(6):
        for small in (greedy.SMALL, 1):  # tried out, and searched
            monkeypatch.setattr(greedy, "SMALL", small)
            model = PeakModel(drawn_profile(seed))
            found = greedy.frontier(model)
            with monkeypatch.context() as other:
                other.setattr(greedy, "moves_from_kept", reference_moves)
                assert greedy.frontier(model) == found


def test_powers_of_e_are_right_to_a_millionth() -> None:
    live = -np.concatenate([np.arange(0, 40_000, 10), [100_000, 600_000, 10**12]])
    assert exponential(live + 5, 5.0, 1e3) == pytest.approx(np.exp(live / 1e3), rel=3e-6, abs=1e-300)
