"""What is done with a saved tensor (Action), and who decides it (Policy)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

from backstash import codecs as codec_registry
from backstash.codecs.base import Codec
from backstash.codecs.sliced import Sliced
from backstash.saved import SavedTensor

MAX_DEPTH = 6
"""The longest chain of recomputed values that begin from each other, unless a policy asks for another one."""


@dataclass(frozen=True)
class Keep:
    """Hold the tensor as it is, by reference.

    Args:
        reason: what the report says.
    """

    reason: str = "the policy says so"


@dataclass(frozen=True, init=False)
class Stash:
    """Encode the tensor and hold the planes.

    Args:
        codecs: a codec, a codec's name, or several: the first that takes the tensor encodes it; where none does, the
            tensor is kept and the report says why.
        store: name of the store that holds the planes.
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
        object.__setattr__(self, "codecs", resolved)
        object.__setattr__(self, "store", store)


@dataclass(frozen=True)
class Recompute:
    """Hold nothing; make the value again in backward, bit for bit, by the cheap functions that made it.

    Bit for bit, unless ``within`` names values.

    Args:
        otherwise: what is done where it cannot be made again: what made it is not cheap or draws numbers that nobody
            noted, an input is not held, or the proof failed.
        max_depth: the longest chain of recomputed values that begin from each other.
        max_inputs: how many stored values it may begin from; None for any number.
        within: keys of values that are stored within a bound from which it may begin nevertheless, through relu, sums
            and batch norm: it is made again within what these do to the bounds, and who reads its sign has that exact,
            a bit per element that is stored.
    """

    otherwise: Keep | Stash = Keep()
    max_depth: int = MAX_DEPTH
    max_inputs: int | None = None
    within: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        most = 1 if self.max_inputs is None else self.max_inputs
        if self.max_depth < 1 or most < 1 or not isinstance(self.otherwise, (Keep, Stash)):
            raise ValueError(
                f"Recompute was asked for max_depth={self.max_depth}, max_inputs={self.max_inputs} and "
                f"otherwise={self.otherwise!r}, but it takes a depth of 1 or more, as many inputs, and Keep() or "
                f"Stash(...)."
            )


@dataclass(frozen=True, init=False)
class Slice(Stash):
    """Encode a convolution's input in slices of the batch, and compute its backward slice by slice. Not bit-equal.

    Only a slice is decoded at a time, and the library's reordered copies are of slices too. The weight's gradient is
    the same sum in another order: no policy that is called exact does this. What is no convolution's input is encoded
    whole.

    Args:
        parts: how many slices, 2 or more.
        codecs, store: as in Stash.
    """

    parts: int

    def __init__(self, parts: int, codecs: Codec | str | Sequence[Codec | str] = "zvc", store: str = "device") -> None:
        super().__init__(codecs, store)
        if parts < 2:
            raise ValueError(f"Slice was asked for {parts} parts, but it takes 2 or more.")
        object.__setattr__(self, "parts", parts)

    def sliced(self) -> Stash:
        """The same with codecs that can decode a slice at a time."""
        return Stash(tuple(Sliced(codec, self.parts) for codec in self.codecs), self.store)


Action = Keep | Stash | Recompute


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a saved tensor.

    Attributes:
        saved: the tensor.
        codec: id of the codec that encoded it, None where it was kept.
        nbytes: bytes held for it now.
        reason: why it was kept, empty where it was encoded.
    """

    saved: SavedTensor
    codec: str | None
    nbytes: int
    reason: str = ""


@runtime_checkable
class Policy(Protocol):
    """Decides what is done with each saved tensor.

    Four more methods are optional, for policies that learn from training (see control.Comet): :class:`DecidesTogether`
    has one; ``begin_step()`` is called before a forward pass saves its first tensor; ``watch(saved, node, x)`` whenever
    one of torch's own autograd nodes has saved ``x``, of which nothing may be kept but a copy; ``trace(saved, readers,
    sources)`` before a value is decided on, where ``sources()`` tells from which values that are held it could be made
    again: by the keys with which these were decided on, by how much an error of theirs is multiplied, channel by
    channel (see producers.gains); None where that is not known.
    """

    def decide(self, saved: SavedTensor) -> Action:
        """The action for one stored value; ``saved`` is the strongest of its uses (see docs/architecture.md)."""

    def observe(self, outcome: Outcome) -> None:
        """Told what became of it."""


OPTIONAL: Mapping[str, Any] = MappingProxyType(
    {"ahead": None, "recomputes": True, "begin_step": None, "watch": None, "trace": None}
)
"""Members that a policy may have beside those of Policy, and what counts where it has none.

``ahead`` is how many values may come back from a store before they are read (see policies.Offload), ``recomputes``
whether a Session has to note how values are made; the methods are told of in Policy. A policy that stands in front of
another one has to pass them on, as Rules does.
"""


def optional(policy: Policy, name: str) -> Any:
    """An optional member of a policy, by its name in OPTIONAL; the default where the policy has none."""
    return getattr(policy, name, OPTIONAL[name])


@runtime_checkable
class DecidesTogether(Protocol):
    """A policy to which it matters who else reads a value."""

    def decide_together(self, saved: SavedTensor, readers: Sequence[SavedTensor]) -> Action:
        """As :meth:`Policy.decide`, which is not asked then; ``readers`` are all uses of the value, ``saved`` too."""


@dataclass(frozen=True)
class Rules:
    """Actions by pattern, first match wins.

    Args:
        rules: (pattern, action) pairs; a pattern is matched against ``SavedTensor.key`` as in a shell
            (``"features.*/Relu*:result"``).
        otherwise: the policy for everything else.

    Example:
        >>> from backstash import policies
        >>> rules = Rules((("classifier.*", Keep()),), otherwise=policies.get("lossless"))
    """

    rules: tuple[tuple[str, Action], ...]
    otherwise: Policy

    def decide(self, saved: SavedTensor) -> Action:
        """The action of the first pattern that matches, else what ``otherwise`` decides."""
        return self.decide_together(saved, (saved,))

    def decide_together(self, saved: SavedTensor, readers: Sequence[SavedTensor]) -> Action:
        """The same, for an ``otherwise`` to which it matters who else reads the value."""
        for pattern, action in self.rules:
            if fnmatchcase(saved.key, pattern):
                return action
        if isinstance(self.otherwise, DecidesTogether):
            return self.otherwise.decide_together(saved, readers)
        return self.otherwise.decide(saved)

    @property
    def recomputes(self) -> bool:
        """Whether a rule makes values again, or ``otherwise`` does."""
        asked = any(isinstance(action, Recompute) for _, action in self.rules)
        return asked or bool(optional(self.otherwise, "recomputes"))

    def __getattr__(self, name: str) -> Any:
        """The optional members of ``otherwise``, as far as it has them."""
        if name not in OPTIONAL:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.otherwise, name)

    def observe(self, outcome: Outcome) -> None:
        """Passed on to ``otherwise``."""
        self.otherwise.observe(outcome)
