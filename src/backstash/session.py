"""The Session: the only file that installs autograd hooks.

A saved tensor passes through it as the package's top level reads: it is *packed* when autograd saves it, *named* when
the op that saved it has returned (the autograd node tells the op and the role, the role tells the need), *encoded* when
nobody but autograd holds its memory any more, and *unpacked* when backward asks for it. What a cheap function made of
something that is held anyway is not encoded but forgotten, and made again at unpack (producers.py).

The unit that is encoded is a storage: however many saved tensors view it, it is encoded once, under the strongest of
their needs, and what only reads a shape holds nothing at all.

Note: [encode when orphaned]
    A tensor is not encoded when it is saved but when its storage's use count says that only autograd's saves are left,
    which is looked at before each torch function runs. Until then encoding gains nothing (the program holds the memory
    anyway), after that nobody can save or change the tensor again. So a storage is never encoded twice, values that the
    program keeps are kept by reference, buffers that an op writes after saving are complete, and no pointer is ever
    looked up after its memory is gone.

Note: [version guard]
    Hooks switch off autograd's check for in-place changes. What is held by reference is therefore held with its version
    and compared at unpack.

Note: [ownership]
    Autograd owns the packed object, which owns the value; autograd frees it when its node has run. There is no table of
    everything, and nothing to do at the end of a step.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from backstash import consumers, needs, policies, producers
from backstash.arguments import check_arguments
from backstash.buffers import Buffers
from backstash.codecs.base import Codec, Encoded, flat, is_dense
from backstash.codecs.bitmask import Binary, Bitmask
from backstash.codecs.fewbit import FewBit
from backstash.codecs.narrow import Narrow
from backstash.codecs.raw import Raw
from backstash.codecs.shape import Shape, stand_in
from backstash.codecs.sliced import Sliced
from backstash.errors import (
    CodecRefusedError,
    NeedNotMetError,
    SavedTensorModifiedError,
    SessionError,
    UnknownNameError,
)
from backstash.gradient_error import Monitor
from backstash.ledger import Entry, PeakRow, Report, Step
from backstash.ops import cpu
from backstash.ops.reference import bits_of
from backstash.policy import (
    MAX_DEPTH,
    Action,
    DecidesTogether,
    Keep,
    Outcome,
    Policy,
    Recompute,
    Slice,
    Stash,
    optional,
)
from backstash.prefetch import Prefetcher, Tag
from backstash.producers import Content, Held, Leaf, Recipe, View
from backstash.saved import PLAIN, Mask, Need, SavedTensor, TensorSpec, Test, is_odd
from backstash.stores import DeviceStore, HostStore, Store, Ticket

MIN_NBYTES = 16 * 1024
"""Tensors smaller than this are kept: naming and encoding them costs more than they hold."""

CHECK_LIMIT = 0.3
"""Relative errors of a gradient above this are warned of: the noise has a tenth of the gradient's energy."""

_use_count: Callable[[int], int] = torch._C._storage_Use_Count
_Sources = Callable[[], dict[str, Tensor] | None]
_active = threading.local()


class _Form:
    """One encoding of a value: the planes' ticket and how to decode them. With a tag they are not on the device."""

    __slots__ = ("__weakref__", "codec", "mask", "planes", "spec", "store", "tag", "ticket")

    def __init__(self, codec: Codec, mask: Mask | None, spec: TensorSpec, store: Store, ticket: Ticket) -> None:
        self.codec, self.mask, self.spec, self.store, self.ticket = codec, mask, spec, store, ticket
        self.tag: Tag | None = None
        self.planes: Encoded | None = None  # fetched for one reader and held for the next

    def __del__(self) -> None:
        self.store.drop(self.ticket)


class _Value:
    """The data of one storage, owned by the saved tensors that view it and by the recipes that begin from it.

    At most one of ``form``, ``recipe`` and dense members holds it; but with a recipe that begins from bounded values,
    ``form`` holds the mask that its readers of signs read. ``made`` is what the recipe made, as long as a saved tensor
    has yet to read it, ``bits`` the mask of what was decoded or made, as long as nobody reads more of it than that.
    ``guard`` is a member of its own: it keeps the data that recipes need, and its version.
    ``height`` is the length of the longest chain of recipes above it. ``key`` is the one that it was decided on with,
    ``errors`` are those of the bounded values whose errors it has, its own among them.
    """

    __slots__ = (
        "__weakref__",
        "bits",
        "buffers",
        "content",
        "entry",
        "errors",
        "exact",
        "form",
        "guard",
        "height",
        "key",
        "live",
        "made",
        "members",
        "recipe",
        "storage",
    )

    def __init__(self, storage: torch.UntypedStorage, entry: Entry, live: _Live) -> None:
        self.storage: torch.UntypedStorage | None = storage
        self.members: list[weakref.ref[_Saved]] = []
        self.entry = entry
        self.form: _Form | None = None
        self.bits: tuple[Mask, Bitmask, Encoded] | None = None
        self.buffers: Buffers | None = None
        self.live = live
        self.content: Content | None = None
        self.recipe: Recipe | None = None
        self.made: Tensor | None = None
        self.guard: _Saved | None = None
        self.height = 0
        self.key = ""
        self.errors: frozenset[str] = frozenset()
        self.exact: Tensor | None = None  # in a checked step, beside a form or a recipe that has an error

    @property
    def depth(self) -> int:
        """How many recomputed values have to be made before it is there, itself included."""
        return 0 if self.recipe is None else 1 + max((leaf.depth for leaf in self.recipe.leaves()), default=0)

    def raise_to(self, height: int) -> None:
        """Note that a chain of that many recipes begins here."""
        if height > self.height:
            self.height = height
            for leaf in self.recipe.leaves() if self.recipe is not None else ():
                leaf.raise_to(height + 1)

    def saved(self) -> Iterator[_Saved]:
        """Those of its saved tensors that are still alive."""
        return (saved for member in self.members if (saved := member()) is not None)

    def hold(self, whole: Tensor | None) -> None:
        """Keep what was made for who reads it next; None: no longer."""
        if self.made is not None:
            self.live.made_nbytes -= self.made.untyped_storage().nbytes()
        self.made = whole
        if whole is not None:
            self.live.made_nbytes += whole.untyped_storage().nbytes()

    def __del__(self) -> None:
        self.hold(None)
        if self.buffers is not None and self.form is not None:
            self.buffers.forget(self.form)
        self.live.nbytes -= self.entry.device_nbytes


class _Saved:
    """The packed object: one tensor that autograd saved."""

    __slots__ = (
        "__weakref__",
        "builtin",
        "dense",
        "live",
        "mask",
        "modified",
        "need",
        "node",
        "offset",
        "read",
        "spec",
        "tensor",
        "value",
        "version",
    )

    def __init__(self, x: Tensor, live: _Live) -> None:
        self.live = live
        live.saved += 1
        self.dense: Tensor | None = x.detach()
        self.version: int = x._version
        self.tensor: SavedTensor | None = None
        self.spec: TensorSpec | None = None
        self.value: _Value | None = None
        self.mask: Mask | None = None
        self.need = Need.VALUE
        self.offset = 0
        self.modified: int | None = None
        self.builtin = False
        self.read = False
        self.node: int | None = None

    # What a kernel of consumers.py, to which it was unpacked as a claim, takes of it.

    def whole(self) -> Tensor:
        """The tensor, decoded or made again."""
        assert self.value is not None and self.spec is not None
        with torch.no_grad(), self.live.lock:
            return _decode(self, self.spec, self.value)

    def encoded(self) -> tuple[Any, Encoded] | None:
        """Codec and planes of exactly what its reader needs; None where something else is stored."""
        value, spec = self.value, self.spec
        assert value is not None and spec is not None
        with self.live.lock:
            if _exact(value) is not None:
                return None
            if value.bits is not None and value.bits[0] == self.mask:
                return value.bits[1:] if _same_layout(value.bits[2].spec, spec) else None
            form = value.form
            if form is None or form.mask != self.mask or not _same_layout(form.spec, spec):
                return None
            if not isinstance(form.codec, Bitmask if self.need is Need.SIGN else (Binary, FewBit, Narrow, Sliced)):
                return None
            return form.codec, _planes(value, form)

    def settle(self) -> None:
        """Its reader is done: let go of what was decoded, but for the bits that others will read."""
        assert self.value is not None
        self.read = True
        with torch.no_grad(), self.live.lock:
            _settle(self.value)

    def adopt(self, dead: Tensor) -> None:
        """Decode into that memory from now on."""
        assert self.value is not None and self.value.buffers is not None
        with self.live.lock:
            self.value.buffers.adopt(dead)

    def __del__(self) -> None:
        live = self.live
        live.saved -= 1
        if live.saved == 0:
            live.buffers.clear()
            if live.waits:
                live.waits = False
                consumers.finished()


class _Live:
    """What is alive now; shared by a Session and its values, so that either may die first."""

    __slots__ = (
        "buffers",
        "lock",
        "made_nbytes",
        "monitor",
        "nbytes",
        "peak_nbytes",
        "prefetcher",
        "saved",
        "stashed_nbytes",
        "unpacked",
        "waits",
    )

    def __init__(self, ahead: int | None) -> None:
        self.buffers = Buffers()
        self.prefetcher = Prefetcher(ahead)
        self.lock = threading.RLock()
        self.monitor: Monitor | None = None
        self.saved = 0
        self.nbytes = 0  # on the device
        self.made_nbytes = 0
        self.stashed_nbytes = 0  # when backward began
        self.peak_nbytes = 0
        self.unpacked = False
        self.waits = False  # left, with graphs whose backward is yet to come

    @property
    def below_peak(self) -> int:
        """How much less is held than at the peak."""
        return self.peak_nbytes - self.nbytes

    def has_room(self, nbytes: int) -> bool:
        """Whether so much more that was made again would still take no more than backward has freed."""
        return self.nbytes + self.made_nbytes + nbytes <= self.stashed_nbytes

    def add(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes)


class _Observer(TorchFunctionMode):
    """Tells the session when a torch function begins and ends. It changes nothing (Note: [observe only]).

    Note: [observe only]
        Replacing ops here would break non-reentrant checkpoint, whose recomputation does not see the mode.
    """

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        session = self.session
        if torch.compiler.is_compiling():  # traced: the compiled function saves its tensors in one op of its own
            return func(*args, **(kwargs or {}))
        if session._pending:
            with torch._C.DisableTorchFunction():
                session._sweep()
        if not torch.is_grad_enabled():
            return func(*args, **(kwargs or {}))
        cheap = session._depth == 0 and session._recomputes and func in producers.CHEAP
        before = producers.random_state(func, args) if cheap else None
        session._depth += 1
        result = None
        try:
            result = func(*args, **(kwargs or {}))
        finally:
            session._depth -= 1
            if session._unnamed and session._depth == 0:
                with torch._C.DisableTorchFunction():
                    session._name(result)
        if cheap and type(result) is Tensor:
            with torch._C.DisableTorchFunction():
                session._note(func, args, kwargs or {}, result, before)
        return result


class _Frame:
    """A module call in progress: its path and how many nodes of each op it has made."""

    __slots__ = ("counts", "fqn")

    def __init__(self, fqn: str) -> None:
        self.fqn = fqn
        self.counts: defaultdict[str, int] = defaultdict(int)


class Session:
    """Stores what autograd saves inside the ``with`` in the form that a policy chooses.

    Args:
        policy: a policy's name (``"lossless"``) or a Policy.
        model: the module that paths in keys start from; without it, whichever module is called outermost.
        stores: stores by name, beside ``"device"`` and ``"host"``, which are there already.
        min_nbytes: smaller tensors are kept.
        check: in how many steps, from the first one on, the error that the policy makes in the gradient is measured
            (``report().gradient_error``). Such a step keeps exact copies beside what is stored with an error, and two
            more backward passes run before its own, so hooks on tensors and nodes, and custom Functions' backward, run
            three times. The gradients, ``.grad`` and the generators' states are those of any other step.
        check_limit: the relative error above which a warning is given. At 0.3 the gradient's direction has a cosine of
            about 0.96 to the exact one, and a step of the optimizer loses a tenth of its use at most.

    Raises:
        UnknownNameError: no policy has that name.
        TypeError: an argument is of another type.
        ValueError: a number is out of its range.
        SessionError: on entering, another Session or other saved-tensor hooks are active.

    The backward pass may run inside or outside the ``with``. A Session may be entered again after it was left. It sees
    the thread that entered it; other threads need a Session of their own. On CPU backward decodes into memory that is
    used again from layer to layer, and given back when the last graph made under the Session is gone.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
        >>> with Session("lossless", min_nbytes=0) as session:
        ...     loss = model(torch.ones(8, 64)).sum()
        >>> loss.backward()
        >>> session.report().ratio > 1
        True
    """

    def __init__(
        self,
        policy: str | Policy = "lossless",
        *,
        model: nn.Module | None = None,
        stores: Mapping[str, Store] | None = None,
        min_nbytes: int = MIN_NBYTES,
        check: int = 0,
        check_limit: float = CHECK_LIMIT,
    ) -> None:
        self.policy = policies.get(policy)
        check_arguments(model, stores, min_nbytes, check, check_limit)
        self.min_nbytes = min_nbytes
        self.stores: dict[str, Store] = {"device": DeviceStore(), "host": HostStore(), **(stores or {})}
        self._model = model
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._roots: weakref.WeakKeyDictionary[nn.Module, set[int]] = weakref.WeakKeyDictionary()
        self._parameters: set[int] = set()
        self._live = _Live(optional(self.policy, "ahead"))
        if check:
            self._live.monitor = Monitor(check, check_limit, repr(self.policy), _packed_by, self._name_of)
        self._step = Step()
        self._steps = 0
        self._seen: dict[int, tuple[StorageWeakRef, Entry]] = {}
        self._pending: dict[int, weakref.ref[_Value]] = {}
        self._unnamed: list[_Saved] = []
        self._depth = 0
        self._frames: list[_Frame] = [_Frame("")]
        self._recomputes: bool = optional(self.policy, "recomputes")
        self._together = self.policy if isinstance(self.policy, DecidesTogether) else None
        self._begun: Callable[[], None] | None = optional(self.policy, "begin_step")
        self._watch: Callable[[SavedTensor, Any, Tensor], None] | None = optional(self.policy, "watch")
        self._trace: Callable[[SavedTensor, list[SavedTensor], _Sources], None] | None = optional(self.policy, "trace")
        self._contents: dict[int, tuple[StorageWeakRef, Content]] = {}
        self._proven: dict[tuple[str, str, str], str] = {}
        self._buffers = self._live.buffers
        self._lock = self._live.lock
        self._installed: list[Any] = []
        self._peak: tuple[PeakRow, ...] = ()

    # -- entering and leaving ------------------------------------------------------------------------------------

    def __enter__(self) -> Session:
        _refuse_other_hooks()
        if self._installed:
            raise SessionError(
                "a Session was entered that is in use already, by another thread. Make a Session for each thread."
            )
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        observer = _Observer(self)
        consumers.install()
        hooks.__enter__()
        observer.__enter__()
        self._installed = [
            nn.modules.module.register_module_forward_pre_hook(self._enter_module),
            nn.modules.module.register_module_forward_hook(self._leave_module, always_call=True),
            observer,
            hooks,
        ]
        self._thread = threading.get_ident()
        _active.session = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _active.session = None
        for installed in self._installed:
            if isinstance(installed, RemovableHandle):
                installed.remove()
            else:
                installed.__exit__(kind, error, trace)
        self._installed = []
        self._depth = 0
        del self._frames[1:]
        try:
            self._name(None)
            self._sweep()
        finally:
            self._pending.clear()
            self._seen.clear()
            self._contents.clear()
            self._roots.clear()
            self._parameters.clear()
            with self._lock:
                waits = self._live.saved > 0 and not self._live.waits
                self._live.waits |= waits
                consumers.uninstall(waits)

    def report(self) -> Report:
        """The accounts of the last step that saved anything."""
        with self._lock:
            return Report(
                repr(self.policy),
                self._steps,
                self._step.rows(),
                sum(self._step.parameters.values()),
                self._live.peak_nbytes,
                self._peak,
                tuple(self._live.monitor.found) if self._live.monitor is not None else (),
            )

    def _checks(self) -> bool:
        """Whether the step in progress keeps exact data for measuring the gradient's error."""
        return self._live.monitor is not None and self._live.monitor.is_due

    def _name_of(self, parameter: Tensor) -> str | None:
        for module, name in self._names.items():
            for own, tensor in module._parameters.items():
                if tensor is parameter:
                    return f"{name}.{own}".lstrip(".")
        return None

    # -- which module is running ---------------------------------------------------------------------------------

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or threading.get_ident() != self._thread:
            return
        if len(self._frames) == 1:
            self._enter_root(self._model or module)
        name = self._names.get(module)
        if name is None:
            self._learn_names(module, prefix=type(module).__name__)
            name = self._names[module]
        self._frames.append(_Frame(name))

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if threading.get_ident() == self._thread and len(self._frames) > 1:
            self._frames.pop()

    def _enter_root(self, module: nn.Module) -> None:
        if module not in self._names:
            self._learn_names(module)
        self._roots[module] = set(_state_storages(module))
        self._parameters = set().union(*self._roots.values())
        if self._live.unpacked and torch.is_grad_enabled() and not _in_backward():
            self._begin_step()

    def _learn_names(self, module: nn.Module, prefix: str = "") -> None:
        for name, child in module.named_modules(prefix=prefix):
            self._names.setdefault(child, name)

    def _begin_step(self) -> None:
        """A root module is called after a backward: the accounts start afresh."""
        self._live.unpacked = False
        self._steps += 1
        if self._begun is not None:
            self._begun()
        if self._live.monitor is not None:
            self._live.monitor.begin_step(self._steps)
        self._step = Step()
        self._seen.clear()
        self._live.prefetcher.begin_step()
        self._frames[0].counts.clear()
        self._contents = {cdata: known for cdata, known in self._contents.items() if not known[0].expired()}
        for _, content in self._contents.values():  # else a running average would remember all of its steps
            content.call = None

    # -- pack ----------------------------------------------------------------------------------------------------

    def _pack(self, x: Tensor) -> _Saved | tuple[Tensor, int]:
        if type(x) in PLAIN and x.layout is torch.strided:
            storage = x.untyped_storage()
            if storage._cdata in self._parameters:
                self._step.parameters[storage._cdata] = storage.nbytes()
                return x.detach(), x._version
            if storage.nbytes() < self.min_nbytes:
                small = self._step.small
                small.saved_nbytes += x.nbytes
                small.stash_nbytes += x.nbytes
                return x.detach(), x._version
        with self._lock:
            if self._steps == 0:
                self._steps = 1
                if self._begun is not None:
                    self._begun()
                if self._live.monitor is not None:
                    self._live.monitor.begin_step(1)
            if self._live.saved == 0 and self._step.entries and not _in_backward():  # the last graph is gone
                self._begin_step()
            saved = _Saved(x, self._live)
            self._unnamed.append(saved)
            # Outside any torch function (a custom Function, an extension's op), or inside backward, which is one long
            # torch function: what a reentrant checkpoint recomputes must not wait for its end.
            if self._depth == 0 or _in_backward():
                with torch._C.DisableTorchFunction():
                    self._sweep()
                    self._name(None)
        return saved

    def _name(self, result: Any) -> None:
        """Find out what the tensors saved by the op that has just returned are, and take them in."""
        with self._lock:
            unnamed, self._unnamed = self._unnamed, []
            large = [saved for saved in unnamed if self._specify(saved)]
            if not large:
                return
            wanted = {id(saved): saved for saved in large}
            for node, found in _find(result, wanted):
                op = needs.op_of(node)
                frame = self._frames[-1]
                number = frame.counts[op]
                frame.counts[op] += 1
                specs = {role: saved.spec for role, saved in found if saved.spec is not None}
                builtin = not isinstance(node, torch.autograd.function.BackwardCFunction)
                copies = _weight_copies(node) if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled() else ()
                for role, saved in found:
                    assert saved.spec is not None
                    if role in ("weight", "mat2") and sorted(saved.spec.shape) in copies:
                        self._step.parameters[id(saved)] = saved.spec.nbytes
                        continue
                    reading = needs.read(node, role, saved.spec, specs) if builtin else needs.VALUE
                    dense = saved.dense
                    self._take(saved, op, role, number, reading, builtin)
                    if builtin and self._watch is not None and saved.tensor is not None and dense is not None:
                        self._watch(saved.tensor, node, dense)
                    del dense
                    if builtin and saved.spec is not None and consumers.can_claim(op, role, saved.spec):
                        saved.node = node._sequence_nr()
            for saved in wanted.values():
                number = self._frames[-1].counts["?"]
                self._frames[-1].counts["?"] += 1
                self._take(saved, "?", "saved", number, needs.VALUE, False)

    def _specify(self, saved: _Saved) -> bool:
        """Fill in the spec; False for what is kept without a further look (and then it is accounted for)."""
        dense = saved.dense
        if dense is None or type(dense) not in PLAIN or dense.layout is not torch.strided or is_odd(dense):
            return False
        saved.spec = TensorSpec.of(dense)
        return True

    def _take(self, saved: _Saved, op: str, role: str, number: int, reading: needs.Reading, builtin: bool) -> None:
        """Account for a named tensor, and queue its storage for encoding unless backward reads nothing of it."""
        dense, spec = saved.dense, saved.spec
        assert dense is not None and spec is not None
        fqn = self._frames[-1].fqn
        key = f"{fqn}/{op}#{number}:{role}"
        saved.tensor = SavedTensor(
            key,
            op,
            role,
            fqn,
            spec,
            reading.need,
            reading.mask,
            reading.window,
            reading.function,
            reading.effect,
            reading.row,
        )
        saved.need, saved.mask, saved.builtin = reading.need, reading.mask, builtin
        saved.offset = int(dense.storage_offset())
        storage = dense.untyped_storage()
        entry = self._entry(saved.tensor, storage)
        if reading.need is Need.SHAPE and self._allows(saved.tensor, Shape.id):
            saved.dense = None
            return
        pending = self._pending.get(storage._cdata)
        value = pending() if pending is not None else None
        if value is None:
            value = _Value(storage, entry, self._live)
            self._pending[storage._cdata] = weakref.ref(value)
            entry.stash_nbytes = entry.saved_nbytes
            entry.reason = "held by the program, kept by reference"
            entry.codec = "kept"
            self._live.add(entry.stash_nbytes)
        value.members.append(weakref.ref(saved))
        saved.value = value
        if self._recomputes:
            value.content = self._content(dense)
            value.content.value = weakref.ref(value)

    def _allows(self, saved: SavedTensor, codec: str) -> bool:
        action = self.policy.decide(saved)
        return isinstance(action, Stash) and any(choice.id == codec for choice in action.codecs)

    def _entry(self, saved: SavedTensor, storage: torch.UntypedStorage) -> Entry:
        """The account of a storage; the weak reference keeps its address from being given to another."""
        seen = self._seen.get(storage._cdata)
        if seen is not None:
            entry = seen[1]
            if Need[entry.need].value < saved.need.value:
                entry.shared_by.append(entry.key)
                entry.key, entry.need, entry.spec = saved.key, saved.need.name, str(saved.spec)
            else:
                entry.shared_by.append(saved.key)
            return entry
        entry = Entry(saved.key, saved.need.name, str(saved.spec), storage.nbytes(), codec="shape")
        self._seen[storage._cdata] = (StorageWeakRef(storage), entry)
        self._step.entries.append(entry)
        return entry

    # -- encode --------------------------------------------------------------------------------------------------

    def _sweep(self) -> None:
        """Encode every pending storage that only autograd's saves hold (Note: [encode when orphaned])."""
        with self._lock:
            for cdata, pending in list(self._pending.items()):
                value = pending()
                if value is None:  # its graph is gone
                    del self._pending[cdata]
                    continue
                count = _use_count(cdata) - 1  # value.storage
                if count <= len(value.members) and count == sum(saved.dense is not None for saved in value.saved()):
                    del self._pending[cdata]
                    with torch.no_grad():
                        self._encode(value)
                    value.storage = None

    def _encode(self, value: _Value) -> None:
        fresh = []
        for saved in value.saved():
            dense = saved.dense
            if dense is not None and dense._version != saved.version:
                saved.modified, saved.dense = dense._version, None
            elif dense is not None:
                fresh.append(saved)
        if not fresh:
            return
        strongest = max(fresh, key=lambda saved: saved.need.value)
        facts = strongest.tensor
        assert facts is not None and value.storage is not None
        if facts.need is Need.SIGN and any(saved.mask != facts.mask for saved in fresh if saved.need is Need.SIGN):
            facts = SavedTensor(facts.key, facts.op, facts.role, facts.fqn, facts.spec, Need.VALUE)
        whole = _whole(strongest, value.storage)
        entry = value.entry
        if whole is None or any(saved.spec.dtype != facts.spec.dtype for saved in fresh if saved.spec):
            self._kept(value, facts, "its storage is seen as different types")
            return
        value.key = facts.key
        readers = [saved.tensor for saved in fresh if saved.tensor is not None]
        if self._trace is not None:
            self._trace(facts, readers, lambda: self._sources(value, strongest))
        if self._together is not None:
            action = self._together.decide_together(facts, readers)
        else:
            action = self.policy.decide(facts)
        value.buffers = self._buffers
        started = time.perf_counter()
        why = ""
        if isinstance(action, Recompute):
            recipe = self._recipe(value, strongest, whole, action)
            if isinstance(recipe, Recipe) and recipe.settled:
                value.errors = frozenset().union(*(leaf.errors for leaf in recipe.leaves()))
                value.form = self._mask(whole, facts, fresh)
            if isinstance(recipe, Recipe):
                if value.errors and self._checks():
                    value.exact = whole.detach()
                value.recipe, value.guard = recipe, None
                for leaf in recipe.leaves():
                    leaf.raise_to(value.height + 1)
                nbytes = 0 if value.form is None else value.form.ticket.nbytes
                label = "recompute within" if recipe.settled else "recompute"
                self._released(value, fresh, facts, label, nbytes, str(recipe), started)
                return
            action, why = action.otherwise, f"; not recomputed: {recipe}"
        if isinstance(action, Keep):
            self._kept(value, facts, action.reason + why)
            return
        if value.height and _has_error(action):  # a recipe that was proven with the exact value begins from it
            action, why = _without_error(action), f"{why}; exact, because others are made again of it"
        if isinstance(action, Slice) and (facts.op, facts.role) == ("Convolution", "input"):
            action = action.sliced()
        form, reason = self._stash(whole, facts, action, fresh)
        if form is None:
            entry.encode_seconds += time.perf_counter() - started
            self._kept(value, facts, reason + why)
            return
        value.form, value.guard = form, None
        if form.codec.bound is not None:
            value.errors = frozenset((facts.key,))
            if self._checks():
                value.exact = whole.detach()
        if action.store != "device":
            self._live.prefetcher.put(form, facts.key)
        label = getattr(form.codec, "label", form.codec.id)
        note = why.removeprefix("; ")
        self._released(value, fresh, facts, label, form.ticket.nbytes, note, started, action.store)

    def _released(
        self,
        value: _Value,
        fresh: list[_Saved],
        facts: SavedTensor,
        codec: str,
        nbytes: int,
        note: str,
        started: float,
        store: str = "device",
    ) -> None:
        """Let go of the dense data, which is stored in another form now."""
        for saved in fresh:
            saved.dense = None
        entry, live = value.entry, value.live
        live.nbytes -= entry.device_nbytes
        entry.stash_nbytes, entry.codec, entry.reason, entry.store = nbytes, codec, note, store
        live.add(entry.device_nbytes)
        entry.encode_seconds += time.perf_counter() - started
        self.policy.observe(Outcome(facts, codec, nbytes))

    def _kept(self, value: _Value, facts: SavedTensor, reason: str) -> None:
        value.entry.codec, value.entry.reason = "kept", reason
        self.policy.observe(Outcome(facts, None, value.entry.stash_nbytes, reason))

    def _stash(self, x: Tensor, facts: SavedTensor, action: Stash, readers: list[_Saved]) -> tuple[_Form | None, str]:
        """Encode with the first codec of the action that takes ``x``; else None and the last reason."""
        if action.store not in self.stores:
            raise UnknownNameError(
                f"store {action.store!r} was asked for by {self.policy!r}, but there are {', '.join(self.stores)}. "
                f"Pass it to Session(stores=...)."
            )
        reason = "the policy named no codec"
        for codec in action.codecs:
            of_another_test = facts.need is Need.SIGN and getattr(codec, "mask", facts.mask) != facts.mask
            if facts.need not in codec.preserves or of_another_test:
                raise NeedNotMetError(
                    f"codec {codec.id!r} preserves {{{', '.join(sorted(need.name for need in codec.preserves))}}}, but "
                    f"backward of {facts.op} reads the {facts.need.name} of its {facts.role!r} ({facts.key}, "
                    f"{facts.spec}). Use a codec that preserves it, such as zvc, or Keep()."
                )
            spec = TensorSpec.of(x)
            refusal = codec.accepts(spec) or _misreads(codec, readers) or codec.declines(x)
            if refusal is None:
                try:
                    # Nobody else holds the memory, so it may become the plane: nothing is copied, nothing lives twice.
                    encoded = codec.adopt(x) if isinstance(codec, Raw) else codec.encode(x)
                except CodecRefusedError as refused:  # only the full pass could tell
                    refusal = str(refused)
                else:
                    mask = facts.mask if facts.need is Need.SIGN else None
                    store = self.stores[action.store]
                    return _Form(codec, mask, encoded.spec, store, store.put(encoded)), ""
            reason = f"{getattr(codec, 'label', codec.id)}: {refusal}"
        return None, reason

    # -- recompute -----------------------------------------------------------------------------------------------

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor, before: Any) -> None:
        """Remember how the content of the result's storage was made."""
        if (
            result.layout is not torch.strided
            or not result.is_floating_point()
            or is_odd(result)
            or result.untyped_storage().nbytes() < self.min_nbytes
        ):
            return
        with self._lock:
            call = producers.call_of(func, args, kwargs, result, lambda x: self._look(x, result), before)
            if call is not None:
                self._content(result).call = call

    def _look(self, x: Tensor, result: Tensor) -> View | Held:
        """A tensor argument of the call that made ``result``."""
        storage = x.untyped_storage()
        cdata = storage._cdata
        if cdata in self._parameters:
            return Held(x.detach(), x._version)
        if storage.nbytes() < self.min_nbytes:
            return Held(small := x.detach().clone(), small._version)
        if cdata != result.untyped_storage()._cdata:
            content = self._content(x)
        else:  # an in-place op: it read the content before this one
            after = self._content(x)
            content, after.before = after.before or Content(x._version - 1), None
        return View(content, TensorSpec.of(x), int(x.storage_offset()))

    def _content(self, x: Tensor) -> Content:
        """What the storage of ``x`` holds now."""
        storage = x.untyped_storage()
        known = self._contents.get(storage._cdata)
        if known is not None and not known[0].expired():
            if known[1].version == x._version:
                return known[1]
            before = known[1] if known[1].version == x._version - 1 else None
        else:
            before = None
        content = Content(x._version, before)
        self._contents[storage._cdata] = (StorageWeakRef(storage), content)
        return content

    def _recipe(self, value: _Value, strongest: _Saved, whole: Tensor, action: Recompute) -> Recipe | str:
        """How to make ``whole`` again; else the reason why it cannot be.

        Note: [proven recipes]
            Whether an op repeats itself bit for bit depends on the device, its library, shapes and layouts, and is
            nowhere documented. So a recipe runs once when it is first used, on the very data, and is trusted only if
            the bits are the same: with fused kernels, or else op by op. One that begins from bounded values has to
            come as near as their bounds allow.
        """
        content = value.content
        if content is None or content.version != strongest.version:
            return "what made it is not known"
        recipe = producers.build(content, lambda view: self._leaf(view, value, action))
        if isinstance(recipe, str):
            return recipe
        inputs = len(set(recipe.leaves()))
        if action.max_inputs is not None and inputs > action.max_inputs:
            return f"it would begin from {inputs} stored values"
        assert strongest.tensor is not None
        bounded = any(leaf.errors for leaf in recipe.leaves())
        if bounded and not _keeps_signs(recipe, value, whole):
            return "its sign is read in another way than a relu does"
        key = (strongest.tensor.key, str(recipe), f"{TensorSpec.of(whole)}{' within' * bounded}")
        if key not in self._proven:
            self._proven[key] = _prove_within(recipe.settle(), whole) if bounded else _prove(recipe, whole)
        proof = self._proven[key]
        if not proof:
            return f"{recipe} does not repeat itself {'within its bounds' if bounded else 'bit for bit'}"
        for leaf in recipe.leaves():
            _guard(leaf)
        if bounded:
            return recipe.settle()
        return recipe if proof == "fused" else recipe.unfused()

    def _leaf(self, view: View, root: _Value, action: Recompute) -> Leaf | str | None:
        """As the function :func:`_leaf`, but nothing begins from a value that is yet to be stored with an error."""
        leaf = _leaf(view, root, action.max_depth, action.within)
        if not isinstance(leaf, Leaf):
            return leaf
        value: _Value = leaf.value
        held = _holder(value) if value.storage is not None and not value.height else None
        if held is not None and held.tensor is not None and _has_error(self.policy.decide(held.tensor)):
            return "it would begin from a value that may be stored with an error"
        return leaf

    def _mask(self, whole: Tensor, facts: SavedTensor, readers: list[_Saved]) -> _Form | None:
        """What who reads signs reads, exactly, of a value that is made again within bounds; None where nobody does."""
        mask = next((saved.mask for saved in readers if saved.need is Need.SIGN), None)
        if mask is None:
            return None
        form, _ = self._stash(whole, replace(facts, need=Need.SIGN, mask=mask), Stash(Bitmask(mask)), readers)
        return form

    def _sources(self, value: _Value, strongest: _Saved) -> dict[str, Tensor] | None:
        """See ``trace`` of :class:`backstash.policy.Policy`."""
        content = value.content
        if content is None or content.version != strongest.version:
            return None
        recipe = producers.build(content, lambda view: _leaf(view, value, MAX_DEPTH, None))
        found = producers.gains(recipe) if isinstance(recipe, Recipe) else None
        return None if found is None else {leaf.key: gain for leaf, gain in found.items() if leaf.key}

    # -- unpack --------------------------------------------------------------------------------------------------

    def _unpack(self, saved: _Saved | tuple[Tensor, int]) -> Tensor:
        live = self._live
        first_order = not torch.is_grad_enabled()
        if not live.unpacked and _in_backward():  # and not a look at grad_fn._saved_*
            live.unpacked = True
            live.stashed_nbytes = live.nbytes
            with self._lock:
                live.prefetcher.begin_backward()
                live.prefetcher.advance(live.below_peak)
        if isinstance(saved, tuple):
            small, version = saved
            if small._version != version:
                raise SavedTensorModifiedError(_modified_message(TensorSpec.of(small), None, small._version, version))
            return small
        if saved.tensor is not None and not live.prefetcher.idle and not _is_moved(saved):
            with self._lock:
                live.prefetcher.passed(saved.tensor.key, live.below_peak)
        if saved.dense is not None:
            _check_version(saved)
            return saved.dense
        if saved.modified is not None:
            raise SavedTensorModifiedError(_modified_message(saved.spec, saved.tensor, saved.modified, saved.version))
        assert saved.spec is not None
        value = saved.value
        if value is None:
            return stand_in(saved.spec)
        with torch._C.DisableTorchFunction(), torch.no_grad(), self._lock:
            if saved.node is not None and first_order:
                claim = consumers.claim(saved, saved.spec, saved.node)
                if claim is not None:
                    return claim
            return _decode(saved, saved.spec, value)


def _has_error(action: Action) -> bool:
    """Whether the action may store a value with an error."""
    stash = action.otherwise if isinstance(action, Recompute) else action
    return isinstance(stash, Stash) and any(codec.bound is not None for codec in stash.codecs)


def _without_error(action: Stash) -> Stash:
    """The same action without the codecs that have an error."""
    return Stash(tuple(codec for codec in action.codecs if codec.bound is None), action.store)


def _misreads(codec: Codec, readers: list[_Saved]) -> str | None:
    """Why a codec with an error does not do for everybody who reads the value; None where it does."""
    if codec.bound is None:
        return None
    serves, keeps = getattr(codec, "serves", None), getattr(codec, "keeps", None)
    for reader in readers:
        facts = reader.tensor
        assert facts is not None
        if serves is not None and (facts.function is None or facts.function not in serves):
            return f"backward of {facts.op} reads more of it than that derivative"
        if facts.need is Need.SIGN and (facts.mask is None or keeps is None or not keeps(facts.mask)):
            return f"backward of {facts.op} reads on which side of a threshold it is"
    return None


def _exact(value: _Value) -> Tensor | None:
    """The exact data of a value that is stored with an error, while the gradient's error is measured."""
    monitor = value.live.monitor
    return value.exact if monitor is not None and monitor.is_exact else None


def _decode(saved: _Saved, spec: TensorSpec, value: _Value) -> Tensor:
    exact = _exact(value)
    if exact is not None:
        exact = exact.as_strided(spec.shape, spec.stride, saved.offset)
        return exact if saved.builtin else exact.clone()  # others may write into it
    whole = _dense(value, borrows=saved.builtin and _in_backward() and not torch.is_grad_enabled())
    saved.read = True
    if all(member.read for member in value.saved()):
        value.hold(None)
    if not saved.builtin:  # may write into it unseen
        value.hold(None)
        assert value.buffers is not None
        value.buffers.forget(value if value.form is None else value.form)
    if whole.shape == spec.shape and whole.stride() == spec.stride:
        return whole.detach()
    return whole.as_strided(spec.shape, spec.stride, saved.offset)


def _keeps_signs(recipe: Recipe, value: _Value, whole: Tensor) -> bool:
    """Whether who reads a value's sign can have it in a bit each, with a relu's zero where it is clear."""
    masks = {saved.mask for saved in value.saved() if saved.need is Need.SIGN and saved.dense is not None}
    if not masks:
        return True
    mask = masks.pop()
    if masks or mask is None or mask.test not in (Test.NOT_LE, Test.GT) or mask.lo != 0.0:
        return False
    return recipe.call.name == "relu" and Bitmask(mask).accepts(TensorSpec.of(whole)) is None


def _settle(value: _Value) -> None:
    """Let go of what was decoded or made. Of what its other readers have yet to read, keep the mask if that is all."""
    buffers = value.buffers
    assert buffers is not None
    owner: Any = value if value.form is None else value.form
    whole = value.made if value.made is not None else buffers.holding(owner)
    unread = [member for member in value.saved() if not member.read]
    if whole is not None and unread:
        mask = unread[0].mask
        if mask is None:
            return
        codec = Bitmask(mask)
        if (
            any(member.need is not Need.SIGN or member.mask != mask for member in unread)
            or codec.accepts(TensorSpec.of(whole)) is not None
        ):
            return
        stored = value.form is not None and value.form.mask == mask
        if not stored and (value.bits is None or value.bits[0] != mask):
            value.bits = mask, codec, codec.encode(whole)
    if not unread:
        value.bits = None
    del whole
    value.hold(None)
    buffers.settle(owner)


def _is_moved(saved: _Saved) -> bool:
    value = saved.value
    return value is not None and value.form is not None and value.form.tag is not None


def _planes(value: _Value, form: _Form) -> Encoded:
    """The planes of a value, from wherever they are."""
    if form.tag is None:
        return form.store.get(form.ticket)
    encoded, seconds = value.live.prefetcher.read(form, value.live.below_peak)
    value.entry.stall_seconds += seconds
    return encoded


def _same_layout(spec: TensorSpec, other: TensorSpec) -> bool:
    return spec.shape == other.shape and spec.stride == other.stride


def _dense(value: _Value, ahead: bool = False, borrows: bool = False) -> Tensor:
    """All of a value that is not held dense, decoded or made again.

    What was stored as it is need not be copied for a reader that ``borrows`` it: one that does not write into it.

    Note: [made ahead]
        What is made as the beginning of something else (``ahead``) will be read by nodes of its own soon, and is held
        for them as long as there is room in what backward has freed already; else it is made once more then. So a chain
        of recomputed values never takes more than storing would.
    """
    form, buffers = value.form, value.buffers
    assert buffers is not None
    owner: Any = form if form is not None else value
    whole = value.made if value.made is not None else buffers.holding(owner)
    if whole is not None:
        return whole
    for member in value.saved():
        member.read = False
    started = time.perf_counter()
    if value.recipe is not None:
        spec = value.recipe.call.spec
        whole = value.recipe.run(_fetch, lambda: buffers.take(spec, spec.dtype))
        if form is not None:
            _apply(form, _planes(value, form), whole)
        if not ahead or value.live.has_room(whole.untyped_storage().nbytes()):
            value.hold(whole.detach())
        if any(leaf.recipe is not None and leaf.made is None for leaf in value.recipe.leaves()):
            buffers.shrink()  # there was no room for them
    elif form is not None and borrows and isinstance(form.codec, Raw):
        encoded = _planes(value, form)
        started = time.perf_counter()
        whole = form.codec.view(encoded)
        buffers.lend(owner, whole)
    else:
        assert form is not None
        # A CPU backward kernel that is given a bool makes a floating copy first (see Bitmask.decode).
        one_bit = form.mask is not None and not (form.mask.ternary or form.mask.nan)
        dtype = torch.bool if one_bit and form.spec.device.type != "cpu" else form.spec.dtype
        whole = buffers.take(form.spec, dtype)
        encoded = _planes(value, form)
        started = time.perf_counter()  # what was waited for is counted apart
        form.codec.decode(encoded, whole)
    buffers.filled(owner, whole)
    value.entry.decode_seconds += time.perf_counter() - started
    value.entry.decodes += 1
    return whole


def _apply(form: _Form, encoded: Encoded, made: Tensor) -> None:
    """Where the mask is clear a relu's result becomes zero, elsewhere the smallest positive number if it is less."""
    tiny = torch.finfo(made.dtype).tiny
    made.clamp_(min=tiny)
    x, bits = flat(made), encoded.planes["mask"]
    if made.device.type != "cpu" or not cpu.mask_select(x, bits, x):
        x.masked_fill_(~flat(form.codec.decode(encoded)), 0.0)


def _fetch(leaf: Leaf) -> Tensor:
    """What a recipe begins from."""
    value: _Value = leaf.value
    if value.form is None and value.recipe is None:
        guard = value.guard
        assert guard is not None
        if guard.dense is None:
            assert guard.modified is not None
            raise SavedTensorModifiedError(_modified_message(guard.spec, guard.tensor, guard.modified, guard.version))
        _check_version(guard)
        whole = guard.dense
    else:
        whole = _dense(value, ahead=True, borrows=True)
    if whole.shape == leaf.spec.shape and whole.stride() == leaf.spec.stride and whole.storage_offset() == leaf.offset:
        return whole.detach()  # and not the pool's own tensor, which does not tell it that the memory is in use
    return whole.as_strided(leaf.spec.shape, leaf.spec.stride, leaf.offset)


def _leaf(view: View, root: _Value, max_depth: int, within: frozenset[str] | None) -> Leaf | str | None:
    """The stored value that holds what a recipe for ``root`` would begin from; None without one, or why it may not.

    It is exact, or has the errors of no values but those ``within``; None for any.
    """
    value = view.content.value() if view.content.value is not None else None
    if value is None or value is root or value.content is not view.content:
        return None
    dtype: torch.dtype | None = None
    if within is not None and not value.errors <= within:
        return None
    if value.recipe is not None:
        if value.depth + root.height >= max_depth:
            return f"it would begin from a chain of {value.depth} recomputed values"
        dtype = value.recipe.call.spec.dtype
    elif value.form is not None:
        if Need.VALUE in value.form.codec.preserves:
            dtype = value.form.spec.dtype
    else:
        member = _holder(value)
        if member is not None and member.dense is not None and member.dense._version == view.content.version:
            dtype = member.dense.dtype
    if dtype is None:
        return None
    return Leaf(value, view.spec, view.offset) if dtype is view.spec.dtype else "its storage is seen as different types"


def _holder(value: _Value) -> _Saved | None:
    """A saved tensor by which a value that is neither encoded nor recomputed is held for its data."""
    return next((one for one in value.saved() if one.need is Need.VALUE and one.dense is not None), None)


def _guard(value: _Value) -> None:
    """Make sure that a value that is held dense stays as long as a recipe begins from it."""
    if value.form is not None or value.recipe is not None or value.guard is not None:
        return
    member = _holder(value)
    assert member is not None and member.dense is not None
    guard = _Saved(member.dense, value.live)
    guard.version, guard.spec, guard.offset = member.version, member.spec, member.offset
    guard.tensor, guard.read = member.tensor, True
    value.guard = guard
    value.members.append(weakref.ref(guard))


def _prove(recipe: Recipe, whole: Tensor) -> str:
    """Whether the recipe makes the bits of ``whole``: "fused", "plain" (op by op), or "" (not)."""
    expected = whole.as_strided((whole.numel(),), (1,), 0)
    for proof, candidate in (("fused", recipe), ("plain", recipe.unfused())):
        made = candidate.run(_first_fetch)
        if made.dtype == whole.dtype and made.untyped_storage().nbytes() == whole.untyped_storage().nbytes():
            flat = made.as_strided((whole.numel(),), (1,), 0)
            if torch.equal(bits_of(flat), bits_of(expected)):
                return proof
    return ""


def _prove_within(recipe: Recipe, whole: Tensor) -> str:
    """Whether the recipe makes ``whole`` within what its bounds allow, and rounding: "within", or "" (not)."""
    off = _off_by(recipe)
    if off is None:
        return ""
    made = recipe.run(_first_fetch)
    if TensorSpec.of(made) != recipe.call.spec:
        return ""
    error = (made - whole.as_strided(made.shape, made.stride(), 0)).abs_()
    by_channel = error.amax([dim for dim in range(made.dim()) if dim != 1])
    rounding = 8 * torch.finfo(made.dtype).eps * made.abs().max()
    return "within" if bool((by_channel <= off * 1.001 + rounding).all()) else ""


def _off_by(recipe: Recipe) -> Tensor | None:
    """How far what the recipe makes may be off, by channel; None where that is not known."""
    found = producers.gains(recipe)
    if found is None:
        return None
    total = torch.zeros(1, device=recipe.call.spec.device)
    for leaf, gain in found.items():
        if leaf.recipe is not None and leaf.recipe.settled:
            off = _off_by(leaf.recipe)
        else:
            bound = leaf.form.codec.bound if leaf.form is not None and leaf.recipe is None else None
            off = torch.zeros(1, device=total.device)
            if bound is not None:
                off = None if bound.abs is None else off + bound.abs
        if off is None:
            return None
        total = total + gain * off
    return total


def _first_fetch(leaf: Leaf) -> Tensor:
    """As :func:`_fetch`, before anything guards the leaf."""
    value: _Value = leaf.value
    if value.form is not None or value.recipe is not None or value.guard is not None:
        return _fetch(leaf)
    member = _holder(value)
    assert member is not None and member.dense is not None
    return member.dense.as_strided(leaf.spec.shape, leaf.spec.stride, leaf.offset)


def _check_version(saved: _Saved) -> None:
    dense = saved.dense
    if dense is not None and dense._version != saved.version:
        raise SavedTensorModifiedError(
            _modified_message(TensorSpec.of(dense), saved.tensor, dense._version, saved.version)
        )


def _whole(saved: _Saved, storage: torch.UntypedStorage) -> Tensor | None:
    """Everything in the storage of a saved tensor: the tensor itself where it fills it, else flat, [n]."""
    dense, spec = saved.dense, saved.spec
    assert dense is not None and spec is not None
    itemsize = spec.dtype.itemsize
    if saved.offset == 0 and spec.nbytes == storage.nbytes() and is_dense(spec.shape, spec.stride):
        return dense
    if storage.nbytes() % itemsize:
        return None
    return dense.as_strided((storage.nbytes() // itemsize,), (1,), 0)


def _state_storages(module: nn.Module) -> Iterator[int]:
    """Addresses of the storages of all parameters and buffers. ``module.parameters()`` takes ten times as long."""
    modules = [module]
    while modules:
        module = modules.pop()
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and type(tensor) in PLAIN and tensor.layout is torch.strided:
                yield tensor.untyped_storage()._cdata
        modules += (child for child in module._modules.values() if child is not None)


def _find(result: Any, wanted: dict[int, _Saved]) -> Iterator[tuple[Any, list[tuple[str, _Saved]]]]:
    """The autograd nodes behind ``result`` that saved something wanted, and what under which role.

    Found tensors are removed from ``wanted``. The walk is bounded: what a function returns may hang on a long graph
    although the node that saved is not in it.
    """
    queue: deque[Any] = deque(node for tensor in _tensors(result) if (node := tensor.grad_fn) is not None)
    budget = 16 + 8 * len(wanted)
    while queue and wanted and budget:
        budget -= 1
        node = queue.popleft()
        found = []
        for attribute, role in _saved_attributes(type(node)):
            try:
                raw = getattr(node, attribute)
            except RuntimeError:  # an older node, whose backward has run and freed what it saved
                break
            for variable in raw if isinstance(raw, (tuple, list)) else (raw,):
                saved = wanted.pop(id(_packed(variable)), None)
                if saved is not None:
                    found.append((role, saved))
        if found:
            yield node, found
        if wanted:
            queue.extend(following for following, _ in node.next_functions if following is not None)


def _tensors(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, (tuple, list)):
        for item in result:
            yield from _tensors(item)
    elif isinstance(result, Mapping):
        yield from _tensors(list(result.values()))


_attributes: dict[type, tuple[tuple[str, str], ...]] = {}


def _saved_attributes(node_type: type) -> tuple[tuple[str, str], ...]:
    """Attribute and role of everything that nodes of this type save."""
    known = _attributes.get(node_type)
    if known is None:
        prefix = "_raw_saved_"
        known = tuple((name, name.removeprefix(prefix)) for name in dir(node_type) if name.startswith(prefix))
        _attributes[node_type] = known
    return known


def _packed(variable: Any) -> Any:
    """What the pack hook returned for a raw saved variable; None where it has none."""
    try:
        return variable.data
    except (AttributeError, RuntimeError):  # None, or an undefined optional input
        return None


def _packed_by(node: Any) -> Iterator[Any]:
    """What pack hooks returned for all that a node has saved."""
    for attribute, _ in _saved_attributes(type(node)):
        try:
            raw = getattr(node, attribute)
        except RuntimeError:  # its backward has run
            return
        for variable in raw if isinstance(raw, (tuple, list)) else (raw,):
            yield _packed(variable)


def _weight_copies(node: Any) -> list[list[int]]:
    """Sorted shapes of the parameters that autocast has cast (and perhaps transposed) for ``node``."""
    shapes = []
    for following, _ in node.next_functions:
        if type(following).__name__ == "TBackward0":
            following = following.next_functions[0][0]
        if type(following).__name__ == "ToCopyBackward0":
            leaf = following.next_functions[0][0]
            if type(leaf).__name__ == "AccumulateGrad":
                shapes.append(sorted(leaf.variable.shape))
    return shapes


def _in_backward() -> bool:
    """Whether autograd runs a node on this thread: what is packed then belongs to the step in progress."""
    return torch._C._current_autograd_node() is not None


def _refuse_other_hooks() -> None:
    if getattr(_active, "session", None) is not None:
        raise SessionError(
            "a Session was opened inside another one, but only the innermost hooks of autograd run, so the outer one "
            "would see nothing. Open one Session around the whole forward pass; for different treatment of parts of "
            "the model use backstash.policy.Rules."
        )
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if top is not None:
        where = getattr(top[0], "__qualname__", repr(top[0]))
        checkpointed = "checkpoint" in where or "checkpoint" in getattr(top[0], "__module__", "")
        cause = "a checkpointed function" if checkpointed else f"the saved-tensor hooks {where}"
        raise SessionError(
            f"a Session was opened inside {cause}, but only the innermost hooks of autograd run, so it would switch "
            f"them off. Open the Session outside: a checkpoint inside a Session works."
        )


def _modified_message(spec: TensorSpec | None, saved: SavedTensor | None, version: int, expected: int) -> str:
    where = f" ({saved.key})" if saved else ""
    return (
        f"one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{spec}]{where} is at version {version}; expected version {expected} instead. Hint: do not change a "
        f"tensor in place after an operation has saved it, or change a clone of it."
    )
