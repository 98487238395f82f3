"""Measures the error that a policy causes in the gradient, with two more backward passes in the first steps.

In a checked step a Session keeps the exact value beside each value that is stored with an error. When backward begins,
the gradient of the graph is computed twice before the real backward pass: from the values as they are stored, and from
the exact values. The two gradients are compared. The real backward pass is not changed by this.

Note: [where backward begins]
    Saved-tensor hooks are called while the node that reads the tensor is locked. A second pass through the same node
    cannot begin in a hook, because it would wait for itself. Besides, only the caller that starts autograd's engine
    knows all roots and their gradients. So the function by which ``torch.autograd`` starts the engine is wrapped while
    a Session waits for the backward pass of a checked step, and is restored afterwards.
"""

from __future__ import annotations

import math
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from backstash import accelerator
from backstash.stash.ledger import GradientError
from backstash.torch_internals import (
    REENTRANT,
    backward_engine,
    functorch_level,
    hide_from_dynamo,
    in_backward,
    nodes_behind,
    replace_backward_engine,
)

if TYPE_CHECKING:
    from backstash.stash.value import Saved, Value

GraphRoot = Tensor | GradientEdge
"""A tensor, or an edge of the graph, that a backward pass begins with or ends in."""

Engine = Callable[..., Any]
"""The function that starts autograd's engine."""

_lock = threading.RLock()
_waiting: weakref.WeakSet[Monitor] = weakref.WeakSet()
_engine: Engine | None = None
"""The function that :func:`_start` replaces; None while it replaces nothing."""


class Monitor:
    """Measures the gradient's error in the first steps of one Session.

    Args:
        steps: in how many steps, from the first one on.
        limit: the relative error above which the Monitor warns.
        policy: the policy's name in the warning.
        packed_by: yields the packed objects of a node's saved tensors, those of other hooks included.
        name_of: returns a parameter's name, or None for a tensor that is no parameter.

    Attributes:
        exact: the exact data of values that are stored with an error in a checked step.
        is_exact: whether backward must read exact values now.
        is_measuring: whether one of the Monitor's own backward passes runs. A reader that writes gets a copy then.
        found: the measured errors, one for each backward pass.
        step: the number of the step in progress.
    """

    def __init__(
        self,
        steps: int,
        limit: float,
        policy: str,
        packed_by: Callable[[Node], Iterable[object]],
        name_of: Callable[[Tensor], str | None],
    ) -> None:
        self.steps, self.limit, self.policy = steps, limit, policy
        self.packed_by, self.name_of = packed_by, name_of
        self.is_exact = self.is_measuring = False
        self.exact: WeakKeyDictionary[Value, Tensor] = WeakKeyDictionary()
        self._thread: int | None = None  # which measures
        self.found: list[GradientError] = []
        self.step = 0
        self._warned = False

    @property
    def is_due(self) -> bool:
        """Whether the step in progress is checked."""
        return 0 < self.step <= self.steps

    @property
    def measures_here(self) -> bool:
        """Whether one of the Monitor's own backward passes runs on this thread."""
        return self.is_measuring and self._thread == threading.get_ident()

    def begin_step(self, step: int) -> None:
        """Notes that a forward pass begins, and waits for its backward pass if the step is checked."""
        global _engine
        self.step = step
        with _lock:
            if self.is_due:
                _waiting.add(self)
                if _engine is None:
                    _engine = backward_engine()
                    replace_backward_engine(_start)
            else:
                _waiting.discard(self)
                _restore()

    def before_backward(
        self,
        engine: Engine,
        roots: Sequence[GraphRoot],
        gradients: Sequence[Tensor | None],
        create_graph: bool,
        inputs: Sequence[GraphRoot],
    ) -> None:
        """Measures the error if the graph has tensors of this Session, or notes why the error cannot be measured.

        Args:
            engine: the function that starts the engine.
            roots: where backward begins.
            gradients: the gradient of each root.
            create_graph: whether backward was asked for a graph of its own.
            inputs: the leaves that backward was asked for; empty: all leaves of the graph.
        """
        graph = Graph(roots)
        packed = [saved for node in graph.nodes for saved in self.packed_by(node)]
        own: list[Saved] = [saved for saved in packed if self._is_own(saved)]
        if not own:
            return
        leaves: list[GraphRoot] = list(inputs) if inputs else list(graph.leaves)
        reason = obstacle(graph, packed, create_graph)
        if reason:
            self.found.append(GradientError(self.step, reason=reason))
        elif not any(saved.value in self.exact for saved in own if saved.value is not None):
            self.found.append(GradientError(self.step, 0.0))
        elif leaves:
            unpacked = own[0].live.unpacked
            try:
                stored = self._gradients(engine, roots, gradients, leaves, is_exact=False)
                exact = self._gradients(engine, roots, gradients, leaves, is_exact=True)
            except RuntimeError as error:
                self.found.append(GradientError(self.step, reason=f"a second backward pass failed: {error}"))
            else:
                names = [self._name(leaf, place) for place, leaf in enumerate(leaves)]
                self.found.append(_compared(self.step, names, stored, exact))
                self._warn(self.found[-1])
            finally:
                own[0].live.unpacked = unpacked

    def _is_own(self, packed: object) -> TypeGuard[Saved]:
        """Whether a packed object is a saved tensor of this Monitor's Session."""
        return getattr(getattr(packed, "live", None), "monitor", None) is self

    def _gradients(
        self,
        engine: Engine,
        roots: Sequence[GraphRoot],
        gradients: Sequence[Tensor | None],
        leaves: list[GraphRoot],
        is_exact: bool,
    ) -> tuple[Tensor | None, ...]:
        """The gradients of ``leaves``, from exact or from stored values. Restores the generators' states."""
        restore_generators = accelerator.noted_generators()
        self.is_exact, self.is_measuring, self._thread = is_exact, True, threading.get_ident()
        try:
            found: tuple[Tensor | None, ...] = engine(
                roots, gradients, True, False, tuple(leaves), True, accumulate_grad=False
            )
            return found
        finally:
            self.is_exact = self.is_measuring = False
            restore_generators()

    def _name(self, leaf: GraphRoot, place: int) -> str:
        name = self.name_of(leaf) if isinstance(leaf, Tensor) else None
        return name or f"(input {place}, {list(leaf.shape) if isinstance(leaf, Tensor) else 'no tensor'})"

    def _warn(self, found: GradientError) -> None:
        if self._warned or found.error is None or found.error <= self.limit:
            return
        self._warned = True
        warnings.warn(
            f"backstash: in step {found.step} the policy {self.policy} made the gradient wrong by {found.error:.3g} of "
            f"its length, and check_limit is {self.limit:g}; the worst leaf is {found.worst}, with a cosine of "
            f"{found.cosine:.3f} to its exact gradient. Give the policy more bits or a smaller bound, keep the worst "
            f"layers exact with backstash.policies.Rules, or pass a larger check_limit.",
            UserWarning,
            stacklevel=6,
        )


class Graph:
    """The nodes that a backward pass from these roots may reach, and the leaves whose gradients it accumulates."""

    def __init__(self, roots: Iterable[GraphRoot]) -> None:
        first = (root.grad_fn if isinstance(root, Tensor) else root[0] for root in roots)
        self.nodes: list[Node] = list(nodes_behind(first))
        accumulating: list[Any] = [node for node in self.nodes if type(node).__name__ == "AccumulateGrad"]
        self.leaves: list[Tensor] = [node.variable for node in accumulating]


def obstacle(graph: Graph, packed: Iterable[object], create_graph: bool) -> str:
    """Returns why the gradient's error cannot be measured, or an empty string if it can."""
    if create_graph:
        return "backward was asked for a graph of its own (create_graph=True)"
    if functorch_level() is not None:
        return "backward runs under a transform of torch.func"
    checkpointed = any(type(node).__name__ == REENTRANT for node in graph.nodes)
    if checkpointed or any(type(other).__module__ == "torch.utils.checkpoint" for other in packed):
        return "the graph has a checkpoint, and what it computes again may change buffers"
    return ""


def _compared(
    step: int, names: list[str], stored: tuple[Tensor | None, ...], exact: tuple[Tensor | None, ...]
) -> GradientError:
    """The error of all gradients together, and the leaf with the largest part of it.

    The leaf with the smallest cosine would tell less: mostly its gradient is zero but for rounding, as the gradient of
    a bias in front of a norm is.

    Args:
        step: number of the step.
        names: names of the leaves.
        stored: the leaves' gradients from stored values; None where a leaf has no gradient.
        exact: the leaves' gradients from exact values.
    """
    wrong = total = most = 0.0
    worst, cosine = "", None
    for name, got, wanted in zip(names, stored, exact, strict=True):
        if got is None or wanted is None:
            continue
        a, b = (x.detach().to_dense().double().flatten() for x in (got, wanted))
        difference = float((a - b).square().sum())
        wrong += difference
        total += float(b.square().sum())
        if difference > most:
            worst, most, lengths = name, difference, float(a.norm() * b.norm())
            cosine = max(-1.0, min(1.0, float(a @ b) / lengths)) if lengths else 0.0
    if not (math.isfinite(wrong) and math.isfinite(total)):
        return GradientError(step, reason="the gradient is not finite")
    error = math.sqrt(wrong / total) if total else math.inf if wrong else 0.0
    return GradientError(step, error, worst, cosine)


def _start(
    roots: Sequence[GraphRoot],
    gradients: Sequence[Tensor | None],
    retain_graph: bool,
    create_graph: bool,
    inputs: Sequence[GraphRoot],
    *more: Any,
    **rest: Any,
) -> Any:
    """Replaces the function that starts autograd's engine while a Session waits for a backward pass."""
    engine = _engine or backward_engine()  # another thread may have restored torch's own meanwhile
    with _lock:
        waiting = list(_waiting)
    if in_backward():  # a backward pass inside another one is not a step's own
        if any(monitor.measures_here for monitor in waiting):
            if rest.get("accumulate_grad"):
                raise RuntimeError("a node runs a backward pass of its own, which would add to .grad once more")
            retain_graph = True  # for the next pass that measures, and for the step's own
    else:
        for monitor in waiting:
            monitor.before_backward(engine, roots, gradients, create_graph, inputs)
        with _lock:
            _restore()
    return engine(roots, gradients, retain_graph, create_graph, inputs, *more, **rest)


def _restore() -> None:
    """Restores torch's own function when no Monitor waits any more, unless other code has wrapped ours meanwhile."""
    global _engine
    if not _waiting and _engine is not None and backward_engine() is _start:
        replace_backward_engine(_engine)
        _engine = None


hide_from_dynamo(_start)  # and not the program's hooks below it
hide_from_dynamo(Monitor.before_backward, and_all_below=True)
