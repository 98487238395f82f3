"""A verification as a page of HTML, which fetches nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from backstash.stash.html import document, html_table
from backstash.verifying.verdict import Verification, VerifyFinding, finding_rows


def verification_page(found: Verification) -> str:
    """Returns the document: the verdict, each cause with what to change, gradients, and all values that differ."""
    title = escape(f"{found.name}: {found.headline()}")
    parts = [f"<h1>{title}</h1>"]
    parts += [_finding(each, place) for place, each in enumerate(found.findings)]
    if found.errors:
        rows = [
            (each.name, f"{each.relative:.2e}", f"{each.largest:.2e}", f"{each.differ:,} of {each.elements:,}")
            for each in found.errors
        ]
        parts.append("<h2>Gradients, beside those of the same step without savers</h2>")
        parts.append(_table(("parameter", "relative error", "largest", "elements"), rows, right=range(1, 4)))
    if found.watched.differences:
        values = [
            (each.place, f"{each.dtype} {each.shape}", each.owner, "" if each.region is None else str(each.region))
            for each in found.watched.differences
        ]
        parts.append("<h2>Values that differ, in the order of forward</h2>")
        parts.append(_table(("value", "shape", "stored by", "region"), values))
    if found.watched.regions:
        regions = [
            (str(each.number), each.path or "the step", each.kind, ", ".join(each.draws))
            for each in found.watched.regions
        ]
        parts.append("<h2>Regions that were computed again</h2>")
        parts.append(_table(("region", "module", "kind", "draws from"), regions))
    parts += [f"<p>note: {escape(note)}</p>" for note in found.notes]
    return document(title, "\n".join(parts))


def _finding(found: VerifyFinding, place: int) -> str:
    heading, rows = finding_rows(found, place, fix=True)
    return f"<h2>{escape(heading.capitalize())}</h2>" + html_table((), _escaped(rows), right=())


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Iterable[int] = ()) -> str:
    """A table of texts, of which some columns are aligned to the right."""
    return html_table(head, _escaped(rows), right)


def _escaped(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    return [[escape(cell) for cell in row] for row in rows]
