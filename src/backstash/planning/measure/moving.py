"""The choices to move values to another memory: when each of them leaves, when it is asked for, and what that takes.

Note: [turns on the link]
    A value has the link for itself from the moment at which its predecessor is read to its own reading: it is asked for
    then, and takes memory from then on. So no two values are on their way back at once, whichever of them a plan moves,
    and what each of them takes does not depend on the others.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate

from backstash.planning.measure.link import SMALLEST, Link
from backstash.planning.measure.survey import SurveyedValue
from backstash.planning.measure.timeline import Timeline
from backstash.planning.model.problem import Choice
from backstash.planning.model.rounding import moved_name


def moved(
    link: Link, found: Mapping[str, SurveyedValue], line: Timeline, seconds: Sequence[float], first: int
) -> dict[str, tuple[Choice, ...]]:
    """Returns, by key, the choices to move each value, for those that it pays for.

    Args:
        link: where to.
        found: what was found out about the values.
        line: the record of the step.
        seconds: time of each position.
        first: the first position of backward.
    """
    until = [0.0, *accumulate(seconds)]
    movable = {key: value for key, value in found.items() if any(form.nbytes >= SMALLEST for form in value.movable)}
    reads = {key: sorted({read for read in line.reads[key] if read >= first}) for key in movable}
    births = sorted({min(line.born[key], reads[key][0]) for key in movable})
    all_reads = sorted({read for each in reads.values() for read in each})
    milestones = sorted({min(read for read in line.reads[key] if read >= first) for key in found})
    choices: dict[str, tuple[Choice, ...]] = {}
    for key, value in movable.items():
        later = bisect_right(births, min(line.born[key], reads[key][0]))
        end = births[later] if later < len(births) else first
        beside = max(0.0, until[max(end, line.born[key])] - until[min(line.born[key] + 1, len(seconds))])
        fetches = []
        for read in reads[key]:
            before = bisect_left(all_reads, read) - 1
            start = all_reads[before] if before >= 0 else first
            place = bisect_left(milestones, start)
            asked = milestones[place] if place < len(milestones) and milestones[place] < read else read
            fetches.append(asked)
        waits = [until[read] - until[asked] for read, asked in zip(reads[key], fetches, strict=True)]
        choices[key] = tuple(
            Choice(
                moved_name(form.codec),
                "offload",
                0,
                encode_nbytes=value.nbytes + (form.nbytes if form.nbytes < value.nbytes else 0),
                decode_nbytes=form.decode_nbytes,
                encode_seconds=form.encode_seconds + link.seconds_out(form.nbytes, beside),
                decode_seconds=form.decode_seconds
                + sum(link.seconds_back(form.nbytes, wait) for wait in waits) / len(waits),
                fetches=tuple(fetches),
                reason=f"to the {link.store}: {form.nbytes / max(1, value.nbytes):.0%} of its bytes, there and back",
            )
            for form in value.movable
        )
    return choices
