"""A partitioner's work on each graph: one row for each value that the forward graph saves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from backstash.stash.ledger import Entry, Report
from backstash.stash.regions import distinct_names

KEPT = "kept"


@dataclass(frozen=True)
class GraphAccount:
    """What became of the values that one graph saves.

    Attributes:
        name: the graph's number, in the order of compilation.
        rows: one Entry per value. Its key begins with the graph's name.
        input_nbytes: bytes of inputs that are saved by reference, parameters included.
        note: what the partitioner was asked for and did not find; empty otherwise.
    """

    name: str
    rows: tuple[Entry, ...]
    input_nbytes: int
    note: str = ""

    @property
    def treated(self) -> int:
        """How many values are held in another form."""
        return sum(row.codec != KEPT for row in self.rows)

    @property
    def outcome(self) -> str:
        """How many values are held in another form, and why the others are not."""
        text = f"{self.treated} of {len(self.rows)} values treated"
        reasons = Counter(row.reason for row in self.rows if row.codec == KEPT)
        if reasons:
            why = "; ".join(f"{count} kept because {reason}" for reason, count in reasons.most_common())
            text += f", {why}" if self.treated else f", because: {why}"
        return f"{text}. {self.note}" if self.note else text

    def __str__(self) -> str:
        return f"{self.name}: {self.outcome}"

    def called(self, name: str) -> GraphAccount:
        """The same account under another name."""
        rows = (replace(row, key=name + row.key.removeprefix(self.name)) for row in self.rows)
        return replace(self, name=name, rows=tuple(rows))


def report_of(
    policy: str,
    graphs: Sequence[GraphAccount],
    loaded: Sequence[GraphAccount],
    from_cache: int,
    more: Sequence[str] = (),
) -> Report:
    """One report of all graphs that a partitioner has treated.

    Args:
        policy: repr of the policy.
        loaded: those of graphs that torch has loaded from its cache on disk, which have run since.
        from_cache: how many graphs torch has loaded from there, which no partitioner has seen.
    """
    names = distinct_names(graph.name for graph in (*graphs, *loaded))
    loaded = [graph.called(name) for graph, name in zip(loaded, names[len(graphs) :], strict=True)]
    notes = [*(str(graph) for graph in graphs), *(f"{graph} (from torch's cache on disk)" for graph in loaded), *more]
    if from_cache > len(loaded):
        notes.append(
            f"{from_cache} graphs came from torch's cache on disk and were treated when they were compiled. "
            f"{len(loaded)} of them are listed here: those that have run and save what they compute"
        )
    if not graphs and not from_cache:
        notes.append(
            "no graph with a backward pass has been compiled yet: run the model's forward pass first. If it has run, "
            "torch.compile has left the model to Python, or no gradient was asked for: TORCH_LOGS=graph_breaks says why"
        )
    rows = tuple(row for graph in (*graphs, *loaded) for row in graph.rows)
    inputs = sum(graph.input_nbytes for graph in (*graphs, *loaded))
    total = sum(row.stash_nbytes for row in rows)
    return Report(policy, len(graphs) + len(loaded), rows, inputs, total, (), tuple(notes))
