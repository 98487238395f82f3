"""The two lines at the top of a report: what would make smaller the values that are still held, and what that costs.

Functions of plain data, as summary.py. Nothing is tried here: bytes and times are those that the Session has noted.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from backstash.stash.accounts import HELD
from backstash.stash.tables import amount, folded, ms, shortened

if TYPE_CHECKING:
    from backstash.stash.ledger import Entry, Report

NOTHING_REMADE = "nothing is made again"
"""Part of the note of a Session that remakes nothing, because a step saves little."""

_BITS = {"float64": 64, "float32": 32, "float16": 16, "bfloat16": 16}
_QUANTIZED_BITS = 8 + 64 / 256
"""Bits per value of the policy ``quantized(8)``: two float32 extremes for each group of 256 values."""

WORTHWHILE = 0.01
"""A share of all bytes that were saved. What would help by less is not suggested."""

WORTH_A_LOOK = 16 << 10
"""Bytes of all small values together, from which on it is said that a Session could look at them."""

_STEPS = 20
"""How many budgets there are to suggest from, as shares of the plain step's peak."""

_PLANS = ("Plan(", "Budgeted(")
"""What the repr of a policy has in it that a budget has made."""

_NAME = 44
"""Characters of a name in a suggestion."""

Kind = Literal["policy", "remake", "fewer bits", "move", "look"]


@dataclass(frozen=True)
class HeldValues:
    """Values of one kind that are still held on the device.

    Attributes:
        name: their module and role, where the numbers of repeated blocks are ``*``.
        count: how many they are.
        nbytes: bytes that the device holds for them.
        why: why they are held, in a few words.
        advice: what would make them smaller; empty if nothing is known.
        gain_nbytes: bytes that the advice would free, at most.
        remake_seconds: how long it takes to make them again, if that is the advice.
        is_stored: whether a codec stores them, so that they are not as dense as they were.
    """

    name: str
    count: int
    nbytes: int
    why: str
    advice: str
    gain_nbytes: int = 0
    remake_seconds: float = 0.0
    is_stored: bool = False


@dataclass(frozen=True)
class Suggestion:
    """Something that would leave fewer bytes on the device.

    Attributes:
        kind: ``"policy"``: store what the policy keeps; ``"remake"``: compute values again in backward;
            ``"fewer bits"``: store them with an error; ``"move"``: move them to the host; ``"look"``: look at smaller
            values too.
        name: the values, as :class:`HeldValues` names them; the largest ones if they have several names.
        count: how many values.
        nbytes: bytes that the device would not hold.
        is_most: whether ``nbytes`` is the most that it may be, because nothing was tried.
        seconds: what it adds to a step, in sum; None where that is not known.
        option: what does that: an option of ``backstash run``, or a policy of the library.
        text: all of it, in one sentence.
    """

    kind: Kind
    name: str
    count: int
    nbytes: int
    is_most: bool
    seconds: float | None
    option: str
    text: str


def holdings(report: Report) -> list[HeldValues]:
    """The values that the device holds, largest first. Values of repeated blocks are one row."""
    was_remaking = not any(NOTHING_REMADE in note for note in report.notes)
    groups: dict[tuple[str, str, str, str], list[Entry]] = defaultdict(list)
    for row in report.rows:
        if row.device_nbytes:
            groups[_folded(row.key), row.spec, row_label(row), why(row, was_remaking)].append(row)
    found = []
    for (name, _, _, reason), alike in groups.items():
        shown = name if len(alike) > 1 else alike[0].key.replace("#0:", ":")
        nbytes = sum(row.device_nbytes for row in alike)
        helps = advice(alike, reason)
        gain = 0 if not helps else _spared(alike) if helps.startswith("8 bits") else nbytes
        seconds = sum(row.remake_seconds for row in alike) if helps.startswith("recompute") else 0.0
        title = shown.lstrip("/") or "?"
        is_stored = alike[0].codec != "kept"
        found.append(HeldValues(title, len(alike), nbytes, reason, helps, gain, seconds, is_stored))
    return sorted(found, key=lambda one: -one.nbytes)


def row_label(row: Entry) -> str:
    """The form in which a value is stored, and where, if that is not the device."""
    return row.codec if row.store == "device" else f"{row.codec} in {row.store}"


def why(row: Entry, was_remaking: bool = True) -> str:
    """Why a value is still held, in a few words.

    Args:
        row: the value.
        was_remaking: whether values were remade where that is possible, so that a reason against it says something.
    """
    if row.codec != "kept":
        return row.codec
    reason, _, origin = row.reason.partition("; not recomputed: ")
    if reason.startswith(HELD):
        return "in use"
    if reason == "small":
        return "too small"
    if reason.endswith("of a sample is not zero"):
        return "unknown origin" if was_remaking and origin == "what made it is not known" else "dense"
    if reason == "the policy says so":
        return "by the policy"
    return shortened(reason, 24) if reason else "kept"


def advice(rows: Sequence[Entry], reason: str) -> str:
    """What would make values of one kind smaller, which are held for that reason, as far as it is known untried.

    The bits of a gradient stay as they are if a value is made again, so that comes first. A budget has it done.
    """
    row = rows[0]
    if reason == "too small":
        return "a smaller min_nbytes" if sum(each.device_nbytes for each in rows) >= WORTH_A_LOOK else ""
    if reason == "by the policy":
        return "the policy lossless"
    if reason == "in use" or row.need in ("", "SIGN", "SHAPE", "INDEX"):
        return ""
    if row.codec == "kept" and all(one.remake_seconds for one in rows):
        return f"recompute: {ms(sum(one.remake_seconds for one in rows))}"
    if row.codec == "kept" and row.effect and _spared(rows):
        return f"8 bits: -{amount(_spared(rows))}"
    return "offload"


def _spared(rows: Sequence[Entry]) -> int:
    """Bytes that 8 bits would spare of values of one kind; 0 where they do not take such values."""
    bits = _BITS.get(rows[0].spec.partition(" ")[0])
    return 0 if bits is None else round(sum(row.device_nbytes for row in rows) * (1 - _QUANTIZED_BITS / bits))


def _folded(key: str) -> str:
    """A key with ``*`` for the numbers of modules, and without the number of the first node of its kind."""
    path, slash, node = key.rpartition("/")
    return folded(path) + slash + node.replace("#0:", ":")


def suggestions(report: Report) -> tuple[Suggestion, ...]:
    """What would help, most bytes first. What would help little is left out."""
    groups: dict[tuple[Kind, str], list[HeldValues]] = defaultdict(list)
    for held in holdings(report):
        kind = _kind(held, report)
        if kind is not None:
            # An option says nothing of single values; a budget begins where most is gained for the time.
            groups[kind, held.name if kind == "remake" else ""].append(held)
    found = [_suggestion(kind, alike, report) for (kind, _), alike in groups.items()]
    least = max(WORTHWHILE * report.saved_nbytes, 1)
    return tuple(sorted((one for one in found if one.nbytes >= least), key=lambda one: -one.nbytes))


def what_now(report: Report) -> tuple[str, ...]:
    """What a reader may do now, in two lines; in one where nothing would help. The last line then says why."""
    if not report.rows:
        return ()
    first, *others = (*suggestions(report)[:2], None)
    if first is None:
        return (f"nothing would help: {_rest(report, 0)}",)
    second = f"helps next: {others[0].text}" if others[0] is not None else f"nothing else helps: {_rest(report, 1)}"
    return f"helps most: {first.text}", second


def _kind(held: HeldValues, report: Report) -> Kind | None:
    """Which kind of help the advice for these values is; None where there is none, or the policy does that already."""
    if held.advice.startswith("recompute"):
        return "remake"
    if held.advice.startswith("8 bits"):
        return "fewer bits"
    if held.advice == "the policy lossless":
        return None if report.policy.startswith("Lossless(") else "policy"
    if held.advice == "offload":
        return None if report.policy.startswith("Offload(") else "move"
    return "look" if held.advice == "a smaller min_nbytes" else None


def _suggestion(kind: Kind, alike: Sequence[HeldValues], report: Report) -> Suggestion:
    """The suggestion for values that the same would help."""
    count, nbytes = sum(held.count for held in alike), sum(held.gain_nbytes for held in alike)
    name = max(alike, key=lambda held: held.gain_nbytes).name
    seconds = sum(held.remake_seconds for held in alike) if kind == "remake" else None
    subject = f"{count} values" if len({held.name for held in alike}) > 1 else shortened(name, _NAME)
    if count > 1 and subject.startswith(shortened(name, _NAME)):
        subject = f"{count} values of {subject}"
    is_most, is_within = kind in ("policy", "look"), any(each in report.policy for each in _PLANS)
    gain = f"{'up to ' if is_most else ''}-{amount(nbytes)}"
    option = {
        "policy": "--policy lossless",
        "remake": "a smaller budget" if is_within else f"--budget {_share(report, nbytes)}%",
        "fewer bits": "policies.quantized(8)",
        "move": "--policy offload",
        "look": "--min-nbytes 1KiB",
    }[kind]
    does = {
        "policy": f"store what the policy keeps: {gain}, no bit changes",
        "remake": f"remake {subject}: {gain}, +{ms(seconds or 0.0)}",
        "fewer bits": f"store {subject} in 8 bits: {gain}, gradients change a little",
        "move": f"move {subject} to the host: {gain}, which takes copies",
        "look": f"look at small values too: {gain}, which takes time for each",
    }[kind]
    text = f"{does}; try {option if option.startswith('a ') else f'`{option}`'}"
    return Suggestion(kind, name, count, nbytes, is_most, seconds, option, text)


def _share(report: Report, gain: int) -> int:
    """A budget, in % of the plain step's peak, for which about a quarter of ``gain`` bytes have to go.

    It is a guess: a report knows what is held between the passes, and a peak may lie elsewhere. Where the budget is too
    small for any plan, the error names the smallest. What a step takes beside its saved values is taken for two of the
    largest values, unless peaks were measured: a layer's backward reads one gradient and writes another.
    """
    now, before = report.device_nbytes, report.saved_nbytes
    beside = 2 * max(row.saved_nbytes for row in report.rows)
    if report.measured is not None and report.measured.peak_nbytes and report.measured.plain_peak_nbytes:
        now, before, beside = report.measured.peak_nbytes, report.measured.plain_peak_nbytes, 0
    wanted = (now + beside - gain / 4) / (before + beside)
    return max(math.ceil(wanted * _STEPS) * 100 // _STEPS, 100 // _STEPS)


def _rest(report: Report, told: int) -> str:
    """Why nothing helps the values that are still held, beside those that were told of."""
    totals: dict[str, int] = defaultdict(int)
    known = {(one.kind, one.name) for one in suggestions(report)[:told]}
    for held in holdings(report):
        kind = _kind(held, report)
        if any(kind == other and (kind != "remake" or held.name == name) for other, name in known):
            continue
        if held.why == "in use":
            totals["in use by the program"] += held.nbytes
        elif held.why == "too small" or kind is not None:
            totals["too little to matter"] += held.nbytes
        elif held.is_stored:
            totals["stored small already"] += held.nbytes
        else:
            totals["no smaller form known"] += held.nbytes
    shown = sorted(totals.items(), key=lambda pair: -pair[1])
    if not shown:
        return "nothing else is held" if told else "nothing is held on the device"
    return ", ".join(f"{amount(nbytes)} {reason}" for reason, nbytes in shown)
