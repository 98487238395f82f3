"""The demonstrations with their pictures: ``python -m studies.demos [--json FILE [--resume]] [NAME ...]``.

The same as ``backstash demo NAME`` for each. With ``--json docs/results/demos-cpu-DATE.json`` the pictures are beside
it, as ``demos-cpu-DATE-NAME.png``. Sizes and peaks are counted; times are those of one step, and tell an order of
magnitude. The exit code is 1 if any gradient has other bits than plain PyTorch's.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

from backstash.cli.options import parse_size
from backstash.demos.demonstrations import DEMONSTRATIONS, Saver
from backstash.demos.picture import save_picture, text_picture
from backstash.demos.reaching import Largest, reach
from bench.results import Results


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs demonstrations, prints and writes what they show."""
    parser = argparse.ArgumentParser(prog="python -m studies.demos", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", choices=[*DEMONSTRATIONS, []], help="these only")
    parser.add_argument("--memory", type=parse_size, help="memory that a step may take, such as 64MiB")
    parser.add_argument(
        "--savers", nargs="+", choices=get_args(Saver), help="ways with these only, such as plain lossless"
    )
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--resume", action="store_true", help="leave out the demonstrations that the file has")
    asked = parser.parse_args(arguments)
    results = Results("studies.demos", asked.json, arguments, resume=asked.resume)
    shown: list[dict[str, Any]] = results.found.get("demos", [])
    is_equal = all(row["is_equal"] for entry in shown for row in entry["ways"])
    for name in asked.names or DEMONSTRATIONS:
        whole = DEMONSTRATIONS[name]
        ways = tuple(way for way in whole.ways if way.saver in (asked.savers or get_args(Saver)))
        if any(entry["name"] == name and len(entry["ways"]) == len(ways) for entry in shown):
            continue
        shown = [entry for entry in shown if entry["name"] != name]
        demonstration = replace(whole, ways=ways)
        nbytes = asked.memory or demonstration.nbytes
        found: list[Largest] = []
        entry: dict[str, Any] = {"name": name, "title": demonstration.title, "unit": demonstration.unit}
        shown.append(entry | {"nbytes": nbytes, "ways": []})
        for row in reach(demonstration, nbytes, lambda text: print(text, flush=True)):
            found.append(row)
            shown[-1]["ways"] = [asdict(each) for each in found]
            results.write(demos=shown)
        is_equal &= all(row.is_equal for row in found)
        print(text_picture(demonstration, nbytes, found), flush=True)
        if asked.json is not None:
            save_picture(demonstration, nbytes, found, asked.json.with_name(f"{asked.json.stem}-{name}.png"), False)
    return int(not is_equal)


if __name__ == "__main__":
    raise SystemExit(main())
