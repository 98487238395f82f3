"""The pages of the six programs, made of their JSON alone. Docs take the same tables. Needs no package."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.rounds import table

ENOUGH = 5
"""Times of fewer rounds are no results."""


@dataclass(frozen=True)
class Section:
    """A table with a title.

    Attributes:
        title: what it shows.
        header: of its columns.
        rows: of text.
        notes: lines below it.
    """

    title: str
    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Parts:
    """The parts of a run by the levels of their names."""

    parts: Mapping[str, Any]

    def results(self, *levels: str) -> dict[str, Any]:
        """Returns the results of the parts below a level, by the rest of their names."""
        prefix = "".join(f"{level}/" for level in levels)
        found = {name.removeprefix(prefix): part for name, part in self.parts.items() if name.startswith(prefix)}
        return {name: part["result"] for name, part in found.items() if part.get("result") is not None}

    def firsts(self) -> list[str]:
        """Returns the first levels of all names."""
        return list(dict.fromkeys(name.partition("/")[0] for name in self.parts))


def sections(program: str, found: Mapping[str, Any]) -> list[Section]:
    """Returns the tables of a program that have rows."""
    made = _PROGRAMS[program](Parts(found.get("parts", {})))
    return [section for section in made if section.rows]


def text(program: str, found: Mapping[str, Any]) -> str:
    """Returns the whole page as plain text."""
    lines = [_head(program, found)]
    for section in sections(program, found):
        lines += ["", section.title, table(section.header, section.rows), *section.notes]
    failed = wrong(program, found)
    return "\n".join([*lines, *(["", "FAILED", *failed] if failed else [])])


def wrong(program: str, found: Mapping[str, Any]) -> list[str]:
    """Returns a line for each part that failed, and for each exact way that has other bits.

    A graph that could not be captured is a finding of g4, and no failure.
    """
    parts = found.get("parts", {})
    lines = [] if program == "g4" else [f"{name}: {part['error']}" for name, part in parts.items() if "error" in part]
    for name, part in parts.items():
        result = part.get("result")
        if isinstance(result, dict) and result.get("is_exact") and _differing(Parts(parts), name, result):
            lines.append(f"{name}: {_differing(Parts(parts), name, result)} gradients differ from plain's")
    return lines


def _differing(parts: Parts, name: str, result: Mapping[str, Any]) -> int:
    """Returns how many gradients differ, but for those that plain itself computes differently a second time."""
    own = set(result.get("differing", ()))
    again = parts.parts.get(f"{name.rpartition('/')[0]}/plain again", {}).get("result") or {}
    return len(own - set(again.get("differing", ())))


def _head(program: str, found: Mapping[str, Any]) -> str:
    machine = found.get("machine") or {}
    times = " Times on the fake device mean nothing." if found.get("device") == "fake" else ""
    about = (
        f"{machine.get('gpu') or found.get('device')}; driver {machine.get('gpu_driver') or '-'}; "
        f"{machine.get('cpu')}, {machine.get('cores')} cores; torch {machine.get('torch')}, "
        f"CUDA {machine.get('cuda') or '-'}, triton {(machine.get('packages') or {}).get('triton', '-')}; "
        f"commit {machine.get('commit')}; {found.get('started', '')}"
    )
    return f"{program}: {about}.{times}\nMedians of interleaved rounds, with the quartiles in brackets."


def _ms(summary: Any, scale: float = 1e3, digits: int = 2) -> str:
    """Returns a median with its quartiles; empty for nothing."""
    if not summary:
        return ""
    median, q1, q3 = (f"{summary[name] * scale:,.{digits}f}" for name in ("median", "q1", "q3"))
    few = "" if summary["count"] >= ENOUGH else f", {summary['count']} rounds"
    return f"{median} [{q1} {q3}{few}]"


def _mib(nbytes: Any) -> str:
    return "" if nbytes is None else f"{nbytes / 2**20:,.1f}"


def _number(found: Any) -> str:
    return "" if found is None else f"{found:,}"


# -- what is known without a GPU ---------------------------------------------------------------------------------------


def prediction(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the cells of a step that was measured and predicted (bench/costs.py)."""
    off = row["predicted_nbytes"] / row["peak_nbytes"] - 1, row["predicted_seconds"] / row["seconds"] - 1
    peaks = f"{row['peak_nbytes'] / 2**20:,.0f}", f"{row['predicted_nbytes'] / 2**20:,.0f}", f"{off[0]:+.1%}"
    times = f"{1e3 * row['seconds']:.1f}", f"{1e3 * row['predicted_seconds']:.1f}", f"{off[1]:+.0%}"
    return (row["network"], row["way"], *peaks, *times, str(row["rounds"]))


PREDICTIONS = ("network", "", "peak, MiB", "predicted", "off", "step, ms", "predicted", "off", "rounds")
"""The header of predictions."""


def graph(way: str, row: Mapping[str, Any], plain: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the cells of a compiled graph beside plain's (bench/cuda_code.py)."""
    moved = f"{row['nbytes'] / 1e9:.2f}", f"{row['nbytes'] / plain['nbytes']:.3f}"
    saved = f"{row['saved_nbytes'] / 1e6:,.0f}" if row["graph"] == "forward" else ""
    return (way, row["graph"], str(row["written"]), str(row["library"]), *moved, saved, str(row["other"]))


GRAPHS = ("", "graph", "kernels", "calls of libraries", "GB moved", "x plain", "MB saved", "kernels of other text")
"""The header of compiled graphs."""


# -- g1 ----------------------------------------------------------------------------------------------------------------


def _g1(parts: Parts) -> Iterator[Section]:
    for network in parts.firsts():
        if network in ("calls", "link"):
            continue
        counts, host = parts.results(network, "counts"), parts.results(network).get("host", {})
        rows = []
        for way, (asked, processor) in counts.items():
            timed = host.get(way, {})
            instructions = cycles = ""
            if processor is not None:
                instructions = f"{processor['instructions'] / 1e6:.1f}"
                cycles = f"{processor['instructions'] / max(1, processor['cycles']):.2f}"
            rows.append(
                (
                    way,
                    _ms(timed.get("seconds")),
                    _ms(timed.get("times_plain"), 1),
                    _ms(timed.get("drain_seconds")),
                    *(_number(asked[name]) for name in ("launches", "copies", "waits", "allocations")),
                    instructions,
                    cycles,
                )
            )
        head = ("", "host ms", "x plain", "ms after it", "launches", "copies", "waits", "allocations")
        yield Section(f"{network}: the host in a step", (*head, "M instructions", "per cycle"), rows)
    calls = parts.parts.get("calls", {}).get("result") or {}
    yield Section("single calls", ("", "host us"), [(name, _ms(each, 1e6)) for name, each in calls.items()])
    link = parts.parts.get("link", {}).get("result") or {}
    rows = [(size, name, _ms(each, 1e-9)) for size, copies in link.items() for name, each in copies.items()]
    yield Section("the link", ("size", "way", "GB/s"), rows)


# -- g2, g6 ------------------------------------------------------------------------------------------------------------


def _networks(parts: Parts) -> Iterator[Section]:
    for network in parts.firsts():
        yield _steps(parts, network)
        yield _steps(parts, network, "large")
        yield _filling(parts, network)


def _steps(parts: Parts, network: str, level: str = "steps") -> Section:
    levels = (network, level) if level else (network,)
    found = parts.results(*levels)
    times = found.pop("times", {})
    plain = found.get("plain")
    again = found.get("plain again", {}).get("differing", ())
    prefix = "/".join(levels)
    foreseen = (parts.parts.get(f"{network}/predicted", {}).get("result") or {}) if level == "steps" else {}
    rows = []
    for way, row in found.items():
        if "/" in way or "peak_nbytes" not in row:
            continue
        differs = _differing(parts, f"{prefix}/{way}", row) if row["is_exact"] and way != "plain again" else 0
        timed = times.get(way, {})
        rows.append(
            (
                way,
                _mib(row["peak_nbytes"]),
                _mib(row.get("predicted_nbytes") or foreseen.get(way, {}).get("peak_nbytes")),
                f"{row['peak_nbytes'] / max(1, plain['peak_nbytes']):.2f}" if plain else "",
                _ms(timed.get("seconds")),
                f"{1e3 * foreseen[way]['seconds']:.1f}" if way in foreseen else "",
                _ms(timed.get("times_plain"), 1),
                f"{differs} gradients differ" if differs else "equal" if row["is_exact"] else "",
                row.get("note", ""),
            )
        )
    head = ("", "peak MiB", "predicted", "x plain", "step ms", "predicted ms", "x plain", "bits", "")
    notes = [f"plain computes {len(again)} gradients differently a second time; they are not compared"] if again else []
    title = "steps of four times the size" if level == "large" else "steps of one size"
    return Section(f"{network}: {title}", head, rows, notes)


def _filling(parts: Parts, network: str) -> Section:
    found = parts.results(network, "filling")
    timed = found.pop("throughput", {})
    first = next(iter(found.values()), None)
    rows = []
    for way, row in found.items():
        speed = timed.get(way, {})
        rows.append(
            (
                way,
                f"{speed.get('size') or row['size']:,}{'' if row['failed'] else ' or more'}",
                f"{row['size'] / first['size']:.2f}" if first and first["size"] else "",
                _mib(row["peak_nbytes"]),
                _ms(speed.get("seconds"), 1e3, 1),
                _ms(speed.get("per_second"), 1, 1),
                _ms(speed.get("times_plain"), 1),
            )
        )
    head = ("", "largest size", "x first", "peak MiB", "step ms", "units per second", "x first")
    lowered = [f"{way}: lowered {row['lowered']} times in rounds" for way, row in timed.items() if row["lowered"]]
    return Section(f"{network}: the memory filled", head, rows, lowered)


def _g6(parts: Parts) -> Iterator[Section]:
    yield from _networks(parts)
    rows = [
        (network, way, str(each["kernels"]), str(each["other"]))
        for network in parts.firsts()
        for way, each in parts.results(network).get("text", {}).items()
    ]
    yield Section("kernels that the compiler wrote", ("network", "", "kernels", "not among plain's"), rows)


# -- g3 ----------------------------------------------------------------------------------------------------------------


def _g3(parts: Parts) -> Iterator[Section]:
    bits = parts.results("bits")
    by_norm: dict[str, list[tuple[str, Any]]] = {}
    for name, found in bits.items():
        kind, _, rest = name.partition("/")
        if kind == "pointwise":
            by_norm.setdefault(kind, []).extend((f"{rest}, {function}", each) for function, each in found.items())
        else:
            by_norm.setdefault(kind, []).append((rest.replace("/", ", "), found))
    for kind, cases in by_norm.items():
        formulas = list(dict.fromkeys(formula for _, found in cases for formula in found["differing"]))
        if kind == "pointwise":  # few formulas and many cases
            rows = [(name, *(_share(found, formula) for formula in formulas)) for name, found in cases]
            yield Section("functions: elements with other bits", ("", *formulas), rows)
            continue
        rows = [(formula, *(_share(found, formula) for _, found in cases)) for formula in formulas]
        kernels = sorted({found["kernel"] for _, found in cases if found["kernel"]})
        notes = [f"kernel: {', '.join(kernels)}"] if kernels else []
        yield Section(f"{kind}: elements with other bits", ("", *(name for name, _ in cases)), rows, notes)
    repeats = parts.results("repeats")
    rows = [
        (dtype, setting, *(str(each) for each in functions.values()))
        for dtype, settings in repeats.items()
        for setting, functions in settings.items()
    ]
    names = next((tuple(functions) for settings in repeats.values() for functions in settings.values()), ())
    yield Section("repeats with other bits, of three", ("", "", *names), rows)
    for dtype, kernels in parts.results("speed").items():
        rows = [
            (name, _ms(each["gb_per_second"], 1, 1), _ms(each["share_of_copy"], 1)) for name, each in kernels.items()
        ]
        yield Section(f"kernels, {dtype}", ("", "GB/s read and written", "of the copy's"), rows)


def _share(found: Mapping[str, Any], formula: str) -> str:
    if formula not in found["differing"]:
        return ""
    differing = found["differing"][formula]
    return "equal" if not differing else f"{differing / found['numel']:.2%}"


# -- g4, g5 ------------------------------------------------------------------------------------------------------------


def _g4(parts: Parts) -> Iterator[Section]:
    for network in parts.firsts():
        times = parts.results(network).get("times", {})
        plain = times.get("plain")
        rows: list[tuple[str, ...]] = []
        refused = []
        for name, part in parts.parts.items():
            level, _, way = name.partition("/")
            if level != network or way == "times":
                continue
            row = part.get("result")
            if row is None:
                rows.append((way, "", "", "", "", "", "refused"))
                refused.append(f"{way}: {_line(part.get('error', 'not finished'))}")
                continue
            bits = f"{len(row['differing'])} gradients differ" if row["differing"] else "equal"
            over = f"{times[way]['median'] / plain['median']:.2f}" if plain and way in times else ""
            sizes = (_mib(row[key]) for key in ("peak_nbytes", "allocated_nbytes", "reserved_nbytes"))
            rows.append((way, *sizes, _ms(times.get(way)), over, bits if row["is_exact"] else ""))
        if times:
            rows.append(("plain, eager", "", "", "", _ms(times["plain, eager"]), "", ""))
        head = ("", "eager peak MiB", "held MiB", "reserved MiB", "replay ms", "x plain's graph", "bits")
        yield Section(f"{network}: captured steps", head, rows, refused)


def _line(error: str) -> str:
    return " ".join(error.split())[:240]


def _g5(parts: Parts) -> Iterator[Section]:
    copies = parts.results("copy")
    rows = [
        (size, *(_ms(each[name], 1e3, 1) for name in ("compute", "copy", "both")), _ms(each["hidden"], 1))
        for size, each in copies.items()
    ]
    yield Section("a copy out and back beside products", ("", "products ms", "copies ms", "both ms", "hidden"), rows)
    for network in parts.firsts():
        if network == "copy":
            continue
        steps = _steps(parts, network, "")
        traces = parts.results(network, "trace")
        rows = [(*row[:-1], *_traced(traces.get(row[0]))) for row in steps.rows]
        head = (*steps.header[:-1], "copying ms", "of it beside kernels")
        yield Section(f"{network}: so much moved to the host", head, rows, steps.notes)


def _traced(trace: Any) -> tuple[str, str]:
    if trace is None:
        return "not measured", ""
    share = trace["both"] / trace["copies"] if trace["copies"] else 0.0
    return f"{1e3 * trace['copies']:.1f}", f"{share:.0%}"


_PROGRAMS: Mapping[str, Callable[[Parts], Iterator[Section]]] = {
    "g1": _g1,
    "g2": _networks,
    "g3": _g3,
    "g4": _g4,
    "g5": _g5,
    "g6": _g6,
}
