"""An exact policy whose stash is in another memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from backstash import codecs
from backstash.arguments import check_count, check_word
from backstash.codecs import Codec, Raw
from backstash.policies.base import Action, Keep, Policy, Recompute, Stash, Wrapper
from backstash.policies.exact import Lossless
from backstash.saved import Need, SavedTensor


@dataclass(frozen=True)
class Offload(Wrapper):
    """Exact, and in another memory: every value that :class:`Lossless` would hold on the device goes to a store.

    A value that is remade in backward needs no store, and a value of which backward only reads the shape has no bytes.
    A value is remade only if it needs a single stored value. That value has to come back for its own reader anyway.
    With two of them, such as for a residual sum, both would be on the device early or cross the link twice, to save a
    single transfer.

    Args:
        codec: a codec that is tried first if backward reads the value, before the codecs of ``lossless``. Gradients are
            then as exact as the codec is. None for the codecs of ``lossless`` alone.
        store: name of the store.
        lossless: the policy that chooses the codecs.
        ahead: how many values may come back before they are read; None for as many as there is room for (see
            stash/prefetch.py). With 1 the least memory is taken, which is enough if the link is fast.

    Raises:
        TypeError: an argument is of another type.
        ValueError: ``ahead`` is below 1.
    """

    codec: Codec | None = None
    store: str = "host"
    lossless: Lossless = field(default_factory=Lossless)
    ahead: int | None = None

    def __post_init__(self) -> None:
        check_word(self.store, "store", "Offload", "host")
        check_count(1 if self.ahead is None else self.ahead, "ahead", "values", "Offload")
        if self.codec is not None and not isinstance(self.codec, Codec):
            raise TypeError(
                f"Offload was asked for codec={self.codec!r:.80}, but that is no codec. Pass one such as "
                f"codecs.Exponents(), or its name."
            )
        if self.ahead is not None and self.ahead < 1:
            raise ValueError(f"Offload was asked for ahead={self.ahead}, but it takes 1 or more, or None.")

    @property
    def inner(self) -> Policy:
        """The policy ``lossless``."""
        return self.lossless

    @property
    def is_fixed(self) -> bool:  # type: ignore[override]  # read-only here
        """As ``lossless``."""
        return self.lossless.is_fixed

    def decide(self, saved: SavedTensor) -> Action:
        """Returns the smallest exact form of what backward reads, in the store."""
        return self._offloaded(saved, self.lossless.decide(saved))

    def decide_together(self, saved: SavedTensor, readers: Sequence[SavedTensor]) -> Action:
        """Likewise."""
        return self._offloaded(saved, self.lossless.decide_together(saved, readers))

    def _offloaded(self, saved: SavedTensor, action: Action) -> Action:
        if saved.need is Need.SHAPE:
            return action
        if isinstance(action, Recompute):
            return replace(action, otherwise=self.moved(saved, action.otherwise), max_inputs=1)
        return self.moved(saved, action)

    def moved(self, saved: SavedTensor, action: Keep | Stash) -> Stash:
        """Returns the action that moves a value which would be held like this on the device."""
        chain = action.codecs if isinstance(action, Stash) else ()
        first = (self.codec,) if self.codec is not None and saved.need is Need.VALUE else ()
        return Stash((*first, *chain, Raw()), self.store)


def offload(
    codec: str | Codec | None = None,
    store: str = "host",
    recompute: bool = True,
    ahead: int | None = None,
    dense: bool = False,
) -> Offload:
    """Returns the policy :class:`Offload`.

    Args:
        codec: as there; it may be a name.
        store, ahead: as there.
        recompute, dense: as in :class:`Lossless`. With ``dense`` values of bfloat16 are moved with shorter exponents,
            in three quarters of their bytes.
    """
    chosen = codecs.get(codec) if isinstance(codec, str) else codec
    return Offload(chosen, store, Lossless(recompute=recompute, dense=dense), ahead)
