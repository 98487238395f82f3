"""Whether a gradient may be overwritten: only where nobody but the node that received it holds its memory.

Note: [exclusive gradients]
    A gradient may be overwritten when only the node that received it holds it: not the sum that sent it both ways, a
    hook's list, ``autograd.grad`` for a tensor in between, or the caller of backward. All of these hold the tensor, its
    Python object, its storage or the storage's Python object, so four counts tell. A gradient that a reshape made is a
    view that holds its base, of which two more tell; a formula that calls ``grad.contiguous()`` first holds it once
    more. What the counts are when nobody else holds the gradient is measured, on tiny steps, not known.

    A debugger or a profiler may hold what it looks at. Whatever it holds can only raise a count, so the smallest count
    that was ever measured is the one that says "nobody else"; measurements are repeated when further Sessions are
    entered, and while a trace or profile function is set nothing is overwritten.

    Memory that torch did not allocate (``from_numpy``, DLPack, a mapped file) belongs to somebody whom no count shows.
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
from backstash.torch_internals import storage_use_count

Counts = tuple[int, ...]
"""Who holds a tensor: Python and tensor references, and those to its storage; then those to the base of a view."""

Measure = Callable[[Callable[[Tensor], Tensor]], Counts]
"""Runs a tiny step through a function and returns what :func:`count` said in its kernel."""

MEASUREMENTS = 3
"""How often the counts are measured in a process, when that many Sessions are entered."""

_lock = threading.Lock()
_alone: dict[tuple[str, bool], Counts] = {}
_held: dict[str, set[Counts]] = {}
_measured = 0
_probing = threading.local()  # .counts, where the tiny steps run: other threads train meanwhile


def count(grad: Tensor) -> Counts:
    """Who holds ``grad``. All callers are alike: a kernel's first statement, with its first positional argument."""
    storage = grad.untyped_storage()
    counts: Counts = (
        sys.getrefcount(grad),
        grad._use_count(),  # type: ignore[attr-defined]
        storage_use_count(storage._cdata),
        sys.getrefcount(storage),
    )
    base = grad._base
    if base is not None:
        counts += (sys.getrefcount(base), base._use_count())  # type: ignore[attr-defined]
    probe: list[Counts] | None = getattr(_probing, "counts", None)
    if probe is not None:
        probe.append(counts)
    return counts


def is_alone(grad: Tensor, counts: Counts, call: str) -> bool:
    """Whether nobody but the node that runs holds ``grad``, which is dense and fills memory that torch allocated.

    Args:
        grad: the gradient, the first argument of a backward kernel.
        counts: what :func:`count` said of it.
        call: how the formula calls its kernel; one of :data:`CALLS`.
    """
    if counts != _alone.get((call, len(counts) > 4)) or getattr(_probing, "counts", None) is not None:
        return False
    if torch.is_grad_enabled() or _is_traced():
        return False
    storage = grad.untyped_storage()
    if not storage.resizable() or storage.is_shared():
        return False
    return storage.nbytes() == grad.numel() * grad.element_size() and is_dense(tuple(grad.shape), grad.stride())


CALLS = ("relu", "silu", "group_norm", "product")
"""Ways in which formulas call their kernels, named after examples: torch holds the gradient more often in some."""


def measure(x: Tensor, functions: dict[str, Callable[[Tensor], Tensor]]) -> None:
    """Find out what the counts are when nobody else holds a gradient, unless they are known well enough.

    Args:
        x: a tensor that requires grad.
        functions: for each of :data:`CALLS` a function whose kernel calls :func:`count`.
    """
    global _measured
    with _lock:
        if _measured >= MEASUREMENTS or _is_traced():
            return
        _measured += 1
        for call, function in functions.items():
            alone = (_counts(function, x), _counts(lambda x, function=function: function(x).view(-1), x))  # type: ignore[misc]
            if call not in _held:
                _held[call] = set(_counts_of_held(function, x))
            for counts in alone:
                before = _alone.get((call, len(counts) > 4), counts)
                _alone[call, len(counts) > 4] = tuple(map(min, before, counts))
            for key in [key for key, counts in _alone.items() if key[0] == call and counts in _held[call]]:
                del _alone[key]


def _is_traced() -> bool:
    return sys.gettrace() is not None or sys.getprofile() is not None


@contextmanager
def _collecting() -> Iterator[list[Counts]]:
    counts: list[Counts] = []
    _probing.counts = counts
    try:
        yield counts
    finally:
        del _probing.counts


def _counts(step: Callable[[Tensor], Tensor], x: Tensor) -> Counts:
    """What the first kernel of the step's backward says; ``x.grad`` is untouched."""
    with _collecting() as counts:
        torch.autograd.grad((step(x) * 2.0).sum(), x)
    return counts[0]


def _counts_of_held(function: Callable[[Tensor], Tensor], x: Tensor) -> Iterator[Counts]:
    """The same where somebody else holds the gradient.

    The function is called last, so that its kernel is the first: a later one may be the last to hold what was shared.
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
