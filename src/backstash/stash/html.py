"""A report as HTML: a page of its own, and the short form that a notebook shows. Neither fetches anything."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from backstash.stash.helping import holdings, row_label, what_now
from backstash.stash.summary import LARGEST, headline
from backstash.stash.tables import amount, ms

if TYPE_CHECKING:
    from backstash.stash.ledger import Entry, Report

_CODE = re.compile(r"`([^`]*)`")

_STYLE = """
.backstash{font:14px/1.45 system-ui,sans-serif;color:#1b1b1b;background:#fff}
.backstash h1{font-size:22px;margin:0 0 4px}.backstash h2{font-size:16px;margin:26px 0 6px}
.backstash p{margin:2px 0 10px;color:#555}.backstash p.help{margin:0 0 4px;color:inherit}
.backstash .scroll{overflow-x:auto}
.backstash table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums}
.backstash th{text-align:left;border-bottom:2px solid #999;padding:4px 14px 4px 0;white-space:nowrap}
.backstash td{text-align:left;border-bottom:1px solid #ddd;padding:3px 14px 3px 0;vertical-align:top}
.backstash .n{text-align:right;white-space:nowrap}
.backstash td.name{font-family:ui-monospace,monospace;font-size:12px;overflow-wrap:anywhere;min-width:110px}
.backstash .bars{font-size:12px;color:#777;margin-top:12px}
.backstash .bar{display:flex;height:22px;max-width:900px;background:#eee;border-radius:3px;overflow:hidden;margin:4px 0}
.backstash .bar span{background:#0072b2}.backstash .bar.plain span{background:#8c8c8c}
@media(prefers-color-scheme:dark){.backstash.page{color:#e6e6e6;background:#16181b}
.backstash.page p{color:#aaa}.backstash.page td{border-color:#333}.backstash.page .bar{background:#2a2d31}}
"""

_PAGE_STYLE = """
body{margin:0}.backstash.page{padding:24px;min-height:100vh;box-sizing:border-box}
.backstash.page th[data-sort]{cursor:pointer}.backstash.page input{font:inherit;padding:5px 9px;width:min(420px,90%);
margin-bottom:8px;color:inherit;background:transparent;border:1px solid #999;border-radius:4px}
"""

_SCRIPT = """
const table=document.querySelector('#values'),body=table.tBodies[0],count=document.querySelector('#count');
document.querySelector('#search').addEventListener('input',event=>{
 const words=event.target.value.toLowerCase().split(/\\s+/);let shown=0;
 for(const row of body.rows){const text=row.textContent.toLowerCase();
  row.hidden=!words.every(word=>text.includes(word));shown+=!row.hidden}
 count.textContent=shown+' of '+body.rows.length+' values'});
table.querySelectorAll('th').forEach((head,index)=>head.addEventListener('click',()=>{
 const down=head.dataset.down!=='1';table.querySelectorAll('th').forEach(other=>delete other.dataset.down);
 if(down)head.dataset.down='1';
 const key=row=>{const cell=row.cells[index];return cell.dataset.v===undefined?cell.textContent:Number(cell.dataset.v)};
 [...body.rows].sort((a,b)=>{const x=key(a),y=key(b);return(x<y?-1:x>y?1:0)*(down?-1:1)})
  .forEach(row=>body.append(row))}));
"""


def fragment(report: Report) -> str:
    """The headline, the forms and the largest values, for a notebook."""
    return f'<style>{_STYLE}</style><div class="backstash">{_heading(report, 3)}{_overview(report)}</div>'


def page(report: Report) -> str:
    """The whole report: a document with a table of all values that can be sorted by a click and searched."""
    title = escape(f"backstash: {headline(report)}")
    header = ("saved tensor", "backward reads", "tensor", "dense", "stored", "as", "encode", "decode", "note")
    numeric = {"dense", "stored", "encode", "decode"}
    heads = "".join(f"<th data-sort{' class=n' if name in numeric else ''}>{name}</th>" for name in header)
    rows = "".join(f"<tr>{_value(row)}</tr>" for row in report.rows)
    return document(
        title,
        f"{_heading(report, 1)}{_overview(report)}\n"
        f"<h2>All values</h2><p>Click a column's name to sort by it.</p>\n"
        f'<input id="search" type="search" placeholder="search: relu features.3" aria-label="search">'
        f'<p id="count">{len(report.rows)} of {len(report.rows)} values</p>\n'
        f'<div class="scroll"><table id="values"><thead><tr>{heads}</tr></thead>\n'
        f"<tbody>{rows}</tbody></table></div>\n",
        f"<script>{_SCRIPT}</script>",
    )


def document(title: str, body: str, script: str = "") -> str:
    """A page of its own, in the style of all reports. Title and body are HTML already."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width,initial-scale=1">\n<title>{title}</title>\n'
        f"<style>{_STYLE}{_PAGE_STYLE}</style></head>\n"
        f'<body><main class="backstash page">{body}</main>{script}</body></html>\n'
    )


def _heading(report: Report, level: int) -> str:
    text = f"<h{level}>{escape(headline(report))}</h{level}>"
    for line in what_now(report):
        line = _CODE.sub(r"<code>\1</code>", escape(line))
        text += f"<p class=help>{line}</p>"
    if report.rows:
        text += f"<p>in step {report.steps} under {escape(report.policy)}</p>"
    return text + "".join(f"<p>note: {escape(note)}</p>" for note in report.notes)


def _overview(report: Report) -> str:
    """Bars of the bytes, the forms in which values are stored, and the largest values."""
    if not report.rows:
        return ""
    groups: dict[str, list[Entry]] = {}
    for row in report.rows:
        groups.setdefault(row_label(row), []).append(row)
    forms = [
        (
            escape(name),
            str(len(rows)),
            amount(sum(row.saved_nbytes for row in rows)),
            amount(sum(row.stash_nbytes for row in rows)),
            ms(sum(row.encode_seconds for row in rows)),
            ms(sum(row.decode_seconds for row in rows)),
        )
        for name, rows in sorted(groups.items(), key=lambda pair: -sum(row.stash_nbytes for row in pair[1]))
    ]
    held = [
        (escape(one.name), amount(one.nbytes), str(one.count), escape(one.why), escape(one.advice))
        for one in holdings(report)[:LARGEST]
    ]
    most = max(report.saved_nbytes, report.device_nbytes, 1)
    bars = "".join(
        f'<div class="bars">{name}: {amount(nbytes)}</div>'
        f'<div class="bar{kind}"><span style="width:{100 * nbytes / most:.1f}%"></span></div>'
        for kind, name, nbytes in (
            (" plain", "plain PyTorch", report.saved_nbytes),
            ("", "on the device", report.device_nbytes),
        )
    )
    return (
        f"{bars}<h2>How values are stored</h2>"
        + html_table(("stored as", "values", "dense", "stored", "encode", "decode"), forms, right=range(1, 6))
        + "<h2>What still takes the most</h2>"
        + html_table(("still held", "bytes", "n", "why", "what would help"), held, right=(1, 2))
    )


def html_table(header: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[int]) -> str:
    """A table of cells that are HTML already. ``right``: the columns that are aligned to the right."""
    numeric = set(right)
    kinds = [" class=n" if index in numeric else " class=name" if index == 0 else "" for index in range(len(header))]
    heads = "".join(f"<th{' class=n' if i in numeric else ''}>{name}</th>" for i, name in enumerate(header))
    lines = "".join(
        "<tr>" + "".join(f"<td{kind}>{cell}</td>" for kind, cell in zip(kinds, row, strict=True)) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table></div>'


def _value(row: Entry) -> str:
    """The cells of one value."""
    note = row.reason or (f"also {', '.join(row.shared_by)}" if row.shared_by else "")
    amounts = "".join(f'<td class=n data-v="{n}">{amount(n)}</td>' for n in (row.saved_nbytes, row.stash_nbytes))
    times = "".join(
        f'<td class=n data-v="{seconds:.9f}">{ms(seconds)}</td>' for seconds in (row.encode_seconds, row.decode_seconds)
    )
    return (
        f"<td class=name>{escape(row.key)}</td><td>{escape(row.need)}</td><td>{escape(row.spec)}</td>"
        f"{amounts}<td>{escape(row_label(row))}</td>{times}<td>{escape(note)}</td>"
    )
