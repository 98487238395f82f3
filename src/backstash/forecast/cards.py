"""Cards that trainings run on: what their makers and torch say of them.

Each number is a fact from a source that is named, or the word of the card's maker; none was measured here but the
memory of the H100. The memory is what ``torch.cuda.get_device_properties(0).total_memory`` says, or what torch's errors
call "total capacity" in public reports; it is less than what is printed on the card. Operations are those without
sparsity, with sums in float32.

Sources, by the table's column:

* memory: docs/results/gpu-cuda-2026-11-23.json for the H100; "total capacity" in errors that users of PyTorch have
  published for the others; where there is none, the maker's gigabytes, which are fewer bytes than those that torch
  finds.
* bandwidth and operations: NVIDIA's data sheets of V100, T4, A10, A100, L4, L40S, H100, H200 and RTX A6000; its papers
  on the architectures GA102 (RTX 3090), Ada (RTX 4090) and RTX Blackwell (RTX 5090); the data sheet of HGX B200.
* link: PCI Express, x16, one way: 15.75 GB/s in version 3, twice and four times that in versions 4 and 5.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

from backstash.errors import UnknownNameError

PCIE_3, PCIE_4, PCIE_5 = 15.75e9, 31.5e9, 63e9
"""Bytes per second, one way."""


@dataclass(frozen=True, slots=True)
class Card:
    """A card.

    Attributes:
        name: as users write it.
        words: as its maker calls it.
        memory_nbytes: bytes that torch finds.
        bandwidth: bytes per second of its memory.
        half: operations per second of products in bfloat16 or float16. Where only float16 is fast, this is float16's.
        tf32: of products of float32 numbers that are rounded to TF32; where there is no TF32, float32's.
        float32: of float32 numbers as they are.
        link: bytes per second to the host's memory, one way.
    """

    name: str
    words: str
    memory_nbytes: int
    bandwidth: float
    half: float
    tf32: float
    float32: float
    link: float


def _card(
    name: str, words: str, gib: float, gb_per_second: float, half: float, tf32: float, float32: float, link: float
) -> Card:
    """Returns a card from units that are usual: GiB, GB/s, and 1e12 operations per second."""
    speeds = half * 1e12, tf32 * 1e12, float32 * 1e12
    return Card(name, words, int(gib * 2**30), gb_per_second * 1e9, *speeds, link)


CARDS = {
    card.name: card
    for card in (
        _card("t4", "Tesla T4", 14.75, 320, 65, 8.1, 8.1, PCIE_3),
        _card("v100-16gb", "Tesla V100 SXM2 16 GB", 15.77, 900, 125, 15.7, 15.7, PCIE_3),
        _card("v100-32gb", "Tesla V100 SXM2 32 GB", 31.73, 900, 125, 15.7, 15.7, PCIE_3),
        _card("rtx3090-24gb", "GeForce RTX 3090", 23.69, 936, 71, 35.6, 35.6, PCIE_4),
        _card("rtx4090-24gb", "GeForce RTX 4090", 23.64, 1008, 165.2, 82.6, 82.6, PCIE_4),
        _card("rtx5090-32gb", "GeForce RTX 5090", 31.36, 1792, 209.5, 104.8, 104.8, PCIE_5),
        _card("a6000-48gb", "RTX A6000", 47.43, 768, 154.8, 77.4, 38.7, PCIE_4),
        _card("a10-24gb", "A10", 22.05, 600, 125, 62.5, 31.2, PCIE_4),
        _card("l4-24gb", "L4", 22.03, 300, 121, 60, 30.3, PCIE_4),
        _card("l40s-48gb", "L40S", 44.40, 864, 362, 183, 91.6, PCIE_4),
        _card("a100-40gb", "A100 SXM4 40 GB", 39.39, 1555, 312, 156, 19.5, PCIE_4),
        _card("a100-80gb", "A100 SXM4 80 GB", 79.15, 2039, 312, 156, 19.5, PCIE_4),
        _card("h100-80gb", "H100 SXM5 80 GB", 79.17, 3350, 989.4, 494.7, 66.9, PCIE_5),
        _card("h200-141gb", "H200 SXM 141 GB", 131.3, 4800, 989.4, 494.7, 66.9, PCIE_5),
        _card("b200-180gb", "B200 180 GB", 167.6, 7700, 2250, 1125, 75, PCIE_5),
    )
}
"""Every card, by name."""


def card_called(words: str, memory_nbytes: int) -> Card | None:
    """Returns the card that a driver calls by these words, of several the one whose memory is nearest; None for none.

    Example:
        >>> card_called("NVIDIA H100 80GB HBM3", 85017493504).name
        'h100-80gb'
    """
    joined = "".join(words.lower().split())
    found = [card for card in CARDS.values() if card.name.partition("-")[0] in joined]
    return min(found, key=lambda card: abs(card.memory_nbytes - memory_nbytes), default=None)


def card_named(name: str) -> Card:
    """Returns the card of that name.

    Raises:
        UnknownNameError: there is none.
    """
    found = CARDS.get(name.strip().lower())
    if found is None:
        near = get_close_matches(name.strip().lower(), CARDS, 1, 0.4)
        meant = f" Did you mean {near[0]!r}?" if near else ""
        raise UnknownNameError(
            f"a forecast was asked for the card {name!r:.80}, but there are facts of {', '.join(CARDS)} alone.{meant} "
            f"Pass one of these, or add a row with its sources to backstash/forecast/cards.py."
        )
    return found
