"""Ready-made policies, by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from backstash import codecs
from backstash.codecs import Binary, Bitmask, BlockQuant, Codec, Csr, FewBit, Minifloat, Narrow, Raw, Shape, Signed, Zvc
from backstash.codecs.base import SINGLES
from backstash.codecs.bitmask import FLOATS
from backstash.codecs.csr import CROSSING
from backstash.codecs.fewbit import ACTIVATIONS
from backstash.codecs.fewbit import BITS as CODE_BITS
from backstash.codecs.narrow import INTEGERS
from backstash.errors import UnknownNameError
from backstash.policies_offload import LOSSES, Cdma, Layrub, Vdnn, VdnnDyn
from backstash.policy import Action, Keep, Outcome, Policy, Recompute, Slice, Stash
from backstash.saved import Effect, Need, SavedTensor

FINE_BITS = 8
"""The fewest bits where an error has more than a linear effect."""

GROUP, LEAST_GROUP = 256, 64
"""Elements of a group: as many as ActNN has, and the fewest whose two extremes take no more than a bit per element."""

LEAST_CODE_BITS = 3
"""Of FewBit, which is biased: of a ViT's gradient error 36 % were bias with 2 bits, 23 % with 3, 15 % with 4."""


@dataclass(frozen=True)
class Lossless:
    """Exact: gradients are bit-identical.

    A formula that reads a shape gets a shape, one that reads a sign a bit per element, indices and bools are stored in
    the fewest bits. A value that a cheap function made of others that are held is made again; any other is compressed
    where a sample says that it holds zeros or only two different numbers.

    Args:
        min_saving: the smallest share of a value's bytes worth compressing it for (see codecs.Zvc).
        recompute: whether values are made again.
    """

    min_saving: float = 0.02
    recompute: bool = True

    @property
    def recomputes(self) -> bool:
        """Whether a Session has to note how values are made."""
        return self.recompute

    def decide(self, saved: SavedTensor) -> Action:
        """The smallest exact form of what backward reads."""
        if saved.need is Need.SHAPE:
            return Stash(Shape())
        if saved.need is Need.SIGN and saved.mask is not None:
            return Stash(Bitmask(saved.mask))
        if saved.spec.dtype in INTEGERS:
            windowed = () if saved.window is None else (Narrow(saved.window),)
            return Stash((*windowed, Narrow()))
        if saved.spec.dtype in FLOATS:
            stash = Stash((Binary(), Zvc(self.min_saving)))
            return Recompute(stash) if self.recompute else stash
        return Keep(f"no exact codec takes {saved.spec.dtype}")

    def observe(self, outcome: Outcome) -> None:
        """Learns nothing."""


@dataclass(frozen=True)
class Gist:
    """Gist's rules (ISCA 2018): Binarize, Sparse Storage and Dense Compute, Delayed Precision Reduction.

    Relu before a pooling becomes a bit per element, the pooling's indices 4 bits or fewer. A sparse value is stored as
    its non-zeros, in the smaller one of Gist's CSR and a bit mask. With a ``format`` every stored number is reduced to
    it, sparse or dense, after the forward pass has used it in full; a relu's zeros stay zeros and nothing else becomes
    zero, so its gradient takes the same way. What a loss saves (log-softmax) is left exact.

    Args:
        format: of Minifloat: ``"fp16"``, ``"fp10"``, ``"fp8"``, ... None: exact, as Gist's lossless mode.
        fewbit: bits for what backward reads for a derivative only (see codecs.FewBit); None: as any other value.

    Raises:
        ValueError: there is no such format, or FewBit has not so many bits.
    """

    format: str | None = None
    fewbit: int | None = None

    recomputes: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.format is not None:
            Minifloat(self.format)
        if self.fewbit is not None:
            FewBit(bits=self.fewbit)

    def decide(self, saved: SavedTensor) -> Action:
        """The paper's encoding of what backward reads."""
        if saved.need is Need.SHAPE or (saved.need is Need.SIGN and saved.mask is not None):
            return Lossless(recompute=False).decide(saved)
        if saved.spec.dtype not in FLOATS:
            return Lossless(recompute=False).decide(saved)
        exact = (Binary(), *_sparse(saved, None))
        if self.format is None or saved.spec.dtype not in SINGLES or saved.op in LOSSES:
            return Stash(exact)
        values = Minifloat(self.format)
        # A sparse form has to be smaller than the dense one. Where a relu reads the zeros, only a sparse form will do.
        dense_saving = 1 - values.bits / (8 * saved.spec.dtype.itemsize)
        if dense_saving <= 0:
            return Stash(exact)
        codes = (FewBit(saved.function, self.fewbit),) if self.fewbit and saved.function else ()
        sparse = _sparse(saved, Minifloat(self.format, group_size=0), dense_saving)
        return Stash((Binary(), *codes, *sparse, values, Zvc(values=sparse[1].values), *exact[1:]))

    def observe(self, outcome: Outcome) -> None:
        """Learns nothing."""


def _sparse(saved: SavedTensor, values: Minifloat | None, min_saving: float = 0.02) -> tuple[Csr, Zvc]:
    """Csr where it is the smaller one, else Zvc."""
    width = 8 * saved.spec.dtype.itemsize
    bits = width if values is None else values.bits
    crossing = 1 - CROSSING * (8 + bits) / width - 1 / (8 * width)
    return Csr(max(min_saving, crossing), values), Zvc(min_saving, values)


class SlicedPeak:
    """As Lossless, but the convolutions that set the peak run their backward in slices of the batch. Not bit-equal.

    Those whose input is at least ``share`` of the largest one that was saved so far; the first step is for learning.

    Args:
        parts: how many slices.
        share: of the largest input.

    Raises:
        ValueError: fewer than two parts, or a share that is not above 0 and at most 1.
    """

    recomputes: ClassVar[bool] = True

    def __init__(self, parts: int = 4, share: float = 0.5) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"SlicedPeak was asked for a share of {share}, but it takes one above 0 and at most 1.")
        self.action = Slice(parts, (Binary(), Zvc()))
        self.share = share
        self._largest = 0

    def __repr__(self) -> str:
        return f"SlicedPeak(parts={self.action.parts}, share={self.share})"

    def decide(self, saved: SavedTensor) -> Action:
        """Slices for the largest inputs of convolutions, else as Lossless."""
        self._largest = max(self._largest, saved.spec.nbytes)
        convolved = saved.need is Need.VALUE and (saved.op, saved.role) == ("Convolution", "input")
        if convolved and saved.spec.dtype in FLOATS and saved.spec.nbytes >= self.share * self._largest:
            return self.action
        return Lossless().decide(saved)

    def observe(self, outcome: Outcome) -> None:
        """Learns nothing but sizes, in decide."""


@dataclass(frozen=True)
class Offload:
    """Exact, and in another memory: what :class:`Lossless` makes smaller or not goes to a store.

    What is made again in backward needs no store, and what is read for its shape has no bytes. A value is made again
    only where a single stored one is enough for it: that one has to come back for its own reader anyway. Made of two,
    such as a residual sum, it would have both on the device early, or twice on the link, to save one transfer.

    Args:
        codec: tried first where backward reads the value, before the codecs of Lossless; gradients are then as exact
            as it is. None for these alone.
        store: name of the store.
        lossless: whose codecs they are.
        ahead: how many values may come back before they are read; None: as many as there is room for (see prefetch).
            One is enough where the link is fast, and takes the least memory.
    """

    codec: Codec | None = None
    store: str = "host"
    lossless: Lossless = Lossless()
    ahead: int | None = None

    def __post_init__(self) -> None:
        if self.ahead is not None and self.ahead < 1:
            raise ValueError(f"Offload was asked for ahead={self.ahead}, but it takes 1 or more, or None.")

    @property
    def recomputes(self) -> bool:
        """Whether a Session has to note how values are made."""
        return self.lossless.recompute

    def decide(self, saved: SavedTensor) -> Action:
        """The smallest exact form of what backward reads, in the store."""
        action = self.lossless.decide(saved)
        if saved.need is Need.SHAPE:
            return action
        if isinstance(action, Recompute):
            return replace(action, otherwise=self._moved(saved, action.otherwise), max_inputs=1)
        return self._moved(saved, action)

    def observe(self, outcome: Outcome) -> None:
        """Learns nothing."""

    def _moved(self, saved: SavedTensor, action: Keep | Stash) -> Stash:
        chain = action.codecs if isinstance(action, Stash) else ()
        first = (self.codec,) if self.codec is not None and saved.need is Need.VALUE else ()
        return Stash((*first, *chain, Raw()), self.store)


@dataclass(frozen=True)
class Quantized:
    """Values in a few bits each between the extremes of their group, after ActNN (ICML 2021); the rest is exact.

    A value is rounded only where it is known, of everybody who reads it, what an error does to the gradients
    (``SavedTensor.effect``, effects.py):

    * where the gradients are linear in it, such as the inputs of layers, to ``bits``: its errors cancel on average;
    * the same for what a norm reads, but each group is a part of one row of the norm, so that no row's error follows
      from the range of a larger neighbour; where rows have no groups of 64 elements, 8 bits are used;
    * what is read for one function's derivative is stored with codecs.FewBit, of 3 bits or more;
    * what goes through another curved function has 8 bits or more, and so has all that a fused attention saves, whose
      backward puts queries and keys through an exponential and subtracts nearly equal products of values and result.

    Exact are what a loss saves, the statistics of norms and of attentions, factors that are broadcast, divisors, what
    other functions saved, and whatever is not known. What a relu reads as well has a bit per element more, by which it
    decides as it did. Errors are passed on to the layers below, so unlike under control.Comet they add up:
    ``Session(check=...)`` measures by how much.

    Args:
        bits: of codecs.BlockQuant: 1, 2, 4 or 8.
        recompute: whether values are made again where what they are made of is exact.

    Raises:
        ValueError: BlockQuant has not so many bits.
    """

    bits: int = 2
    recompute: bool = True

    def __post_init__(self) -> None:
        BlockQuant(self.bits)

    @property
    def recomputes(self) -> bool:
        """Whether a Session has to note how values are made."""
        return self.recompute

    def decide(self, saved: SavedTensor) -> Action:
        """As if nobody else read the value."""
        return self.decide_together(saved, (saved,))

    def decide_together(self, saved: SavedTensor, readers: Sequence[SavedTensor]) -> Action:
        """A few bits for a value if the effect of its error on every reader is known, else an exact form."""
        exact = Lossless(recompute=self.recompute).decide(saved)
        values = [reader for reader in readers if reader.need is Need.VALUE]
        bears = values and all(reader.effect is not Effect.UNKNOWN for reader in values)
        if saved.need is not Need.VALUE or saved.spec.dtype not in SINGLES or not bears:
            return exact
        rounded = Stash((Binary(), *self._codes(values), *self._integers(values), Zvc()))
        return Recompute(rounded) if self.recompute else rounded

    def _codes(self, values: Sequence[SavedTensor]) -> tuple[FewBit, ...]:
        """The codec for a value that is read for one function's derivative only, where that takes less."""
        functions = {reader.function for reader in values}
        function = functions.pop() if len(functions) == 1 else None
        if function not in ACTIVATIONS or self.bits > max(CODE_BITS):
            return ()
        return (FewBit(function, max(self.bits, LEAST_CODE_BITS)),)

    def _integers(self, values: Sequence[SavedTensor]) -> tuple[BlockQuant, Signed]:
        """The codecs for a value, and for one whose zeros and signs are read as well."""
        fine = max(self.bits, FINE_BITS)
        normalised = [reader.row for reader in values if reader.effect is Effect.NORMALISED]
        group = math.gcd(GROUP, *(normalised or [reader.row for reader in values]))
        is_aligned = group >= LEAST_GROUP
        is_fine = any(reader.effect is Effect.SENSITIVE for reader in values)
        bits = fine if is_fine or (normalised and not is_aligned) else self.bits
        among_zeros = fine if is_fine or normalised else self.bits  # what is not zero is no row of the norm any more
        return BlockQuant(bits, group if is_aligned else GROUP), Signed(BlockQuant(among_zeros))

    def observe(self, outcome: Outcome) -> None:
        """Learns nothing."""


@dataclass(frozen=True)
class KeepAll:
    """Encodes nothing: what plain PyTorch does, with the report."""

    recomputes: ClassVar[bool] = False

    def decide(self, saved: SavedTensor) -> Action:
        """Keep."""
        return Keep()

    def observe(self, outcome: Outcome) -> None:
        """Learns nothing."""


POLICIES: dict[str, Callable[[], Policy]] = {
    "lossless": Lossless,
    "lossless_stored": lambda: Lossless(recompute=False),
    "gist_lossless": Gist,
    "gist_fp16": lambda: Gist("fp16"),
    "gist_fp10": lambda: Gist("fp10"),
    "gist_fp8": lambda: Gist("fp8"),
    "sliced": SlicedPeak,
    "quantized": Quantized,
    "keep": KeepAll,
    "offload": Offload,
    "vdnn": Vdnn,
    "vdnn_conv": lambda: Vdnn("conv"),
    "cdma": Cdma,
    "layrub": Layrub,
}


def lossless(min_saving: float = 0.02, recompute: bool = True) -> Policy:
    """The policy :class:`Lossless`."""
    return Lossless(min_saving, recompute)


def sliced(parts: int = 4, share: float = 0.5) -> Policy:
    """The policy :class:`SlicedPeak`."""
    return SlicedPeak(parts, share)


def gist(format: str = "fp16", fewbit: int | None = None) -> Policy:
    """The policy :class:`Gist` with all of its encodings."""
    return Gist(format, fewbit)


def gist_lossless() -> Policy:
    """The policy :class:`Gist` without precision reduction."""
    return Gist()


def offload(
    codec: str | Codec | None = None, store: str = "host", recompute: bool = True, ahead: int | None = None
) -> Policy:
    """The policy :class:`Offload`."""
    chosen = codecs.get(codec) if isinstance(codec, str) else codec
    return Offload(chosen, store, Lossless(recompute=recompute), ahead)


def vdnn(rule: Literal["all", "conv", "dyn"] = "all", store: str = "host", budget: int | None = None) -> Policy:
    """The policy :class:`Vdnn`, or for ``"dyn"``, which needs a ``budget``, :class:`VdnnDyn`.

    Raises:
        ValueError: there is no such rule, or ``budget`` is not what the rule needs.
    """
    if (rule == "dyn") is not (budget is not None):
        raise ValueError(
            f"vdnn was asked for the rule {rule!r} and budget={budget}, but 'dyn' takes a budget, the bytes that may "
            f"stay on the device, and no other rule does."
        )
    return Vdnn(rule, store) if rule != "dyn" else VdnnDyn(budget or 0, store)


def cdma(codec: str = "zvc", store: str = "host") -> Policy:
    """The policy :class:`Cdma`."""
    return Cdma(codec, store)


def layrub(store: str = "host") -> Policy:
    """The policy :class:`Layrub`."""
    return Layrub(store)


def quantized(bits: int = 2) -> Policy:
    """The policy :class:`Quantized`."""
    return Quantized(bits)


def get(policy: str | Policy) -> Policy:
    """A policy by name, or the policy itself.

    Raises:
        UnknownNameError: no policy has that name.
        TypeError: it is neither a name nor a policy.
    """
    if isinstance(policy, str):
        if policy not in POLICIES:
            raise UnknownNameError(f"policy {policy!r} was asked for, but there are {', '.join(sorted(POLICIES))}.")
        return POLICIES[policy]()
    if isinstance(policy, type) or not isinstance(policy, Policy):
        raise TypeError(
            f"a policy was asked for, got {policy!r}, which has no decide() and observe(). Pass a name "
            f"({', '.join(sorted(POLICIES))}) or an object with these methods."
        )
    return policy
