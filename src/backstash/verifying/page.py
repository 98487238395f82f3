"""A verification as a page of HTML, which fetches nothing."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from backstash.verifying.verdict import Verification, VerifyFinding, finding_rows

_STYLE = """
body{font:14px/1.45 system-ui,sans-serif;color:#1b1b1b;background:#fff;margin:24px}
h1{font-size:22px;margin:0 0 4px}h2{font-size:16px;margin:26px 0 6px}p{color:#555;margin:2px 0 10px}
table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums}
th{text-align:left;border-bottom:2px solid #999;padding:4px 14px 4px 0;white-space:nowrap}
td{border-bottom:1px solid #ddd;padding:3px 14px 3px 0;vertical-align:top}
.n{text-align:right}.name{font-family:ui-monospace,monospace;font-size:12px;overflow-wrap:anywhere}
@media(prefers-color-scheme:dark){body{color:#e6e6e6;background:#16181b}p{color:#aaa}td{border-color:#333}}
"""


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
        parts.append(_table(("parameter", "relative error", "largest", "elements"), rows))
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
    body = "\n".join(parts)
    head = f'<meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{body}</body></html>\n'


def _finding(found: VerifyFinding, place: int) -> str:
    heading, rows = finding_rows(found, place, fix=True)
    return f"<h2>{escape(heading.capitalize())}</h2>" + _table(("", ""), rows, right=False)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], right: bool = True) -> str:
    def cells(row: Sequence[str], tag: str) -> str:
        classes = ["name"] + ["n" if right else ""] * (len(row) - 1)
        return "".join(f'<{tag} class="{kind}">{escape(cell)}</{tag}>' for cell, kind in zip(row, classes, strict=True))

    top = f"<tr>{cells(head, 'th')}</tr>" if any(head) else ""
    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return f"<table>{top}{body}</table>"
