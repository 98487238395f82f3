"""The contents of the stash: the value of a storage, the forms it may have, and the saved tensors that view it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from backstash.codecs.base import Codec, Encoded
from backstash.codecs.masks.codec import Bitmask
from backstash.interpreter import is_odd
from backstash.saved import PLAIN, Mask, Need, SavedTensor, TensorSpec
from backstash.stash.accounts import Account
from backstash.stash.buffers import Buffers
from backstash.stash.live import Live
from backstash.stash.place import Place
from backstash.stash.prefetch import Tag
from backstash.stash.sample import Sample
from backstash.stores import Store, Ticket

if TYPE_CHECKING:
    from backstash.policies.base import Keep, Stash
    from backstash.stash.calls import Content
    from backstash.stash.recipes import Recipe
    from backstash.stash.wrapped import Wrapping


NO_ERRORS: frozenset[str] = frozenset()
"""The errors of an exact value: one object for all of them."""


class Form:
    """One encoding of a value: the planes' ticket and how to decode them. With a tag they are not on the device."""

    __slots__ = ("__weakref__", "codec", "mask", "planes", "spec", "store", "tag", "ticket")

    def __init__(self, codec: Codec, mask: Mask | None, spec: TensorSpec, store: Store, ticket: Ticket) -> None:
        self.codec, self.mask, self.spec, self.store, self.ticket = codec, mask, spec, store, ticket
        self.tag: Tag | None = None
        self.planes: Encoded | None = None  # fetched for one reader and held for the next

    def __del__(self) -> None:
        self.store.drop(self.ticket)


class Value:
    """The data of one storage, owned by the saved tensors that view it and by the recipes that begin from it.

    At most one of ``form``, ``recipe`` and dense members holds the data; but with a recipe that begins from bounded
    values, ``form`` holds the mask that its readers of signs read.

    Attributes:
        storage: the program's memory, as long as nothing has been decided about the value.
        cdata: its address.
        address: what keeps that address from being given to another one, where the value is never encoded.
        members: the saved tensors that view it.
        unread: how many members that are alive have not read what was decoded or remade last.
        round: how often it was decoded or remade; a member that has read it notes the number.
        bits: the mask of what was decoded or remade, as long as nobody reads more of it than that.
        remade: what the recipe made, as long as a saved tensor has yet to read it.
        sample: bits that the remade value must have (Note: [samples] in sample.py).
        otherwise: what is done with the value if the recipe has to be given up.
        guard: a member of its own, which keeps the dense data that recipes need, and its version.
        height: the length of the longest chain of recipes above it.
        key, facts: those that it was decided on with.
        errors: keys of the bounded values whose errors it has, its own among them.
        exact: in a checked step, the exact data beside a form or a recipe that has an error.
        shares: whether what its recipe makes is held for all who read it, and not made again for each.
        children: the values that are remade from it, where these share; None where there are none.
        has_room: whether the policy knows that its readers may hold it until they are done.
        born: when it was queued, on the Session's clock.
        place: where in the model it was saved first.
        depth: how many recomputed values had to be made before it was there, itself included, when it was forgotten.
        written: the versions of tensors that were decoded for readers who may write into them.
    """

    __slots__ = (
        "__weakref__",
        "account",
        "address",
        "bits",
        "born",
        "buffers",
        "cdata",
        "children",
        "content",
        "depth",
        "errors",
        "exact",
        "facts",
        "form",
        "guard",
        "has_room",
        "height",
        "key",
        "live",
        "members",
        "otherwise",
        "place",
        "recipe",
        "remade",
        "round",
        "sample",
        "shares",
        "storage",
        "unread",
        "written",
    )

    def __init__(self, storage: torch.UntypedStorage, account: Account, live: Live, place: Place | None = None) -> None:
        self.storage: torch.UntypedStorage | None = storage
        self.cdata: int = storage._cdata
        self.address: StorageWeakRef | None = None
        self.members: list[weakref.ref[Saved]] = []
        self.unread = 0
        self.round = 0
        self.account = account
        self.form: Form | None = None
        self.bits: tuple[Mask, Bitmask, Encoded] | None = None
        self.buffers: Buffers | None = None
        self.live = live
        self.content: Content | None = None
        self.recipe: Recipe | None = None
        self.remade: Tensor | None = None
        self.sample: Sample | None = None
        self.shares = False
        self.children: list[weakref.ref[Value]] | None = None
        self.otherwise: Keep | Stash | None = None
        self.guard: Saved | None = None
        self.has_room = False
        self.height = 0
        self.key = ""
        self.facts: SavedTensor | None = None
        self.errors = NO_ERRORS
        self.exact: Tensor | None = None
        self.born = 0
        self.place = place
        self.depth = 0
        self.written: list[tuple[Tensor, int]] | None = None

    @property
    def is_dense(self) -> bool:
        """Whether it is held as it is, and nothing else."""
        return self.form is None and self.recipe is None

    def raise_to(self, height: int) -> None:
        """Note that a chain of that many recipes begins here."""
        if self.shares:  # such chains may have any length
            self.height = max(self.height, 1)
        elif height > self.height:
            self.height = height
            for leaf in self.recipe.leaves if self.recipe is not None else ():
                leaf.raise_to(height + 1)

    def saved(self) -> Iterator[Saved]:
        """Those of its saved tensors that are still alive."""
        return (saved for member in self.members if (saved := member()) is not None)

    def begin_round(self) -> None:
        """It is decoded or remade anew: every member has yet to read that."""
        self.round += 1
        unread = 0
        for member in self.members:
            unread += member() is not None
        self.unread = unread

    def hold(self, whole: Tensor | None) -> None:
        """Keep what was remade for who reads it next; None: no longer."""
        if self.remade is not None:
            self.live.add_remade(-self.remade.untyped_storage().nbytes())
        self.remade = whole
        if whole is not None:
            self.live.add_remade(whole.untyped_storage().nbytes())

    @property
    def is_awaited(self) -> bool:
        """Whether a saved tensor has yet to read what was made, or a value that has yet to be made from it."""
        if self.unread > 0:
            return True
        return any((value := child()) is not None and value.round == 0 for child in self.children or ())

    def let_go(self) -> None:
        """Hold what was remade no longer, unless somebody waits for it."""
        if not (self.is_awaited if self.shares else self.unread > 0):
            self.hold(None)

    def __del__(self) -> None:
        remade = 0 if self.remade is None else self.remade.untyped_storage().nbytes()
        if self.buffers is not None and self.form is not None:
            self.buffers.forget(self.form)
        nbytes = self.account.device_nbytes
        if nbytes or remade:
            self.live.lose(nbytes=nbytes, remade_nbytes=remade)


class Saved:
    """The packed object: one tensor that autograd saved.

    Attributes:
        dense: the tensor, where it is held as it is.
        version: of the tensor when it was saved.
        counter: an empty tensor that shares the version of one of which only the shape is held.
        node: the sequence number of the autograd node that saved it; None where that is not one of torch's own.
        claimable: whether a kernel of the package backward reads it.
        modified: the version that it was found at when it was to be encoded, if that is another one.
        round: of its value, when it was read last.
        place: where in the model it was saved.
        original: the program's own tensor, as long as the program holds it.
        pinned: whether it is a leaf that autograd accumulates into, or a view of one: it is never encoded.
        wrapping: the rest of a wrapper whose inner tensor was packed.
    """

    __slots__ = (
        "__weakref__",
        "builtin",
        "claimable",
        "counter",
        "dense",
        "live",
        "mask",
        "modified",
        "need",
        "node",
        "offset",
        "original",
        "pinned",
        "place",
        "round",
        "spec",
        "tensor",
        "value",
        "version",
        "wrapping",
    )

    def __init__(self, x: Tensor, live: Live) -> None:
        self.live = live
        live.add_saved()
        self.dense: Tensor | None = x.detach()
        self.original: weakref.ref[Tensor] | None = weakref.ref(x)
        self.version: int = x._version
        self.counter: Tensor | None = None
        self.tensor: SavedTensor | None = None
        self.place: Place | None = None
        self.spec: TensorSpec | None = None
        self.value: Value | None = None
        self.mask: Mask | None = None
        self.need = Need.VALUE
        self.offset = 0
        self.modified: int | None = None
        self.builtin = False
        self.claimable = False
        self.node: int | None = None
        self.round = 0
        self.pinned = False
        self.wrapping: Wrapping | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it is looked at at all: what is not plain and strided is kept as it is."""
        x = self.dense
        return x is not None and type(x) in PLAIN and x.layout is torch.strided and not is_odd(x)

    @property
    def is_moved(self) -> bool:
        """Whether its value is in a store other than the device."""
        value = self.value
        return value is not None and value.form is not None and value.form.tag is not None

    def is_of(self, x: Tensor) -> bool:
        """Whether it was saved of that very tensor."""
        return self.original is not None and self.original() is x

    def looks_like(self, spec: TensorSpec) -> bool:
        """Whether the dense tensor has that spec."""
        assert self.dense is not None
        return spec.describes(self.dense)

    def has_read(self) -> None:
        """Note that it has read what its value was decoded or remade to last."""
        value = self.value
        if value is not None and self.round != value.round:
            self.round = value.round
            value.unread -= 1

    def __del__(self) -> None:
        value = self.value
        if value is not None and self.round != value.round:
            value.unread -= 1
        self.live.lose(saved=1)


def version_of(x: Tensor) -> Tensor:
    """An empty tensor that shares the version of ``x``, and none of its memory."""
    counter = x.detach()
    counter.data = torch.empty(0, dtype=x.dtype, device=x.device)
    return counter


def holder(value: Value) -> Saved | None:
    """A saved tensor by which a value that is neither encoded nor recomputed is held for its data."""
    for member in value.members:
        saved = member()
        if saved is not None and saved.dense is not None and (saved.need is Need.VALUE or saved.need is Need.INDEX):
            return saved
    return None
