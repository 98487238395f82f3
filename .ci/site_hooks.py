"""What the site changes in the HTML of its pages: roles such as ``:class:`Plan``` become links, and options stay whole.

mkdocs runs it, because mkdocs.yml names it. Docstrings have the roles of Sphinx, which mkdocstrings shows as text. A
browser may end a line within ``--budget``, behind its dashes.
"""

from __future__ import annotations

import re
from typing import Any

_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):\s*<code>(~?)\.?([\w.]+)(\(\))?</code>")
_INLINE = re.compile(r"<code>[^<]*</code>")  # a block of code has tags inside
_OPTION = re.compile(r"(?<![\w-])--\w[\w-]*")
_HEADING = re.compile(r'<h[1-6] id="(backstash[\w.]*)"')


def on_page_content(html: str, **_: Any) -> str:
    """Returns a page's HTML with each role as the name that it stands for, and each option in one piece.

    A name is a link where the page describes exactly one thing of that name. Of a name after ``~`` the last part is
    shown, as Sphinx does it.
    """
    described = list(dict.fromkeys(_HEADING.findall(html)))

    def named(role: re.Match[str]) -> str:
        name = role[2]
        found = [each for each in described if each == name or each.endswith(f".{name}")]
        shown = f"<code>{name.rpartition('.')[2] if role[1] else name}{role[3] or ''}</code>"
        return f'<a href="#{found[0]}">{shown}</a>' if len(found) == 1 else shown

    def whole(code: re.Match[str]) -> str:
        return _OPTION.sub(r'<span class="option">\g<0></span>', code[0])

    return _INLINE.sub(whole, _ROLE.sub(named, html))
