"""A report as plain data: the saved tensors of a Session, what became of them, what it cost. Holds no tensor.

The methods that show a report import what they show it with, which a step that nobody looks at does not need.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from backstash.stash.accounts import Entry as Entry

if TYPE_CHECKING:
    from backstash.stash.helping import Suggestion


@dataclass(frozen=True)
class CodecTotal:
    """Totals over the values of one codec."""

    codec: str
    count: int
    saved_nbytes: int
    stash_nbytes: int
    encode_seconds: float
    decode_seconds: float
    encode_gb_per_second: float | None
    decode_gb_per_second: float | None


@dataclass(frozen=True, slots=True)
class PeakRow:
    """Some of what was alive when a step took most.

    Attributes:
        role: what it was for, as planning.model.trace.Buffer has it.
        name: the operation that it was allocated in or after.
        nbytes: bytes of all such buffers.
        count: how many they were.
    """

    role: str
    name: str
    nbytes: int
    count: int


@dataclass(frozen=True, slots=True)
class GradientError:
    """How far off the policy made the gradient of one backward pass (``Session(check=...)``).

    Attributes:
        step: of which step.
        error: the length of the difference from the exact gradient, over all leaves together, as a share of the exact
            gradient's length (L2); None where it was not measured.
        worst: the leaf whose gradient has the largest part of the difference; empty where there is none.
        cosine: between this leaf's gradient and its exact one.
        reason: why it was not measured, else empty.
    """

    step: int
    error: float | None = None
    worst: str = ""
    cosine: float | None = None
    reason: str = ""

    def __str__(self) -> str:
        if self.error is None:
            return f"step {self.step} not measured: {self.reason}"
        worst = f" (worst leaf {self.worst}: cosine {self.cosine:.4f})" if self.worst else ""
        return f"step {self.step}: {self.error:.3g}{worst}"


@dataclass(frozen=True)
class Measured:
    """Peaks and times that were measured beside a report; None where they were not.

    Attributes:
        peak_nbytes, plain_peak_nbytes: the counted peak of a step under the policy, and of plain PyTorch.
        seconds, plain_seconds: the time of a step, likewise.
    """

    peak_nbytes: int | None = None
    plain_peak_nbytes: int | None = None
    seconds: float | None = None
    plain_seconds: float | None = None


@dataclass(frozen=True)
class Report:
    """The accounts of one step: the last that saved anything.

    Attributes:
        policy: repr of the policy.
        steps: steps seen so far.
        rows: one Entry per stored value, in the order of saving.
        parameter_nbytes: parameters and buffers that were saved by reference; not counted elsewhere.
        peak_stash_nbytes: the most that the device held at any moment since the Session was made.
        peak: what was alive when the recorded step took most; empty where none was (planning.record).
        notes: what a reader should know before the numbers.
        proofs: recipes that were compared with their value in this step for the first time.
        repeated_proofs: recipes that were compared once more.
        gradient_error: how far off the policy made the gradient, for each backward pass of a checked step.
        measured: peaks and times that somebody has measured and put here; a Session measures neither.
        named: saved tensors that were looked at in this step: neither small nor parameters.
        recognised: those of them that were found to be what they were in an earlier step, so that their names, needs
            and treatment were not worked out again. In a step like an earlier one these are all.
        script: how passes like this one are replayed, as text; or why they are not. See :meth:`programs`.

    Printed, a report is a :meth:`summary`. All values are in :meth:`table`, :meth:`to_json` and :meth:`to_html`.
    """

    policy: str
    steps: int
    rows: tuple[Entry, ...]
    parameter_nbytes: int
    peak_stash_nbytes: int
    peak: tuple[PeakRow, ...] = ()
    notes: tuple[str, ...] = ()
    proofs: int = 0
    repeated_proofs: int = 0
    gradient_error: tuple[GradientError, ...] = ()
    measured: Measured | None = None
    named: int = 0
    recognised: int = 0
    script: str = ""

    def programs(self) -> str:
        """The program of each value, as a step that is known runs it: held, encoded or made again, and from what.

        Returns:
            A line for each value, after a line with the numbers of saves, calls and values. Where nothing is replayed,
            a line that says why.
        """
        return self.script or "nothing is replayed: steps go the long way"

    @property
    def saved_nbytes(self) -> int:
        """Dense bytes of the distinct storages saved, parameters excluded."""
        return sum(row.saved_nbytes for row in self.rows)

    @property
    def stash_nbytes(self) -> int:
        """Bytes held for them in all stores, those kept by reference included."""
        return sum(row.stash_nbytes for row in self.rows)

    @property
    def device_nbytes(self) -> int:
        """Of these, the bytes on the device."""
        return sum(row.device_nbytes for row in self.rows)

    @property
    def moved_nbytes(self) -> int:
        """Of these, the bytes in stores other than the device."""
        return self.stash_nbytes - self.device_nbytes

    @property
    def ratio(self) -> float:
        """``saved_nbytes / stash_nbytes``; 1.0 where nothing was saved, inf where it is held in no bytes at all."""
        if self.stash_nbytes:
            return self.saved_nbytes / self.stash_nbytes
        return math.inf if self.saved_nbytes else 1.0

    @property
    def encode_seconds(self) -> float:
        """Host time spent encoding."""
        return sum(row.encode_seconds for row in self.rows)

    @property
    def decode_seconds(self) -> float:
        """Host time spent decoding."""
        return sum(row.decode_seconds for row in self.rows)

    @property
    def stall_seconds(self) -> float:
        """Time that backward waited for stores."""
        return sum(row.stall_seconds for row in self.rows)

    @property
    def suggestions(self) -> tuple[Suggestion, ...]:
        """What would leave fewer bytes on the device, most first; the first two are at the top of the summary."""
        from backstash.stash.helping import suggestions

        return suggestions(self)

    def by_codec(self) -> tuple[CodecTotal, ...]:
        """Totals per codec, largest saving first. Speeds are dense bytes per second of host time."""
        groups: dict[str, list[Entry]] = defaultdict(list)
        for row in self.rows:
            groups[row.codec].append(row)
        totals = []
        for codec, rows in groups.items():
            saved, encode = sum(row.saved_nbytes for row in rows), sum(row.encode_seconds for row in rows)
            decode = sum(row.decode_seconds for row in rows)
            decoded = sum(row.saved_nbytes * row.decodes for row in rows)
            totals.append(
                CodecTotal(
                    codec,
                    len(rows),
                    saved,
                    sum(row.stash_nbytes for row in rows),
                    encode,
                    decode,
                    saved / encode / 1e9 if encode and codec != "kept" else None,
                    decoded / decode / 1e9 if decode and codec != "kept" else None,
                )
            )
        return tuple(sorted(totals, key=lambda total: total.stash_nbytes - total.saved_nbytes))

    def to_json(self) -> str:
        """Everything as one JSON object, of which :meth:`from_json` makes the report again."""
        totals = {
            name: getattr(self, name)
            for name in (
                "policy",
                "steps",
                "saved_nbytes",
                "stash_nbytes",
                "device_nbytes",
                "ratio",
                "parameter_nbytes",
                "peak_stash_nbytes",
                "encode_seconds",
                "decode_seconds",
                "moved_nbytes",
                "stall_seconds",
                "proofs",
                "repeated_proofs",
                "named",
                "recognised",
            )
        }
        totals["ratio"] = self.ratio if math.isfinite(self.ratio) else None
        totals["notes"] = list(self.notes)
        totals["suggestions"] = [asdict(one) for one in self.suggestions]
        totals["by_codec"] = [asdict(total) for total in self.by_codec()]
        totals["peak"] = [asdict(row) for row in self.peak]
        totals["gradient_error"] = [
            asdict(found) | {"error": found.error if found.error is not None and math.isfinite(found.error) else None}
            for found in self.gradient_error
        ]
        totals["measured"] = None if self.measured is None else asdict(self.measured)
        totals["rows"] = [asdict(row) for row in self.rows]
        return json.dumps(totals, indent=1)

    @classmethod
    def from_json(cls, found: Mapping[str, Any], measured: Measured | None = None) -> Report:
        """The report whose :meth:`to_json` was read into ``found``, with other measurements if they are given."""
        if measured is None and found["measured"] is not None:
            measured = Measured(**found["measured"])
        return cls(
            found["policy"],
            found["steps"],
            tuple(Entry(**row) for row in found["rows"]),
            found["parameter_nbytes"],
            found["peak_stash_nbytes"],
            tuple(PeakRow(**row) for row in found["peak"]),
            tuple(found["notes"]),
            found["proofs"],
            found["repeated_proofs"],
            tuple(GradientError(**error) for error in found["gradient_error"]),
            measured,
            found["named"],
            found["recognised"],
        )

    def headline(self) -> str:
        """What was gained, in one line."""
        from backstash.stash.summary import headline

        return headline(self)

    def summary(self, width: int | None = None) -> str:
        """What was gained, what would help now, how values are stored, and which of them still take the most.

        Args:
            width: characters of a line. By default the terminal's, between 60 and 120.
        """
        from backstash.stash.summary import summary

        return summary(self, width)

    def __str__(self) -> str:
        return self.summary()

    def to_html(self) -> str:
        """A page for a browser, in one file that fetches nothing: all values, to be sorted and searched."""
        from backstash.stash import html

        return html.page(self)

    def _repr_pretty_(self, printer: Any, is_cycle: bool) -> None:
        """How IPython shows the report in a terminal."""
        printer.text(str(self))

    def _repr_html_(self) -> str:
        """How a notebook shows the report."""
        from backstash.stash import html

        return html.fragment(self)

    def table(self) -> str:
        """All values in a table, below the totals by codec, in lines as long as they have to be."""
        from backstash.stash.summary import every_value

        return every_value(self)
