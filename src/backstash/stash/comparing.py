"""Samples of what a backward pass has made again on a GPU, compared when the pass ends.

Note: [compared at the end]
    To compare numbers on a GPU the host has to wait for all that the GPU was told before, and then the GPU waits for
    the host. So what was made is used at once, and a few of its elements are put aside. The callback that autograd runs
    at the end of a pass compares all of them, and the host waits once for each device. A difference is an error of the
    same pass, as it is on CPU; but its gradients have been computed already.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from backstash.errors import RecomputedDifferentlyError
from backstash.ops.reference import bits_of
from backstash.saved import TensorSpec
from backstash.stash.sample import Sample
from backstash.torch_internals import at_end_of_backward, graph_task

if TYPE_CHECKING:
    from backstash.stash.live import Live
    from backstash.stash.value import Value

AT_ONCE = frozenset({"cpu"})
"""Types of devices whose numbers the host can look at without waiting."""

COMPUTED = "Gradients were computed from it before that was known: do not use those of this backward pass."
"""What an error at the end of a pass says of its gradients."""


class _Pass:
    """What is to be compared at the end of one backward pass. Its callback owns it, and dies with a pass that fails."""

    __slots__ = ("__weakref__", "expected", "failed", "found", "streams")

    def __init__(self) -> None:
        self.found: list[Tensor] = []
        self.expected: list[Tensor] = []
        self.failed: list[Callable[[], str]] = []
        self.streams: set[torch.Stream] = set()  # on which the elements were copied

    def compare(self) -> None:
        """Compares all samples with what was made.

        Raises:
            RecomputedDifferentlyError: one differs.
        """
        for stream in self.streams:
            torch.accelerator.current_stream(stream.device).wait_stream(stream)  # on the device; the host does not wait
        groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for at, found in enumerate(self.found):
            groups.setdefault((found.device, found.dtype), []).append(at)
        unequal: dict[torch.device, list[tuple[list[int], Tensor]]] = {}
        for (device, _), members in groups.items():
            parts = [group[at] for group in (self.found, self.expected) for at in members]
            found, expected = torch.cat(parts).chunk(2)
            unequal.setdefault(device, []).append((members, bits_of(found) != bits_of(expected)))
        for of_device in unequal.values():
            if torch.stack([different.any() for _, different in of_device]).any():  # the host waits here
                members, different = next(pair for pair in of_device if pair[1].any())
                ends = torch.tensor([self.found[at].numel() for at in members], device="cpu").cumsum(0)
                first = int(different.long().argmax())
                raise RecomputedDifferentlyError(self.failed[members[int((ends <= first).sum())]]())


class Comparisons:
    """What a Session compares at the ends of backward passes."""

    def __init__(self) -> None:
        self._passes: WeakValueDictionary[int, _Pass] = WeakValueDictionary()

    def takes(self, sample: Sample, whole: Tensor) -> bool:
        """Whether the sample is to be compared later with that tensor, which a backward pass has just made."""
        return (
            whole.device.type not in AT_ONCE
            and isinstance(sample.bits, Tensor)
            and sample.allows is None
            and sample.bits.numel() > 0
            and whole.dtype is sample.bits.dtype
            and graph_task() != -1
        )

    def add(self, sample: Sample, whole: Tensor, failed: Callable[[], str]) -> None:
        """Compares at the end of the backward pass that runs.

        Args:
            sample: one that :meth:`takes` allows.
            whole: the tensor, which may be overwritten afterwards.
            failed: what is to be said of a difference.

        Raises:
            RecomputedDifferentlyError: the tensor is not even of the same size.
        """
        number = graph_task()
        ours = self._passes.get(number)
        if ours is None:
            ours = self._passes[number] = _Pass()
            at_end_of_backward(ours.compare)
        assert isinstance(sample.bits, Tensor)
        found = sample.elements(whole)
        if found.shape != sample.bits.shape:
            raise RecomputedDifferentlyError(failed())
        picked, sample.picked = sample.picked, None
        ours.found.append(sample.copied(found) if picked is None else picked)
        ours.expected.append(sample.bits)
        ours.failed.append(failed)
        if not whole.is_cpu:
            ours.streams.add(torch.accelerator.current_stream(whole.device))


def check_sample(value: Value, whole: Tensor) -> None:
    """Compares a remade value with its sample, now or at the end of the pass.

    Raises:
        RecomputedDifferentlyError: it has other bits than it had (Note: [samples] in sample.py).
    """
    sample, comparisons, recipe = value.sample, value.live.comparisons, value.recipe
    if sample is None:
        return
    assert recipe is not None
    if comparisons.takes(sample, whole):
        comparisons.add(sample, whole, partial(_distrusted, value.live, value.key, recipe.call.spec, None))
    elif sample.differs(whole):
        raise RecomputedDifferentlyError(_distrusted(value.live, value.key, recipe.call.spec, str(recipe)))


def _distrusted(live: Live, key: str, spec: TensorSpec, recipe: str | None) -> str:
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
