"""Peers that backstash is measured beside, each behind a small adapter.

* Training steps: `plain`, `checkpointing`, `offload`, and backstash itself in `stash`.
* Codecs: `blosc2_lz4` and `zlib_level1`, and backstash's own in `stash`.

A peer that is not installed is named as such in the results, never left out in silence.
"""

from __future__ import annotations

from bench.peers.base import Absent, CodecPeer, StepPeer
from bench.peers.blosc2_lz4 import load_blosc2
from bench.peers.checkpointing import Checkpointing
from bench.peers.offload import SaveOnCpu
from bench.peers.plain import Plain
from bench.peers.stash import Chunked, Own, StashedCheckpointing, Stashing
from bench.peers.zlib_level1 import load_zlib

__all__ = [
    "Absent",
    "Checkpointing",
    "Chunked",
    "CodecPeer",
    "Own",
    "Plain",
    "SaveOnCpu",
    "StashedCheckpointing",
    "Stashing",
    "StepPeer",
]


def step_peers(device: str) -> tuple[StepPeer, ...]:
    """The candidates of the step table; the first is what the others are compared with."""
    offload: tuple[StepPeer, ...] = (SaveOnCpu(),) if device == "cuda" else ()
    return (Plain(), Checkpointing(), *offload, Stashing("lossless"))


def peak_peers(network: str) -> tuple[StepPeer, ...]:
    """The candidates of the peak table, which shows what can be combined; plain first."""
    found: tuple[StepPeer, ...] = (Plain(), Checkpointing(), Stashing("lossless"), StashedCheckpointing("lossless"))
    if network.startswith("gpt2"):
        both = StashedCheckpointing("lossless")
        found = (*found, Chunked(Plain()), Chunked(Stashing("lossless")), Chunked(both))
    return found


def codec_peers(device: str) -> tuple[CodecPeer | Absent, ...]:
    """The other libraries of the codec table, or why they are not there."""
    if device != "cpu":
        return tuple(Absent(name, "compresses on CPU only") for name in ("blosc2", "zlib"))
    return (load_blosc2(), load_zlib())
