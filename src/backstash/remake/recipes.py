"""Recipes: the tree of calls by which a value is made again, bit for bit, instead of being stored.

The call that made a content is followed back until every input is something that is held anyway: another stored value
(a leaf), or a copy of a parameter or of something small. A recipe is proven before it is trusted (Note: [proven
recipes] in remaking.py). It may also begin from values that are stored within a bound; gains.py tells what becomes of
their errors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from backstash.numerics import settings, under
from backstash.remake import fused, onepass
from backstash.remake.calls import (
    INPUT,
    Call,
    Content,
    Held,
    Leaf,
    Memory,
    View,
)
from backstash.remake.repeating import OVERWRITES, norm_from_statistics, repeat
from backstash.saved import TensorSpec

if TYPE_CHECKING:
    from backstash.stash.sample import Sample
    from backstash.stash.value import Value

UNKNOWN = "what made it is not known, or costs too much to do again"
"""Why most values have no recipe."""

MAX_CALLS = 12
"""The most calls that a recipe of cheap calls makes."""

MOST_CALLS = 64
"""The most calls that any other recipe makes."""


class Recipe:
    """A tree of calls that makes one value.

    Attributes:
        call: the last call.
        inputs: for each tensor argument, in the order of ``call.inputs``: a Leaf, something Held, or the recipe of
            what the argument is a view of, with that view.
        fused: whether several calls, or a norm from its saved statistics, may run as one kernel of our own.
        from_statistics: whether batch norm uses the statistics that it has saved, and not those of its present input.
        leaves: the stored values that it begins from, each as often as it is read.
        references: the program's own tensors that it reads where they are.
        any_producer: whether it may have costly calls, so that what it makes is made once and shared.
        sample: of the value that it makes, whose elements a fused kernel copies as well; None where there is none yet,
            or where it refers to the recipe itself because it allows an error.
        text: the recipe as text, where that is known; it is noted of each value that is forgotten.
        tree: patterns of the calls, one in another as the calls are (Note: [patterns of calls]); None where one is not
            known.
        first_use: what is told how the recipe made the value's bits the first time, "fused" or "plain"; None where that
            is known.
    """

    __slots__ = (
        "any_producer",
        "call",
        "first_use",
        "from_statistics",
        "fused",
        "inputs",
        "leaves",
        "references",
        "sample",
        "text",
        "tree",
    )

    def __init__(
        self,
        call: Call,
        inputs: tuple[Leaf | Held | tuple[Recipe, View], ...],
        fused: bool = True,
        from_statistics: bool = False,
        any_producer: bool = False,
    ) -> None:
        self.call, self.inputs, self.fused, self.from_statistics = call, inputs, fused, from_statistics
        self.any_producer = any_producer
        self.first_use: Callable[[str], None] | None = None
        self.sample: Sample | None = None
        self.text: str | None = None
        leaves: list[Value] = []
        references: list[Held] = []
        tree: list[Any] = [call.pattern]
        is_known = call.pattern is not None
        for given in inputs:
            kind: Any = type(given)
            if kind is Leaf:
                leaves.append(given.value)  # type: ignore[union-attr]
            elif kind is tuple:
                inner = given[0]  # type: ignore[index]
                leaves += inner.leaves
                references += inner.references
                is_known = is_known and inner.tree is not None
                kind = inner.tree
            elif given.is_reference:  # type: ignore[union-attr]
                references.append(given)  # type: ignore[arg-type]
            tree.append(kind)
        self.leaves: tuple[Value, ...] = tuple(leaves)
        self.references: tuple[Held, ...] = tuple(references)
        self.tree: tuple[Any, ...] | None = tuple(tree) if is_known else None

    def __str__(self) -> str:
        if self.text is not None:
            return self.text
        inner = [str(given[0]) for given in self.inputs if isinstance(given, tuple)]
        return f"{self.call.name}({', '.join(inner)})" if inner else self.call.name

    def likeness(self) -> tuple[object, ...]:
        """Everything that its result depends on but numbers: functions, arguments, and the specs of all tensors."""
        call = self.call
        inputs = [
            (given.spec, given.offset)
            if type(given) is Leaf
            else TensorSpec.of(given.tensor)
            if type(given) is Held
            else (given[0].likeness(), given[1].spec, given[1].offset)  # type: ignore[index]
            for given in self.inputs
        ]
        return call.function, call.args, call.kwargs, call.spec, call.settings, call.autocast, call.needs_grad, inputs

    def run(self, fetch: Callable[[Leaf], Tensor], out: Memory | None = None) -> Tensor:
        """Make the value.

        Args:
            fetch: returns the tensor that a leaf stands for, which the recipe does not change.
            out: makes the memory for the result; it is asked only where the recipe can use it.

        Returns:
            The value, laid out like the original; in ``out`` or in fresh memory.
        """
        wanted, device = self.call.settings, self.call.spec.device.type
        if settings(device) is wanted:
            return self._run(fetch, out)
        with under(wanted, device):
            return self._run(fetch, out)

    def _run(self, fetch: Callable[[Leaf], Tensor], out: Memory | None) -> Tensor:
        if self.fused:
            result = fused.affine(self, fetch, out)
            if result is None:
                result = onepass.make_in_one_pass(self, fetch, out)
            if result is not None:
                return result
        tensors = [self._input(index, fetch, out) for index in range(len(self.inputs))]
        if self.from_statistics and self.call.statistics is not None:
            return norm_from_statistics(self.call, tensors)
        return repeat(self.call, self.function, tensors)

    @property
    def function(self) -> Callable[..., Any]:
        """What makes the result: the call's function, or one that writes over its first input, where nobody keeps that.

        The input has to be all of what a call has made: a part of that would begin elsewhere in its memory than the
        result does. And its layout has to be the result's: what reads another layout may add up in another order.
        """
        first, call = self.inputs[0] if self.inputs else None, self.call
        is_first = bool(call.args) and call.args[0] is INPUT  # and not given by its name
        if not is_first or not isinstance(first, tuple) or call.needs_grad:
            return call.function
        view, made = first[1], first[0].call.spec
        is_all = view.offset == 0 and view.spec.nbytes == made.nbytes and view.spec.dtype == made.dtype
        return OVERWRITES.get(call.name, call.function) if is_all and view.spec == call.spec else call.function

    def places(self) -> frozenset[str]:
        """Names of the places of its calls (Note: [calls of a plan] in noting.py); none where one is not known."""
        inner = [given[0].places() for given in self.inputs if isinstance(given, tuple)]
        if self.call.place is None or not all(inner):
            return frozenset()
        return frozenset((self.call.place.name,)).union(*inner)

    def has_in_place(self) -> bool:
        """Whether one of its calls has worked in place, which is proven on copies."""
        return self.call.in_place or any(given[0].has_in_place() for given in self.inputs if isinstance(given, tuple))

    def unfused(self) -> Recipe:
        """The same calls, each on its own."""
        inputs = tuple((given[0].unfused(), given[1]) if isinstance(given, tuple) else given for given in self.inputs)
        return Recipe(self.call, inputs, False, self.from_statistics, self.any_producer)

    def using_statistics(self) -> Recipe:
        """The same calls, for inputs that have errors: the statistics that batch norm has saved are exact."""
        inputs = tuple(
            (given[0].using_statistics(), given[1]) if isinstance(given, tuple) else given for given in self.inputs
        )
        return Recipe(self.call, inputs, self.fused, True)

    def _input(self, index: int, fetch: Callable[[Leaf], Tensor], out: Memory | None) -> Tensor:
        given = self.inputs[index]
        if isinstance(given, Held):
            return given.get()
        if isinstance(given, Leaf):
            return fetch(given)
        recipe, view = given
        run = recipe._run if recipe.call.settings is self.call.settings else recipe.run
        result = run(fetch, out if index == 0 else None)
        if result.shape == view.spec.shape and result.stride() == view.spec.stride and view.offset == 0:
            return result
        return result.as_strided(view.spec.shape, view.spec.stride, view.offset)


def build(
    content: Content, leaf: Callable[[View], Leaf | str | None], any_producer: bool = False, budget: int = 0
) -> Recipe | str:
    """The recipe that makes ``content``, or the reason why there is none.

    Args:
        content: what is to be made.
        leaf: returns a Leaf where a stored value holds what a view looks at, None where no value does, and a reason
            where one does that may not be used.
        any_producer: whether costly calls may be repeated, if they are proven.
        budget: the most calls that the recipe may make; 0 for as many as any recipe may.
    """
    call = content.call
    if call is None or not (call.is_cheap or any_producer):
        return UNKNOWN
    if any_producer and not call.is_proven:
        return f"{call.name} does not repeat itself bit for bit"
    budget = (budget or (MOST_CALLS if any_producer else MAX_CALLS)) - 1
    inputs: list[Leaf | Held | tuple[Recipe, View]] = []
    for given in call.inputs:
        if isinstance(given, Held):
            if given.tensor._version != given.version:
                return f"an input of the {call.name} that made it was changed since"
            inputs.append(given)
            continue
        found = leaf(given)
        if isinstance(found, str):
            return found
        if found is None:
            if budget < 1:
                return "it would take too many calls to make it again"
            recipe = build(given.content, leaf, any_producer, budget)
            if isinstance(recipe, str):
                return f"{recipe} (input of {call.name})" if given.content.call is None else recipe
            if recipe.call.spec.dtype is not given.spec.dtype:
                return "its storage is seen as different types"
            budget -= _number_of_calls(recipe)
            inputs.append((recipe, given))
        else:
            inputs.append(found)
    return Recipe(call, tuple(inputs), any_producer=any_producer)


def _number_of_calls(recipe: Recipe) -> int:
    return 1 + sum(_number_of_calls(given[0]) for given in recipe.inputs if isinstance(given, tuple))
