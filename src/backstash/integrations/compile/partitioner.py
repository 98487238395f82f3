"""The partitioner: torch splits a joint graph, and then what is saved gets the form that a policy chooses."""

from __future__ import annotations

import hashlib
import logging
import uuid
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import fx

from backstash.integrations.compile.account import GraphAccount, report_of
from backstash.integrations.compile.choose import Choice, choose
from backstash.integrations.compile.effect import gradient_nodes
from backstash.integrations.compile.rewrite import rewrite
from backstash.integrations.compile.values import SavedValue, Split, spec_of
from backstash.policies.base import Policy
from backstash.stash.ledger import Entry, Report
from backstash.torch_internals import compile_counters, min_cut_partition
from backstash.version import __version__

log = logging.getLogger("backstash.compile")


class Treatment:
    """Splits joint graphs and treats what they save.

    Args:
        policy: decides.
        min_nbytes: smaller values are kept.
    """

    def __init__(self, policy: Policy, min_nbytes: int) -> None:
        self.policy = policy
        self.min_nbytes = min_nbytes
        self.graphs: list[GraphAccount] = []
        self._identity = self._fingerprint()
        self._hits = _cache_hits()

    def split(self, joint: fx.GraphModule, inputs: Any, **keywords: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        """A joint graph's forward and backward graph. Takes and returns what AOTAutograd's partitioners do."""
        forward, backward = min_cut_partition()(joint, inputs, **keywords)
        self.graphs.append(self.treat(Split(forward, backward, keywords["num_fwd_outputs"])))
        log.info("%s", self.graphs[-1])
        return forward, backward

    def treat(self, split: Split) -> GraphAccount:
        """Gives every saved value its form, and accounts for it."""
        name = f"graph {len(self.graphs)}"
        gradients = gradient_nodes(split.backward.graph)
        values, counts = split.values(), Counter[str]()
        rows = []
        for value in values:
            key = f"{value.fqn}/{value.op}"
            counts[key] += 1
            key = f"{name}/{key}#{counts[key] - 1}"
            choice = choose(value, key, self.policy, self.min_nbytes, gradients)
            rows.append(self._carry_out(split, value, key, choice))
        for module in (split.forward, split.backward):
            module.graph.lint()
            module.recompile()
        return GraphAccount(name, tuple(rows), _input_nbytes(split))

    def _carry_out(self, split: Split, value: SavedValue, key: str, choice: Choice) -> Entry:
        spec = value.spec()
        need = "VALUE" if choice.saved is None else choice.saved.need.name
        others = [member.node.name for member in value.members[1:]]
        held = spec.nbytes if choice.is_kept else rewrite(split, value, choice)
        return Entry(
            f"{key}:{value.base.name}", need, str(spec), spec.nbytes, held, choice.label, choice.reason, others
        )

    def report(self) -> Report:
        """What became of the values of every graph that was split."""
        return report_of(repr(self.policy), self.graphs, _cache_hits() - self._hits)

    @property
    def identity(self) -> bytes:
        """A fingerprint of all that the result depends on; it becomes part of the key of torch's caches."""
        return self._identity

    def _fingerprint(self) -> bytes:
        text = f"{__version__} {sources()} {self.policy!r} {self.min_nbytes}"
        if " at 0x" in text:  # an object's default repr says nothing about what it does
            text = str(uuid.uuid4())
        return hashlib.sha256(text.encode()).digest()


@cache
def sources() -> str:
    """A hash of the package's source, on which a graph's form depends."""
    package = Path(__file__).parents[2]
    digest = hashlib.sha256(torch.__version__.encode())
    for path in sorted(package.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _cache_hits() -> int:
    counters = compile_counters()
    return int(counters["aot_autograd"]["autograd_cache_hit"])


def _input_nbytes(split: Split) -> int:
    """Bytes of the forward graph's inputs that it saves."""
    inputs = {node for node in split.results[split.outputs :] if isinstance(node, fx.Node) and node.op == "placeholder"}
    return sum(spec_of(node.meta["val"]).nbytes for node in inputs if isinstance(node.meta.get("val"), torch.Tensor))
