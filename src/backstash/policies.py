"""Ready-made policies, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from backstash.codecs import Binary, Bitmask, BlockQuant, Csr, FewBit, Minifloat, Narrow, Shape, Zvc
from backstash.codecs import minifloat as _minifloat
from backstash.codecs.bitmask import FLOATS
from backstash.codecs.csr import CROSSING
from backstash.codecs.narrow import INTEGERS
from backstash.errors import UnknownNameError
from backstash.policy import Action, Keep, Outcome, Policy, Recompute, Stash
from backstash.saved import Need, SavedTensor


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
        if self.format is None or saved.spec.dtype not in _minifloat.FLOATS or saved.op in _LOSSES:
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


_LOSSES = frozenset({"LogSoftmax", "NllLoss", "NllLoss2D"})


def _sparse(saved: SavedTensor, values: Minifloat | None, min_saving: float = 0.02) -> tuple[Csr, Zvc]:
    """Csr where it is the smaller one, else Zvc."""
    width = 8 * saved.spec.dtype.itemsize
    bits = width if values is None else values.bits
    crossing = 1 - CROSSING * (8 + bits) / width - 1 / (8 * width)
    return Csr(max(min_saving, crossing), values), Zvc(min_saving, values)


@dataclass(frozen=True)
class Quantized:
    """Values in a few bits each between the extremes of their group, after ActNN (ICML 2021); the rest is exact.

    What a relu reads as well, or any other formula that asks on which side of a threshold a value is, is exact too:
    rounded values would answer otherwise. So is what a loss saves. What is read by others than layers' weight gradients
    is rounded, so unlike under control.Comet the errors of layers do add up.

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
        """A few bits for a value, else an exact form."""
        exact = Lossless(recompute=self.recompute).decide(saved)
        if saved.need is not Need.VALUE or saved.spec.dtype not in _minifloat.FLOATS or saved.op in _LOSSES:
            return exact
        rounded = Stash((Binary(), BlockQuant(self.bits), Zvc()))
        return Recompute(rounded) if self.recompute else rounded

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
    "quantized": Quantized,
    "keep": KeepAll,
}


def lossless(min_saving: float = 0.02, recompute: bool = True) -> Policy:
    """The policy :class:`Lossless`."""
    return Lossless(min_saving, recompute)


def gist(format: str = "fp16", fewbit: int | None = None) -> Policy:
    """The policy :class:`Gist` with all of its encodings."""
    return Gist(format, fewbit)


def gist_lossless() -> Policy:
    """The policy :class:`Gist` without precision reduction."""
    return Gist()


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
