"""The choices to move values to another memory: when each of them leaves, when it is asked for, and what that takes.

Note: [turns on the link]
    A value has the link for itself from the moment at which its predecessor is read to its own reading: it is asked for
    then, and takes memory from then on. So no two values are on their way back at once, whichever of them a plan moves,
    and what each of them takes does not depend on the others. What does not fit into its turn is waited for.

Note: [prices of a link]
    Beside an accelerator transfers can overlap. A search adds up what its choices take, but values that are moved share
    the link. So it is worked out first which values could all be moved without a wait (hiding.py). Those cost what is
    not hidden of their transfers, whichever of them a plan moves: a queue without some of its transfers makes no other
    one later. Any other value costs its whole transfers, because one more transfer in a queue delays no other by more
    than it takes itself. So what is added up is never less than what the queues make a step wait. A value that has to
    be asked for before its turn, because the turn is too short, takes memory for longer, so its turn is offered too.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate

from backstash.planning.measure.hiding import Candidate, hide
from backstash.planning.measure.link import SMALLEST, Link
from backstash.planning.measure.survey import Movable, SurveyedValue
from backstash.planning.measure.timeline import Timeline
from backstash.planning.model.problem import Choice
from backstash.planning.model.rounding import IN_TURN, moved_name
from backstash.stores.host import IN_FLIGHT


def moved(
    link: Link, found: Mapping[str, SurveyedValue], line: Timeline, seconds: Sequence[float], first: int
) -> dict[str, tuple[Choice, ...]]:
    """Returns, by key, the choices to move each value, for those that it pays for."""
    until = [0.0, *accumulate(seconds)]
    movable = {key: value for key, value in found.items() if any(form.nbytes >= SMALLEST for form in value.movable)}
    reads = {key: sorted({read for read in line.reads[key] if read >= first}) for key in movable}
    births = {key: min(line.born[key], reads[key][0]) for key in movable}
    milestones = sorted({min(read for read in line.reads[key] if read >= first) for key in found})
    hidden = _hidden(link, movable, births, reads, milestones, seconds, first) if link.store == "host" else {}
    all_births, all_reads = sorted(set(births.values())), sorted({read for each in reads.values() for read in each})
    choices: dict[str, tuple[Choice, ...]] = {}
    for key, value in movable.items():
        turns = tuple(_asked(read, all_reads, milestones, first) for read in reads[key])
        offers: list[Choice] = []
        if hidden:
            early = hidden.get(key)
            for form in value.movable:
                out, back = _slowed(link, form.nbytes)
                out_whole = link.hand_over.seconds(form.nbytes) + link.out.seconds(form.nbytes)
                if early is not None:
                    offers.append(_choice(link, value, form, (out, back), early, ""))
                if early != turns:
                    costs = max(out, 0.0 if early is not None else out_whole), max(back, link.back.seconds(form.nbytes))
                    offers.append(_choice(link, value, form, costs, turns, "" if early is None else IN_TURN))
        else:
            later = bisect_right(all_births, births[key])
            end = all_births[later] if later < len(all_births) else first
            beside = max(0.0, until[max(end, line.born[key])] - until[min(line.born[key] + 1, len(seconds))])
            waits = [until[read] - until[asked] for read, asked in zip(reads[key], turns, strict=True)]
            for form in value.movable:
                back = sum(link.seconds_back(form.nbytes, wait) for wait in waits) / len(waits)
                costs = link.seconds_out(form.nbytes, beside), back
                offers.append(_choice(link, value, form, costs, turns, ""))
        choices[key] = tuple(offers)
    return choices


def _choice(
    link: Link, value: SurveyedValue, form: Movable, costs: tuple[float, float], fetches: tuple[int, ...], ending: str
) -> Choice:
    return Choice(
        moved_name(form.codec) + ending,
        "offload",
        0,
        encode_nbytes=value.nbytes + (form.nbytes if form.nbytes < value.nbytes else 0),
        decode_nbytes=form.decode_nbytes,
        encode_seconds=form.encode_seconds + costs[0],
        decode_seconds=form.decode_seconds + costs[1],
        fetches=fetches,
        reason=f"to the {link.store}: {form.nbytes / max(1, value.nbytes):.0%} of its bytes, there and back",
    )


def _hidden(
    link: Link,
    movable: Mapping[str, SurveyedValue],
    births: Mapping[str, int],
    reads: Mapping[str, Sequence[int]],
    milestones: Sequence[int],
    seconds: Sequence[float],
    first: int,
) -> dict[str, tuple[int, ...]]:
    """Returns, by key, when each value is asked for, for those that can all be moved without a wait."""
    keys = list(movable)
    sizes = [max(form.nbytes for form in movable[key].movable) for key in keys]
    candidates = [Candidate(size, births[key], tuple(reads[key])) for key, size in zip(keys, sizes, strict=True)]
    found = hide(
        seconds,
        candidates,
        *link.directions(),
        first,
        asks=milestones,
        spare=0.0,
        late=1e-9,
        worth=math.inf,
        near=-1.0,
        in_flight=IN_FLIGHT,
    )
    return {keys[number]: move.fetches for number, move in zip(found.chosen, found.moves, strict=True)}


def _asked(read: int, reads: Sequence[int], milestones: Sequence[int], first: int) -> int:
    """Returns from when on a value that is read then has the link for itself."""
    before = bisect_left(reads, read) - 1
    start = reads[before] if before >= 0 else first
    place = bisect_left(milestones, start)
    return milestones[place] if place < len(milestones) and milestones[place] < read else read


def _slowed(link: Link, nbytes: int) -> tuple[float, float]:
    """Returns by how much a step is slowed down while so many bytes go out, and while they come back."""
    out, back = link.directions()
    return out.slows * out.busy(nbytes) + link.hand_over.latency, back.slows * back.busy(nbytes)
