"""The record of one watched run: data only, so that a run in another process can hand it over as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

MOST_DIFFERENCES = 200
"""How many differing values a run describes. The others are counted."""


@dataclass(slots=True)
class ValueDifference:
    """A value of which backward did not get the bits that forward had.

    Attributes:
        number: its place among the values of the run, in the order of forward.
        backward: number of the backward pass that read it.
        path: of the module that saved it.
        op: the autograd node that reads it, without its suffix.
        role: what the node calls it.
        shape, dtype: in forward.
        owner: whose hooks have stored it: ``"autograd"``, ``"checkpoint"``, or the name of the pack hook.
        region: number of the region that recomputed it, or None.
        producer: the autograd node that computed it, or None for an input or a parameter.
        forward_sum, backward_sum: checksums.
        got: shape, dtype and device of what backward got, where they differ from forward's.
        version: by how many writes its version has grown since forward.
        same_as: place (``"path/op:role"``) of another value whose bits backward got instead, or None.
        changed: facts that differ between forward and recomputation, each as kind, name, before, after.
        detail: of the values themselves, where both were kept (see :func:`backstash.verifying.detail.compared`).
        operation: the first operation of the region that differs, where operations were written down.
    """

    number: int
    backward: int
    path: str
    op: str
    role: str
    shape: list[int]
    dtype: str
    owner: str
    region: int | None = None
    producer: str | None = None
    forward_sum: int = 0
    backward_sum: int = 0
    got: str = ""
    version: int = 0
    same_as: str | None = None
    changed: list[list[str]] = field(default_factory=list)
    detail: dict[str, Any] = field(default_factory=dict)
    operation: dict[str, str] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """Where it is: ``"layers.1.act/Gelu:self"``."""
        return f"{self.path}/{self.op}:{self.role}" if self.path else f"{self.op}:{self.role}"


@dataclass(slots=True)
class RegionLog:
    """A region of the program that backward computes again.

    Attributes:
        number: its place in the order of forward.
        path: of the module that runs it; ``""`` outside modules.
        kind: ``"checkpoint(use_reentrant=False)"``, ``"checkpoint(use_reentrant=True)"`` or the name of a function.
        runs_again: how often it was computed again.
        keeps_generators: whether it restores torch's generators; None if that is not known.
        draws: names of the generators that it draws from in forward.
        selective: whether it keeps some of its results.
        compared: how many of its results were compared in forward and again.
    """

    number: int
    path: str
    kind: str
    runs_again: int = 0
    keeps_generators: bool | None = None
    draws: list[str] = field(default_factory=list)
    selective: bool = False
    compared: int = 0


@dataclass(slots=True)
class RunLog:
    """All that is known of one run.

    Attributes:
        values: how many values backward got and were compared.
        nbytes: bytes of these values.
        owners: how many of them each owner's hooks have stored.
        unchecked: why values were not compared, and how many.
        differences: the first values that differ, in the order of forward.
        differing: how many differ.
        gradients: for each backward pass, checksums of the gradients by name; None for a parameter without one.
        results: for each backward pass, checksums of what it begins from.
        calls: for each backward pass, what modules were given and returned before it (Note: [inputs that differ] in
            reference.py): 1 and the checksums of what one was given, or 0 and those of what it returned. Only of a
            reference run.
        returned: checksums of the tensors that the step returned.
        state: checksums of parameters and buffers at the end.
        generators: digests of the generators' states at the end.
        recomputing: custom autograd functions that go backward in their backward.
        replaced: of these, those that a reference run has called plainly; the value says why one was not.
        sessions: the policies of Sessions that were entered, and whether they promise the same bits.
        compiled: how many graphs were compiled.
        is_compiled: whether a reference run compiled them anew, and did not run them in eager mode.
        passes: how many backward passes there were.
        changed: by the number of such a region, the facts that differ, as in ValueDifference.
        operations: by the number of a region whose operations were written down, the first that differs.
        error: the type and message of the exception that ended the run, or None.
    """

    values: int = 0
    nbytes: int = 0
    owners: dict[str, int] = field(default_factory=dict)
    unchecked: dict[str, int] = field(default_factory=dict)
    differences: list[ValueDifference] = field(default_factory=list)
    differing: int = 0
    regions: list[RegionLog] = field(default_factory=list)
    gradients: list[dict[str, int | None]] = field(default_factory=list)
    results: list[list[int]] = field(default_factory=list)
    calls: list[list[list[int]]] = field(default_factory=list)
    returned: list[int] = field(default_factory=list)
    state: dict[str, int] = field(default_factory=dict)
    generators: dict[str, str] = field(default_factory=dict)
    recomputing: list[str] = field(default_factory=list)
    replaced: dict[str, str] = field(default_factory=dict)
    sessions: dict[str, bool] = field(default_factory=dict)
    compiled: int = 0
    is_compiled: bool = False
    passes: int = 0
    error: str | None = None
    changed: dict[str, list[list[str]]] = field(default_factory=dict)
    operations: dict[str, dict[str, str]] = field(default_factory=dict)

    def to_json(self) -> str:
        """The record as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RunLog:
        """The record that :meth:`to_json` has written."""
        data = json.loads(text)
        data["differences"] = [ValueDifference(**each) for each in data["differences"]]
        data["regions"] = [RegionLog(**each) for each in data["regions"]]
        return cls(**data)
