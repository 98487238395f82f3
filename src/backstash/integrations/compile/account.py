"""What a partitioner did to each graph: one row for each value that the forward graph saves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from backstash.stash.ledger import Entry, Report

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

    def __str__(self) -> str:
        text = f"{self.name}: {self.treated} of {len(self.rows)} values treated"
        reasons = Counter(row.reason for row in self.rows if row.codec == KEPT)
        if reasons:
            why = "; ".join(f"{count} kept because {reason}" for reason, count in reasons.most_common())
            text += f", {why}" if self.treated else f", because: {why}"
        return f"{text}. {self.note}" if self.note else text


def report_of(policy: str, graphs: Sequence[GraphAccount], from_cache: int, more: Sequence[str] = ()) -> Report:
    """One report of all graphs that a partitioner has treated.

    Args:
        policy: repr of the policy.
        graphs: the accounts.
        from_cache: how many graphs torch has loaded from its cache on disk, which no partitioner has seen.
        more: further notes.
    """
    notes = [*(str(graph) for graph in graphs), *more]
    if from_cache:
        notes.append(
            f"{from_cache} graphs came from torch's cache on disk. They were treated when they were compiled, and are "
            f"not listed here: a Session around the model lists them, and so does a run with "
            f"TORCHINDUCTOR_FORCE_DISABLE_CACHES=1."
        )
    if not graphs and not from_cache:
        notes.append(
            "no graph with a backward pass has been compiled yet: run the model's forward pass first. If it has run, "
            "torch.compile has left the model to Python, or no gradient was asked for: TORCH_LOGS=graph_breaks says why"
        )
    rows = tuple(row for graph in graphs for row in graph.rows)
    total = sum(row.stash_nbytes for row in rows)
    return Report(policy, len(graphs), rows, sum(graph.input_nbytes for graph in graphs), total, (), tuple(notes))
