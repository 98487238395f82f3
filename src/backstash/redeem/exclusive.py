"""The test that a gradient may be overwritten, because nobody but the node that received it holds its memory.

Note: [exclusive gradients]
    A gradient may be overwritten when only the node that received it holds it. Others that may hold it are the sum that
    sent it both ways, a hook's list, ``autograd.grad`` for a tensor in between, and the caller of backward. All of them
    hold the tensor, its Python object or its storage, so three reference counts show them. No Python object of the
    storage is made for that: it would stay with the storage, and the engine adds another gradient into one of which
    nobody else holds the storage, but beside it otherwise, which takes memory and may be laid out in another way.
    A gradient that comes out of a reshape is a view and holds its base, whose two counts show the rest. A formula that
    calls ``grad.contiguous()`` first holds the gradient once more. Torch documents none of these numbers, so the counts
    of a gradient that nobody else holds are measured on tiny steps.

    A debugger or a profiler may hold what it looks at. Whatever it holds can only raise a count, so the smallest count
    that was ever measured means "nobody else". Measurements are repeated when further Sessions are made, and while a
    trace or profile function is set nothing is overwritten.

    Memory that torch did not allocate (``from_numpy``, DLPack, a mapped file) belongs to a holder that no count shows.
    Its storage cannot be resized, and it is never overwritten.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from backstash.codecs.base import is_dense
from backstash.interpreter import owns_memory
from backstash.torch_internals import storage_of, storage_use_count, unheard_gradient

UseCounts = tuple[int, ...]
"""References to a tensor's Python object, to the tensor and to its storage; of a view then those to its base's Python
object and to its base."""

MEASUREMENTS = 3
"""How often the counts are measured in a process: when each of that many Sessions is made."""

_lock = threading.Lock()
_alone: dict[tuple[str, bool], UseCounts] = {}
_held: dict[str, set[UseCounts]] = {}
_measured = 0
_probing = threading.local()  # .counts, on the thread that runs the tiny steps while others train


def count(grad: Tensor) -> UseCounts:
    """References to ``grad``, which every caller holds equally often: it asks first, about its first argument."""
    counts: UseCounts = (
        sys.getrefcount(grad),
        grad._use_count(),  # type: ignore[attr-defined]
        storage_use_count(storage_of(grad)),
    )
    base = grad._base
    if base is not None:
        counts += (sys.getrefcount(base), base._use_count())  # type: ignore[attr-defined]
    probe: list[UseCounts] | None = getattr(_probing, "counts", None)
    if probe is not None:
        probe.append(counts)
    return counts


def is_alone(grad: Tensor, counts: UseCounts, call: str) -> bool:
    """Whether nobody but the node that runs holds ``grad``, which is dense and fills memory that torch allocated.

    Args:
        grad: the gradient, the first argument of a backward kernel.
        counts: what :func:`count` said of it.
        call: how the formula calls its kernel; one of :data:`CALLS`.
    """
    if counts != _alone.get((call, len(counts) > 3)) or getattr(_probing, "counts", None) is not None:
        return False
    if torch.is_grad_enabled() or _is_traced():
        return False
    return owns_memory(grad) and (grad.is_contiguous() or is_dense(tuple(grad.shape), grad.stride()))


CALLS = ("relu", "silu", "group_norm", "product")
"""Ways in which formulas call their kernels, named after examples: in some, torch holds the gradient more often."""


def is_measured() -> bool:
    """Whether :func:`measure_uses` has nothing to do: it has measured often enough, or would measure a tracer."""
    return _measured >= MEASUREMENTS or _is_traced()


def measure_uses(x: Tensor, functions: dict[str, Callable[[Tensor], Tensor]]) -> None:
    """Measures the counts of a gradient that nobody else holds, unless they are known well enough.

    Args:
        x: a tensor that requires grad.
        functions: for each of :data:`CALLS` a function whose kernel calls :func:`count`.
    """
    global _measured
    with _lock:
        if is_measured():
            return
        _measured += 1
        for call, function in functions.items():
            alone = (_counts(function, x), _counts(lambda x, function=function: function(x).view(-1), x))  # type: ignore[misc]
            if call not in _held:
                _held[call] = set(_counts_of_held(function, x))
            for counts in alone:
                before = _alone.get((call, len(counts) > 3), counts)
                _alone[call, len(counts) > 3] = tuple(map(min, before, counts))
            for key in [key for key, counts in _alone.items() if key[0] == call and counts in _held[call]]:
                del _alone[key]


def _is_traced() -> bool:
    return sys.gettrace() is not None or sys.getprofile() is not None


@contextmanager
def _collecting() -> Iterator[list[UseCounts]]:
    counts: list[UseCounts] = []
    _probing.counts = counts
    try:
        yield counts
    finally:
        del _probing.counts


def _counts(step: Callable[[Tensor], Tensor], x: Tensor) -> UseCounts:
    """The counts that the first kernel of the step's backward takes; ``x.grad`` is untouched."""
    with _collecting() as counts:
        unheard_gradient((step(x) * 2.0).sum(), x)
    return counts[0]


def _counts_of_held(function: Callable[[Tensor], Tensor], x: Tensor) -> Iterator[UseCounts]:
    """The same where somebody else holds the gradient, in every way that we know.

    The function is called last, so that its kernel is the first of backward: a later kernel may be the last that holds
    what was shared.
    """
    kept: list[Tensor] = []

    def shared(x: Tensor) -> Tensor:
        other = (x * 2.0).tanh()
        return other + function(x * 1.0)

    def shared_base(x: Tensor) -> Tensor:
        other = (x * 2.0).tanh().view(-1)
        return other + function(x * 1.0).view(-1)

    def hooked(y: Tensor) -> Tensor:
        y.register_hook(kept.append)
        return y

    yield _counts(shared, x)
    yield _counts(lambda x: hooked(function(x)), x)
    yield _counts(lambda x: shared(x).view(-1), x)
    yield _counts(lambda x: hooked(function(x)).view(-1), x)
    yield _counts(shared_base, x)
    yield _counts(lambda x: hooked(function(x).view(-1)), x)
