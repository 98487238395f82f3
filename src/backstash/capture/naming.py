"""The autograd node that saved a tensor, and its role there: read off the graph behind a function's result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from backstash.saved import is_tensor
from backstash.stash import wrapped
from backstash.stash.value import Saved

NamedTensors = list[tuple[Any, list[tuple[str, Saved]]]]
"""Autograd nodes, and what each of them has saved under which role."""


def find_saved(result: Any, unnamed: list[Saved], saves: int = 0) -> tuple[NamedTensors, list[Saved]]:
    """The autograd nodes behind ``result`` that saved what has no name yet, and what under which role.

    Args:
        result: what a function has returned.
        unnamed: what it has saved.
        saves: how many tensors it has saved in all, if there are more of them.

    Returns:
        What was found of those that are plain, and the rest of these.
    """
    nodes: list[Any] = [result.grad_fn] if type(result) is Tensor else [x.grad_fn for x in tensors_within(result)]
    wanted = {id(saved): saved for saved in unnamed if saved.is_plain}
    return find_by_nodes(nodes, wanted, saves), list(wanted.values())


def most_nodes(wanted: int) -> int:
    """How many nodes behind a function's results are looked at for so many tensors."""
    return 16 + 8 * wanted


def find_by_nodes(nodes: list[Any], wanted: dict[int, Saved], saves: int = 0) -> NamedTensors:
    """As :func:`find_saved`. Found tensors are removed from ``wanted``.

    The walk is bounded: what a function returns may hang on a long graph although the node that saved is not in it.
    """
    answer: NamedTensors = []
    most, seen = most_nodes(max(saves, len(wanted))), set()
    for node in nodes:  # which grows on the way
        if node is None or node in seen:
            continue
        seen.add(node)
        found = _found(node, wanted)
        if found:
            answer.append((node, found))
        most -= 1
        if not wanted or not most:
            break
        nodes += [following for following, _ in node.next_functions]
    return answer


def _found(node: Any, wanted: dict[int, Saved]) -> list[tuple[str, Saved]]:
    """What is wanted of all that a node has saved, with its role; it is removed from ``wanted``."""
    found: list[tuple[str, Saved]] = []
    for attribute, role in saved_attributes(type(node)):
        try:
            raw = getattr(node, attribute)
        except RuntimeError:  # an older node, whose backward has run and freed what it saved
            break
        for variable in raw if type(raw) in (tuple, list) else (raw,):
            saved = wanted.pop(id(_packed(variable)), None)
            if saved is not None:
                found.append((role, saved))
        if not wanted:  # the node's other variables need not be made objects of Python
            break
    return found


def tensors_within(result: Any) -> Iterator[Tensor]:
    """The tensors in a result, however deep in tuples, lists and the values of dicts, in order."""
    if is_tensor(result):
        yield result
    elif isinstance(result, (tuple, list)):
        for item in result:
            yield from tensors_within(item)
    elif isinstance(result, dict):
        yield from tensors_within(list(result.values()))


attributes: dict[type, tuple[tuple[str, str], ...]] = {}


def saved_attributes(node_type: type) -> tuple[tuple[str, str], ...]:
    """Attribute and role of everything that nodes of this type save."""
    known = attributes.get(node_type)
    if known is None:
        prefix = "_raw_saved_"
        known = tuple((name, name.removeprefix(prefix)) for name in dir(node_type) if name.startswith(prefix))
        attributes[node_type] = known
    return known


def _packed(variable: Any) -> Any:
    """What the pack hook returned for a raw saved variable; None where it has none."""
    try:
        return variable.data
    except (AttributeError, RuntimeError):  # None, or an undefined optional input
        return None


def packed_by(node: Any) -> Iterator[Any]:
    """What pack hooks returned for all that a node has saved."""
    for attribute, _ in saved_attributes(type(node)):
        try:
            raw = getattr(node, attribute)
        except RuntimeError:  # its backward has run
            return
        for variable in raw if isinstance(raw, (tuple, list)) else (raw,):
            yield _packed(variable)


def weight_copies(node: Any) -> list[list[int]]:
    """Sorted shapes of the parameters that autocast has cast (and perhaps transposed) for ``node``."""
    shapes = []
    for following, _ in node.next_functions:
        if type(following).__name__ == "TBackward0":
            following = following.next_functions[0][0]
        if type(following).__name__ == "ToCopyBackward0":
            leaf = following.next_functions[0][0]
            if type(leaf).__name__ == "AccumulateGrad":
                dense = wrapped.inner_tensor(leaf.variable)
                shapes.append(sorted(leaf.variable.shape if dense is None else dense.shape))
    return shapes
