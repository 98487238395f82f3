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

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
"""What the browser is told to allow: no request at all."""

_STYLE = """
.backstash{font:14px/1.45 system-ui,sans-serif;color:#1b1b1b;background:#fff}
.backstash h1{font-size:22px;margin:0 0 4px}.backstash h2{font-size:16px;margin:26px 0 6px}
.backstash p{margin:2px 0 10px;color:#555}.backstash p.help{margin:0 0 4px;color:inherit}
.backstash .scroll{overflow-x:auto}
.backstash table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums}
.backstash thead th{text-align:left;border-bottom:2px solid #999;padding:4px 14px 4px 0;white-space:nowrap}
.backstash tbody :is(th,td){text-align:left;border-bottom:1px solid #ddd;padding:3px 14px 3px 0;vertical-align:top}
.backstash .n{text-align:right;white-space:nowrap}
.backstash .name{font:12px ui-monospace,monospace;overflow-wrap:anywhere;min-width:110px}
.backstash .bars{font-size:12px;color:#777;margin-top:12px}
.backstash .bar{display:flex;height:22px;max-width:900px;background:#eee;border-radius:3px;overflow:hidden;margin:4px 0}
.backstash .bar span{background:#0072b2}.backstash .bar.plain span{background:#8c8c8c}
"""

PAGE_STYLE = """
:root{color-scheme:light dark;--text:#1b1b1b;--soft:#5c6066;--ground:#fff;--card:#f5f6f8;--line:#d9dce1;--plain:#6b6b6b;
--budget:#c0392b;--rest:#b8bec6;--keep:#7d8894;--encode:#009e73;--recompute:#e69f00;--offload:#0072b2;--passing:#cc79a7}
@media(prefers-color-scheme:dark){:root{--text:#e8e8e8;--soft:#a3a8b0;--ground:#15171a;--card:#1f2226;--line:#363a41;
--plain:#c9c9c9;--budget:#ff7b6b;--rest:#4a505a;--keep:#76818e;--offload:#4aa3df}}
*{box-sizing:border-box}body{margin:0;font:15px/1.5 system-ui,sans-serif;color:var(--text);background:var(--ground)}
main{max-width:1240px;margin:0 auto;padding:24px 24px 60px}h1{font-size:24px;line-height:1.25;margin:0 0 6px}
h1,code,.name,.long{overflow-wrap:anywhere}h2{font-size:18px;margin:38px 0 4px}p{margin:0 0 10px}
.soft,.small{color:var(--soft)}.small{font-size:13px}code{font:.92em ui-monospace,monospace}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin:18px 0 0;padding:0}
.tiles div{background:var(--card);border-radius:8px;padding:10px 14px}.tiles dt{color:var(--soft);font-size:13px}
.tiles dd{margin:0;font-size:22px;font-weight:600;line-height:1.3}.tiles dd small{display:block;font-size:13px;
font-weight:400;color:var(--soft)}
:is(input,summary,button,[tabindex]):focus-visible{outline:2px solid var(--offload);outline-offset:2px}
.help{margin:0 0 4px}.scroll{overflow-x:auto}.bars{font-size:13px;color:var(--soft);margin-top:12px}
.bar{display:flex;height:22px;max-width:900px;background:var(--card);border-radius:4px;overflow:hidden;margin:4px 0}
.bar span{background:var(--offload)}.bar.plain span{background:var(--plain)}
.tools{display:none;gap:12px;align-items:center;flex-wrap:wrap;margin:8px 0}.js .tools{display:flex}
.tools input{font:inherit;padding:6px 10px;width:min(380px,100%);color:inherit;background:var(--card);
border:1px solid var(--line);border-radius:6px}
table{border-collapse:collapse;width:100%;font-size:13px;font-variant-numeric:tabular-nums}
th{text-align:left}thead th{border-bottom:2px solid var(--line);padding:0 14px 0 0;white-space:nowrap;font-weight:600}
th button{all:unset;cursor:pointer;padding:5px 0}th button:focus-visible{outline:2px solid var(--offload)}
th[aria-sort=ascending] button::after{content:" \\2191"}th[aria-sort=descending] button::after{content:" \\2193"}
tbody :is(th,td){border-bottom:1px solid var(--line);padding:5px 14px 5px 0;vertical-align:top}.n{text-align:right}
.name{font:12.5px/1.5 ui-monospace,monospace;min-width:100px}.cards .name{min-width:290px}td.n{white-space:nowrap}
.chip{display:inline-block;white-space:nowrap;margin-right:10px}.chip i{display:inline-block;width:9px;height:9px;
border-radius:2px;margin-right:5px}summary{cursor:pointer}.name ul{margin:4px 0;padding-left:18px}
.name summary::marker{color:var(--soft)}.wide>summary{font-size:18px;font-weight:600;margin:38px 0 6px}
[hidden]{display:none!important}
@media(max-width:700px){main{padding:16px 14px 40px}
h1{font-size:20px}.tiles{grid-template-columns:1fr 1fr}.tiles dd{font-size:19px}
.cards,.cards tbody,.cards tbody :is(th,td){display:block}.cards thead{position:absolute;width:1px;
overflow:hidden;clip-path:inset(50%)}
.js .sortable thead{display:block;position:static;width:auto;clip-path:none}
.js .sortable thead tr{display:flex;flex-wrap:wrap;gap:6px;margin-bottom:8px}
.sortable thead th{border:1px solid var(--line);border-radius:14px;padding:0 10px}.cards tbody tr{display:flex;
flex-wrap:wrap;gap:0 18px;padding:8px 0;border-bottom:1px solid var(--line)}
.cards tbody :is(th,td){border:0;padding:1px 0;text-align:left!important;overflow-wrap:anywhere}
.cards td[data-l]::before{content:attr(data-l) " ";color:var(--soft)}
.cards .name{flex:0 0 100%;min-width:0;font-size:14px;font-weight:600}
.cards .name ul{font-weight:400;font-size:13px}
.cards td:empty{display:none}}
"""
"""The style of every page: reports, verdicts and plans; light and dark, on a telephone and on a wide screen."""

TABLE_SCRIPT = """
document.documentElement.classList.add('js');
for(const box of document.querySelectorAll('.tools')){
 const input=box.querySelector('input'),count=box.querySelector('output');
 const table=document.getElementById(input.dataset.table),body=table.tBodies[0];
 const search=()=>{
  const words=input.value.toLowerCase().split(/\\s+/);let shown=0;
  for(const row of body.rows){
   const text=row.textContent.toLowerCase();
   row.hidden=!words.every(word=>text.includes(word));shown+=!row.hidden}
  count.textContent=shown+' of '+body.rows.length};
 input.addEventListener('input',search);search();
 const heads=[...table.tHead.rows[0].cells],order=[...body.rows];
 heads.forEach((head,index)=>{
  const button=document.createElement('button');button.textContent=head.textContent;head.replaceChildren(button);
  button.addEventListener('click',()=>{
   const before=head.getAttribute('aria-sort'),first=head.classList.contains('n')?'descending':'ascending';
   const next=before===null?first:before===first?(first==='ascending'?'descending':'ascending'):null;
   heads.forEach(other=>other.removeAttribute('aria-sort'));
   if(next)head.setAttribute('aria-sort',next);
   const key=row=>{const cell=row.cells[index],v=cell.dataset.v;return v===undefined?cell.textContent:Number(v)};
   const sign=next==='descending'?-1:1;
   const rows=next?[...order].sort((a,b)=>{const x=key(a),y=key(b);return sign*(x<y?-1:x>y?1:0)}):order;
   body.append(...rows)})})}
"""
"""Sorts and searches the tables of a page, by pointer and by keyboard, and says the outcome to screen readers."""


def fragment(report: Report) -> str:
    """The headline, the forms and the largest values, for a notebook."""
    return f'<style>{_STYLE}</style><div class="backstash">{_heading(report, 3)}{_overview(report)}</div>'


def page(report: Report) -> str:
    """The whole report: a document with a table of all values that can be sorted by a click and searched."""
    title = escape(f"backstash: {headline(report)}")
    header = ("saved tensor", "backward reads", "tensor", "dense", "stored", "as", "encode", "decode", "note")
    numeric = {"dense", "stored", "encode", "decode"}
    heads = "".join(f'<th scope="col"{" class=n" if name in numeric else ""}>{name}</th>' for name in header)
    rows = "".join(f"<tr>{_value(row)}</tr>" for row in report.rows)
    return document(
        title,
        f"{_heading(report, 1)}\n{_tiles(report)}{_overview(report)}\n"
        f"<h2>All values</h2>{tools('values', 'search: relu features.3')}\n"
        f'<table class="cards sortable" id="values"><thead><tr>{heads}</tr></thead>\n<tbody>{rows}</tbody></table>\n',
        f"<script>{TABLE_SCRIPT}</script>",
    )


def tools(table: str, example: str) -> str:
    """A field that searches the table of that id, and how many of its rows are shown."""
    return (
        f'<div class="tools"><input type="search" data-table="{table}" placeholder="{example}" '
        f'aria-label="search the table" aria-controls="{table}"><output class="small"></output></div>'
    )


def document(title: str, body: str, script: str = "", style: str = PAGE_STYLE) -> str:
    """A page of its own, in the style of all pages, which the browser lets ask for nothing.

    Args:
        title, body: HTML already.
        script: the elements behind the body.
        style: PAGE_STYLE, and what a page adds to it.
    """
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f'<meta name="viewport" content="width=device-width,initial-scale=1">\n<title>{title}</title>\n'
        f"<style>{style}</style></head>\n<body><main>\n{body}</main>{script}</body></html>\n"
    )


def _heading(report: Report, level: int) -> str:
    text = f"<h{level}>{escape(headline(report))}</h{level}>"
    for line in what_now(report):
        line = _CODE.sub(r"<code>\1</code>", escape(line))
        text += f"<p class=help>{line}</p>"
    if report.rows:
        text += f"<p>in step {report.steps} under {escape(report.policy)}</p>"
    return text + "".join(f"<p>note: {escape(note)}</p>" for note in report.notes)


def _tiles(report: Report) -> str:
    """What is held and what that takes, in figures."""
    saved, device = report.saved_nbytes, report.device_nbytes
    encode, decode = (sum(getattr(row, f"{way}_seconds") for row in report.rows) for way in ("encode", "decode"))
    small = "held as they are" if device >= saved else f"{1 - device / saved:.0%} less"
    facts = [
        ("saved, plain", exactly(saved), "what backward reads"),
        ("on the device", exactly(device), small),
        *([("moved", exactly(report.moved_nbytes), "to other memory")] if report.moved_nbytes else []),
        ("encoding and decoding", f'<data value="{encode + decode!r}">{ms(encode + decode)}</data>', "of this step"),
        ("values", f'<data value="{len(report.rows)}">{len(report.rows)}</data>', ""),
    ]
    return tiles(facts) if report.rows else ""


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
    """A table of cells that are HTML already. The first cell of each row names it.

    Args:
        header: names of the columns; none if the rows are facts, each with its name.
        rows: the cells.
        right: the columns that are aligned to the right.
    """
    numeric = set(right)
    heads = "".join(f'<th scope="col"{" class=n" if i in numeric else ""}>{name}</th>' for i, name in enumerate(header))
    head = f"<thead><tr>{heads}</tr></thead>" if header else ""
    texts = "" if header else " class=long"
    lines = "".join(
        f"<tr>{named(row[0])}"
        + "".join(f"<td{' class=n' if i in numeric else texts}>{cell}</td>" for i, cell in enumerate(row[1:], 1))
        + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table>{head}<tbody>{lines}</tbody></table></div>'


def named(name: str) -> str:
    """The first cell of a row, which names it, and which screen readers say before the others. HTML already."""
    return f'<th scope="row" class="name">{name}</th>'


def tiles(facts: Iterable[tuple[str, str, str]]) -> str:
    """The figures at the top of a page: for each its name, the figure and a note on it. HTML already."""
    found = "".join(f"<div><dt>{name}</dt><dd>{figure}<small>{note}</small></dd></div>" for name, figure, note in facts)
    return f'<dl class="tiles">{found}</dl>'


def exactly(nbytes: int) -> str:
    """Bytes, as text for people and exactly for programs."""
    return f'<data value="{nbytes}">{amount(nbytes)}</data>'


def _value(row: Entry) -> str:
    """The cells of one value."""
    note = row.reason or (f"also {', '.join(row.shared_by)}" if row.shared_by else "")
    amounts = "".join(
        f'<td class=n data-l="{label}" data-v="{n}">{amount(n)}</td>'
        for label, n in (("dense", row.saved_nbytes), ("stored", row.stash_nbytes))
    )
    times = "".join(
        f'<td class=n data-l="{label}" data-v="{seconds:.9f}">{ms(seconds)}</td>'
        for label, seconds in (("encode", row.encode_seconds), ("decode", row.decode_seconds))
    )
    return (
        f'{named(escape(row.key))}<td data-l="backward reads">{escape(row.need)}</td>'
        f'<td data-l="tensor">{escape(row.spec)}</td>{amounts}<td data-l="as">{escape(row_label(row))}</td>{times}'
        f'<td class="long" data-l="note">{escape(note)}</td>'
    )
