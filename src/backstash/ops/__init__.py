"""Kernels: their table, the choice of a backend, and what families of kernels share.

What is named in ``__all__`` here, in ``ops.cpu.library``, ``ops.cpu.planes``, ``ops.triton.launching`` and
``ops.triton.elements`` is what a family is written with, in ``codecs/`` or elsewhere. CONTRIBUTING.md says how.
"""

from typing import TYPE_CHECKING

from backstash.facade import on_demand

if TYPE_CHECKING:
    from backstash.ops.bits import (
        bits_of,
        count_of,
        gathered,
        pack_fields,
        per_chunk,
        unpack_fields,
        with_room,
    )
    from backstash.ops.layout import ZVC_CHUNK, bytes_for, check_plane, disagreement, groups, zvc_chunks
    from backstash.ops.registration import kernel
    from backstash.ops.table import IN_GRAPHS, ON_DEVICES, dynamic_size

__all__ = [
    "IN_GRAPHS",
    "ON_DEVICES",
    "ZVC_CHUNK",
    "bits_of",
    "bytes_for",
    "check_plane",
    "count_of",
    "disagreement",
    "dynamic_size",
    "gathered",
    "groups",
    "kernel",
    "pack_fields",
    "per_chunk",
    "unpack_fields",
    "with_room",
    "zvc_chunks",
]

_HOMES = {
    "IN_GRAPHS": "table",
    "ON_DEVICES": "table",
    "ZVC_CHUNK": "layout",
    "bits_of": "bits",
    "bytes_for": "layout",
    "check_plane": "layout",
    "count_of": "bits",
    "disagreement": "layout",
    "dynamic_size": "table",
    "gathered": "bits",
    "groups": "layout",
    "kernel": "registration",
    "pack_fields": "bits",
    "per_chunk": "bits",
    "unpack_fields": "bits",
    "with_room": "bits",
    "zvc_chunks": "layout",
}

__getattr__, __dir__ = on_demand(__name__, _HOMES)
