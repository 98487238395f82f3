"""A trace: the buffers of one training step and their lifetimes, as plain data without tensors.

Time is counted in ticks. Tick ``t`` is the state after the ``t``-th allocation or release of the step, so a trace is
exact: the most bytes alive in it are the counted peak. :meth:`Trace.by_op` counts in operations instead, for a planner
that knows the graph but not the inside of its kernels.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import Literal, get_args

from backstash.errors import PlanError
from backstash.planning.model.sealed import parsed, restore
from backstash.stash.ledger import PeakRow

Role = Literal["stashed", "encoded", "decoded", "recomputed", "immediate", "workspace", "gradient", "parameter"]
ROLES: tuple[Role, ...] = get_args(Role)
"""Every role, in the order in which charts stack them from the top."""

LONGEST = 1 << 24
"""The most ticks of a trace that is read."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """One piece of memory.

    Attributes:
        name: the operation in which, or after which, it was allocated.
        role: ``"stashed"``: dense, allocated in the forward pass and alive when backward begins; ``"encoded"``: a
            plane of a codec; ``"decoded"``: stashed values are decoded into it; ``"recomputed"``: values are remade
            into it; ``"immediate"``: allocated and released in the same pass, as feature maps and passing gradients
            are; ``"workspace"``: allocated and released in one operation; ``"gradient"``: allocated in the backward
            pass and alive after the step; ``"parameter"``: a parameter or buffer of the model.
        start: the time from which on it is alive.
        end: the time at which it is no longer alive.
    """

    name: str
    role: Role
    nbytes: int
    start: int
    end: int

    def __post_init__(self) -> None:
        if self.nbytes < 0 or not 0 <= self.start < self.end or self.role not in ROLES:
            raise ValueError(
                f"Buffer was asked for {self.role!r} {self.name!r} of {self.nbytes} bytes in [{self.start}, "
                f"{self.end}), but it needs a role of {', '.join(ROLES)}, nbytes >= 0 and 0 <= start < end."
            )

    def overlaps(self, other: Buffer) -> bool:
        """Whether both buffers are alive at the same time."""
        return self.start < other.end and other.start < self.end


@dataclass(frozen=True, slots=True)
class Op:
    """One operation: a torch function of the forward pass, or a node of the backward pass.

    If the node of a convolution or linear layer releases its input halfway, each half is an operation of its own.
    """

    name: str
    start: int


@dataclass(frozen=True, slots=True)
class Decode:
    """The decoding or remaking of a stashed value.

    Attributes:
        name: the node that asked for the value.
        nbytes: bytes of the value; 0 if its planes were read as they are.
        start: the time at which the value is complete.
        end: the time at which the last node that reads it has run.
        planes: numbers of the trace's buffers that it was decoded from; empty if it was remade.
    """

    name: str
    nbytes: int
    start: int
    end: int
    planes: tuple[int, ...]


@dataclass(frozen=True)
class Trace:
    """The buffers, operations and decodings of one training step.

    Attributes:
        policy: repr of the policy, or ``"plain"``.
        buffers: all buffers that are alive at some time of the step.
        backward: the time at which the backward pass begins.
        end: the time at which the step ends.

    Example:
        >>> y, dy = Buffer("y", "stashed", 100, 0, 4), Buffer("dy", "immediate", 60, 3, 5)
        >>> trace = Trace("plain", (y, dy), (), backward=2, end=5)
        >>> trace.live()
        [100, 100, 100, 160, 60]
        >>> trace.peak_nbytes
        160
    """

    policy: str
    buffers: tuple[Buffer, ...]
    ops: tuple[Op, ...]
    backward: int
    end: int
    decodes: tuple[Decode, ...] = ()

    def live(self, roles: Collection[Role] = ROLES) -> list[int]:
        """Returns how many bytes of these roles are alive at each time of the step."""
        changes = [0] * (self.end + 1)
        for buffer in self.buffers:
            if buffer.role in roles:
                changes[buffer.start] += buffer.nbytes
                changes[buffer.end] -= buffer.nbytes
        return list(accumulate(changes[: self.end]))

    @property
    def peak_nbytes(self) -> int:
        """The most bytes alive at once."""
        return max(self.live(), default=0)

    def at_peak(self, roles: Collection[Role] = ROLES) -> tuple[PeakRow, ...]:
        """What is alive when the buffers of these roles take the most bytes, by role and operation, largest first."""
        live = self.live(roles)
        when = live.index(max(live)) if live else 0
        groups: dict[tuple[Role, str], list[int]] = defaultdict(list)
        for buffer in self.buffers:
            if buffer.role in roles and buffer.start <= when < buffer.end:
                groups[buffer.role, buffer.name].append(buffer.nbytes)
        rows = (PeakRow(role, name, sum(sizes), len(sizes)) for (role, name), sizes in groups.items())
        return tuple(sorted(rows, key=lambda row: -row.nbytes))

    def by_op(self) -> Trace:
        """The same trace with operations as the unit of time.

        Time ``n`` is the whole ``n``-th operation, and time 0 is all that comes before the first. A buffer is alive
        from the operation that allocates it to the operation that releases it, both included.
        """
        starts = [op.start for op in self.ops]

        def during(tick: int) -> int:
            return bisect_right(starts, tick)

        end = len(self.ops) + 1
        return replace(
            self,
            buffers=tuple(replace(b, start=during(b.start), end=during(b.end) + 1) for b in self.buffers),
            ops=tuple(replace(op, start=number) for number, op in enumerate(self.ops, 1)),
            backward=during(self.backward),
            end=end,
            decodes=tuple(replace(d, start=during(d.start), end=during(d.end) + 1) for d in self.decodes),
        )

    def by_definition(self) -> Trace:
        """The same trace with the lifetimes that Gist defines.

        An encoded value lives until its last decoding; in fact autograd holds it until its node has run. A decoded
        value is a buffer of its own, from its decoding to the end of the last node that reads it; in fact the pool of
        decode buffers keeps the memory for the next value. A dense value lives from the operation that produces it to
        its encoding, by the definition and in fact.

        Source: Gist (Jain et al., ISCA 2018), section on the schedule builder.
        """
        last: dict[int, int] = {}
        for decode in self.decodes:
            for plane in decode.planes:
                last[plane] = max(last.get(plane, 0), decode.start + 1)  # alive while it is read
        kept = [number for number, buffer in enumerate(self.buffers) if buffer.role not in ("decoded", "recomputed")]
        shorter = [replace(self.buffers[n], end=min(self.buffers[n].end, last.get(n, self.end))) for n in kept]
        remade = [
            Buffer(d.name, "decoded" if d.planes else "recomputed", d.nbytes, d.start, d.end) for d in self.decodes
        ]
        now = {before: after for after, before in enumerate(kept)}
        decodes = (replace(d, planes=tuple(now[plane] for plane in d.planes)) for d in self.decodes)
        return replace(self, buffers=(*shorter, *remade), decodes=tuple(decodes))

    def to_json(self) -> str:
        """The trace as one JSON object."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Trace:
        """The trace that :meth:`to_json` has written.

        Raises:
            PlanError: the text is no such trace.
        """
        try:
            found = restore(cls, parsed("Trace", text)[0], "Trace")
        except PlanError:
            raise
        except ValueError as error:  # of a buffer
            raise PlanError(f"a Trace was asked for from a JSON text, but {error}") from None
        planes = {plane for decode in found.decodes for plane in decode.planes}
        ends = [buffer.end for buffer in found.buffers]
        is_short = max(ends, default=0) <= found.end <= LONGEST and found.backward >= 0
        is_forward = all(each.nbytes >= 0 and 0 <= each.start < each.end <= found.end for each in found.decodes)
        if not is_short or not is_forward or not planes <= set(range(len(ends))):
            raise PlanError(
                f"a Trace was asked for from a JSON text, but it ends at {found.end}, when a buffer is still alive "
                f"or after more than {LONGEST} ticks, or decodes at no time of it, or one of its {len(ends)} "
                f"buffers that is not there. Pass the text that Trace.to_json() has written, unchanged."
            )
        return found
