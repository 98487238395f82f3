"""What one training step holds and when: plain data, no tensors.

Time is counted in ticks. Tick ``t`` is the state after the ``t``-th allocation or release of the step, so that a trace
is exact: its most live bytes are the counted peak. :meth:`Trace.by_op` counts in operations instead, as a planner must
that knows the graph and not the inside of its kernels.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import Literal, get_args

from backstash.stash.ledger import PeakRow

Role = Literal["stashed", "encoded", "decoded", "recomputed", "immediate", "workspace", "gradient", "parameter"]
ROLES: tuple[Role, ...] = get_args(Role)
"""Every role, in the order in which charts stack them from the top."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """One piece of memory.

    Attributes:
        name: the operation that it was allocated in or after.
        role: ``"stashed"``: dense, allocated in the forward pass, still there when backward begins; ``"encoded"``: a
            plane that a codec made; ``"decoded"``: what stashed values are decoded into; ``"recomputed"``: or made
            again in; ``"immediate"``: allocated and released in the same pass: feature maps, gradients on their way;
            ``"workspace"``: within one operation; ``"gradient"``: allocated in the backward pass and
            still there after the step; ``"parameter"``: parameters and buffers of the model.
        nbytes: its size.
        start, end: it is alive from ``start`` on and no longer at ``end``.
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
        """Whether both are alive at some time."""
        return self.start < other.end and other.start < self.end


@dataclass(frozen=True, slots=True)
class Op:
    """One operation: a torch function of the forward pass, or a node of the backward pass.

    Where a convolution's or linear layer's node lets go of its input halfway, each half is one.

    Attributes:
        name: as torch's profiler has it.
        start: when it begins.
    """

    name: str
    start: int


@dataclass(frozen=True, slots=True)
class Decode:
    """A stashed value that was decoded or made again.

    Attributes:
        name: the node that asked for it.
        nbytes: bytes of the value.
        start: when it is done.
        end: when the last node that reads it has run.
        planes: which buffers of the trace it was decoded from; none where it was made again.
    """

    name: str
    nbytes: int
    start: int
    end: int
    planes: tuple[int, ...]


@dataclass(frozen=True)
class Trace:
    """What one training step holds.

    Attributes:
        policy: repr of the policy, or ``"plain"``.
        buffers: everything that is alive at some time of the step.
        ops: the operations, in their order.
        backward: when the backward pass begins.
        end: when the step ends.
        decodes: every decoding, in its order.

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
        """Bytes of the buffers of these roles that are alive at each time of the step."""
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
        """What is alive when the buffers of these roles take most, by role and operation, the largest first."""
        live = self.live(roles)
        when = live.index(max(live)) if live else 0
        groups: dict[tuple[Role, str], list[int]] = defaultdict(list)
        for buffer in self.buffers:
            if buffer.role in roles and buffer.start <= when < buffer.end:
                groups[buffer.role, buffer.name].append(buffer.nbytes)
        rows = (PeakRow(role, name, sum(sizes), len(sizes)) for (role, name), sizes in groups.items())
        return tuple(sorted(rows, key=lambda row: -row.nbytes))

    def by_op(self) -> Trace:
        """The same, in operations: time ``n`` is all of the ``n``-th operation, 0 what comes before the first.

        A buffer is alive from the operation that allocates it to the one that releases it, both included.
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
        """The same with the lifetimes that Gist defines, in place of those of the pool that values are decoded into.

        An encoded value lives until it was decoded last, where autograd in fact holds it until its node has run. A
        decoded value is a buffer of its own, from its decoding to the end of the last node that reads it, where in fact
        the pool keeps the memory for the next one. A dense value lives from the operation that produces it to its
        encoding either way.

        Source: Gist (Jain et al., ISCA 2018), section on the schedule builder.
        """
        last: dict[int, int] = {}
        for decode in self.decodes:
            for plane in decode.planes:
                last[plane] = max(last.get(plane, 0), decode.start + 1)  # there while it is read
        kept = [number for number, buffer in enumerate(self.buffers) if buffer.role not in ("decoded", "recomputed")]
        shorter = [replace(self.buffers[n], end=min(self.buffers[n].end, last.get(n, self.end))) for n in kept]
        made = [Buffer(d.name, "decoded" if d.planes else "recomputed", d.nbytes, d.start, d.end) for d in self.decodes]
        now = {before: after for after, before in enumerate(kept)}
        decodes = (replace(d, planes=tuple(now[plane] for plane in d.planes)) for d in self.decodes)
        return replace(self, buffers=(*shorter, *made), decodes=tuple(decodes))

    def to_json(self) -> str:
        """Everything as one JSON object."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Trace:
        """What :meth:`to_json` wrote."""
        found = json.loads(text)
        return cls(
            found["policy"],
            tuple(Buffer(**buffer) for buffer in found["buffers"]),
            tuple(Op(**op) for op in found["ops"]),
            found["backward"],
            found["end"],
            tuple(Decode(**{**decode, "planes": tuple(decode["planes"])}) for decode in found["decodes"]),
        )
