"""The partitioner: torch splits a joint graph, and then what is saved gets the form that a policy chooses."""

from __future__ import annotations

import hashlib
import logging
import pickle
import uuid
from collections import Counter
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from torch import fx

from backstash.compile.budget.lifetimes import Estimate
from backstash.compile.budget.splitting import Chosen, GraphPlan, Partition, cheapest, choice_nbytes, is_exact_choice
from backstash.compile.forms.account import GraphAccount, report_of
from backstash.compile.forms.announce import accounts_since, emit_account, rows_of, runs
from backstash.compile.forms.bounded import Bounding
from backstash.compile.forms.bounds import loop_of, moves_bounds
from backstash.compile.forms.choose import FormChoice, choose_forms
from backstash.compile.forms.offload import HOST, Offloaded
from backstash.compile.forms.rewrite import number_results, planes_nbytes, rewrite
from backstash.compile.forms.saved_inputs import save_as_matrices
from backstash.compile.forms.substitutes import substitutes
from backstash.compile.graph.convolutions import copy_saved_inputs, keep_formats
from backstash.compile.graph.effect import gradient_nodes
from backstash.compile.graph.image_calls import call_twice
from backstash.compile.graph.image_gradients import split_convolutions
from backstash.compile.graph.repeated import repeat_for_readers
from backstash.compile.graph.sums import add_products_in_place, store_sums, take_apart
from backstash.compile.graph.values import SavedValue, Split, spec_of
from backstash.policies.base import Policy
from backstash.stash.ledger import Entry, Report
from backstash.torch_internals import SavedValues, asks_what_to_save, compile_counters, min_cut_partition
from backstash.version import __version__

log = logging.getLogger("backstash.compile")

SHORT_FLOATS = (
    "It has numbers of 16 bits, which Inductor rounds where its loops store them. What is treated or computed again "
    "may change its loops, so a gradient may differ by such a rounding"
)
FUSED_SUMS = (
    "Its backward pass adds up what Inductor computes in the same loop. What is treated or computed again may change "
    "its loops, and with them the order of additions, so a gradient may differ in its last bits"
)


class Treatment:
    """Splits joint graphs and treats what they save.

    Args:
        policy: decides.
        min_nbytes: smaller values are kept.
        budget: bytes at the peak of each graph, its inputs excluded, or a share of compiled plain's such as ``"60%"``;
            None for no budget.
        fuses: whether the compiler of the graphs fuses elementwise operators.
        bounded_bits: bits of a code of a value that is held within a bound.
    """

    def __init__(
        self,
        policy: Policy,
        min_nbytes: int,
        budget: int | str | None = None,
        fuses: bool = True,
        bounded_bits: int = 8,
    ) -> None:
        self.policy = policy
        self.min_nbytes = min_nbytes
        self.budget = budget
        self.fuses = fuses
        self.bounded_bits = bounded_bits
        self.graphs: list[GraphAccount] = []
        self._identity = self._fingerprint()
        self.loop = loop_of(policy, self._identity.hex()[:16])
        self._hits, self._runs = _cache_hits(), runs()
        self._announced: set[str] = set()  # the names under which its graphs announce their accounts

    def split(self, joint: fx.GraphModule, inputs: Any, **keywords: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        """A joint graph's forward and backward graph. Takes and returns what AOTAutograd's partitioners do."""

        def partition(
            settings: dict[str, Any], choose: SavedValues | None = None
        ) -> tuple[fx.GraphModule, fx.GraphModule, int]:
            return *min_cut_partition(choose, **settings)(joint, inputs, **keywords), keywords["num_fwd_outputs"]

        name, note = f"graph {len(self.graphs)}", ""
        if self.budget is None:
            # The partitioner leaves marks of its own, so it is asked before whether a checkpoint has left some.
            has_checkpoint = any("recompute" in node.meta for node in joint.graph.nodes)
            split = Split(*partition({}))
            plan = self.plan(split)
            if not has_checkpoint:
                split, plan = self._with_substitutes(partition, split, plan)
            chosen = Chosen(split, plan, Estimate.nothing())
        else:
            lasting = keywords.get("static_lifetime_input_indices") or ()
            chosen, note = cheapest(partition, self.plan, self.budget, self.fuses, lasting)
        self.graphs.append(self.carry_out(name, chosen, note))
        log.info("%s", self.graphs[-1])
        return chosen.split.forward, chosen.split.backward

    def _with_substitutes(self, partition: Partition, split: Split, plan: GraphPlan) -> tuple[Split, GraphPlan]:
        """Saves other values where the policy cannot round what torch saves, if that takes fewer bytes."""
        if not asks_what_to_save() or all(is_exact_choice(choice) for _, choice in plan):
            return split, plan
        kept = [value for value, choice in plan if choice.is_kept and choice.saved is not None]
        names = substitutes(split, kept, gradient_nodes(split.backward.graph))
        if not names:
            return split, plan

        def swap(graph: fx.Graph, saved: list[fx.Node]) -> list[fx.Node]:
            nodes = {node.name: node for node in graph.nodes}
            return list(dict.fromkeys(nodes.get(names.get(node.name, ""), node) for node in saved))

        other = Split(*partition({}, swap))
        others = self.plan(other)
        before, after = (sum(choice_nbytes(*item) for item in each) for each in (plan, others))
        return (other, others) if after < before else (split, plan)

    def plan(self, split: Split) -> list[tuple[SavedValue, FormChoice]]:
        """The form of each value that is saved."""
        gradients = gradient_nodes(split.backward.graph)
        bounding = Bounding(self.policy, self.loop.name, _name(split), self.bounded_bits, split)
        plan, taken = [], set[fx.Node]()
        for value, key in zip(split.values(), self._keys(split), strict=True):
            choice = choose_forms(value, key, self.policy, self.min_nbytes, gradients, bounding)
            # The outcome of a comparison that two values lead to is stored once.
            choice = replace(choice, tests=tuple(node for node in choice.tests if node not in taken))
            taken |= set(choice.tests)
            plan.append((value, choice))
        return plan

    def carry_out(self, name: str, chosen: Chosen, note: str = "") -> GraphAccount:
        """Gives every saved value its form, and accounts for it."""
        split, plan = chosen.split, chosen.plan
        matrices = [] if chosen.saves_copies else save_as_matrices(split)
        keys = self._keys(split)
        planes: dict[int, list[fx.Node]] = {}
        for number, (value, choice) in enumerate(plan):
            if not choice.is_kept:
                planes[number] = rewrite(split, value, choice, self.fuses, self.fuses and self.budget is not None)
        number_results(split)
        rows = [
            self._row(f"{name}/{key}", *item, planes.get(number))
            for number, (key, item) in enumerate(zip(keys, plan, strict=True))
        ]
        if self._may_change_loops(plan):
            reasons = (SHORT_FLOATS if split.has_short_floats else "", FUSED_SUMS if split.adds_up_in_loops else "")
            note = ". ".join(filter(None, (note, *reasons)))
        account = GraphAccount(name, tuple(rows), _input_nbytes(split), note)
        of_row = rows_of([value for value, _ in plan], planes)
        if announced := emit_account(split, account, of_row, self.identity):
            self._announced.add(announced)
        # Last, because what was put into the graph before may read a product as well.
        if chosen.is_apart:
            take_apart(split.backward.graph)
        if self.fuses:
            add_products_in_place(split.backward.graph)
        if chosen.stores_sums:
            store_sums(split.backward.graph)
        copy_saved_inputs(split.backward.graph, matrices, 1)
        if self.fuses and chosen.stores_sums:
            split_convolutions(split.backward.graph)
        copy_saved_inputs(split.backward.graph, matrices, 2)
        if chosen.keeps_formats:
            keep_formats(split)
        if chosen.repeats_light:
            repeat_for_readers(split.backward.graph)
        if self.fuses and self.budget is not None:
            call_twice(split.backward.graph)
        for module in (split.forward, split.backward):
            module.graph.lint()
            module.recompile()
        return account

    def _may_change_loops(self, plan: GraphPlan) -> bool:
        """Whether exact forms may change loops, and so bits. Where values are rounded gradients differ anyway."""
        treats = any(not choice.is_kept for _, choice in plan)
        return self.fuses and (treats or self.budget is not None) and all(is_exact_choice(choice) for _, choice in plan)

    def _keys(self, split: Split) -> list[str]:
        counts, keys = Counter[str](), []
        for value in split.values():
            key = f"{value.fqn}/{value.op}"
            keys.append(f"{key}#{counts[key]}")
            counts[key] += 1
        return keys

    def _row(self, key: str, value: SavedValue, choice: FormChoice, planes: list[fx.Node] | None) -> Entry:
        spec = value.spec()
        need = "VALUE" if choice.saved is None else choice.saved.need.name
        others = [member.node.name for member in value.members[1:]]
        held = spec.nbytes if planes is None else planes_nbytes(planes)
        name = f"{key}:{value.base.name}"
        store = HOST if isinstance(choice.codec, Offloaded) else "device"
        return Entry(name, need, str(spec), spec.nbytes, held, choice.label, choice.reason, others, store=store)

    def report(self) -> Report:
        """What became of the values of every graph that was split, or loaded from torch's cache and run.

        A graph from the cache does not tell which of two treatments that do the same has asked for it. So each of them
        lists it.
        """
        hits = _cache_hits() - self._hits
        ran = accounts_since(self._runs, self.identity) if hits else {}
        loaded = [account for name, account in ran.items() if name not in self._announced]
        return report_of(repr(self.policy), self.graphs, loaded, hits, self.loop.notes())

    @property
    def identity(self) -> bytes:
        """A fingerprint of all that the result depends on; it becomes part of the key of torch's caches."""
        return self._identity

    def __reduce__(self) -> Any:  # without what it has done
        return Treatment, (self.policy, self.min_nbytes, self.budget, self.fuses, self.bounded_bits)

    @cached_property
    def pickled(self) -> bytes | None:
        """The treatment, which becomes a part of the keys of torch's caches; None if it has no lasting form."""
        if moves_bounds(self.policy):  # it holds what it has learned, and the optimizer
            return None
        try:
            return pickle.dumps(self)
        except Exception:  # a policy may be of any class, and such errors are of many
            return None

    def _fingerprint(self) -> bytes:
        settings = self.min_nbytes, self.budget, self.fuses, self.bounded_bits
        text = f"{__version__} {sources()} {self.policy!r} {settings}"
        if " at 0x" in text:  # an object's default repr says nothing about what it does
            text = str(uuid.uuid4())
        if moves_bounds(self.policy):
            # Graphs ask the policy while they run. Two that look alike must not be asked for each other; the first one
            # of a process has the graphs of the first one of the process before.
            _alike[text] += 1
            text += f" number {_alike[text]}"
        return hashlib.sha256(text.encode()).digest()


_alike: Counter[str] = Counter()
"""How many policies that move bounds this process has had, by their fingerprint."""


def _name(split: Split) -> str:
    """A name for a graph that is the same in every process."""
    nodes = " ".join(f"{node.name} {node.target}" for node in split.forward.graph.nodes)
    return hashlib.sha256(nodes.encode()).hexdigest()[:12]


@cache
def sources() -> str:
    """A hash of the package's source, on which a graph's form depends; of this process alone if it cannot be read."""
    package = Path(__file__).parents[2]
    digest = hashlib.sha256(torch.__version__.encode())
    try:
        for path in sorted(package.rglob("*.py")):
            digest.update(path.read_bytes())
    except OSError:  # the package is being replaced: nothing of a cache fits
        digest.update(uuid.uuid4().bytes)
    return digest.hexdigest()


def _cache_hits() -> int:
    counters = compile_counters()
    return int(counters["aot_autograd"]["autograd_cache_hit"])


def _input_nbytes(split: Split) -> int:
    """Bytes of the forward graph's inputs that it saves."""
    inputs = {node for node in split.results[split.outputs :] if isinstance(node, fx.Node) and node.op == "placeholder"}
    return sum(spec_of(node.meta["val"]).nbytes for node in inputs if isinstance(node.meta.get("val"), torch.Tensor))
