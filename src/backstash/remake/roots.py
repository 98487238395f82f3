"""Values that a policy with errors stores exactly, because others can then be made again from them.

Note: [exact roots]
    A value is remade from exact values only. So a policy that rounds everything has to store a layer's output and all
    that was computed from it: four rounded copies of one activation take more bytes than one exact copy, from which the
    others are remade. The *root* of a value is the one rounded value that its recipe goes back to. In the first steps
    each rounded value tells its root what it takes itself. Some tell it before the root is stored and some after it, so
    the bytes are complete a step later. A root whose exact form takes no more bytes beyond the rounded one than all of
    these together is stored exactly from then on.
"""

from __future__ import annotations

from dataclasses import dataclass

from backstash.policies.base import MAX_DEPTH
from backstash.remake import leaves
from backstash.remake.recipes import Recipe, build
from backstash.stash.place import Place
from backstash.stash.value import Saved, Value

LEARNING = 3
"""Steps in which values tell their roots: it is known after one what is rounded at all, then what is a root, then how
many bytes go back to it."""


@dataclass(slots=True)
class Root:
    """What is known of a place whose value was stored with an error.

    Attributes:
        above: the place of its own root; None where the value has none.
        is_exact: whether it is stored exactly, because others are remade from it.
        stored_nbytes: what its value took with an error.
        spared_nbytes: what values that could be remade from it have taken since it was stored last.
        told: in how many steps its value was stored with an error, up to LEARNING.
    """

    above: Place | None = None
    is_exact: bool = False
    stored_nbytes: int = 0
    spared_nbytes: int = 0
    told: int = 0


def is_exact(place: Place | None) -> bool:
    """Whether the value of a place is stored exactly, so that others can be remade from it."""
    return place is not None and place.root is not None and place.root.is_exact


def settle(value: Value, nbytes: int) -> bool:
    """Returns whether a value that is about to be stored with an error is stored exactly instead, in ``nbytes``."""
    root = None if value.place is None else value.place.root
    if root is None:
        return False
    if not root.is_exact:
        is_known = root.told >= LEARNING - 1 and root.above is None
        root.is_exact = is_known and nbytes - root.stored_nbytes <= root.spared_nbytes
        root.spared_nbytes = 0
    return root.is_exact


def tell(value: Value, strongest: Saved, nbytes: int) -> None:
    """Note that a value was stored with an error in so many bytes, and tell the root that it goes back to."""
    place = value.place
    if place is None:
        return
    if place.root is None:
        place.root = Root()
    own = place.root
    own.stored_nbytes = nbytes
    if own.told == LEARNING:
        return
    own.told += 1
    own.above = _above(value, strongest)
    if own.above is not None and own.above.root is not None:
        own.above.root.spared_nbytes += nbytes


def _above(value: Value, strongest: Saved) -> Place | None:
    """The place of the only rounded value that a value could be remade from, if that one were exact."""
    content = value.content
    if content is None or content.version != strongest.origin.version:
        return None
    recipe = build(content, lambda view: leaves.find_leaf(view, value, MAX_DEPTH, None))
    if not isinstance(recipe, Recipe):
        return None
    places = [leaf.place for leaf in recipe.leaves]
    roots = {_top(place) for place in places if place is not None and place.root is not None}
    return roots.pop() if len(roots) == 1 else None


def _top(place: Place) -> Place:
    """The root of the root, and so on."""
    for _ in range(MAX_DEPTH):
        above = None if place.root is None else place.root.above
        if above is None:
            break
        place = above
    return place
