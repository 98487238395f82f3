"""The record of a model's forward passes under one policy, which may be the same again and again."""

from __future__ import annotations

from typing import Any

EQUAL, MOST_EQUAL = 4, 256
"""After how many equal passes one is written down, at first and at most."""


class Passes:
    """What is known of the passes of one model under one policy.

    Attributes:
        script, read: the script, and the same as the interpreter has read it; None where none was written.
        counted: how many tensors the latest pass has saved, and their bytes.
        equal: how many equal passes there were.
        needed: how many there have to be.
        refusal: why the latest one could not be written down.
        since: how many passes have run the script since one went the long way.
        runs, misses: how many passes have begun with a script, and how many of these were given back.
        step: the accounts of the pass that was written down.
        revision: of the policy then.
    """

    __slots__ = (
        "counted",
        "equal",
        "misses",
        "needed",
        "read",
        "refusal",
        "revision",
        "runs",
        "script",
        "since",
        "step",
    )

    def __init__(self) -> None:
        self.script: Any = None
        self.read: Any = None
        self.counted = (0, 0)
        self.equal, self.needed, self.since, self.misses, self.runs = 0, EQUAL, 0, 0, 0
        self.refusal = ""
        self.step: Any = None
        self.revision: object | None = None

    def forget(self) -> None:
        """The passes differ: it takes twice as many equal ones until the next is written down."""
        self.script = self.read = None
        self.equal, self.since = 0, 0
        self.needed = min(2 * self.needed, MOST_EQUAL)
