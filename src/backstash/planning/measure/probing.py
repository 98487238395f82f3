"""Measures what the rounding of a value does to the gradients of a step, with backward passes of their own.

The step runs with everything kept. When its backward pass begins, the gradient is computed from the exact values. Then
some values are replaced by what a codec makes of them, the gradient is computed again, and the two are compared. The
step's own backward pass is not changed by this.

Note: [one pass for many values]
    Backward reads the input of a convolution or of a linear layer for the weight's gradient alone. So all such values
    are rounded in one pass, and the error of each is that of its own weight's gradient. An error in any other value is
    passed on to all layers below, so such a value takes a pass of its own. If there are too many of them, values that
    were saved one after the other share a pass. Then the group with the largest error is divided, and so on as long as
    there are passes, so that what causes large errors is measured alone. What a group causes in the end is divided
    among its values by the squares of the errors that rounding made in these.

Note: [one codec for all]
    Only one codec of a value is tried. To first order the gradients' error is proportional to the value's own, so the
    error that any other codec causes is scaled by the ratio of the two codecs' errors in the value.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from backstash.capture.naming import packed_by
from backstash.errors import CodecRefusedError
from backstash.gradient_error import Engine, Graph, GraphRoot, Monitor, obstacle
from backstash.planning.measure.survey import Births, Rounded, SurveyedValue
from backstash.planning.model.problem import Choice
from backstash.planning.model.rounding import codec_named
from backstash.remake.recipes import Recipe
from backstash.saved import Need
from backstash.stash.encode import whole_of
from backstash.stash.value import Saved, Value
from backstash.torch_internals import no_torch_function

PASSES = 24
"""How many backward passes there are at most for values whose errors are passed on."""

REFERENCE = 1e-2
"""The codec that is tried is the one whose error in the value is closest to this: small, and no rounding of sums."""

LEAST = 1e-12
"""The least error that is predicted for a codec with a bound. It is above 0, because 0 means exact."""

_WEIGHTS = {("Convolution", "input"): 1, ("Linear", "input"): 1, ("Addmm", "mat1"): 2, ("Mm", "self"): 1}
"""Values that backward reads for a weight's gradient alone: which of the node's edges leads to the weight."""

_VIEWS = ("TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0", "ToCopyBackward0")


class Probe(Monitor):
    """Measures, in one step, what the rounding of each value does to the gradients of all parameters together.

    Args:
        found: the values, by their keys; those without rounded choices are left alone.

    Attributes:
        squares: the square of the error that each value causes by its reference codec, relative to the gradient.
        watcher: is to watch the Session of the step.
    """

    def __init__(self, found: Mapping[str, SurveyedValue]) -> None:
        super().__init__(1, math.inf, "", packed_by, lambda leaf: None)
        self.squares: dict[str, float] = {}
        self.watcher = _Values()
        self._noise: dict[str, float] = {}
        self._codecs: dict[str, Any] = {}
        for key, value in found.items():
            if value.rounded:
                tried = reference(value.rounded)
                self._codecs[key], self._noise[key] = codec_named(tried.choice.name), tried.noise

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, the backward passes of the step that begins are measured."""
        self.begin_step(1)
        try:
            yield
        finally:
            self.stop()

    def stop(self) -> None:
        """Measures nothing from now on."""
        self.begin_step(self.steps + 1)

    def before_backward(
        self,
        engine: Engine,
        roots: Sequence[GraphRoot],
        gradients: Sequence[Tensor | None],
        create_graph: bool,
        inputs: Sequence[GraphRoot],
    ) -> None:
        """Measures what can be measured in this backward pass."""
        graph = Graph(roots)
        packed = [saved for node in graph.nodes for saved in packed_by(node)]
        if not graph.leaves or obstacle(graph, packed, create_graph):
            return
        leaves: list[GraphRoot] = list(graph.leaves)

        def compute() -> tuple[Tensor | None, ...]:
            return self._gradients(engine, roots, gradients, leaves, is_exact=False)

        with no_torch_function():
            exact = compute()  # this decides on every value that is yet to be decided on
            total = sum(_square(x) for x in exact if x is not None)
            if not (0.0 < total < math.inf):
                return

            def errors(keys: Sequence[str]) -> list[float]:
                with self._rounded(keys):
                    rounded = compute()
                pairs = zip(rounded, exact, strict=True)
                return [0.0 if a is None or b is None else _square(a - b) / total for a, b in pairs]

            self._measure(graph, errors)

    def _measure(self, graph: Graph, errors: Callable[[Sequence[str]], list[float]]) -> None:
        """Note: [one pass for many values]."""
        places = {id(leaf): place for place, leaf in enumerate(graph.leaves)}
        readers = self._readers(graph)
        weights = {key: _weight(found) for key, found in readers.items()}
        users: dict[int, list[str]] = defaultdict(list)
        for key, leaf in weights.items():
            if leaf is not None and id(leaf) in places:
                users[id(leaf)].append(key)
        alone = {keys[0]: places[leaf] for leaf, keys in users.items() if len(keys) == 1}
        if alone:
            found = errors(tuple(alone))
            for key, place in alone.items():
                self._note(key, found[place])
        others = [key for key in self._codecs if key in readers and key not in alone]
        for group, square in self._shared(others, errors):
            noise = sum(self._noise[key] ** 2 for key in group)
            for key in group:
                self._note(key, square * (self._noise[key] ** 2 / noise if noise else 1.0))

    def _shared(
        self, keys: Sequence[str], errors: Callable[[Sequence[str]], list[float]]
    ) -> list[tuple[Sequence[str], float]]:
        """The values in groups, each with the square of the error that the rounding of the group causes."""
        passes = PASSES if len(keys) <= PASSES else PASSES // 2
        count = min(passes, len(keys))
        groups = [keys[number * len(keys) // count : (number + 1) * len(keys) // count] for number in range(count)]
        found = [(group, sum(errors(group))) for group in groups]
        for _ in range((PASSES - passes) // 2):
            group, _ = largest = max(found, key=lambda each: (len(each[0]) > 1, each[1]))
            if len(group) == 1:
                break
            found.remove(largest)
            found += [(half, sum(errors(half))) for half in (group[: len(group) // 2], group[len(group) // 2 :])]
        return found

    def _note(self, key: str, square: float) -> None:
        if math.isfinite(square):
            self.squares[key] = max(square, self.squares.get(key, 0.0))

    def _readers(self, graph: Graph) -> dict[str, list[tuple[Node, Saved]]]:
        """Returns, by key, the nodes that read the numbers of each value that may be rounded and was seen."""
        readers: dict[str, list[tuple[Node, Saved]]] = defaultdict(list)
        seen = {key for key in self._codecs if next(self.watcher.alive(key), None) is not None}
        for node in graph.nodes:
            for saved in packed_by(node):
                value = saved.value if isinstance(saved, Saved) else None
                if value is not None and value.key in seen and saved.need is Need.VALUE:
                    readers[value.key].append((node, saved))
        return readers

    @contextmanager
    def _rounded(self, keys: Sequence[str]) -> Iterator[None]:
        """Inside, backward reads what codecs make of these values."""
        before: list[tuple[Saved, Tensor | None, int, Any]] = []
        try:
            for key in keys:
                for value in self.watcher.alive(key):
                    before += _round(value, self._codecs[key])
            yield
        finally:
            for saved, dense, version, original in before:
                saved.dense, saved.origin.version, saved.origin.tensor = dense, version, original


class _Values(Births):
    """Remembers the values of a step by their keys, without holding them."""

    def __init__(self) -> None:
        self._values: dict[str, list[weakref.ref[Value]]] = defaultdict(list)

    def decided(self, value: Value, whole: Tensor, find_recipe: Callable[[], Recipe | str]) -> None:
        """Remembers a value."""
        self._values[value.key].append(weakref.ref(value))

    def read(self, tensor: Tensor, is_stored: bool, key: str) -> None:
        """Notes nothing."""

    def alive(self, key: str) -> Iterator[Value]:
        """Returns the values of that key that are still there: more than one where a place is passed repeatedly."""
        return (value for reference in self._values[key] if (value := reference()) is not None)


def reference(rounded: Sequence[Rounded]) -> Rounded:
    """Returns the choice that is tried for a value (Note: [one codec for all])."""
    return min(rounded, key=lambda each: abs(math.log((each.noise or 1e-30) / REFERENCE)))


def with_errors(found: SurveyedValue, square: float | None) -> list[Choice]:
    """Returns the rounded choices of a value with the errors that they cause; none if these could not be measured.

    A choice that another one beats in bytes, time and error is left out.
    """
    if square is None or not found.rounded:
        return []
    tried, least = reference(found.rounded), min(choice.held_nbytes for choice in found.choices)
    gain = math.sqrt(square) / tried.noise if tried.noise else 0.0
    choices: list[Choice] = []
    for each in found.rounded:
        choice = replace(each.choice, error=max(LEAST, gain * each.noise))
        if choice.held_nbytes < least and not any(_beats(other, choice) for other in choices):
            choices = [other for other in choices if not _beats(choice, other)] + [choice]
    return choices


def _beats(choice: Choice, other: Choice) -> bool:
    mine = choice.held_nbytes, choice.encode_seconds + choice.decode_seconds, choice.error
    theirs = other.held_nbytes, other.encode_seconds + other.decode_seconds, other.error
    return all(a <= b for a, b in zip(mine, theirs, strict=True))


def _square(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x.detach().to_dense().flatten(), dtype=torch.float64)) ** 2


def _weight(readers: Sequence[tuple[Node, Saved]]) -> Tensor | None:
    """Returns the parameter whose gradient is all that a value is read for, or None if it is read for more."""
    if len(readers) != 1:
        return None
    node, saved = readers[0]
    facts = saved.tensor
    edge = None if facts is None else _WEIGHTS.get((facts.op, facts.role))
    if edge is None or edge >= len(node.next_functions):
        return None
    following: Any = node.next_functions[edge][0]
    while following is not None and type(following).__name__ in _VIEWS:
        following = following.next_functions[0][0]
    if type(following).__name__ != "AccumulateGrad":
        return None
    variable: Tensor = following.variable
    return variable


def _round(value: Value, codec: Any) -> list[tuple[Saved, Tensor | None, int, Any]]:
    """Has backward read what a codec makes of a value. Returns what has to be restored."""
    members = [saved for saved in value.saved() if saved.dense is not None]
    if not members or members[0].dense is None:
        return []
    whole = whole_of(members[0], members[0].dense.untyped_storage())
    try:
        rounded = None if whole is None else codec.decode(codec.encode(whole))
    except CodecRefusedError:  # its numbers in this step are others than when it was asked
        return []
    if rounded is None:
        return []
    before = [(saved, saved.dense, saved.origin.version, saved.origin.tensor) for saved in members]
    for saved in members:
        assert saved.spec is not None
        saved.dense = rounded.as_strided(saved.spec.shape, saved.spec.stride, saved.offset)
        saved.origin.version, saved.origin.tensor = saved.dense._version, None
    return before
