"""Kernels: their table, the choice of a backend, and what families of kernels share.

What is named in ``__all__`` here, in ``ops.cpu.library``, ``ops.cpu.planes``, ``ops.triton.launching`` and
``ops.triton.elements`` is what a family is written with, in ``codecs/`` or elsewhere. CONTRIBUTING.md says how.
"""

from backstash.ops.bits import bits_of, count_of, gathered, pack_fields, per_chunk, unpack_fields, with_room
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
