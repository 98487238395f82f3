"""The result of ``verify``: as data, as text, as JSON and as a page of HTML, which fetches nothing."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from html import escape
from typing import Any

from backstash.stash.html import document, html_table
from backstash.verifying.causes import ROUNDED, UNSTEADY, Cause, cause_of
from backstash.verifying.gradients import ParameterError, first_unequal, missing_names, unequal_names
from backstash.verifying.runlog import RegionLog, RunLog, ValueDifference

EQUAL, DIFFERS, UNSTEADY_VERDICT, BY_INTENTION = "equal", "differs", "unsteady", "rounded"
_WIDTH = 118
_MOST_ROWS = 8


@dataclass(frozen=True, slots=True)
class VerifyFinding:
    """Differences that have one cause.

    Attributes:
        subject: what differs first: the place of a value (``"layers.1.drop/Mul:other"``), or of gradients their name.
        value: the first value that differs; None where only gradients, buffers or generators differ.
        region: the region that recomputed it, or None.
        count: how many values differ for this cause.
        places: how many regions, or pairs of hooks, have it.
        names: parameters or buffers that it is about, where it is not about a value.
    """

    cause: Cause
    subject: str
    value: ValueDifference | None = None
    region: RegionLog | None = None
    count: int = 1
    places: int = 1
    names: tuple[str, ...] = ()

    @property
    def is_wrong(self) -> bool:
        """Whether it is a fault: neither meant, nor a kernel that does not repeat itself."""
        return self.cause.kind not in (UNSTEADY, ROUNDED)


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of :func:`backstash.verify`.

    Attributes:
        verdict: ``"equal"``; ``"differs"``; ``"rounded"``: what differs is meant, by a policy or hooks that round;
            ``"unsteady"``: kernels of the step do not repeat themselves, or the program's inputs differ from run to
            run, so what differs may follow from that.
        findings: the differences by cause, in the order of forward.
        watched, reference: the records of the run as it is and of the run without savers.
        errors: the gradients' errors by parameter, in the first backward pass in which they differ; empty if none do.
        runs: how many times the step ran.
        name: of the step or the script.
        is_interrupted: whether Ctrl-C has come before a closer look at what differs.
        unsteady: why two runs without savers differ; empty if they do not, or if there was no second one.
    """

    verdict: str
    findings: tuple[VerifyFinding, ...]
    watched: RunLog
    reference: RunLog
    errors: tuple[ParameterError, ...] = ()
    runs: int = 2
    name: str = "step"
    notes: tuple[str, ...] = field(default=())
    is_interrupted: bool = False
    unsteady: str = ""

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs."""
        return self.verdict == EQUAL

    @property
    def exit_code(self) -> int:
        """The exit code of the command: 1 if something differs that is not meant, else 0."""
        return int(self.verdict == DIFFERS)

    @property
    def first(self) -> VerifyFinding | None:
        """The finding of the first value that differs; None if there is none."""
        return self.findings[0] if self.findings else None

    def fixes(self) -> list[str]:
        """What to change, one line for each finding with a known mend."""
        return list(dict.fromkeys(each.cause.fix for each in self.findings if each.cause.fix))

    def to_json(self) -> str:
        """The result with both records, as JSON."""
        data: dict[str, Any] = {
            "name": self.name,
            "verdict": self.verdict,
            "headline": self.headline(),
            "findings": [asdict(each) for each in self.findings],
            "gradient_errors": [asdict(each) for each in self.errors],
            "fixes": self.fixes(),
            "runs": self.runs,
            "notes": list(self.notes),
            "watched": asdict(self.watched),
            "reference": asdict(self.reference),
        }
        return json.dumps(_finite(data), indent=1)

    def headline(self) -> str:
        """The result in one line."""
        log = self.watched
        seen = f"{log.values:,} saved values in {_count(log.passes, 'backward pass', 'backward passes')}"
        regions = sum(bool(each.runs_again) for each in log.regions)
        if regions:
            seen += f", {_count(regions, 'recomputed region')}"
        if self.verdict == EQUAL:
            return f"equal: {seen}; backward read the bits that forward had, and gradients equal those without savers"
        if self.verdict == BY_INTENTION:
            return f"rounded: {seen}; what differs is meant"
        if self.verdict == UNSTEADY_VERDICT:
            return f"unsteady: {seen}; {self.unsteady or _KERNELS}"
        if log.differing:
            return f"differs: {seen}; {_count(log.differing, 'value')} differ{'s' if log.differing == 1 else ''}"
        rest = "torch noticed it and raised" if log.error else "no value differs, but gradients or state do"
        return f"differs: {seen}; {rest}"

    def __str__(self) -> str:
        return "\n".join(self.lines(fix=True))

    def lines(self, fix: bool = False) -> list[str]:
        """The result as text."""
        found = [f"{self.name}: {self.headline()}"]
        for place, each in enumerate(self.findings):
            found += ["", *_finding_lines(each, place, fix)]
        if self.errors:
            found += ["", "gradients, beside those of the same step without savers"]
            found += _table(_ERRORS, _error_rows(self.errors[:_MOST_ROWS]))
            if len(self.errors) > _MOST_ROWS:
                found.append(f"  and {len(self.errors) - _MOST_ROWS} more parameters")
        for note in self.notes:
            found += ["", *textwrap.wrap(f"note: {note}", _WIDTH, subsequent_indent="  ")]
        return found


def judge(
    name: str,
    watched: RunLog,
    reference: RunLog,
    closer: RunLog | None = None,
    again: RunLog | None = None,
    errors: Sequence[ParameterError] = (),
    tolerance: float = 0.0,
) -> Verification:
    """Returns the verdict on two runs of a step, or on four.

    Args:
        watched, reference: the run as it is, and the run without savers.
        closer, again: both once more, if something differs: with the values that differ and the operations of their
            regions, and with gradients.
        tolerance: relative error up to which hooks may round.
    """
    unsteady = "" if again is None else _why_unsteady(reference, again)
    findings = _value_findings(watched, closer, tolerance, unsteady)
    if watched.error is not None and not findings and closer is not None:
        findings = _error_findings(closer)
    unequal = list(unequal_names(watched.gradients, reference.gradients))
    if not any(each.is_wrong for each in findings):
        findings += _gradient_findings(watched, reference, unequal, errors, unsteady, bool(findings))
    findings += _state_findings(watched, reference, findings, not unsteady)
    wrong = [each for each in findings if each.is_wrong]
    if wrong:
        verdict = DIFFERS
    elif any(each.cause.kind == UNSTEADY for each in findings):
        verdict = UNSTEADY_VERDICT
    else:
        verdict = BY_INTENTION if findings else EQUAL
    runs = 2 if closer is None else 4
    shown = tuple(errors) if findings else ()
    notes = tuple(_notes(watched, reference))
    return Verification(verdict, tuple(findings), watched, reference, shown, runs, name, notes, unsteady=unsteady)


def needs_closer_look(watched: RunLog, reference: RunLog) -> bool:
    """Whether anything differs between two runs."""
    return bool(
        watched.differing
        or any(unequal_names(watched.gradients, reference.gradients))
        or len(watched.gradients) != len(reference.gradients)
        or watched.state != reference.state
        or watched.generators != reference.generators
        or watched.results != reference.results
        or watched.returned != reference.returned
    )


def _why_unsteady(reference: RunLog, again: RunLog) -> str:
    """Why two runs without savers gave different gradients (Note: [inputs that differ]); empty if they did not."""
    differing = first_unequal(reference.gradients, again.gradients)
    if differing is None:
        return ""
    for one, two in zip(reference.calls[: differing + 1], again.calls[: differing + 1], strict=False):
        for call, other in zip(one, two, strict=False):
            if call != other:
                return _INPUTS if call[0] else _KERNELS
    return _KERNELS if reference.results[: differing + 1] == again.results[: differing + 1] else _TARGETS


# -- findings ----------------------------------------------------------------------------------------------------


def _value_findings(watched: RunLog, closer: RunLog | None, tolerance: float, unsteady: str) -> list[VerifyFinding]:
    details = {} if closer is None else {each.number: each for each in closer.differences}
    firsts: dict[Any, list[ValueDifference]] = {}
    for each in watched.differences:
        firsts.setdefault(("region", each.region) if each.region is not None else each.owner, []).append(each)
    found: dict[tuple[str, str, str], VerifyFinding] = {}
    for group in firsts.values():
        for number, value in enumerate(group):
            if value.region is not None and number:
                break  # what follows in a region follows from its first
            seen = details.get(value.number)
            if seen is not None:
                value.detail = seen.detail or value.detail
                value.operation = seen.operation or value.operation
                value.same_as = value.same_as or seen.same_as
            region = None if value.region is None else watched.regions[value.region]
            cause = cause_of(value, region)
            if cause.kind == ROUNDED and value.detail.get("relative", math.inf) > tolerance:
                cause = Cause("rounding", cause.reason, cause.fix)
            if closer is not None and seen is None and value.owner != "autograd":
                state = "with other inputs" if unsteady == _INPUTS else "from the same state"
                cause = Cause(UNSTEADY, f"it differed in one run and not in another {state}")
            count = len(group) if value.region is not None else 1
            key = (cause.kind, cause.fix, value.owner if region is None else region.kind)
            if key in found:
                found[key] = replace(found[key], count=found[key].count + count, places=found[key].places + 1)
            else:
                found[key] = VerifyFinding(cause, value.place, value, region, count)
    return list(found.values())


def _error_findings(closer: RunLog) -> list[VerifyFinding]:
    """What is wrong where a checkpoint has noticed by itself that it computed something else."""
    for number, operation in sorted(closer.operations.items(), key=lambda item: int(item[0])):
        region = closer.regions[int(number)]
        changed = closer.changed.get(number, [])
        value = ValueDifference(
            -1, 0, operation["path"], operation["name"], "operation", [], "", "checkpoint", region.number
        )
        value.operation, value.changed = operation, changed
        return [VerifyFinding(cause_of(value, region), value.place, None, region, names=(value.place,))]
    return []


def _gradient_findings(
    watched: RunLog,
    reference: RunLog,
    unequal: list[list[str]],
    errors: Sequence[ParameterError],
    unsteady: str,
    is_explained: bool,
) -> list[VerifyFinding]:
    """What is wrong where gradients differ and no value does."""
    missing = missing_names(watched.gradients, reference.gradients)
    if missing:
        return [VerifyFinding(_no_gradient(watched), missing[0], names=tuple(missing), count=len(missing))]
    first, names = next(((number, tuple(each)) for number, each in enumerate(unequal) if each), (0, ()))
    if len(watched.gradients) != len(reference.gradients):
        cause = Cause(
            "passes",
            f"there were {watched.passes} backward passes with savers and {reference.passes} without",
        )
        return [VerifyFinding(cause, "the step")]
    if not names or is_explained:
        return []
    worst = max((each.relative for each in errors), default=math.inf)
    other = "those without a budget" if reference.is_compiled else "eager ones"
    if unsteady:
        cause = Cause(UNSTEADY, *_OF_UNSTEADY[unsteady])
    elif watched.results[: first + 1] != reference.results[: first + 1]:  # later ones may differ by these gradients
        cause = Cause(
            "forward",
            "forward itself computed other bits with the savers on than with them off",
            "use_reentrant=False runs forward with grad mode on" if _has_reentrant(watched) else "",
        )
        if watched.compiled and worst <= _COMPILED:
            cause = Cause(ROUNDED, f"compiled kernels round otherwise than {other} (relative error {worst:.1e})")
    elif watched.recomputing and any(not watched_reason for watched_reason in reference.replaced.values()):
        functions = [name for name in watched.recomputing if not reference.replaced.get(name, "?")]
        cause = Cause(
            "function",
            f"the custom function {functions[0]} recomputes in its backward, and its gradients are not those of its "
            f"own forward",
            "have its backward restore the generators, autocast and settings of its forward, or use "
            "torch.utils.checkpoint with use_reentrant=False",
        )
    elif watched.sessions:
        policy, is_exact = next(iter(watched.sessions.items()))
        reason = f"a Session under the policy {policy} stores values with an error (relative error {worst:.1e})"
        cause = Cause("session", f"the policy {policy} promises the same bits") if is_exact else Cause(ROUNDED, reason)
    elif watched.compiled:
        kind = ROUNDED if worst <= _COMPILED else "compiled"
        cause = Cause(
            kind,
            f"compiled graphs give other gradients than {other} (relative error {worst:.1e})",
            "" if kind == ROUNDED else "torch._functorch.config.activation_memory_budget = 1.0 recomputes least",
        )
    else:
        cause = Cause("gradient", "gradients differ although backward read the bits that forward had")
    return [VerifyFinding(cause, names[0], names=names, count=len(names))]


_COMPILED = 1e-3
_KERNELS = "kernels of this step do not repeat themselves"
_INPUTS = "the program's inputs differ between runs"
_TARGETS = "what the loss reads differs between runs, or its kernels do not repeat themselves"
_DETERMINISM = "torch.use_deterministic_algorithms(True)"
_SEED = "seed all that the program draws, as np.random.default_rng(0), and take no inputs from a clock or os.urandom"
_OF_UNSTEADY = {
    _KERNELS: ("two runs without savers gave different gradients", _DETERMINISM),
    _INPUTS: ("modules were given other inputs or weights in two runs without savers", _SEED),
    _TARGETS: (
        "modules were given and returned the same in two runs without savers, and the losses are others",
        f"{_SEED}; and {_DETERMINISM}",
    ),
}
"""For each reason why two runs differ: what is said of the gradients, and what to do."""


def _no_gradient(watched: RunLog) -> Cause:
    if _has_reentrant(watched):
        return Cause(
            "no gradient",
            "checkpoint(use_reentrant=True) was called with no input that asks for a gradient, so its parameters get "
            "none",
            "use_reentrant=False, or have an input require a gradient (transformers: enable_input_require_grads())",
        )
    return Cause("no gradient", "parameters have a gradient without savers and none with them")


def _has_reentrant(watched: RunLog) -> bool:
    return any(region.kind == "checkpoint(use_reentrant=True)" for region in watched.regions)


def _state_findings(
    watched: RunLog, reference: RunLog, findings: Sequence[VerifyFinding], is_steady: bool
) -> list[VerifyFinding]:
    """Buffers and generators that the savers leave in another state."""
    gradients_differ = any(unequal_names(watched.gradients, reference.gradients))
    if gradients_differ or not is_steady:
        return []
    found = []
    names = tuple(name for name, total in watched.state.items() if reference.state.get(name, total) != total)
    if names and watched.regions:
        cause = Cause(
            "buffer written twice",
            "a region writes it in forward, and once more when it is computed again",
            "write it only while not torch.is_grad_enabled() ... in one of the runs; of BatchNorm: momentum**0.5, or "
            "keep it out of the region",
        )
        found.append(VerifyFinding(cause, names[0], names=names, count=len(names)))
    elif names:
        found.append(
            VerifyFinding(Cause("state", "it is left with other bits than without savers"), names[0], names=names)
        )
    moved = tuple(name for name, state in watched.generators.items() if reference.generators.get(name, state) != state)
    if moved and not any(each.cause.kind == "generator" for each in findings):
        cause = Cause(
            "generator moved",
            "the savers draw random numbers, or draw them twice, so that later steps draw others",
            "pass preserve_rng_state=True to checkpoint" if watched.regions else "",
        )
        found.append(VerifyFinding(cause, f"the generator {moved[0]}", names=moved))
    return found


def _notes(watched: RunLog, reference: RunLog) -> list[str]:
    found = []
    for reason, count in watched.unchecked.items():
        found.append(f"{_count(count, 'value was', 'values were')} not compared: {reason}")
    for name in watched.recomputing:
        reason = reference.replaced.get(name, "it was not called in the run without savers")
        if reason:
            found.append(f"{name} recomputes by itself and was not checked: {reason}")
    if watched.compiled:
        found.append(
            f"{_count(watched.compiled, 'graph')} compiled by torch.compile: hooks do not see inside, so only "
            f"gradients were compared, with those of "
            f"{'the same program compiled without a budget' if reference.is_compiled else 'eager mode'}"
        )
    for policy, is_exact in watched.sessions.items():
        found.append(
            f"the Session's own values ({policy}) were not compared one by one, only the gradients "
            f"({'the same bits are promised' if is_exact else 'it may round'})"
        )
    if watched.error is not None:
        found.append(f"the step ended with {watched.error.splitlines()[0][:200]}")
    return found


# -- text --------------------------------------------------------------------------------------------------------


def _finding_lines(found: VerifyFinding, place: int, fix: bool) -> list[str]:
    head, rows = finding_rows(found, place, fix)
    lines = [head]
    for label, text in rows:
        lines += textwrap.wrap(f"  {label:<12}{text}", _WIDTH, subsequent_indent=" " * 14, break_long_words=False)
    return lines


def finding_rows(found: VerifyFinding, place: int, fix: bool) -> tuple[str, list[tuple[str, str]]]:
    """Returns a heading and labelled sentences."""
    value = found.value
    rows: list[tuple[str, str]] = []
    if value is not None:
        head = "the first value that differs" if place == 0 else "another cause"
        rows.append(("where", f"{value.place}, {value.dtype} {value.shape}"))
        if value.producer is not None:
            rows.append(("computed by", value.producer))
        by = value.owner if found.region is None else f"{found.region.kind} in {found.region.path or 'the step'}"
        rows.append(("stored by", f"{by}, region {found.region.number}" if found.region is not None else by))
        rows.append(("differs", _extent(value)))
    else:
        head = "no value differs, but" if place == 0 else "besides"
        shown = ", ".join(found.names[:3]) + (f" and {len(found.names) - 3} more" if len(found.names) > 3 else "")
        rows.append(("where", shown or found.subject))
    rows.append(("why", found.cause.reason))
    if fix and found.cause.fix:
        rows.append(("fix", found.cause.fix))
    if found.places > 1:
        rows.append(("also", f"in {found.places - 1} more places, {found.count} values in all"))
    elif found.count > 1 and value is not None:
        rows.append(("also", f"{found.count - 1} more values in the same region"))
    return head, rows


def _extent(value: ValueDifference) -> str:
    detail = value.detail
    if "differ" not in detail:
        return f"backward got {value.got}" if value.got else "its bits"
    text = f"{detail['differ']:,} of {detail['elements']:,} elements"
    if "relative" in detail:
        text += f", relative {detail['relative']:.1e}"
    if detail.get("ulps") is not None:
        text += f", up to {detail['ulps']:,} ulps"
    if "first" in detail:
        text += f"; first at {detail['first']}: {detail['forward']:.6g} -> {detail['backward']:.6g}"
    return text


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[place]) for row in (head, *rows)) for place in range(len(head))]
    return [
        "  "
        + "  ".join(
            cell.ljust(width) if not place else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (head, *rows)
    ]


_ERRORS = ("parameter", "relative error", "largest", "elements")


def _error_rows(errors: Sequence[ParameterError]) -> list[tuple[str, ...]]:
    return [
        (each.name, f"{each.relative:.2e}", f"{each.largest:.2e}", f"{each.differ:,} of {each.elements:,}")
        for each in errors
    ]


def _count(number: int, word: str, several: str | None = None) -> str:
    return f"{number:,} {word if number == 1 else several or word + 's'}"


def _finite(data: Any) -> Any:
    """The same without numbers that JSON does not have."""
    if isinstance(data, float) and not math.isfinite(data):
        return None
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    return [_finite(each) for each in data] if isinstance(data, (list, tuple)) else data


def verification_page(found: Verification) -> str:
    """Returns the document: the verdict, each cause with what to change, gradients, and all values that differ."""
    title = escape(f"{found.name}: {found.headline()}")
    parts = [f"<h1>{title}</h1>"]
    parts += [_finding_html(each, place) for place, each in enumerate(found.findings)]
    if found.errors:
        parts.append("<h2>Gradients, beside those of the same step without savers</h2>")
        parts.append(_html_table(_ERRORS, _error_rows(found.errors), right=range(1, 4)))
    if found.watched.differences:
        values = [
            (each.place, f"{each.dtype} {each.shape}", each.owner, "" if each.region is None else str(each.region))
            for each in found.watched.differences
        ]
        parts.append("<h2>Values that differ, in the order of forward</h2>")
        parts.append(_html_table(("value", "shape", "stored by", "region"), values))
    if found.watched.regions:
        regions = [
            (str(each.number), each.path or "the step", each.kind, ", ".join(each.draws))
            for each in found.watched.regions
        ]
        parts.append("<h2>Regions that were computed again</h2>")
        parts.append(_html_table(("region", "module", "kind", "draws from"), regions))
    parts += [f"<p>note: {escape(note)}</p>" for note in found.notes]
    return document(title, "\n".join(parts))


def _finding_html(found: VerifyFinding, place: int) -> str:
    heading, rows = finding_rows(found, place, fix=True)
    return f"<h2>{escape(heading.capitalize())}</h2>" + _html_table((), rows)


def _html_table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Iterable[int] = ()) -> str:
    """A table of texts, of which some columns are aligned to the right."""
    return html_table(head, [[escape(cell) for cell in row] for row in rows], right)
