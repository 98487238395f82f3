"""A snapshot of CUDA's allocator beside the model of it: ``python -m bench.snapshot SNAPSHOT [--device N]``.

The snapshot is the file that ``torch.cuda.memory._dump_snapshot`` writes, of a history that began with an empty cache.
The allocations in it run through the model, which should have asked the device for the same segments.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from backstash.report.allocated import recorded
from bench.rounds import mib, table


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints both; returns 0 if they reserved the same, else 1."""
    parser = argparse.ArgumentParser(prog="python -m bench.snapshot", description=__doc__)
    parser.add_argument("snapshot", type=Path)
    parser.add_argument("--device", type=int, default=0)
    asked = parser.parse_args(arguments)
    found = recorded(asked.snapshot.read_bytes(), asked.device)
    modelled, given = found.modelled()
    rows = [
        ("recorded", mib(found.reserved_nbytes), str(len(found.reserved)), ""),
        ("modelled", mib(modelled.reserved_nbytes), str(len(given)), mib(modelled.fragmented_nbytes)),
    ]
    print(table(("allocator", "reserved MiB", "segments", "of it unusable MiB"), rows))
    return 0 if given == found.reserved else 1


if __name__ == "__main__":
    raise SystemExit(main())
