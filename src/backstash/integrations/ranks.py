"""Programs of several processes: which one this is, and what the others have to say when all have ended.

A launcher such as torchrun starts the same program several times and tells each process its number, its *rank*, in the
environment. torchrun also keeps a store of keys and values that all ranks can reach until the last of them has ended.
What ranks tell each other at the end goes through that store and not through collectives, because by then a rank may
have failed, or may have destroyed its process group.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

WAIT_SECONDS = 60.0
"""How long rank 0 waits for the others at the end: they may have to write their results first."""


@dataclass(frozen=True)
class Rank:
    """The place of this process among those that a launcher has started.

    Attributes:
        number: from 0 on.
        count: of the processes.
    """

    number: int = 0
    count: int = 1

    @classmethod
    def here(cls) -> Rank:
        """This process's, from the variables RANK and WORLD_SIZE, which torchrun and accelerate set."""
        number, count = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
        return cls(int(number), int(count)) if number.isdigit() and count.isdigit() else cls()

    @property
    def is_first(self) -> bool:
        """Whether this process speaks for all of them."""
        return self.number == 0

    def own(self, path: Path) -> Path:
        """The file of this rank: ``report.json`` is that of rank 0, ``report.rank1.json`` that of rank 1."""
        return path if self.is_first else path.with_name(f"{path.stem}.rank{self.number}{path.suffix}")


def gather_ranks(rank: Rank, mine: Mapping[str, Any], seconds: float = WAIT_SECONDS) -> dict[int, dict[str, Any]]:
    """Tells rank 0 what this rank has to say.

    Args:
        rank: this process's.
        mine: what it has to say, as JSON can hold it.
        seconds: how long rank 0 waits for the others.

    Returns:
        On rank 0, what each rank has said that was heard, its own included. On any other rank, its own.
    """
    found = {rank.number: dict(mine)}
    if rank.count == 1 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return found
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    try:
        agent = TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=seconds),
        )
        # A launcher that starts the ranks again after a failure keeps its store.
        store = PrefixStore(f"backstash/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", agent)
        store.set(str(rank.number), json.dumps(mine))
        if rank.is_first:
            for other in range(1, rank.count):
                found[other] = json.loads(store.get(str(other)))
    except RuntimeError:  # the store is gone, or a rank has said nothing in time: report what there is
        pass
    return found
