"""The names of saved tensors: which module is running, and what is known of the nodes that it makes.

Note: [known nodes]
    The key of a saved tensor is made of the running module's path, the autograd node's op, how many nodes of that op
    this call of the module has made before, and the formula's name for the tensor. What the needs table says of it
    depends on the node's type, on scalars that the node has saved, and on the specs of what it has saved. So for each
    module path, node type and number the answers are kept together with all that they depend on: the roles, the specs,
    and the scalars that the table has asked for. They are used again if every one of these is found equal. A module
    that is called on several sizes, or steps that take turns, have several answers for one number.

Note: [calls apart]
    A module may be called several times in a step, and a step may have several forward and backward passes in turn: in
    gradient accumulation, or where two models train each other. All these calls save tensors of the same path, op and
    number. A plan has to know which is which, because each of them is alive at another time. So a policy may ask for
    keys that tell them apart: the path of a module's second call is ``path@2``, and in the second pass of a step
    ``path+1``. The model's own path is empty, as is that of what runs outside of modules, so their nodes are counted
    together. Where a step begins is known if each ``with`` is a step, or each of them a pass, or if the number of
    passes is known.

Note: [skipped passes]
    Training loops skip batches: an error is caught, or a loss that is not finite is not differentiated. What such a
    pass has saved may be alive as long as the next one runs, because the program's variable holds its loss. The next
    pass is then not a further one of its step, whose modules are called a second time. So a step begins with a ``with``
    that follows one which has raised, or as many as a step has had at most in the last RECENT ones. A pass of which
    nothing is alive when backward begins was skipped as well.

Note: [modules of known passes]
    In a pass that runs a script nobody asks for names, so nobody hears of module calls (Note: [no hooks in known
    passes] in modules.py). Names may be asked for inside of a module when the pass ends: it was given back, or it ends
    there. Then the calls in progress are found in Python's stack, and those before them are taken from the pass that
    was written down. What each call in progress has saved is counted as well. Else the values that the rest of a module
    saves would have the keys of those before them. No hook tells when such a call ends, so Python's stack is looked at
    once more before anything is named in it. Where the pass ends outside of modules, calls are counted as they were in
    the pass that was written down, if keys tell calls apart.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from backstash import formulas
from backstash.capture import modules
from backstash.capture.learned import Learned
from backstash.saved import UNKNOWN_OP, SavedTensor, TensorSpec
from backstash.stash.live import Live
from backstash.stash.place import Place
from backstash.stash.value import Saved

MOST_VARIANTS = 8
"""How many different nodes are remembered of one place and number; beyond that the oldest is forgotten.

There are several where a module is called more than once in a step, or where steps take turns.
"""

RECENT = 16
"""Steps of which it is remembered how many ``with`` they had."""


class Entries:
    """How often a Session is entered for a step (Note: [skipped passes])."""

    __slots__ = ("_latest", "_number", "_of_steps", "is_broken")

    def __init__(self) -> None:
        self._number = 0  # in the step in progress
        # Of the latest one the id of its Session's totals, and how many tensors that had saved ever.
        self._latest = 0, 0
        self._of_steps: deque[int] = deque(maxlen=RECENT)
        self.is_broken = False  # the latest one has raised

    @property
    def are_all(self) -> bool:
        """Whether the next one is of another step."""
        return self.is_broken or (bool(self._of_steps) and self._number >= max(self._of_steps))

    def add(self, begins_step: bool, live: Live) -> None:
        """A forward pass begins in one more.

        Args:
            begins_step: it is the first one of a step.
            live: the totals of the Session.
        """
        self._number = 1 if begins_step else self._number + 1
        self._latest = id(live), live.saved_ever
        self.is_broken = False

    def begin_backward(self, live: Live, replaying: Any) -> None:
        """The step in progress has no more.

        Args:
            live: the totals of the Session.
            replaying: what has packed for scripts, of which there are no such totals; None for nothing.
        """
        of, before = self._latest
        if self._number > 1 and of == id(live) and (replaying is None or not replaying.alive):
            self._number = 1 if live.saved <= live.saved_ever - before else self._number
        if self._number:
            self._of_steps.append(self._number)
        self._number = 0


class Frame:
    """A module call in progress.

    Attributes:
        fqn: the path of the module.
        label: what keys call it.
        module: the module's id; 0 for none.
        call: which one it is of :func:`~backstash.capture.modules.calls_in_progress`, if it was found there.
        counts: how many nodes of each op it has made, and how many calls of each function.
    """

    __slots__ = ("call", "counts", "fqn", "label", "module")

    def __init__(self, fqn: str, label: str, module: int = 0) -> None:
        self.fqn, self.label, self.module = fqn, label, module
        self.call: int | None = None
        self.counts: dict[Any, int] = {}  # by the name of an op, or the function


class ModuleEvent(NamedTuple):
    """A module's call has begun, or the latest one has ended.

    Attributes:
        path: of the module; None where a call has ended.
        is_recording: whether autograd recorded.
        at: how many tensors were saved before.
    """

    path: str | None
    is_recording: bool
    at: int


class CallCounts(NamedTuple):
    """What names count: calls of modules by their paths, and by the names of their ops nodes outside of modules.

    Those of the model itself are among the latter where keys tell calls apart.
    """

    calls: Counter[str]
    outside: dict[Any, int]


class KnownNode:
    """What is known of the tensors that one node of the model saves (Note: [known nodes])."""

    __slots__ = ("asked", "places", "roles", "specs")

    def __init__(self, roles: tuple[str, ...], places: list[Place], asked: tuple[tuple[str, Any], ...]) -> None:
        self.roles, self.places, self.asked = roles, places, asked
        self.specs = tuple([place.facts.spec for place in places])


def fits(known: KnownNode, node: Any, found: list[tuple[str, Saved]]) -> bool:
    """Whether the same holds for a node of the same type, place and number.

    Args:
        known: what is known.
        node: the node.
        found: the roles and the tensors that it has saved.
    """
    if known.roles != tuple([role for role, _ in found]):
        return False
    for spec, (_, saved) in zip(known.specs, found, strict=True):
        if not saved.looks_like(spec):
            return False
    return not known.asked or all(scalar_of(node, name) == scalar for name, scalar in known.asked)


class _Result(NamedTuple):
    """What may be asked about a result of a node's function."""

    shape: tuple[int, ...]


def scalar_of(node: Any, name: str) -> Any:
    """An attribute of a node, None where it has none. Of its results' metadata, which torch makes anew, the shapes."""
    found: Any = getattr(node, name, None)
    return tuple([_Result(tuple(each.shape)) for each in found]) if name == "_input_metadata" else found


class _Asked:
    """Stands in for a node, and notes which scalars are asked for. Only what can be compared may be remembered.

    Where nodes of one type have a scalar and those of another a saved tensor, the tensor is None, and is not unpacked.
    """

    def __init__(self, node: Any) -> None:
        self._node = node
        self._noted: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if hasattr(self._node, f"_raw{name}"):
            return None
        if name not in self._noted:
            getattr(self._node, name)  # or the error is the node's own
            self._noted[name] = scalar_of(self._node, name)
        return self._noted[name]


def _is_comparable(scalar: Any) -> bool:
    """Whether equal scalars of two nodes compare as equal."""
    if isinstance(scalar, (tuple, list)):
        return all(_is_comparable(each) for each in scalar)
    return isinstance(scalar, (bool, int, float, str, type(None)))


class Names:
    """Knows which module is running, and names what autograd saves.

    Args:
        model: the module that paths start from; None for whichever module is called outermost.
        can_claim: whether a kernel of the package redeem reads what nodes of an op save under a role.
        cycles: as in Policy.

    Attributes:
        frames: the module calls in progress; the first stands for what runs outside of modules.
        learned: where what is known is kept.
    """

    __slots__ = (
        "__weakref__",
        "_calls",
        "_can_claim",
        "_cycle",
        "_cycles",
        "_found",
        "_has_whole_steps",
        "_is_fresh",
        "_most_found",
        "_noted",
        "_root",
        "_saves",
        "_thread",
        "frames",
        "learned",
        "model",
    )

    def __init__(
        self, model: nn.Module | None, can_claim: Callable[[str, str, TensorSpec], bool], cycles: int | None = None
    ) -> None:
        self.model = model if cycles is None else None
        self._can_claim = can_claim
        self._cycles = cycles
        self._cycle = 0
        self._calls: Counter[str] = Counter()  # of the modules of this forward pass, by their paths
        self._is_fresh = True  # nothing was saved since the Session was entered
        self._has_whole_steps = cycles == 0  # in one ``with`` each
        self.frames = [Frame("", "")]
        self._root: weakref.ref[nn.Module] | None = None
        self._found: dict[int, tuple[weakref.ref[nn.Module], str]] = {}  # by the module's id (Note: [no callbacks])
        self._most_found = 1024
        self._noted: list[ModuleEvent] = []
        self._saves: Callable[[], int] | None = None  # how many there were, while calls are noted
        self._thread = 0
        self.learned = Learned()

    def count_call(self, function: Any) -> tuple[str, int]:
        """The label of the module call that runs, and how many calls of a function there were in it before this one."""
        frame = self.current
        number = frame.counts.get(function, 0)
        frame.counts[function] = number + 1
        return frame.label, number

    # -- modules -------------------------------------------------------------------------------------------------

    @property
    def is_outside(self) -> bool:
        """Whether no module is running."""
        self._leave_ended()
        return len(self.frames) == 1

    @property
    def current(self) -> Frame:
        """The module call in progress; the first frame where there is none."""
        self._leave_ended()
        return self.frames[-1]

    def _leave_ended(self) -> None:
        """Leaves calls that were found and have ended (Note: [modules of known passes])."""
        if self.frames[-1].call is not None:
            running = {call for _, call in modules.calls_in_progress(self._thread)}
            while self.frames[-1].call is not None and self.frames[-1].call not in running:
                self.frames.pop()

    def enter(self, module: nn.Module | None) -> None:
        """A module's forward begins; None where nothing will be named in it."""
        if module is None:
            self.frames.append(self.frames[0])
            return
        self._leave_ended()
        path = self._path_of(module)
        if self._saves is not None:
            self._noted.append(ModuleEvent(path, torch.is_grad_enabled(), self._saves()))
        self._begin_call(path, id(module), torch.is_grad_enabled())

    def _path_of(self, module: nn.Module) -> str:
        found = self._found.get(id(module))
        if found is not None and found[0]() is module:
            return found[1]
        if self._root is not None:  # it was put into the model since
            root, self._root = self._root(), None  # once a call: a model may make modules while it runs
            if root is not None:
                self._learn_paths(root)
        if not self._knows(module):
            self._learn_paths(module, prefix=type(module).__name__)
        return self._found[id(module)][1]

    def _knows(self, module: nn.Module) -> bool:
        found = self._found.get(id(module))
        return found is not None and found[0]() is module

    def _begin_call(self, path: str, module: int, is_recording: bool) -> None:
        if self._cycles is None:
            self.frames.append(Frame(path, path, module))
            return
        if is_recording:  # else nothing is saved
            self._calls[path] += 1
        call, outside = self._calls[path], self.frames[0]
        frame = Frame(path, f"{path}{f'@{call}' if call > 1 else ''}{outside.label}", module)
        if frame.label == outside.label:
            frame.counts = outside.counts
        self.frames.append(frame)

    def note_calls(self, saves: Callable[[], int]) -> None:
        """Notes module calls from now on.

        Args:
            saves: how many tensors were saved until then.
        """
        self._saves = saves
        self._noted = [ModuleEvent(frame.fqn, True, 0) for frame in self.frames[1:]]

    def noted_calls(self) -> tuple[ModuleEvent, ...]:
        """The module calls that were noted, which no more are from now on."""
        noted, self._noted, self._saves = tuple(self._noted), [], None
        return noted

    def follow(
        self,
        noted: Iterable[ModuleEvent],
        saved: Sequence[SavedTensor | None],
        running: Sequence[tuple[nn.Module, int]],
        thread: int,
    ) -> None:
        """Hears late of module calls, and of what was saved in them (Note: [modules of known passes]).

        Args:
            noted: the module calls of the pass that was written down.
            saved: facts about what this one has saved until now; None where nobody named a tensor.
            running: the calls in progress: see :func:`~backstash.capture.modules.calls_in_progress`.
            thread: in which they are.
        """
        del self.frames[1:]
        self._thread = thread
        paths, begins = [self._path_of(module) for module, _ in running], [0]
        for path, is_recording, at in noted:
            if at > len(saved) or (at == len(saved) and self._running() == paths):
                break
            if path is not None:
                self._begin_call(path, 0, is_recording)
                begins.append(at)
            elif len(self.frames) > 1:
                self.frames.pop()
                begins.pop()
        same = 0
        for known, path in zip(self._running(), paths, strict=False):
            if known != path:
                break
            same += 1
        del self.frames[same + 1 :], begins[same + 1 :]
        for path in paths[same:]:
            self._begin_call(path, 0, torch.is_grad_enabled())
            begins.append(len(saved))
        for frame, (module, call) in zip(self.frames[1:], running, strict=True):
            frame.module, frame.call = id(module), call
        for frame, begin in zip(self.frames, begins, strict=True):
            for facts in saved[begin:]:
                number = None if facts is None else facts.number_in(frame.label)
                if facts is not None and number is not None:
                    frame.counts[facts.op] = max(frame.counts.get(facts.op, 0), number + 1)

    def counted(self) -> CallCounts:
        """What was counted in this forward pass outside of calls in progress."""
        return CallCounts(self._calls.copy(), dict(self.frames[0].counts))

    def count_as(self, counts: CallCounts) -> None:
        """Counts what a pass has counted that went as this one did (Note: [modules of known passes])."""
        self._calls = counts.calls.copy()
        self.frames[0].counts = dict(counts.outside)

    def _running(self) -> list[str]:
        return [frame.fqn for frame in self.frames[1:]]

    def leave(self, module: nn.Module) -> None:
        """It has returned or raised."""
        for at in range(len(self.frames) - 1, 0, -1):
            frame = self.frames[at]
            if frame.module == id(module) or frame is self.frames[0]:  # or nothing was named in it
                del self.frames[at:]
                if self._saves is not None:
                    self._noted.append(ModuleEvent(None, False, self._saves()))
                return

    def enter_root(self, module: nn.Module) -> None:
        """A module is called outermost: paths below it start there."""
        self._root = weakref.ref(module)
        if not self._knows(module):
            self._learn_paths(module)

    def enter_session(self) -> None:
        """The Session is entered."""
        self._is_fresh = True
        if self._has_whole_steps:
            self._begin_cycle(0)

    def begin_step(self, is_next: bool) -> None:
        """A forward pass begins: count nodes and calls from 0 again.

        Args:
            is_next: the one before it had its backward pass; else this one takes the place of that.
        """
        cycle = max(0, self._cycle)  # where steps start over, whatever became of the pass before
        if is_next:
            cycle = 0 if self._is_fresh and self._has_whole_steps else self._cycle + 1
            self._has_whole_steps = self._has_whole_steps or not self._is_fresh
        self._is_fresh = False
        self._begin_cycle(cycle % self._cycles if self._cycles else cycle)

    def start_over(self) -> None:
        """The next forward pass is the first one of a step."""
        self._cycle = -1

    def _begin_cycle(self, cycle: int) -> None:
        self._cycle = cycle
        self._calls.clear()
        outside = self.frames[0]
        outside.counts = {}  # the model, if it is running, goes on counting
        outside.label = f"+{cycle}" if cycle and self._cycles is not None else ""

    def leave_all(self) -> None:
        """No module is running any more."""
        del self.frames[1:]

    def _learn_paths(self, module: nn.Module, prefix: str = "") -> None:
        if len(self._found) > self._most_found:
            self._found = {key: found for key, found in self._found.items() if found[0]() is not None}
            self._most_found = max(1024, 2 * len(self._found))
        for name, child in module.named_modules(prefix=prefix):
            if not self._knows(child):
                self._found[id(child)] = weakref.ref(child), name

    def parameter_name(self, parameter: Tensor) -> str | None:
        """The path of a parameter; None for a tensor that is no parameter of a module that has run."""
        for reference, name in self._found.values():
            module = reference()
            for own, tensor in () if module is None else module._parameters.items():
                if tensor is parameter:
                    return f"{name}.{own}".lstrip(".")
        return None

    # -- saved tensors -------------------------------------------------------------------------------------------

    def places(self, node: Any, found: list[tuple[str, Saved]]) -> tuple[list[Place], bool]:
        """The places at which a node has saved tensors.

        Args:
            node: the autograd node.
            found: the roles and the tensors, plain and strided.

        Returns:
            The places, and whether they are those of an earlier step (Note: [known nodes]).
        """
        op = formulas.op_of(node)
        frame = self.current
        self._is_fresh = False
        number = frame.counts.get(op, 0)
        frame.counts[op] = number + 1
        index = frame.label, type(node), number
        for known in self.learned.nodes.get(index, ()):
            if fits(known, node, found):
                return known.places, True
        own_specs = [TensorSpec.of(saved.dense) for _, saved in found if saved.dense is not None]
        specs = {role: spec for (role, _), spec in zip(found, own_specs, strict=True)}
        asked = _Asked(node)
        places, members = [], dict.fromkeys(specs, 0)
        builtin = not isinstance(node, torch.autograd.function.BackwardCFunction)
        for (role, saved), spec in zip(found, own_specs, strict=True):  # the tensors of a list have one role
            wrapping = saved.origin.wrapping
            reading = formulas.requirement_of(asked, role, spec, specs, op) if builtin else formulas.VALUE
            if wrapping is not None:
                reading = wrapping.reading(reading, op, role)
            claimable = builtin and wrapping is None and self._can_claim(op, role, spec)
            places.append(Place(_facts(frame, op, number, role, spec, reading, members[role]), claimable))
            members[role] += 1
        if _is_comparable(tuple(asked._noted.values())) and all(saved.origin.wrapping is None for _, saved in found):
            roles = tuple([role for role, _ in found])
            self._remember(index, KnownNode(roles, places, tuple(asked._noted.items())))
        return places, False

    def unknown_place(self, saved: Saved) -> tuple[Place, bool]:
        """The place of a tensor of which no node was found that has saved it, and whether it is an earlier step's."""
        assert saved.dense is not None
        frame = self.current
        self._is_fresh = False
        number = frame.counts.get(UNKNOWN_OP, 0)
        frame.counts[UNKNOWN_OP] = number + 1
        spec = TensorSpec.of(saved.dense)
        index = frame.label, type(None), number
        for known in self.learned.nodes.get(index, ()):
            if known.places[0].facts.spec == spec:
                return known.places[0], True
        place = Place(_facts(frame, UNKNOWN_OP, number, "saved", spec, formulas.VALUE))
        if saved.origin.wrapping is None:
            self._remember(index, KnownNode(("saved",), [place], ()))
        return place, False

    def _remember(self, index: tuple[str, type, int], node: KnownNode) -> None:
        nodes = self.learned.nodes
        if self.learned.limit.is_reached(len(nodes), self.learned.forward_passes):
            nodes.clear()
        nodes[index] = (node, *nodes.get(index, ())[: MOST_VARIANTS - 1])


def _facts(
    frame: Frame, op: str, number: int, role: str, spec: TensorSpec, reading: formulas.Requirement, member: int = 0
) -> SavedTensor:
    return SavedTensor(
        f"{frame.label}/{op}#{number}:{role}{f'.{member}' if member else ''}",
        op,
        role,
        frame.fqn,
        spec,
        reading.need,
        reading.mask,
        reading.window,
        reading.function,
        reading.effect,
        reading.row,
        reading.product,
    )
