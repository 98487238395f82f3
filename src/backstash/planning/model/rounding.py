"""Codecs for a plan: the names by which it keeps them, and which of those with an error suit a value.

A value may be rounded where it is known for each of its readers what an error does to the gradients (formulas.py). How
large the error of the gradients becomes is measured (probing.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

from backstash import codecs
from backstash.codecs import BlockQuant, Exponents, FewBit, Minifloat, Signed, Szp, Upcast
from backstash.codecs.base import SINGLES, Codec, label
from backstash.codecs.fewbit.codec import ACTIVATIONS
from backstash.codecs.minifloat.formats import FORMATS
from backstash.policies.quantizing import GROUP, group_of
from backstash.saved import Effect, Need, SavedTensor

DENSE: tuple[Codec, ...] = (Upcast(), Upcast(Exponents()), Exponents())
"""The exact codecs of values that have no zeros, the fastest first."""

HALF = "fp16"
"""Half of the bytes of a float32, with the least error of all: rarely worth more than 2**-12 of an element."""

SHARES = (1e-3, 1e-2)
"""Bounds of Szp, as shares of a value's range."""


def candidates(saved: SavedTensor, readers: Sequence[SavedTensor]) -> tuple[Codec, ...]:
    """Returns the codecs with an error by which a value may be stored, the most exact first.

    Returns:
        None at all if a reader's effect is not known, or if the value is no number that can be rounded. A value that
        goes through a curved function has 8 bits or more, and so has one whose groups do not lie within the rows of a
        norm (policies/quantizing.py says why). A value whose sign is read keeps its zeros and signs.
    """
    values = [reader for reader in readers if reader.need is Need.VALUE]
    is_known = bool(values) and all(reader.effect is not Effect.UNKNOWN for reader in values)
    if saved.need is not Need.VALUE or saved.spec.dtype not in SINGLES or not is_known:
        return ()
    group = group_of(values)
    is_normalised = any(reader.effect is Effect.NORMALISED for reader in values)
    is_fine = any(reader.effect is Effect.SENSITIVE for reader in values) or (is_normalised and not group)
    bits = (8,) if is_fine else (8, 4, 2)
    if any(reader.need is Need.SIGN for reader in readers):
        among_zeros = (8,) if is_fine or is_normalised else bits
        return (*(Szp(share, "rel") for share in SHARES), *(Signed(BlockQuant(each)) for each in among_zeros))
    small = () if is_fine else (Minifloat("float8_e4m3fn"),)
    return (Minifloat(HALF), *(BlockQuant(each, group or GROUP) for each in bits), *small)


def codec_name(codec: Codec) -> str:
    """Returns the name by which :func:`codec_named` finds the codec again, such as ``"blockquant4/64"``.

    Example:
        >>> codec_name(BlockQuant(4)), codec_name(Signed(BlockQuant(8))), codec_name(Szp(1e-3, "rel"))
        ('blockquant4', 'signed blockquant8', 'szp+rel0.001')
    """
    if isinstance(codec, BlockQuant) and codec.group_size != GROUP:
        return f"{label(codec)}/{codec.group_size}"
    if isinstance(codec, Szp):
        return f"{codec.id}+{codec.mode}{codec.error!r}"
    return label(codec)


def codec_named(name: str) -> Codec | None:
    """Returns the codec of a name: an id, or what :func:`codec_name` has returned. None if there is none.

    Example:
        >>> codec_named("blockquant4/64")
        BlockQuant(bits=4, group_size=64, rounding='stochastic', seed=0)
    """
    if name in codecs.names():
        return codecs.get(name)
    try:
        return _parsed(name)
    except ValueError:  # the codec has no such bits, groups or bound
        return None


def _parsed(name: str) -> Codec | None:
    exact = {label(codec): codec for codec in DENSE}
    if name in exact:
        return exact[name]
    if name.startswith("signed "):
        inner = name.removeprefix("signed ")
        values = None if inner.startswith("signed ") else _parsed(inner)
        return None if values is None else Signed(values)
    if name.startswith("blockquant"):
        bits, _, group = name.removeprefix("blockquant").partition("/")
        return BlockQuant(int(bits), int(group) if group else GROUP)
    if name.startswith("szp+rel"):
        return Szp(float(name.removeprefix("szp+rel")), "rel")
    if name in FORMATS:
        return Minifloat(name)
    if name[:-1] in ACTIVATIONS and name[-1:].isdigit():
        return FewBit(name[:-1], int(name[-1]))
    return None


IN_TURN = " in turn"
"""The end of the name of a choice by which a value comes back when no other does, if another one asks for it sooner."""


def moved_name(codec: str) -> str:
    """Returns the name of the choice to move what the codec of that name makes of a value; "" for no codec of DENSE.

    Example:
        >>> moved_name(""), moved_name("exponents")
        ('offload', 'offload exponents')
    """
    return f"offload {codec}".rstrip()


def moved_as(name: str) -> tuple[Codec, ...] | None:
    """Returns the codecs that a choice of that name to move a value asks first; None if there is no such choice.

    Example:
        >>> moved_as("offload"), moved_as("offload upcast"), moved_as("offload in turn"), moved_as("offload szp")
        ((), (Upcast(values=None),), (), None)
    """
    known = {moved_name(""): (), **{moved_name(label(codec)): (codec,) for codec in DENSE}}
    return known.get(name.removesuffix(IN_TURN))


def is_named(word: str, name: str) -> bool:
    """Whether a user's word means the codec of that name: its name with or without the group, or its id."""
    if word in (name, name.partition("/")[0]):
        return True
    codec = codec_named(name)
    return codec is not None and codec.id == word


def word_has_error(word: str) -> bool:
    """Whether a user's word names a codec with an error."""
    codec = codec_named(word)
    return codec is not None and codec.bound is not None


def nearest(word: str, words: Sequence[str]) -> str:
    """Returns a sentence that names the word that was meant, or nothing."""
    named = (*words, *codecs.names(), *(f"blockquant{bits}" for bits in (1, 2, 4, 8)), *FORMATS)
    close = get_close_matches(word, named, 1, 0.6)
    return f" Did you mean {close[0]!r}?" if close else ""


def reason_of(nbytes: int, of_nbytes: int, noise: float = 0.0) -> str:
    """Returns the reason why a codec is offered: the share of the bytes that it takes, and how far it rounds."""
    share = f"{nbytes / max(1, of_nbytes):.0%} of its bytes"
    return f"{share}, off by {noise:.1%}" if noise else share
