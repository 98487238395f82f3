"""Codecs by name: ``codecs.get("zvc").encode(x)``. To add one, see CONTRIBUTING.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from backstash.codecs.base import Codec, Encoded, ErrorBound
from backstash.errors import UnknownNameError
from backstash.facade import on_demand

if TYPE_CHECKING:
    from backstash.codecs.blockquant import BlockQuant
    from backstash.codecs.csr import Csr
    from backstash.codecs.deflate import Deflate, Lz4, Zstd
    from backstash.codecs.exponents import Exponents
    from backstash.codecs.fewbit import FewBit
    from backstash.codecs.masks import Binary, Bitmask
    from backstash.codecs.minifloat import Minifloat
    from backstash.codecs.narrow import Narrow
    from backstash.codecs.raw import Raw
    from backstash.codecs.rle import Rle
    from backstash.codecs.shape import Shape
    from backstash.codecs.signed import Signed
    from backstash.codecs.sz import Sz
    from backstash.codecs.szp import Szp
    from backstash.codecs.upcast import Operand, Upcast
    from backstash.codecs.zvc import Zvc

__all__ = [
    "Binary",
    "Bitmask",
    "BlockQuant",
    "Codec",
    "Csr",
    "Deflate",
    "Encoded",
    "ErrorBound",
    "Exponents",
    "FewBit",
    "Lz4",
    "Minifloat",
    "Narrow",
    "Operand",
    "Raw",
    "Rle",
    "Shape",
    "Signed",
    "Sz",
    "Szp",
    "Upcast",
    "Zstd",
    "Zvc",
    "get",
    "names",
    "register_codec",
]

_HOMES = {
    "Binary": "masks",
    "Bitmask": "masks",
    "BlockQuant": "blockquant",
    "Csr": "csr",
    "Deflate": "deflate",
    "Exponents": "exponents",
    "FewBit": "fewbit",
    "Lz4": "deflate",
    "Minifloat": "minifloat",
    "Narrow": "narrow",
    "Operand": "upcast",
    "Raw": "raw",
    "Rle": "rle",
    "Shape": "shape",
    "Signed": "signed",
    "Sz": "sz",
    "Szp": "szp",
    "Upcast": "upcast",
    "Zstd": "deflate",
    "Zvc": "zvc",
}

_REGISTRY: dict[str, type[Codec] | str] = {name.lower(): name for name in _HOMES}
"""Codecs by their ids; of one that nobody has asked for yet, the name of its class."""

__getattr__, __dir__ = on_demand(__name__, _HOMES)


def register_codec(codec: type[Codec]) -> type[Codec]:
    """Make a codec class available by its ``id``; usable as a decorator.

    Raises:
        TypeError: it is no class, or has no id.
        ValueError: another class has that id.
    """
    if not isinstance(codec, type) or not isinstance(getattr(codec, "id", None), str):
        raise TypeError(
            f"register_codec was asked to add {codec!r:.80}, but that is no class with an id. Pass a class that keeps "
            f"the contract of backstash.Codec, with a name of its own as its id."
        )
    _REGISTRY.setdefault(codec.id, codec)
    known = _registered(codec.id)
    if known is not codec:
        raise ValueError(
            f"register_codec was asked to add {codec.__name__} as {codec.id!r}, but that is {known.__name__}. Choose "
            f"another id."
        )
    return codec


def names() -> tuple[str, ...]:
    """The ids of all registered codecs."""
    return tuple(sorted(_REGISTRY))


def get(name: str, **parameters: Any) -> Codec:
    """The codec registered as ``name``, made with ``parameters``.

    Raises:
        UnknownNameError: no codec has that id.
    """
    if not isinstance(name, str) or name not in _REGISTRY:
        raise UnknownNameError(f"codec {name!r:.80} was asked for, but there are {', '.join(names())}.")
    return _registered(name)(**parameters)


def load_all() -> None:
    """Imports every codec of the package, after which the table of kernels (``ops/table.py``) has theirs."""
    for name in _HOMES:
        __getattr__(name)


def _registered(name: str) -> type[Codec]:
    found = _REGISTRY[name]
    codec: type[Codec] = __getattr__(found) if isinstance(found, str) else found
    _REGISTRY[name] = codec
    return codec
