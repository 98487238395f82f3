"""Facts as a text that is an argument of an operator of a graph.

Inductor writes it into C++ as it is where it is asked for a wrapper in C++, so it holds no quotes and no backslashes.
"""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any


def to_text(facts: Any) -> str:
    """What json can write, in letters, digits, ``-``, ``_`` and ``=``."""
    return base64.urlsafe_b64encode(zlib.compress(json.dumps(facts).encode())).decode()


def from_text(text: str) -> Any:
    """The facts, with lists for tuples."""
    return json.loads(zlib.decompress(base64.urlsafe_b64decode(text)))
