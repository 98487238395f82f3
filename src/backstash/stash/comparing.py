"""Samples of what a backward pass has made again on a GPU, compared when the pass ends.

Note: [compared at the end]
    To compare numbers on a GPU the host has to wait for all that the GPU was told before, and then the GPU waits for
    the host. So what was made is used at once, and a few of its elements are put aside. The callback that autograd runs
    at the end of a pass has the device compare all of them, and copies the outcome while the host goes on. A difference
    is an error of the same pass if the outcome is there by then. Else it is an error of whatever the Session is asked
    next: the next backward pass, the report, and at the latest the first call of the next step, which waits for it.
    Gradients have been computed by then, and an optimizer may have used them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from backstash import codecs, graphs, ops
from backstash.errors import BackstashError, DamagedPlanesError, RecomputedDifferentlyError
from backstash.saved import TensorSpec
from backstash.torch_internals import at_end_of_backward, graph_task

if TYPE_CHECKING:
    from backstash.remake.recipes import Recipe
    from backstash.stash.live import Live
    from backstash.stash.sample import Sample
    from backstash.stash.value import Value

AT_ONCE = frozenset({"cpu"})
"""Types of devices whose numbers the host can look at without waiting."""

Late = tuple[Tensor, Tensor, Callable[[], str]]
"""Elements of what was made again, the same of what it was made from, and what is to be said of a difference."""

COMPUTED = "Gradients were computed from it before that was known: do not use those of the backward pass that read it."
"""What an error at or after the end of a pass says of its gradients."""


class _Pass:
    """What is to be compared at the end of one backward pass. Its callback owns it, and dies with a pass that fails."""

    __slots__ = ("__weakref__", "expected", "failed", "found", "late", "outcomes", "streams")

    def __init__(self, outcomes: deque[_Outcome]) -> None:
        self.outcomes = outcomes
        self.late: dict[Any, Callable[[], list[Late]]] = {}  # which return what others keep until the end
        self.found: list[Tensor] = []
        self.expected: list[Tensor] = []
        self.failed: list[Callable[[], str]] = []
        self.streams: set[torch.Stream] = set()  # on which the elements were copied

    def compare(self) -> None:
        """Has all samples compared with what was made."""
        for remade, sample, said in [each for late in self.late.values() for each in late()]:
            self.found.append(remade)
            self.expected.append(sample)
            self.failed.append(said)
        for stream in self.streams:
            torch.accelerator.current_stream(stream.device).wait_stream(stream)  # on the device; the host does not wait
        groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for at, found in enumerate(self.found):
            groups.setdefault((found.device, found.dtype), []).append(at)
        for members in groups.values():
            found, expected = torch.cat([group[at] for group in (self.found, self.expected) for at in members]).chunk(2)
            ends = list(accumulate(self.found[at].numel() for at in members))
            failed = [self.failed[at] for at in members]
            _tell(self.outcomes, ops.bits_of(found) != ops.bits_of(expected), ends, failed)


class _Outcome(NamedTuple):
    """What a comparison of many samples will tell.

    Attributes:
        numbers: whether anything differs, and the first element that does.
        ends: behind which element each sample ends.
        failed: of each, what is to be said of a difference.
        error: the class of the error.
    """

    numbers: codecs.numbers.Numbers
    ends: list[int]
    failed: list[Callable[[], str]]
    error: type[BackstashError]

    def check(self) -> None:
        """Raises the error if a sample differs. The host waits if that is not known yet."""
        error = _error(self.ends, self.failed, self.error, self.numbers.get())
        if error is not None:
            try:
                raise error
            finally:
                del error  # or the frame and the error would hold each other, and the pass


def _error(
    ends: list[int], failed: list[Callable[[], str]], kind: type[BackstashError], numbers: list[int]
) -> BackstashError | None:
    differs, first = numbers
    return kind(failed[bisect_right(ends, first)]()) if differs else None


def _tell(
    outcomes: deque[_Outcome],
    different: Tensor,
    ends: list[int],
    failed: list[Callable[[], str]],
    kind: type[BackstashError] = RecomputedDifferentlyError,
) -> None:
    """Has the host find out later whether anything is true in ``different``, [n], by an outcome or by a graph.

    Args:
        outcomes: where the outcome goes, unless the step is captured.
        different: on an accelerator.
        ends, failed, kind: as the outcome's attributes ``ends``, ``failed`` and ``error``.
    """
    flags = different.view(torch.uint8)
    numbers = torch.cat((flags.amax(0, keepdim=True), flags.argmax(0, keepdim=True)))
    captured = graphs.capture()
    if captured is None:
        outcomes.append(_Outcome(codecs.numbers.Numbers(numbers), ends, failed, kind))
    else:
        captured.expect(numbers, partial(_error, ends, failed, kind))


class Comparisons:
    """What a Session compares at the ends of backward passes."""

    def __init__(self) -> None:
        self._passes: WeakValueDictionary[int, _Pass] = WeakValueDictionary()
        self._outcomes: deque[_Outcome] = deque()

    def check(self, waits: bool = False) -> None:
        """Looks at the outcomes of earlier passes, as far as the host has them.

        Args:
            waits: whether it waits for those that it has not.

        Raises:
            RecomputedDifferentlyError: a sample differs.
            DamagedPlanesError: what was decoded is damaged.
        """
        if graphs.capture() is not None:
            return
        while self._outcomes and (waits or self._outcomes[0].numbers.have_arrived()):
            self._outcomes.popleft().check()

    def _end(self, ours: _Pass) -> None:
        ours.compare()
        self.check()

    def takes(self, sample: Sample, whole: Tensor) -> bool:
        """Whether the sample is to be compared later with that tensor, which was just made."""
        return (
            whole.device.type not in AT_ONCE
            and isinstance(sample.bits, Tensor)
            and sample.allows is None
            and sample.bits.numel() > 0
            and whole.dtype is sample.bits.dtype
        )

    def add(self, sample: Sample, whole: Tensor, failed: Callable[[], str]) -> None:
        """Compares at the end of the backward pass that runs, or now if none does. The host does not wait.

        Args:
            sample: one that :meth:`takes` allows.
            whole: the tensor, which may be overwritten afterwards.
            failed: what is to be said of a difference.

        Raises:
            RecomputedDifferentlyError: the tensor is not even of the same size.
        """
        assert isinstance(sample.bits, Tensor)
        found = sample.elements(whole)
        if found.shape != sample.bits.shape:
            raise RecomputedDifferentlyError(failed())
        picked, sample.picked = sample.picked, None
        number = graph_task()
        if number == -1:
            self.add_different(ops.bits_of(found) != ops.bits_of(sample.bits), failed)
            return
        ours = self._pass(number)
        ours.found.append(sample.copied(found) if picked is None else picked)
        ours.expected.append(sample.bits)
        ours.failed.append(failed)
        if not whole.is_cpu:
            ours.streams.add(torch.accelerator.current_stream(whole.device))

    def expect(self, number: int, late: Callable[[int], list[Late]]) -> None:
        """What ``late`` returns is compared as well when that backward pass ends; the current stream has copied it."""
        ours = self._pass(number)
        ours.late[late] = partial(late, number)
        ours.streams.add(torch.accelerator.current_stream())

    def _pass(self, number: int) -> _Pass:
        ours = self._passes.get(number)
        if ours is None:
            self.check()
            ours = self._passes[number] = _Pass(self._outcomes)
            at_end_of_backward(partial(self._end, ours))
        return ours

    def add_different(self, different: Tensor, failed: Callable[[], str]) -> None:
        """Has it found out later whether anything is true in ``different``, [n], which is an error.

        Args:
            different: on an accelerator.
            failed: what is to be said then.
        """
        _tell(self._outcomes, different, [different.numel()], [failed])
        self.check()

    def add_damage(self, flag: Tensor, failed: Callable[[], str]) -> None:
        """Has it found out later whether what was decoded is damaged: whether ``flag``, [1], is not 0."""
        _tell(self._outcomes, flag != 0, [1], [failed], DamagedPlanesError)
        self.check()


def check_sample(value: Value, whole: Tensor) -> None:
    """Compares a remade value with its sample, now or at the end of the pass.

    Raises:
        RecomputedDifferentlyError: it has other bits than it had (Note: [samples] in sample.py).
    """
    recipe = value.state.recipe
    if recipe is not None and is_other(value, whole):
        raise RecomputedDifferentlyError(distrusted(value.live, value.key, recipe.call.spec, str(recipe)))


def is_other(value: Value, whole: Tensor) -> bool:
    """Whether a remade value has other bits than its sample; False where that is told at the end of the pass."""
    state, comparisons = value.state, value.live.comparisons
    sample, recipe = state.sample, state.recipe
    if sample is None or recipe is None:
        return False
    if comparisons.takes(sample, whole):
        comparisons.add(sample, whole, partial(distrusted, value.live, value.key, recipe.call.spec, None))
        return False
    return sample.differs(whole)


def check_again(value: Value, recipe: Recipe, different: Tensor) -> None:
    """Has an error raised if a recipe that was proven before makes other bits now.

    Args:
        value: what it makes.
        recipe: the recipe.
        different: which bits differ, on an accelerator.
    """
    value.live.comparisons.add_different(different, partial(distrusted, value.live, value.key, recipe.call.spec, None))


def distrusted(live: Live, key: str, spec: TensorSpec, recipe: str | None) -> str:
    """Distrusts a recipe from now on, all of a value's where it is None, and returns what is to be said."""
    live.distrusted.add((key, recipe))
    return (
        f"backward needs {key} ({spec}), which was to be computed again{'' if recipe is None else f' by {recipe}'}, "
        f"but the result has other bits than the value had in the forward pass: what it is computed from, or the value "
        f"itself, was changed where the Session could not see it (through a pointer, by an extension, outside of "
        f"the Session). {COMPUTED if recipe is None else 'No gradient was computed from it.'} Change a copy instead, "
        f"or use a policy without recomputation, such as backstash.policies.lossless(recompute=False); from the next "
        f"step on this value is stored."
    )
