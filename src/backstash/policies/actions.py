"""The actions between which a policy chooses for a saved tensor, and their outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from backstash import codecs as codec_registry
from backstash.codecs.base import Codec
from backstash.saved import SavedTensor

MAX_DEPTH = 6
"""The longest chain of remade values, each of which begins from the next, unless a policy asks for another length."""


@dataclass(frozen=True)
class Keep:
    """Hold the tensor as it is, by reference.

    Args:
        reason: why; the report shows it.
    """

    reason: str = "the policy says so"


@dataclass(frozen=True, init=False)
class Stash:
    """Encode the tensor and hold the planes.

    Args:
        codecs: a codec, a codec's name, or several of them. The first codec that accepts the tensor encodes it. If none
            does, the tensor is kept, and the report says why.
        store: name of the store that holds the planes.

    Raises:
        TypeError: one of ``codecs`` is neither a codec nor a name, or ``store`` is no name.
        UnknownNameError: no codec has that name.
    """

    codecs: tuple[Codec, ...]
    store: str

    def __init__(self, codecs: Codec | str | Sequence[Codec | str], store: str = "device") -> None:
        chosen = codecs if isinstance(codecs, Sequence) and not isinstance(codecs, str) else (codecs,)
        resolved = tuple(codec_registry.get(codec) if isinstance(codec, str) else codec for codec in chosen)
        for codec in resolved:
            if isinstance(codec, type) or not hasattr(codec, "nbytes_bound"):
                raise TypeError(
                    f"Stash was asked for the codec {codec!r}, which is none. Pass a codec such as Zvc(), a name "
                    f"({', '.join(codec_registry.names())}), or several of these."
                )
        if not isinstance(store, str):
            raise TypeError(
                f"Stash was asked for store={store!r:.80}, but that is no name. Pass 'device', 'host', or a name "
                f"among the Session's stores."
            )
        object.__setattr__(self, "codecs", resolved)
        object.__setattr__(self, "store", store)


@dataclass(frozen=True)
class Recompute:
    """Hold nothing, and remake the value in backward with the functions that computed it, which are cheap by default.

    The remade value is equal bit for bit, unless ``within`` names values.

    Args:
        otherwise: the action for a value that cannot be remade. That is so if the function that computed it is not
            cheap, or draws random numbers that nobody noted; if an input is not held; or if the proof failed.
        max_depth: the longest chain of remade values, each of which begins from the next.
        max_inputs: the most stored values that a recipe may begin from; None for any number.
        max_moved: the most values in other stores that a recipe may begin from, those counted from which remade values
            begin that it begins from; None for any number.
        within: keys of values that are stored within a bound, and from which the value may be remade nevertheless. Only
            relu, sums and batch norms may lie between. The remade value is then off by as much as these functions make
            of the bounds. Its sign stays exact for those who read it, because a bit per element is stored for them.
        any_producer: whether costly functions may be repeated as well: convolutions, products of matrices, attention.
            The value is then made once in a backward pass, when it is needed first, and held until it was read for the
            last time, by autograd and by other values that are made from it. Chains may be of any length.
        exact_roots: whether the value is stored without an error, although ``otherwise`` allows one, if others can then
            be remade from it, and all of them together take no more bytes (Note: [exact roots] in remake/roots.py).

    Raises:
        ValueError: a number is below 1 (``max_moved`` below 0), or ``otherwise`` is neither a Keep nor a Stash.
    """

    otherwise: Keep | Stash = Keep()
    max_depth: int = MAX_DEPTH
    max_inputs: int | None = None
    within: frozenset[str] = frozenset()
    any_producer: bool = False
    exact_roots: bool = False
    max_moved: int | None = None

    def __post_init__(self) -> None:
        most = 1 if self.max_inputs is None else self.max_inputs
        if self.any_producer and self.within:
            raise ValueError(
                f"Recompute was asked for any_producer=True within the bounds of {len(self.within)} values, but costly "
                f"functions are only repeated on exact values. Leave one of the two out."
            )
        if self.max_depth < 1 or most < 1 or (self.max_moved or 0) < 0 or not isinstance(self.otherwise, (Keep, Stash)):
            raise ValueError(
                f"Recompute was asked for max_depth={self.max_depth}, max_inputs={self.max_inputs}, "
                f"max_moved={self.max_moved} and otherwise={self.otherwise!r}, but it takes a depth of 1 or more, as "
                f"many inputs, 0 or more that are moved, and Keep() or Stash(...)."
            )


@dataclass(frozen=True, init=False)
class Slice(Stash):
    """Encode a convolution's input in slices of the batch, and compute its backward slice by slice. Not bit-equal.

    Backward decodes a single slice at a time, and the library's reordered copies are of a slice too. The weight's
    gradient is the same sum in another order, so no policy that is called exact uses this action. A tensor that is not
    a convolution's input is encoded whole.

    Args:
        parts: how many slices, 2 or more.
        codecs, store: as for Stash.

    Raises:
        ValueError: fewer than two parts.
    """

    parts: int

    def __init__(self, parts: int, codecs: Codec | str | Sequence[Codec | str] = "zvc", store: str = "device") -> None:
        super().__init__(codecs, store)
        if parts < 2:
            raise ValueError(f"Slice was asked for {parts} parts, but it takes 2 or more.")
        object.__setattr__(self, "parts", parts)

    def sliced(self) -> Stash:
        """Returns the same action with codecs that can decode a slice at a time."""
        return Stash(tuple(codec_registry.sliced.Sliced(codec, self.parts) for codec in self.codecs), self.store)


Action = Keep | Stash | Recompute
"""What a policy may answer for one saved tensor: keep it as it is, store it, or compute it again."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the Session did with a saved tensor.

    Attributes:
        saved: the tensor.
        codec: id of the codec that encoded it; ``"recompute"`` or ``"recompute within"`` if it will be remade; None if
            it was kept.
        nbytes: bytes that are held for it now.
        reason: why it was kept; empty if it was encoded.
    """

    saved: SavedTensor
    codec: str | None
    nbytes: int
    reason: str = ""
