"""The values that are forgotten and made again, and the proof that this makes the same bits.

Note: [proven recipes]
    Whether an op repeats itself bit for bit depends on the device, its library, shapes and layouts, and is documented
    nowhere. So a recipe runs when it is first used, on the very data, and is trusted only if the bits are the same:
    with fused kernels, or else call by call. A recipe that begins from bounded values has to come as near as their
    bounds allow. The proof is repeated now and then, on the numbers of another step.

    Under a plan there is no room for a value beside its copy, and what a recipe begins from may itself be made again.
    There the calls were proven one by one (Note: [proven calls] in repeating.py), and of the value that is forgotten a
    checksum of all its bits is kept the first time. Backward makes it by fused kernels. If their bits do not have that
    checksum, the calls are made one by one, then and from then on. In later steps samples alone watch the bits.
"""

from __future__ import annotations

import sys
import weakref
import zlib
from collections.abc import Callable
from functools import partial

from torch import Tensor

from backstash import graphs
from backstash.capture.names import Names
from backstash.policies.base import MAX_DEPTH, Policy, Recompute
from backstash.proofs import proofs
from backstash.remake import leaves, onepass, proving, roots
from backstash.remake.calls import Leaf, View
from backstash.remake.gains import gains
from backstash.remake.making import remade_whole
from backstash.remake.recipes import Recipe, build
from backstash.remake.tape import CallTape
from backstash.saved import TensorSpec
from backstash.stash import seams
from backstash.stash.accounts import Step
from backstash.stash.comparing import AT_ONCE, check_again
from backstash.stash.encode import has_error
from backstash.stash.live import Live
from backstash.stash.parameters import ParameterStorages
from backstash.stash.pending import Pending
from backstash.stash.place import Place, Proven
from backstash.stash.sample import Rows, Sample
from backstash.stash.value import Remade, Saved, Value, holder

REPEAT = 256
"""A recipe is proven again at every so many of its uses, on the numbers of that step; each recipe at another step."""


class Remaking:
    """Finds recipes, and proves them.

    Args:
        policy: decides about the values that recipes begin from.
        names: which module runs, and what was learned of the model.
        live: the running totals.
        pending: decides about an older value that nobody holds, so that it is known how it is stored.
        parameters: tells the storages of parameters and buffers.
        full: whether samples are checksums.

    Attributes:
        tape: what the forward pass tells of its calls.
    """

    __slots__ = ("_full", "_live", "_number", "_own", "_pending", "_policy", "_rows", "_step", "tape")

    remake = staticmethod(remade_whole)

    def __init__(
        self,
        policy: Policy,
        names: Names,
        live: Live,
        pending: Pending,
        parameters: ParameterStorages,
        full: bool,
    ) -> None:
        self._policy = policy
        noted = bool(policy.remakes_anything), policy.repeated_calls
        self.tape = CallTape(names, pending, parameters, live, *noted)
        self._live = live
        self._full = full
        self._pending = pending
        self._step = Step()
        self._number = 0
        self._rows = Rows()
        self._own = object()  # bounds are this Session's own, and so are proofs within them

    def begin_step(self, step: Step, number: int) -> None:
        """The accounts of the step that begins, and its number."""
        self._step, self._number = step, number
        self._rows = Rows()  # a graph's memory is its own

    def forget(self, value: Value, strongest: Saved, whole: Tensor, action: Recompute) -> Remade | str:
        """As Producer.forget. What the recipe begins from knows of it from now on."""
        found = self._recipe(value, strongest, whole, action)
        if isinstance(found, str):
            return self.tape.noting().lack(value.key, found)
        recipe, sample = found
        self.tape.noting().use(value.key, recipe)
        remade = Remade(recipe, sample, action.otherwise)
        if recipe.from_statistics:
            remade.errors = frozenset().union(*(leaf.state.errors for leaf in recipe.leaves))
        if remade.shares:
            for leaf in set(recipe.leaves):
                children = leaf.dependents.children = leaf.dependents.children or []
                children.append(weakref.ref(value))
            if recipe.call.group is not None:
                recipe.call.group.values.append(weakref.ref(value))
        else:
            remade.depth = 1 + max((leaf.state.depth for leaf in recipe.leaves), default=0)
        height = value.dependents.height
        for leaf in recipe.leaves:
            if leaf.dependents.height <= height:
                leaf.raise_to(height + 1)
        return remade

    def is_stored_exactly(self, value: Value, nbytes: int) -> bool:
        """As Producer.is_stored_exactly (Note: [exact roots] in roots.py)."""
        return roots.settle(value, nbytes)

    def stored(self, value: Value, strongest: Saved, nbytes: int) -> None:
        """As Producer.stored."""
        roots.tell(value, strongest, nbytes)

    def _recipe(self, value: Value, strongest: Saved, whole: Tensor, action: Recompute) -> tuple[Recipe, Sample] | str:
        content = value.content
        if content is None or content.version != strongest.origin.version:
            return "what made it is not known"
        recipe = build(content, lambda view: self._find_leaf(view, value, action), action.any_producer)
        if isinstance(recipe, str):
            return recipe
        if recipe.call.spec.dtype is not whole.dtype:
            return "its storage is seen as different types"
        begins_from = set(recipe.leaves)
        if action.max_inputs is not None and len(begins_from) > action.max_inputs:
            return f"it would begin from {len(begins_from)} stored values"
        if action.max_moved is not None and (moved := leaves.count_moved(begins_from)) > action.max_moved:
            return f"it would begin from {moved} values in other stores"
        assert strongest.tensor is not None
        bounded = False
        for leaf in begins_from:
            bounded = bounded or bool(leaf.state.errors)
        if bounded and value.dependents.height:
            return "others, which were proven with its exact numbers, are made again of it"
        if bounded and not leaves.keeps_signs(recipe, value, whole):
            return "its sign is read in another way than a relu does"
        place = strongest.place or Place(strongest.tensor)
        distrusted = self._live.distrusted
        if distrusted and not distrusted.isdisjoint((value.key, each) for each in (str(recipe), None)):
            return f"{recipe} has made other bits than the value had"
        first_use, is_known = None, True
        if action.any_producer and (not bounded or any(leaf.state.recipe is not None for leaf in begins_from)):
            way, first_use, is_known = self._way_untried(place, recipe, whole, bounded)
        else:
            way = self._way(value, place, recipe, whole, bounded, repeats=not action.any_producer)
        if not way:
            return f"{recipe} does not repeat itself {'within its bounds' if bounded else 'bit for bit'}"
        for leaf in begins_from:
            leaves.guard_leaf(leaf)
        text = recipe.text
        recipe = recipe.using_statistics() if bounded else recipe if way == "fused" else recipe.unfused()
        recipe.text, recipe.first_use = text, first_use
        self.tape.leaning.watch(value, begins_from, recipe.references)
        allows = partial(_allows, recipe, place, self._policy.revision) if bounded else None
        full = self._full or not is_known
        sample = Sample.of(whole, self._number, full, allows, self._rows)
        recipe.sample = sample if allows is None else None
        return recipe, sample

    def find(self, value: Value, strongest: Saved) -> Recipe | str:
        """How a value could be made again, whatever made it, before anything is done about it; or why it cannot be.

        Its account tells from then on whether the program could change what the value would have been made from.
        """
        content = value.content
        if content is None or content.version != strongest.origin.version:
            return "what made it is not known"
        action = Recompute(any_producer=True)
        recipe = build(content, lambda view: self._find_leaf(view, value, action), any_producer=True)
        if (
            isinstance(recipe, Recipe)
            and strongest.spec is not None
            and recipe.call.spec.dtype is not strongest.spec.dtype
        ):
            return "its storage is seen as different types"
        if isinstance(recipe, Recipe):
            self.tape.leaning.watch(value, dict.fromkeys(recipe.leaves), recipe.references)
        return recipe

    def sources(self, value: Value, strongest: Saved) -> dict[str, Tensor] | None:
        """From which stored values a value could be made, and by how much errors of theirs are multiplied.

        See :meth:`backstash.policies.Policy.trace`.
        """
        content = value.content
        if content is None or content.version != strongest.origin.version:
            return None
        recipe = build(content, lambda view: leaves.find_leaf(view, value, MAX_DEPTH, None))
        found = gains(recipe) if isinstance(recipe, Recipe) else None
        return None if found is None else {leaf.key: gain for leaf, gain in found.items() if leaf.key}

    def _find_leaf(self, view: View, root: Value, action: Recompute) -> Leaf | str | None:
        """As :func:`leaves.find_leaf`, but nothing begins from a value that is yet to be stored with an error."""
        stored = view.content.value() if view.content.value is not None else None
        if stored is not None and stored is not root and stored.waiting.storage is not None:
            self._pending.decide_if_orphaned(stored)
        max_depth = sys.maxsize if action.any_producer else action.max_depth
        leaf = leaves.find_leaf(view, root, max_depth, action.within)
        if not isinstance(leaf, Leaf):
            return leaf
        value = leaf.value
        is_settled = value.waiting.storage is None or value.dependents.height or roots.is_exact(value.place)
        held = None if is_settled else holder(value)
        if held is not None and not action.any_producer and self._may_have_error(held):
            return "it would begin from a value that may be stored with an error"
        return leaf

    def _may_have_error(self, held: Saved) -> bool:
        """Whether the value by which a leaf is held may yet be stored with an error."""
        if held.tensor is None:
            return False
        place = held.place
        if not self._policy.is_fixed or place is None or place.facts is not held.tensor:
            return has_error(self._policy.decide(held.tensor))
        if place.action is None:
            place.action = self._policy.decide(held.tensor)
        return has_error(place.action)

    def _way_untried(
        self, place: Place, recipe: Recipe, whole: Tensor, bounded: bool
    ) -> tuple[str, Callable[[str], None] | None, bool]:
        """As :meth:`_way`, without making the value now: each of its calls is proven.

        Returns:
            How it is run this time; what has to be told how it has made the value's bits, None if nothing has to; and
            whether it has made a value in this place before.
        """
        if bounded or not onepass.has_form(recipe):
            is_known = bool(place.proofs)
            if not is_known:
                place.prove((), "plain")
            return "plain", None, is_known
        spec, device = TensorSpec.of(whole), whole.device.type
        likeness = recipe.likeness()
        facts = (likeness, spec, None)
        known = place.proof_of(facts)
        if known is not None:
            return known, None, True

        def tell(way: str) -> None:
            question = (place.facts.key, repr(likeness), spec, None)
            proofs.ask("recipe", question, lambda: way, device_type=device, counts=self._step)
            place.prove(facts, way)

        return "fused", tell, False

    def _way(self, value: Value, place: Place, recipe: Recipe, whole: Tensor, bounded: bool, repeats: bool) -> str:
        """How the recipe makes the value: "fused", "plain", "within", or "" where it does not.

        The settings on which its bits depend are those of its calls: under these they run now, and in backward.
        """
        own, spec, proven = self._own if bounded else None, TensorSpec.of(whole), place.proven
        if proven is not None and proven[:3] == (recipe.tree, spec, own):
            recipe.text = proven.text
            if not proven.way or not repeats or (place.uses + 1) % REPEAT:
                place.uses += 1
                return proven.way
        likeness = recipe.likeness()
        facts = likeness, spec, own
        known = place.proof_of(facts)
        if known is not None:
            place.proven = _proven(recipe, spec, own, known)
            place.uses += 1
            if not known or not repeats or place.uses % REPEAT:
                return known
        if graphs.capture() is not None and known is None:
            return ""

        def prove() -> str:
            unheld = [leaf for leaf in recipe.leaves if leaf.state.made is None]
            if known is not None and not bounded and whole.device.type not in AT_ONCE:
                way = self._prove_later(value, recipe, known, whole)
            elif bounded:
                way = proving.prove_within(recipe.using_statistics(), whole)
            else:
                way = proving.prove(recipe, whole)
            for leaf in unheld:  # nothing is held of what the recipe begins from
                leaf.hold(None)
            self._live.buffers.clear()
            return way

        question, device = (place.facts.key, repr(likeness), spec, own), whole.device.type
        again = known is not None
        way = proofs.ask("recipe", question, prove, device_type=device, again=again, counts=self._step)
        if not again:  # others are repeated in other steps
            place.uses = zlib.crc32(place.facts.key.encode()) % REPEAT
        place.prove(facts, way)
        place.proven = _proven(recipe, spec, own, way)
        return way

    def _prove_later(self, value: Value, recipe: Recipe, way: str, whole: Tensor) -> str:
        """As proving.prove for a way that was proven before: the host does not wait for the device to compare bits."""
        different = proving.differing(recipe, way, whole)
        if different is None:
            return ""
        check_again(value, recipe, different)
        return way


def _proven(recipe: Recipe, spec: TensorSpec, own: object | None, way: str) -> Proven | None:
    """What is known of a recipe that was proven; None where the pattern of one of its calls is not known."""
    return None if recipe.tree is None else Proven(recipe.tree, spec, own, way, str(recipe))


def _allows(recipe: Recipe, place: Place, revision: object | None, off: float, sample: Tensor) -> bool:
    """Whether an element that a recipe makes within bounds may be so far ``off`` from that of the sample.

    To find out how far takes some hundred microseconds, because each batch norm has other statistics in each step. So
    what was found with the same bounds is found again only where it is not enough.
    """
    known = place.tolerance
    if revision is not None and known is not None and known[0] is revision and off <= known[1]:
        return True
    tolerance = proving.tolerance(recipe, sample)
    place.tolerance = revision, tolerance
    return not off > tolerance


seams.producer = Remaking
