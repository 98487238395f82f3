"""How far off a policy makes the gradient: measured in the first steps of training, by two backward passes more.

In a checked step a Session keeps beside each value that is stored with an error the exact one. When backward begins,
the graph's gradient is computed twice before it: of the values as they are stored, and of the exact ones. Then the real
backward pass runs, which knows nothing of it.

Note: [where backward begins]
    Saved-tensor hooks are called while the node that reads is locked, so a second pass through the same node cannot
    begin there: it would wait for itself. And only who starts the engine knows all roots, and with which gradients. So
    the function by which ``torch.autograd`` starts it is wrapped while a Session waits for a checked step's backward;
    afterwards it is put back.
"""

from __future__ import annotations

import math
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from backstash.stash.ledger import GradientError
from backstash.torch_internals import backward_engine, functorch_level, in_backward, replace_backward_engine

_lock = threading.RLock()
_waiting: weakref.WeakSet[Monitor] = weakref.WeakSet()
_engine: Any = None
"""The function that :func:`_start` stands in for; None where it does not."""


class Monitor:
    """Measures the gradient's error in the first steps of one Session.

    Args:
        steps: how many.
        limit: the relative error above which it warns.
        policy: what the warning calls the policy.
        packed_by: yields what the Session packed for a node's saved tensors, and what others packed too.
        name_of: a parameter's name, None for a tensor that is no parameter.

    Attributes:
        is_exact: whether backward is to read exact values now.
        is_measuring: whether one of its two backward passes runs, in which a reader that writes gets a copy.
        found: what was measured.
    """

    def __init__(
        self,
        steps: int,
        limit: float,
        policy: str,
        packed_by: Callable[[Any], Iterable[Any]],
        name_of: Callable[[Tensor], str | None],
    ) -> None:
        self.steps, self.limit, self.policy = steps, limit, policy
        self.packed_by, self.name_of = packed_by, name_of
        self.is_exact = self.is_measuring = False
        self.found: list[GradientError] = []
        self.step = 0
        self._warned = False

    @property
    def is_due(self) -> bool:
        """Whether the step in progress is checked."""
        return 0 < self.step <= self.steps

    def begin_step(self, step: int) -> None:
        """A forward pass begins: wait for its backward if it is to be checked."""
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

    def before_backward(self, engine: Any, roots: Any, gradients: Any, create_graph: bool, inputs: Any) -> None:
        """Measure, if the graph is one of this Session's; say why where that is not possible."""
        graph = _Graph(roots)
        packed = [mine for node in graph.nodes for mine in self.packed_by(node)]
        own = [mine for mine in packed if getattr(getattr(mine, "live", None), "monitor", None) is self]
        if not own:
            return
        leaves = list(inputs) if inputs else graph.leaves
        reason = _obstacle(graph, packed, create_graph)
        if reason:
            self.found.append(GradientError(self.step, reason=reason))
        elif not any(mine.value is not None and mine.value.exact is not None for mine in own):
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

    def _gradients(
        self, engine: Any, roots: Any, gradients: Any, leaves: list[Any], is_exact: bool
    ) -> tuple[Tensor | None, ...]:
        devices = sorted({leaf.device.index for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_cuda})
        self.is_exact, self.is_measuring = is_exact, True
        try:
            with torch.random.fork_rng(devices):
                made: tuple[Tensor | None, ...] = engine(
                    roots, gradients, True, False, tuple(leaves), True, accumulate_grad=False
                )
            return made
        finally:
            self.is_exact = self.is_measuring = False

    def _name(self, leaf: Any, place: int) -> str:
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


class _Graph:
    """The nodes that a backward pass from these roots may reach, and the leaves it adds to."""

    def __init__(self, roots: Iterable[Any]) -> None:
        self.nodes = list(_reached(roots))
        self.leaves = [node.variable for node in self.nodes if type(node).__name__ == "AccumulateGrad"]


def _reached(roots: Iterable[Any]) -> Iterator[Any]:
    nodes = [root.grad_fn if isinstance(root, Tensor) else root[0] for root in roots]
    seen = set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            nodes += (following for following, _ in node.next_functions)


def _obstacle(graph: _Graph, packed: Iterable[Any], create_graph: bool) -> str:
    """Why the gradient's error cannot be measured, or an empty string if it can."""
    if create_graph:
        return "backward was asked for a graph of its own (create_graph=True)"
    if functorch_level() is not None:
        return "backward runs under a transform of torch.func"
    checkpointed = any(type(node).__name__ == "CheckpointFunctionBackward" for node in graph.nodes)
    if checkpointed or any(type(mine).__module__ == "torch.utils.checkpoint" for mine in packed):
        return "the graph has a checkpoint, and what it computes again may change buffers"
    return ""


def _compared(
    step: int, names: list[str], stored: tuple[Tensor | None, ...], exact: tuple[Tensor | None, ...]
) -> GradientError:
    """The error of all gradients together, and the leaf that has the largest part of it.

    The smallest cosine would mostly name a leaf whose gradient is zero but for rounding, such as a bias in front of a
    norm.
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
    roots: Any, gradients: Any, retain_graph: bool, create_graph: bool, inputs: Any, *more: Any, **rest: Any
) -> Any:
    """Stands in for the function that starts autograd's engine, while a Session waits for a backward pass."""
    engine = _engine
    if not in_backward():  # and not inside another backward
        with _lock:
            waiting = list(_waiting)
        for monitor in waiting:
            monitor.before_backward(engine, roots, gradients, create_graph, inputs)
        with _lock:
            _restore()
    return engine(roots, gradients, retain_graph, create_graph, inputs, *more, **rest)


def _restore() -> None:
    """Put back torch's own function when nobody waits any more, unless somebody else has wrapped ours."""
    global _engine
    if not _waiting and _engine is not None and backward_engine() is _start:
        replace_backward_engine(_engine)
        _engine = None
