"""Watches a run: of every tensor that autograd saves, forward's checksum is compared with what backward gets.

Note: [everybody's hooks]
    Only the innermost pair of saved-tensor hooks runs, so a pair of our own around the program would see nothing of
    what a checkpoint or an offloader stores. Therefore every pair that the program installs is wrapped: its pack hook
    is given the same tensor, and what its unpack hook returns goes on to backward; the wrapper only sums both. Around
    the program lies a plain pair of our own, for what nobody else stores. It does what autograd does without hooks, and
    raises the same error for a tensor that was changed in place.

Note: [reentrant regions]
    ``checkpoint(use_reentrant=True)`` saves nothing in forward. What can be compared are the results of its function
    and of the modules in it, in forward and in the recomputation, in their order.

Note: [no waits]
    Checksums of tensors on an accelerator stay there, and are compared at the end of each backward pass, with one wait
    for all of them. No tensor is held: what is kept of a value are its checksum and some facts.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from backstash.capture import checkpoints, transforms
from backstash.capture.naming import saved_attributes, tensors_within
from backstash.redeem.install import prepare
from backstash.saved import is_tensor
from backstash.session import Session
from backstash.torch_internals import (
    ReentrantCheckpoint,
    checkpoint_argument,
    checkpoint_frame,
    checkpointed_arguments,
    function_apply,
    hide_from_dynamo,
    in_backward,
    is_traced,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    recomputed_frame,
    remove_saved_tensor_hooks,
    replace_recomputed,
    running_node,
    saved_tensor_hooks,
    unseen_by_modes,
    without_gradients,
    wrapped_backward_engine,
)
from backstash.verifying.checksum import Checksum, checksum, numbers_of, why_unchecked
from backstash.verifying.detail import compared
from backstash.verifying.facts import Change, Facts, Written, changes, generator_digests, moved_generators
from backstash.verifying.observing import ObservedRun, is_compiling, name_of_class, replaced
from backstash.verifying.operations import OperationLog, first_different_operation
from backstash.verifying.paths import address_of
from backstash.verifying.runlog import MOST_DIFFERENCES, RegionLog, ValueDifference

_UNREAD = ("running_mean", "running_var")
"""Roles of what batch norm saves and does not read: its backward in training reads the batch's statistics."""

WITHOUT_REENTRANCE = "checkpoint(use_reentrant=False)"
AUTOGRAD, CHECKPOINT = "autograd", "checkpoint"


@dataclass(slots=True, eq=False)
class WatchedValue:
    """What is kept of a value from forward to backward; the numbers are those of :class:`ValueDifference`."""

    number: int
    path: str
    owner: str
    region: WatchedRegion | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    sum: Checksum
    producer: str | None = None
    version: int = 0
    address: int = 0
    op: str = ""
    role: str = ""
    kept: Tensor | None = None


class _Plain:
    """What our own pack hook returns: the tensor, as autograd holds it without hooks."""

    __slots__ = ("tensor", "value", "version")

    def __init__(self, tensor: Tensor, value: WatchedValue | None, version: int) -> None:
        self.tensor, self.value, self.version = tensor, value, version


class _Packed:
    """What a wrapped pack hook returns: what the program's own hook has returned, and the value."""

    __slots__ = ("__weakref__", "packed", "value")

    def __init__(self, packed: Any, value: WatchedValue | None) -> None:
        self.packed, self.value = packed, value


class WatchedRegion:
    """A region that backward computes again, from forward on."""

    def __init__(self, log: RegionLog) -> None:
        self.log = log
        self.before: Facts | None = None
        self.modules: dict[int, tuple[str, nn.Module]] = {}
        self.inputs: list[tuple[str, Tensor]] = []
        self.written: Written | None = None
        self.changed: list[Change] = []
        self.results: list[WatchedValue] = []
        self.operations: OperationLog | None = None
        self.is_recomputing = False
        self.cursor = 0

    def end_forward(self) -> None:
        """Forward has left the region."""
        if self.before is not None:
            self.log.draws = moved_generators(self.before.generators, generator_digests())
        self.written = Written(self.modules.values(), self.inputs)
        self.inputs, self.modules = [], {}

    def begin_again(self) -> None:
        """The region is computed again."""
        self.log.runs_again += 1
        self.is_recomputing, self.cursor = True, 0
        if self.log.runs_again > 1 or self.before is None:
            return
        self.changed = changes(self.before, Facts.here())
        if not self.log.draws:  # whose states cannot matter
            self.changed = [each for each in self.changed if each.kind != "generator"]
        if self.written is not None:
            self.changed += self.written.changed()
        self.written = None


class WatchedRun(ObservedRun):
    """Inside the ``with``, values are compared.

    Args:
        kept: numbers of values, of which a copy is kept from forward to backward, to compare elements.
        traced: numbers of regions whose operations are written down.
        recomputing: names of custom autograd functions whose callable arguments are regions.
        keep_pass: as in ObservedRun.
    """

    def __init__(
        self,
        kept: Collection[int] = (),
        traced: Collection[int] = (),
        recomputing: Collection[str] = (),
        keep_pass: int | None = None,
    ) -> None:
        super().__init__(recomputing, keep_pass)
        self._kept, self._traced = frozenset(kept), frozenset(traced)
        self._count = 0
        self._frames: weakref.WeakKeyDictionary[Any, WatchedRegion] = weakref.WeakKeyDictionary()
        self._read: list[tuple[WatchedValue, Checksum, str, int, dict[str, Any]]] = []
        self._operations: dict[int, dict[str, str]] = {}
        self._compiled: set[int] = set()
        self._lock = threading.Lock()
        self._pack: Any = self._pack_plainly()
        self._differences: list[ValueDifference] = []

    # -- entering and leaving ------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        prepare()  # a Session inside could not measure, because our hooks lie around it
        return super().__enter__()

    def _install(self, undo: ExitStack) -> None:
        undo.enter_context(wrapped_backward_engine(self._go_backward))
        undo.enter_context(replaced(Session, "__enter__", self._noting_sessions()))
        undo.callback(remove_saved_tensor_hooks, self._pack)
        push_saved_tensor_hooks(self._pack, self._unpack_plain)
        undo.callback(transforms.dismiss, self)
        transforms.admit(self)
        undo.callback(checkpoints.dismiss, self)
        checkpoints.admit(self, self._pack)

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self.flush()
        self.finish()

    def step_aside(self) -> bool:
        """Takes the plain pair away for a transform that refuses hooks; returns whether it was the innermost."""
        top = saved_tensor_hooks(True)
        if top is None or top[0] is not self._pack:
            return False
        pop_saved_tensor_hooks()
        return True

    def step_back(self) -> None:
        """Puts the plain pair back."""
        push_saved_tensor_hooks(self._pack, self._unpack_plain)

    def _noting_sessions(self) -> Callable[[Session], Session]:
        original = Session.__enter__

        def enter(session: Session) -> Session:
            name, is_exact = _described(session)
            self.log.sessions[name] = is_exact
            return original(session)

        return enter

    # -- hooks ---------------------------------------------------------------------------------------------------

    def _pack_plainly(self) -> Callable[[Tensor], _Plain]:
        def pack(x: Tensor) -> _Plain:
            value = self._note(x, AUTOGRAD, None)
            return _Plain(x.detach(), value, 0 if x.is_inference() else x._version)

        pack.only_observes = True  # type: ignore[attr-defined]  # so that a Session may be opened inside
        hide_from_dynamo(pack)
        return pack

    def _unpack_plain(self, packed: _Plain) -> Tensor:
        x = packed.tensor
        written = 0 if x.is_inference() else x._version - packed.version
        self._compare(packed, packed.value, x, written)
        if written:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{x.type()} {list(x.shape)}] is at version {x._version}; expected version {packed.version} instead."
            )
        return x

    def _push(self, pack: Any, unpack: Any) -> None:
        push, _ = self._before
        is_compilers = isinstance(pack, torch.fx.GraphModule) or is_compiling()
        # The values of a frame that is computed again were noted in forward, and go on from there.
        if is_compilers or recomputed_frame(pack) is not None:
            push(pack, unpack)
            self._here.stack.append(None)
            return
        frame = checkpoint_frame(pack)
        region = None if frame is None else self._begin_checkpoint(frame)
        owner = CHECKPOINT if frame is not None else _owner(pack)
        self._here.stack.append(region)

        def packed(x: Tensor) -> _Packed:
            return _Packed(pack(x), self._note(x, owner, region))

        def unpacked(kept: _Packed) -> Any:
            x = unpack(kept.packed)
            if is_tensor(x):
                self._compare(kept, kept.value, x, _writes(kept.value, x))
            return x

        hide_from_dynamo(packed)
        hide_from_dynamo(unpacked)
        push(packed, unpacked)
        if region is not None and region.operations is not None:
            region.operations.__enter__()

    def _pop(self) -> None:
        stack = self._here.stack
        region = stack.pop() if stack else None
        if region is not None:
            if region.operations is not None:
                region.operations.__exit__(None, None, None)
            region.end_forward()
        self._before[1]()

    # -- regions -------------------------------------------------------------------------------------------------

    def _new_region(self, kind: str) -> WatchedRegion:
        with self._lock:
            log = RegionLog(len(self.log.regions), self.paths.current, kind)
            self.log.regions.append(log)
        region = WatchedRegion(log)
        if log.number in self._traced:
            region.operations = self._new_operations(region)
        return region

    def _new_operations(self, region: WatchedRegion) -> OperationLog:
        def name(x: Tensor) -> str | None:
            address = x.data_ptr()
            for label, each in region.inputs:
                if each.data_ptr() == address:
                    return label
            return self.paths.name_of_memory(address)

        return OperationLog(lambda: self.paths.current, name)

    def _begin_checkpoint(self, frame: Any) -> WatchedRegion:
        region = self._new_region(WITHOUT_REENTRANCE)
        region.before = Facts.here()
        region.log.keeps_generators = checkpoint_argument(frame, "preserve_rng_state")
        context = checkpoint_argument(frame, "recompute_context")
        region.log.selective = context is not None and type(context).__name__ != "nullcontext"
        region.inputs = [named for label, each in checkpointed_arguments() for named in _labelled(label, each)]
        self._frames[frame] = region
        function = checkpoint_argument(frame, "fn")

        def again(*args: Any, **kwargs: Any) -> Any:
            with self._computing_again(region, args):
                return function(*args, **kwargs)

        replace_recomputed(frame, again)
        return region

    @contextmanager
    def _computing_again(self, region: WatchedRegion, args: Any) -> Iterator[None]:
        """Inside, a region is computed again, the first time with its operations, if forward wrote them down."""
        region.begin_again()
        log = None if region.operations is None or region.log.runs_again > 1 else self._new_operations(region)
        try:
            if log is not None:
                region.inputs = _named(args)
            with log or nullcontext():
                yield
        finally:
            region.inputs = []
            region.is_recomputing = False
            self._explain(region, log)

    def _explain(self, region: WatchedRegion, again: OperationLog | None) -> None:
        """Notes the first operation of a region that differs."""
        if again is None or region.operations is None:
            return
        found = first_different_operation(region.operations.operations, again.operations)
        region.operations = None
        if found is not None:
            self._operations[region.log.number] = asdict(found)
            self.log.changed[str(region.log.number)] = _listed(region.changed)

    def _apply(self, cls: Any, *args: Any, **kwargs: Any) -> Any:
        """In the place of ``Function.apply``: callables that will be called again in backward are regions."""
        original = function_apply.__get__(None, cls)
        if is_compiling() or not torch.is_grad_enabled():
            return original(*args, **kwargs)
        if cls is ReentrantCheckpoint:
            region = self._new_region("checkpoint(use_reentrant=True)")
            region.log.keeps_generators = bool(args[1])
            region.inputs = _named(args[2:])
            return original(_RegionFunction(self, region, args[0]), *args[1:], **kwargs)
        name = name_of_class(cls)
        if name in self._recomputing:
            given = []
            for each in args:
                if callable(each) and not isinstance(each, (type, Tensor)):
                    region = self._new_region(name)
                    each = _RegionFunction(self, region, each)
                given.append(each)
            return original(*given, **kwargs)
        return original(*args, **kwargs)

    def _go_backward(self, engine: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """In the place of the engine: notes custom functions that go backward in their backward."""
        node = running_node()
        function = getattr(type(node), "_forward_cls", None) if node is not None else None
        if function is not None and function is not ReentrantCheckpoint:
            name = name_of_class(function)
            if name not in self.log.recomputing:
                self.log.recomputing.append(name)
        return engine(*args, **kwargs)

    def run_region(self, region: WatchedRegion, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs the function of a reentrant region, in forward and then again."""
        stack, is_first = self._here.stack, region.before is None
        stack.append(region)
        try:
            if is_first:
                region.before = Facts.here()
                if region.operations is not None:
                    region.inputs = _named(args)
                with region.operations or nullcontext():
                    found = function(*args, **kwargs)
                self._note_result(region, "", found)
            else:
                with self._computing_again(region, args):
                    found = function(*args, **kwargs)
                    self._note_result(region, "", found)
            return found
        finally:
            stack.pop()
            if is_first:
                region.end_forward()
            else:
                region.results = []

    def _note_result(self, region: WatchedRegion, path: str, result: Any) -> None:
        """Compares a result of a reentrant region with that of forward, or notes it (Note: [reentrant regions])."""
        for x in tensors_within(result):
            if why_unchecked(x) is not None:
                continue
            found = checksum(x)
            if not region.is_recomputing:
                value = self._new_value(x, path, CHECKPOINT, region, found)
                value.op, value.role = "Module" if path else "Region", "output"
                region.results.append(value)
            elif region.log.runs_again == 1 and region.cursor < len(region.results):
                value = region.results[region.cursor]
                value.device = x.device
                region.cursor += 1
                region.log.compared += 1
                detail = {} if value.kept is None else _unseen(value.kept, x)
                self._read.append((value, found, _got(value, x), 0, detail))

    def _new_value(
        self, x: Tensor, path: str, owner: str, region: WatchedRegion | None, total: Checksum
    ) -> WatchedValue:
        number, self._count = self._count, self._count + 1
        value = WatchedValue(number, path, owner, region, tuple(x.shape), x.dtype, x.device, total)
        value.kept = _copy(x) if number in self._kept else None
        return value

    # -- values --------------------------------------------------------------------------------------------------

    def _note(self, x: Tensor, owner: str, region: WatchedRegion | None) -> WatchedValue | None:
        if is_compiling():
            return None
        reason = why_unchecked(x)
        if reason is not None:
            self.log.unchecked[reason] = self.log.unchecked.get(reason, 0) + 1
            return None
        value = self._new_value(x, self.paths.current, owner, region, checksum(x))
        value.producer = None if x.grad_fn is None else _short_name(x.grad_fn)
        value.version = 0 if x.is_inference() else x._version
        value.address = address_of(x)
        return value

    def _compare(self, packed: Any, value: WatchedValue | None, x: Tensor, written: int) -> None:
        if value is None or is_traced():
            return
        value.op, value.role = self._reader(packed)
        if value.role in _UNREAD:
            return
        if why_unchecked(x) is not None:
            return
        detail = {}
        if value.kept is not None and value.kept.device == x.device:
            detail = _unseen(value.kept, x)
        self._read.append((value, checksum(x), _got(value, x), written, detail))

    def _reader(self, packed: Any) -> tuple[str, str]:
        """The node that reads a value now, and what it calls it."""
        node = running_node()
        if node is None:
            return "?", "?"
        name = _short_name(node)
        if name == "CompiledFunction" and id(node) not in self._compiled:
            self._compiled.add(id(node))
            self.log.compiled += 1
        for attribute, role in saved_attributes(type(node)):
            try:
                raw = getattr(node, attribute)
            except RuntimeError:
                break
            for place, each in enumerate(raw if isinstance(raw, (tuple, list)) else (raw,)):
                try:
                    data = getattr(each, "data", None)
                except RuntimeError:
                    continue
                if data is packed:
                    return name, f"saved tensor {place}" if role == "tensors" else role
        return name, "?"

    # -- modules and passes --------------------------------------------------------------------------------------

    def _entered(self, module: nn.Module, args: Any) -> None:
        for region in reversed(self._here.stack):
            if region is not None and not region.is_recomputing:
                region.modules[id(module)] = self.paths.current, module
        if self.paths.depth == 1 and not in_backward():
            top = saved_tensor_hooks(True)
            if top is not None and top[0] is self._pack:
                transforms.admit(self)  # again, because a Session that was open meanwhile has dismissed itself

    def _leaving(self, module: nn.Module, output: Any) -> None:
        for region in self._here.stack:
            if region is not None and region.log.kind != WITHOUT_REENTRANCE and output is not None:
                self._note_result(region, self.paths.current or type(module).__name__, output)

    def begin_backward(self, tensors: Any) -> None:
        """A backward pass begins."""
        self._compiled.clear()
        super().begin_backward(tensors)

    def end_backward(self) -> None:
        """A backward pass has ended."""
        self.flush()
        super().end_backward()

    def fail_backward(self) -> None:
        """A backward pass has raised."""
        self.flush()

    def flush(self) -> None:
        """Compares what backward has read so far."""
        read, self._read = self._read, []
        forward = numbers_of([value.sum for value, *_ in read])
        backward = numbers_of([total for _, total, *_ in read])
        by_sum: dict[int, WatchedValue] = {}
        if any(one != two for one, two in zip(forward, backward, strict=True)):
            by_sum = {total: value for total, (value, *_) in zip(forward, read, strict=True)}
        for (value, _, got, written, detail), one, two in zip(read, forward, backward, strict=True):
            self.log.values += 1
            self.log.nbytes += value.dtype.itemsize * math.prod(value.shape)
            self.log.owners[value.owner] = self.log.owners.get(value.owner, 0) + 1
            if one != two or got:
                self.log.differing += 1
                found = ValueDifference(
                    number=value.number,
                    backward=self.log.passes - 1,
                    path=value.path,
                    op=value.op,
                    role=value.role,
                    shape=list(value.shape),
                    dtype=str(value.dtype).removeprefix("torch."),
                    owner=value.owner,
                    producer=value.producer,
                    forward_sum=one,
                    backward_sum=two,
                    got=got,
                    version=written,
                    detail=detail,
                )
                other, region = by_sum.get(two), value.region
                if other is not None and other is not value and other.sum != value.sum and one != two:
                    found.same_as = f"{other.path}/{other.op}:{other.role}"
                if region is not None:
                    found.region, found.changed = region.log.number, _listed(region.changed)
                self._differences.append(found)
        self._differences.sort(key=lambda each: each.number)
        del self._differences[MOST_DIFFERENCES:]

    def finish(self) -> None:
        """Completes the record."""
        for each in self._differences:
            if each.region is not None and each.region in self._operations:
                each.operation = self._operations[each.region]
        self.log.operations = {str(number): found for number, found in self._operations.items()}
        self.log.differences = self._differences


class _RegionFunction:
    """The function of a reentrant region."""

    def __init__(self, watch: WatchedRun, region: WatchedRegion, function: Callable[..., Any]) -> None:
        self._watch, self._region, self._function = watch, region, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._watch.run_region(self._region, self._function, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)


def _copy(x: Tensor) -> Tensor:
    return unseen_by_modes(lambda: x.detach().clone())


def _unseen(forward: Tensor, backward: Tensor) -> dict[str, Any]:
    return without_gradients(lambda: unseen_by_modes(lambda: compared(forward, backward)))


def _listed(changed: list[Change]) -> list[list[str]]:
    return [[each.kind, each.name, each.before, each.after] for each in changed]


def _named(args: Any) -> list[tuple[str, Tensor]]:
    return [named for place, each in enumerate(args) for named in _labelled(f"argument {place}", each)]


def _labelled(label: str, tree: Any) -> list[tuple[str, Tensor]]:
    """The tensors in an argument, with what a reader calls them."""
    found = tensors_within(tree)
    if is_tensor(tree):
        return [(label, tree)]
    return [(f"{label}, tensor {place}", each) for place, each in enumerate(found)]


def _described(session: Session) -> tuple[str, bool]:
    from backstash import policies

    policy = session.policy
    for each in policies.descriptions():
        if type(policies.get(each.name)) is type(policy) and repr(policies.get(each.name)) == repr(policy):
            return each.name, each.is_exact
    return repr(policy), isinstance(policy, policies.Lossless)


def _writes(value: WatchedValue | None, x: Tensor) -> int:
    """How often a value was written since forward, if what backward got lies where the value lay."""
    if value is None or x.is_inference() or not value.address or address_of(x) != value.address:
        return 0
    return max(0, x._version - value.version)


def _got(value: WatchedValue, x: Tensor) -> str:
    """Shape, dtype and device of what backward got, where they are not those of forward."""
    if tuple(x.shape) == value.shape and x.dtype == value.dtype and x.device == value.device:
        return ""
    return f"{_dtype(x)} {list(x.shape)} on {x.device}"


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _owner(pack: Any) -> str:
    name = getattr(pack, "__qualname__", type(pack).__qualname__).replace(".<locals>", "")
    module = getattr(pack, "__module__", "") or ""
    short = name.removesuffix(".__init__.pack_hook")
    return short if module in ("", "__main__") else f"{module}.{short}"


def _short_name(node: Any) -> str:
    name: str = node.name() if hasattr(node, "name") else type(node).__name__
    name = name.rpartition("::")[2]
    head, found, number = name.rpartition("Backward")
    return head if found and (not number or number.isdigit()) else name
