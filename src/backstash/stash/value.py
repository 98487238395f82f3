"""The contents of the stash: the value of a storage, the state of its bytes, and the saved tensors that view it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from backstash.codecs.base import Codec, Encoded
from backstash.interpreter import is_odd
from backstash.saved import PLAIN, Mask, Need, SavedTensor, TensorSpec
from backstash.stash.accounts import Account
from backstash.stash.live import Live
from backstash.stash.place import Place
from backstash.stash.prefetch import Tag
from backstash.stores import Store, Ticket

if TYPE_CHECKING:
    from backstash.codecs import Bitmask
    from backstash.policies.base import Keep, Stash
    from backstash.remake.calls import Content
    from backstash.remake.recipes import Recipe
    from backstash.stash.sample import Sample
    from backstash.stash.wrapped import Wrapping


NO_ERRORS: frozenset[str] = frozenset()
"""The errors of an exact value: one object for all of them."""


class ValueState:
    """Where a value's bytes are: one of the classes below.

    Attributes:
        errors: keys of the bounded values whose errors the value has, its own among them.
        form: the planes that hold the value, or beside a recipe those that its readers of signs read; None without any.
        recipe: what makes the value again; None where nothing does.
        sample: bits that the remade value must have (Note: [samples] in sample.py).
        depth: how many remade values had to be made before it was there, itself included, when it was forgotten.
        made: what was decoded or remade, as long as a saved tensor has yet to read it.
        shares: whether what its recipe makes is held for all who read it, and not made again for each.
    """

    __slots__ = ("__weakref__", "errors", "made")

    form: Form | None = None
    recipe: Recipe | None = None
    sample: Sample | None = None
    depth = 0
    shares = False

    def __init__(self) -> None:
        self.errors = NO_ERRORS
        self.made: Tensor | None = None


class Dense(ValueState):
    """Held as it is, by the saved tensors that view it.

    Attributes:
        otherwise: what is done with a value that has errors when nobody but autograd holds it again; else None.
    """

    __slots__ = ("otherwise",)

    def __init__(self) -> None:
        super().__init__()
        self.otherwise: Stash | None = None


DENSE = Dense()
"""The state of every exact value that is held as it is."""


class Form(ValueState):
    """Encoded: the planes' ticket and how to decode them. With a tag they are not on the device."""

    __slots__ = ("codec", "mask", "planes", "spec", "store", "tag", "ticket")

    def __init__(self, codec: Codec, mask: Mask | None, spec: TensorSpec, store: Store, ticket: Ticket) -> None:
        self.codec, self.mask, self.spec, self.store, self.ticket = codec, mask, spec, store, ticket
        super().__init__()
        self.tag: Tag | None = None
        self.planes: Encoded | None = None  # fetched for one reader and held for the next

    @property
    def form(self) -> Form:  # type: ignore[override]  # read-only here
        """Itself."""
        return self

    def __del__(self) -> None:
        if hasattr(self, "ticket"):  # else it was interrupted while it was made
            self.store.drop(self.ticket)


class Remade(ValueState):
    """Forgotten, to be made again by a recipe.

    Attributes:
        otherwise: what is done with the value if the recipe has to be given up.
    """

    __slots__ = ("depth", "form", "otherwise", "recipe", "sample", "shares")

    def __init__(self, recipe: Recipe, sample: Sample | None, otherwise: Keep | Stash) -> None:
        super().__init__()
        self.recipe: Recipe = recipe
        self.sample, self.otherwise = sample, otherwise
        self.form: Form | None = None
        self.depth, self.shares = 0, recipe.any_producer


class Waiting:
    """The program's memory, as long as nothing has been decided about the value in it.

    Attributes:
        storage: the memory; None where it was decided on, or where the value is never encoded.
        cdata: its address.
        address: what keeps that address from being given to another one, where the value is never encoded.
        born: when it was queued, on the Session's clock.
    """

    __slots__ = ("address", "born", "cdata", "storage")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage: torch.UntypedStorage | None = storage
        self.cdata: int = storage._cdata
        self.address: StorageWeakRef | None = None
        self.born = 0


class Reads:
    """What the saved tensors of a value have read of what was decoded or remade last.

    Attributes:
        round: how often it was decoded or remade; a saved tensor that has read it notes the number.
        unread: how many of those that are alive have not read it.
        bits: its mask, as long as nobody reads more of it than that.
        written: the versions of tensors that were decoded for readers who may write into them.
        has_room: whether the policy knows that the readers may hold it until they are done.
    """

    __slots__ = ("bits", "has_room", "round", "unread", "written")

    def __init__(self) -> None:
        self.round = self.unread = 0
        self.bits: tuple[Mask, Bitmask, Encoded] | None = None
        self.written: list[tuple[Tensor, int]] | None = None
        self.has_room = False


class Dependents:
    """What is remade from a value.

    Attributes:
        height: the length of the longest chain of recipes above the value.
        guard: a saved tensor of its own, which keeps the dense data that recipes need, and its version.
        children: the values that are remade from it, where these share; None where there are none.
    """

    __slots__ = ("children", "guard", "height")

    def __init__(self) -> None:
        self.height = 0
        self.guard: Saved | None = None
        self.children: list[weakref.ref[Value]] | None = None


class Value:
    """The data of one storage, owned by the saved tensors that view it and by the recipes that begin from it.

    Attributes:
        account: what a report says of it.
        content: what the storage held when it was saved, and how that was made; None where it is not known.
        dependents: what is remade from it.
        facts: those that it was decided on with; None before that.
        held_nbytes: bytes of it in the running totals; an account goes on to later values.
        live: the running totals.
        members: the saved tensors that view it.
        place: where in the model it was saved first.
        reads: what these have read.
        state: where its bytes are.
        waiting: the program's memory.
    """

    __slots__ = (
        "__weakref__",
        "account",
        "content",
        "dependents",
        "facts",
        "held_nbytes",
        "live",
        "members",
        "place",
        "reads",
        "state",
        "waiting",
    )

    def __init__(self, storage: torch.UntypedStorage, account: Account, live: Live, place: Place | None = None) -> None:
        self.account, self.live, self.place = account, live, place
        self.waiting = Waiting(storage)
        self.state: ValueState = DENSE
        self.members: list[weakref.ref[Saved]] = []
        self.reads, self.dependents = Reads(), Dependents()
        self.content: Content | None = None
        self.facts: SavedTensor | None = None
        self.held_nbytes = 0

    def take(self, nbytes: int, store: str = "device") -> None:
        """So many bytes are held of it now, in that store."""
        self.account.stash_nbytes, self.account.store = nbytes, store
        more = self.account.device_nbytes - self.held_nbytes
        self.held_nbytes += more
        self.live.add(more)

    @property
    def key(self) -> str:
        """The key that it was decided on with; empty before that."""
        return "" if self.facts is None else self.facts.key

    @property
    def is_dense(self) -> bool:
        """Whether it is held as it is, and nothing else."""
        return isinstance(self.state, Dense)

    def raise_to(self, height: int) -> None:
        """Note that a chain of that many recipes begins here."""
        own, state = self.dependents, self.state
        if state.shares:  # such chains may have any length
            own.height = max(own.height, 1)
        elif height > own.height:
            own.height = height
            for leaf in state.recipe.leaves if state.recipe is not None else ():
                leaf.raise_to(height + 1)

    def saved(self) -> Iterator[Saved]:
        """Those of its saved tensors that are still alive."""
        return (saved for member in self.members if (saved := member()) is not None)

    def begin_round(self) -> None:
        """It is decoded or remade anew: every saved tensor has yet to read that."""
        self.reads.round += 1
        unread = 0
        for member in self.members:
            unread += member() is not None
        self.reads.unread = unread

    def hold(self, whole: Tensor | None) -> None:
        """Keep what was decoded or remade for who reads it next; None: no longer."""
        state = self.state
        if state.made is not None:
            self.live.add_remade(-state.made.untyped_storage().nbytes())
        state.made = whole
        if whole is not None:
            self.live.add_remade(whole.untyped_storage().nbytes())

    @property
    def is_awaited(self) -> bool:
        """Whether a saved tensor has yet to read what was made, or a value that has yet to be made from it."""
        if self.reads.unread > 0:
            return True
        children = self.dependents.children or ()
        return any((value := child()) is not None and value.reads.round == 0 for child in children)

    def let_go(self) -> None:
        """Hold that no longer, unless somebody waits for it."""
        if not (self.is_awaited if self.state.shares else self.reads.unread > 0):
            self.hold(None)

    def __del__(self) -> None:
        if not hasattr(self, "state"):  # it was interrupted while it was made
            return
        made = self.state.made
        remade = 0 if made is None else made.untyped_storage().nbytes()
        if not self.is_dense:
            self.live.buffers.forget(self.state)
        if self.held_nbytes or remade:
            self.live.lose(nbytes=self.held_nbytes, remade_nbytes=remade)


class Origin:
    """The program's own tensor, as it was when autograd saved it.

    Attributes:
        tensor: the tensor, as long as the program holds it; None where it is the saved one itself.
        version: of the tensor when it was saved.
        counter: an empty tensor that shares its version, where only its shape is held, or the node that saved it may
            write into it (Note: [reader that writes] in hazards.md); else None.
        modified: the version that it was found at when it was to be encoded, if that is another one.
        pinned: whether it is a leaf that autograd accumulates into, or a view of one: it is never encoded.
        wrapping: the rest of a wrapper whose inner tensor was packed.
    """

    __slots__ = ("counter", "modified", "pinned", "tensor", "version", "wrapping")

    def __init__(self, x: Tensor) -> None:
        self.tensor: weakref.ref[Tensor] | None = weakref.ref(x)
        self.version: int = x._version
        self.counter: Tensor | None = None
        self.modified: int | None = None
        self.pinned = False
        self.wrapping: Wrapping | None = None


class Saved:
    """The packed object: one tensor that autograd saved.

    Attributes:
        dense: the tensor, where it is held as it is.
        live: the running totals.
        node: the sequence number of the autograd node that saved it; None where that is not one of torch's own.
        origin: the program's own tensor when it was saved.
        place: where in the model it was saved; None before it has a name.
        round: of its value, when it was read last.
        value: the data of its storage; None where it has none of its own.
        view: how it looks, and where it begins in its storage; None before it has a name.
    """

    __slots__ = ("__weakref__", "dense", "live", "node", "origin", "place", "round", "value", "view")

    def __init__(self, x: Tensor, live: Live) -> None:
        self.dense: Tensor | None = x.detach()
        self.origin = Origin(x)
        self.place: Place | None = None
        self.view: tuple[TensorSpec, int] | None = None
        self.value: Value | None = None
        self.node: int | None = None
        self.round = 0
        live.add_saved()
        self.live = live  # last: the finalizer of what was interrupted before that takes nothing away

    @property
    def tensor(self) -> SavedTensor | None:
        """Facts about it; None before it has a name."""
        return None if self.place is None else self.place.facts

    @property
    def need(self) -> Need:
        """How much of it backward reads: all, before it has a name."""
        return Need.VALUE if self.place is None else self.place.facts.need

    @property
    def mask(self) -> Mask | None:
        """What backward reads of its sign."""
        return None if self.place is None else self.place.facts.mask

    @property
    def spec(self) -> TensorSpec | None:
        """How it looks."""
        return None if self.view is None else self.view[0]

    @property
    def offset(self) -> int:
        """Where it begins in its storage, in elements."""
        return 0 if self.view is None else self.view[1]

    @property
    def builtin(self) -> bool:
        """Whether a node of torch's own has saved it."""
        return self.node is not None

    @property
    def claimable(self) -> bool:
        """Whether a kernel of the package redeem reads it."""
        return self.node is not None and self.value is not None and self.place is not None and self.place.claimable

    @property
    def is_plain(self) -> bool:
        """Whether it is looked at at all: what is not plain and strided is kept as it is."""
        x = self.dense
        return x is not None and type(x) in PLAIN and x.layout is torch.strided and not is_odd(x)

    @property
    def is_moved(self) -> bool:
        """Whether its value is in a store other than the device."""
        form = None if self.value is None else self.value.state.form
        return form is not None and form.tag is not None

    def is_of(self, x: Tensor) -> bool:
        """Whether it was saved of that very tensor."""
        return self.origin.tensor is not None and self.origin.tensor() is x

    def looks_like(self, spec: TensorSpec) -> bool:
        """Whether the dense tensor has that spec."""
        assert self.dense is not None
        return spec.describes(self.dense)

    def has_read(self) -> None:
        """Note that it has read what its value was decoded or remade to last."""
        reads = None if self.value is None else self.value.reads
        if reads is not None and self.round != reads.round:
            self.round = reads.round
            reads.unread -= 1

    def __del__(self) -> None:
        if hasattr(self, "live"):
            self.has_read()
            self.dense = None  # its memory may be a decode buffer, which is given back with the last saved tensor
            self.live.lose(saved=1)


def version_of(x: Tensor) -> Tensor:
    """An empty tensor that shares the version of ``x``, and none of its memory."""
    counter = x.detach()
    counter.data = torch.empty(0, dtype=x.dtype, device=x.device)
    return counter


def with_version_of(counter: Tensor, memory: Tensor) -> Tensor:
    """``memory`` as a tensor that shares the version of ``counter``: a write into it is a write into that as well."""
    tensor = counter.detach()
    tensor.data = memory
    return tensor


def holder(value: Value) -> Saved | None:
    """A saved tensor by which a value that is neither encoded nor recomputed is held for its data."""
    for member in value.members:
        saved = member()
        if saved is not None and saved.dense is not None and (saved.need is Need.VALUE or saved.need is Need.INDEX):
            return saved
    return None


def guard_with(value: Value, dense: Tensor) -> None:
    """Have that tensor hold the data of a dense value."""
    guard = value.dependents.guard = Saved(dense, value.live)
    guard.view = TensorSpec.of(dense), int(dense.storage_offset())
    value.members.append(weakref.ref(guard))
