"""``bs.verify``: runs a step as it is and without savers, and compares what backward gets with what forward had."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.utils.checkpoint import CheckpointError

from backstash.arguments import check_model, check_step
from backstash.capture.naming import tensors_within
from backstash.errors import MeasureError
from backstash.rewrites.state import Generators, State, StepState
from backstash.torch_internals import gradient_of
from backstash.verifying.checksum import checksum, numbers_of, why_unchecked
from backstash.verifying.facts import generator_digests
from backstash.verifying.gradients import first_unequal, gradient_errors, state_sums
from backstash.verifying.observing import ObservedRun
from backstash.verifying.reference import Reference
from backstash.verifying.runlog import RunLog
from backstash.verifying.verdict import Verification, judge, needs_closer_look
from backstash.verifying.watch import WatchedRun

IN_PLACE = "modified by an inplace operation"

MOST_TRACED = 8
"""Of how many differing values the regions are looked into."""


def verify(
    step: Callable[[], object], model: nn.Module | None = None, *, tolerance: float = 0.0, name: str = "step"
) -> Verification:
    """Checks that backward reads the bits that forward had, under whatever stores or recomputes them.

    The step runs twice from the same state: as it is, with the checksum of every saved tensor compared, and with every
    checkpoint, offloader and Session switched off, whose gradients are compared. If anything differs, both run once
    more to say where, how far and why. Afterwards everything that the step reaches is as it was before, as after
    :func:`backstash.profile`.

    Args:
        step: runs forward and backward, such as ``lambda: criterion(model(x), y).backward()``. Optimizers may step in
            it.
        model: the model that it trains. Without it, the modules that the step calls outermost are taken.
        tolerance: relative error up to which hooks may round the values that they store.
        name: of the step in the report.

    Raises:
        MeasureError: the step ran no backward pass.
        TypeError: ``step`` cannot be called without arguments, ``model`` is no module, or ``name`` is no text.
        ValueError: ``tolerance`` is no number from 0 to 1.

    Example:
        >>> import torch
        >>> from torch.utils.checkpoint import checkpoint
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        >>> x = torch.ones(4, 8, requires_grad=True)
        >>> options = {"use_reentrant": False, "preserve_rng_state": False}
        >>> found = verify(lambda: checkpoint(model, x, **options).sum().backward())
        >>> found.verdict, found.findings[0].cause.kind
        ('differs', 'generator')
    """
    check_step(step, "verify")
    is_number = isinstance(tolerance, (int, float)) and not isinstance(tolerance, bool)
    if not (is_number and 0.0 <= tolerance <= 1.0):  # NaN is not
        raise ValueError(
            f"verify was asked for tolerance={tolerance!r:.80}, but it takes the relative error up to which hooks may "
            f"round: a number from 0 to 1."
        )
    if not isinstance(name, str):
        raise TypeError(
            f"verify was asked for name={name!r:.80}, but it takes a text that names the step in the report."
        )
    if model is not None:
        check_model(model, "verify", ", or None for the modules that the step calls")
    with _Repeated(step, [] if model is None else [model]) as repeated:
        watch = WatchedRun()
        watched = repeated.run(watch)
        if not watched.passes:
            raise MeasureError(
                "verify was asked for a step, but it ran no backward pass. Pass a function that runs forward and "
                "backward, such as lambda: criterion(model(x), y).backward()."
            )
        reference = repeated.run_plainly(watched.recomputing)
        compiled = rounds_otherwise(watched, reference.log)
        if compiled:
            reference = repeated.run_plainly(watched.recomputing, compiled=True)
        if not _any_rank(needs_closer_look(watched, reference.log)):
            return judge(name, watched, reference.log)
        differing = first_unequal(watched.gradients, reference.log.gradients)
        look = repeated.look_closer(watched, differing)
        if _any_rank(bool(look.log.differing and not watched.differing)):  # in regions that are known as such only now
            watched = look.log
            look = repeated.look_closer(watched, differing)
        again = repeated.run_plainly(watched.recomputing, differing, compiled)
        errors = gradient_errors(look.gradients, again.gradients)
        return judge(name, watched, reference.log, look.log, again.log, errors, tolerance)


def _any_rank(asked: bool) -> bool:
    """Whether any rank asks for a run: all have to make it, because they wait for each other in it."""
    if not _is_distributed():
        return asked
    answers: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(answers, asked)
    return any(answers)


def _is_distributed() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def looked_at(watched: RunLog) -> tuple[list[int], list[int]]:
    """Numbers of the values that are kept, and of the regions whose operations are written down, in a closer look.

    The run without savers has held more: all values, and not only those that differ.
    """
    regions = {each.region for each in watched.differences[:MOST_TRACED] if each.region is not None}
    if watched.error is not None:  # a checkpoint has noticed something by itself, in any of them
        regions |= {each.number for each in watched.regions if each.runs_again}
    return [each.number for each in watched.differences], sorted(regions)


def rounds_otherwise(watched: RunLog, reference: RunLog) -> bool:
    """Whether compiled kernels gave forward other bits than eager mode has (Note: [savers switched off])."""
    return bool(watched.compiled) and watched.results != reference.results


class _Repeated:
    """Inside the ``with``, a step runs again and again from the same state, which is restored at the end."""

    def __init__(self, step: Callable[[], object], models: list[nn.Module]) -> None:
        self._step, self._models = step, models
        self._found: dict[int, State] = {}
        self._leaves: list[Tensor] = []
        self._sharded: list[nn.Module] = []
        self._buffers: list[tuple[Tensor, Tensor]] = []
        self._aside: list[tuple[Tensor, Tensor | None]] = []

    def __enter__(self) -> _Repeated:
        self._generators = Generators()
        return self

    def __exit__(self, *error: Any) -> None:
        self._restore()
        for parameter, gradient in self._aside:
            parameter.grad = gradient

    def _undone(self) -> AbstractContextManager[Any]:
        """What undoes a run. A sharded model keeps its own account of what is where, which is not to be touched.

        So of a distributed program only buffers, gradients and generators are put back.
        """
        if _is_distributed():
            return nullcontext()
        return StepState(self._step, self._models)

    def _restore(self) -> None:
        """Puts back what was found in the first run, when something may have been drawn or written already."""
        for state in self._found.values():
            state.restore()
        with torch.no_grad():
            for buffer, content in self._buffers:
                buffer.copy_(content)
        self._generators.restore()

    def run_plainly(self, recomputing: list[str], keep_pass: int | None = None, compiled: bool = False) -> Reference:
        """Runs the step without savers. If it cannot go backward without them, autograd saves copies.

        A saver that copies, or that hides a version, lets a program go on which changes saved values in place.
        """
        under = Reference(recomputing, keep_pass, compiled)
        try:
            self.run(under)
        except RuntimeError as error:
            if IN_PLACE not in str(error):
                raise
            under = Reference(recomputing, keep_pass, compiled, copies=True)
            self.run(under)
        return under

    def look_closer(self, watched: RunLog, keep_pass: int | None) -> WatchedRun:
        """Runs the step with what is needed to describe the differences of a run."""
        under = WatchedRun(*looked_at(watched), watched.recomputing, keep_pass)
        self.run(under)
        return under

    def run(self, under: ObservedRun) -> RunLog:
        """Runs the step once and returns the record."""
        self._restore()
        under.paths.found_root = self._note
        with self._undone():
            gradients = [(leaf, gradient_of(leaf)) for leaf in self._leaves]
            for state in self._found.values():
                state.set_gradients_aside()
            for leaf in self._leaves:
                leaf.grad = None
            try:
                returned = None
                try:
                    with under:
                        returned = self._step()
                except RuntimeError as error:  # a checkpoint's own error tells less than what is found
                    if not under.log.differing and not isinstance(error, CheckpointError):
                        raise
                self._note_end(under, returned)
            finally:
                self._leaves = [x for _, x in under.paths.parameters()]
                for state in self._found.values():
                    state.restore_gradients()
                for leaf, gradient in gradients:
                    leaf.grad = gradient
        return under.log

    def _note_end(self, under: ObservedRun, returned: object) -> None:
        tensors = [x for x in tensors_within(returned) if why_unchecked(x) is None]
        under.log.returned = numbers_of([checksum(x) for x in tensors])
        under.log.state = state_sums(under.paths)
        under.log.generators = generator_digests()

    def _note(self, module: nn.Module) -> None:
        """Notes the state of a module that is called outermost for the first time."""
        if _is_distributed():
            if module not in self._sharded:
                self._sharded.append(module)
                self._buffers += [(each, each.detach().clone()) for each in module.buffers()]
                self._aside += [(each, gradient_of(each)) for each in module.parameters()]
                for parameter, _ in self._aside:
                    parameter.grad = None
            return
        known = {id(each) for model in self._models for each in model.modules()}
        if id(module) not in known and id(module) not in self._found:
            self._found[id(module)] = state = State(module)
            state.set_gradients_aside()
