"""Tables of what is moved: Layrub, schedules over a link, networks too deep for their memory, cDMA, the disk."""

from __future__ import annotations

import statistics
from typing import Any

from studies.published.results import ENOUGH, MARK, load, machine_line, mib, started, table, title

_LAYRUB = ("layrub-cpu", "layrub-vgg16-cpu")
_DEEP = {1517: "layrub-deep-cpu", 15170: "layrub-15170-cpu"}


def _networks() -> list[Any]:
    """Every network of Layrub's table; where two files have one, that of the later measurement."""
    found: dict[str, tuple[str, Any]] = {}
    for kind in _LAYRUB:
        results = load(kind)
        for network in results.get("networks", []):
            name = network["case"]["name"]
            if not network["failure"] and (name not in found or started(results) > found[name][0]):
                found[name] = (started(results), network)
    return [network for _, network in found.values()]


def _rows(network: Any) -> dict[str, Any]:
    return {row["policy"]: row for row in network["rows"]}


def _shown() -> list[str]:
    """Policies that are in every network's rows, in the order of the file, without plain."""
    return [name for name in _rows(_networks()[0]) if name != "plain"]


def layrub() -> str:
    """Peaks of every network under every policy that moves."""
    rows = []
    for network in _networks():
        found = _rows(network)
        cells = [
            f"{mib(found[name]['peak_nbytes'])}: {found[name]['cut']:.0%} ({found[name]['cut_in_all']:.0%})"
            for name in _shown()
        ]
        rows.append((title(network["case"]["network"]), mib(found["plain"]["peak_nbytes"]), *cells))
    means = [
        " ".join(f"{form}" for form in (f"{_mean(name, 'cut'):.0%}", f"({_mean(name, 'cut_in_all'):.0%})"))
        for name in _shown()
    ]
    rows.append(("mean", "", *means))
    text = table(("network", "plain", *_shown()), rows)
    return f"Peak in MiB. {machine_line('layrub-cpu')}\n\n{text}"


def _mean(policy: str, field: str) -> float:
    return statistics.fmean(_rows(network)[policy][field] for network in _networks())


def layrub_times() -> str:
    """Times of the same steps over plain's."""
    rows = []
    for network in _networks():
        found = _rows(network)
        rounds = {row["seconds"]["count"] for row in found.values()}
        mark = f" {MARK}" if min(rounds) < ENOUGH else ""
        cells = [f"{found[name]['times_plain']:.2f}{mark}" for name in _shown()]
        rows.append((title(network["case"]["network"]), str(min(rounds)), *cells))
    return f"{machine_line('layrub-cpu')}\n\n{table(('network', 'rounds', *_shown()), rows)}"


def link() -> str:
    """What crossed the link, and how much of it was hidden behind computation."""
    rows = []
    for network in _networks():
        for policy in ("layrub", "offload"):
            row = _rows(network)[policy]
            moved = row["transfer"]
            rows.append(
                (
                    title(network["case"]["network"]) if policy == "layrub" else "",
                    policy,
                    f"{mib(moved['out_nbytes'])}, {mib(moved['back_nbytes'])}",
                    f"{moved['hidden']:.1%}" + (f" {MARK}" if row["seconds"]["count"] < ENOUGH else ""),
                )
            )
    header = ("network", "policy", "MiB out, back", "share of the transfer that nothing waited for")
    return f"{machine_line('layrub-cpu')}\n\n{table(header, rows)}"


def schedules() -> str:
    """Schedules over a link that is only as fast as a perfect one would need."""
    rows = []
    for measured in load("layrub-cpu")["prefetch"]:
        for row in measured["rows"]:
            moved = row["transfer"]
            rows.append(
                (
                    title(measured["case"]["network"]),
                    row["schedule"],
                    f"{row['busy']:.0%}, {row['bytes_per_second'] / 1e9:.2f} GB/s",
                    f"{moved['hidden']:.1%} {MARK}",
                    f"{row['limit']['reached']:.0%} {MARK}",
                )
            )
    header = ("network", "schedule", "link busy for, at", "transfer hidden", "of the limit")
    return f"{machine_line('layrub-cpu')}\n\n{table(header, rows)}"


_WAYS = {
    ("plain", False): "plain",
    ("plain", True): "plain, limited",
    ("disk", True): "offload to a disk, limited",
    ("counted", False): "offload, one value ahead, peak counted",
    ("link", False): "offload, one value ahead, over the simulated link",
}


def _deep(layers: int) -> str:
    kind = _DEEP[layers]
    (found,) = [network for network in load(kind)["deep"] if network["layers"] == layers]
    about = found["deep"]
    plain = found["runs"][0]
    rows = []
    for run in found["runs"]:
        equal = (run["losses"], run["weights"]) == (plain["losses"], plain["weights"])
        bits = "the reference" if run is plain else "equal, every bit" if equal else "different"
        rows.append(
            (
                _WAYS.get((run["way"], run["limited"]), run["way"]),
                f"fails in {run['failure'].partition(':')[0]}" if run["failure"] else str(len(run["losses"])),
                "-" if run["failure"] else bits,
                f"{run['peak_nbytes'] / 2**20:,.1f}" if run["peak_nbytes"] else "",
                ", ".join(f"{seconds:.1f}" for seconds in run["seconds"]) + (f" {MARK}" if run["seconds"] else ""),
                mib(run["virtual_peak_nbytes"] - run["virtual_nbytes"]),
            )
        )
    header = ("", "steps", "losses and weights", "peak, MiB", "seconds of each step", "address space grew, MiB")
    text = (
        f"{layers:,} layers in blocks {'/'.join(map(str, about['blocks']))}, the first stage {about['width']} wide, "
        f"batch {about['batch']} at {about['size']}x{about['size']}, {plain['parameter_nbytes'] // 4:,} parameters; "
        f"budget {mib(about['budget_nbytes'])} MiB."
    )
    return f"{text} {machine_line(kind)}\n\n{table(header, rows)}"


def deep() -> str:
    """The ResNet of 1,517 layers."""
    return _deep(1517)


def deeper() -> str:
    """The ResNet of 15,170 layers."""
    return _deep(15170)


_MULTIPLY_ADDS = 111e9
"""Of the forward pass of one image of 224x224 in the ResNet of 1,517 layers, by its layers' shapes."""


def deep_224() -> str:
    """What the ResNet of 1,517 layers would take at 224x224, scaled from what was measured."""
    (found,) = [network for network in load(_DEEP[1517])["deep"] if network["layers"] == 1517]
    about, runs = found["deep"], {run["way"]: run for run in reversed(found["runs"])}
    batch, size, counted, moved = about["batch"], about["size"], runs["counted"], runs["link"]
    area = (224 / size) ** 2
    largest = batch * 256 * (size // 4) ** 2 * 4  # float32, the output of a block of the first stage
    multiple = counted["peak_nbytes"] / largest
    state = 3 * counted["parameter_nbytes"]
    peak, saved, out = (
        area * nbytes for nbytes in (counted["peak_nbytes"], counted["saved_nbytes"], moved["out_nbytes"])
    )
    seconds = out / load(_DEEP[1517])["bytes_per_second"]
    rows = [
        ("the largest value", f"[{batch}, 256, 56, 56], {mib(area * largest)} MiB"),
        ("peak above the state, with `offload(ahead=1)`", f"{multiple:.2f} times that, {mib(peak)} MiB"),
        ("state: parameters, gradients, momenta", f"{mib(state)} MiB"),
        ("together", f"{mib(state + peak)} MiB"),
        ("saved, which plain PyTorch holds beside the state", f"{saved / 2**30:.1f} GiB"),
        ("moved to the host", f"{out / 2**30:.1f} GiB, {out / saved:.0%} of what is saved; the rest is remade"),
        ("batch that fits into 12 GB", f"{int(batch * (12e9 - state) / peak)}"),
        ("the link of 12.8 GB/s carries this in", f"{seconds:.1f} s each way"),
        (
            "it is hidden on a device that sustains less than",
            f"{2 * _MULTIPLY_ADDS * batch / seconds / 1e12:.1f} TFLOP/s in forward, twice that in backward",
        ),
    ]
    return table(("at 224x224", f"batch {batch}"), rows)


def cdma() -> str:
    """Bytes that cross the link, compressed."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in load("cdma-cpu")["rows"]:
        found.setdefault((row["network"], row["state"]), {})[row["layout"]] = row
    rows = []
    for (network, state), layouts in found.items():
        nchw, last = layouts["NCHW"]["ratios"], layouts["channels_last"]["ratios"]
        rows.append(
            (
                f"{title(network)}, {state}",
                f"{layouts['NCHW']['zeros']:.0%}",
                f"{nchw['zvc']:.2f}",
                f"{nchw['rle']:.2f} / {last['rle']:.2f}",
                f"{nchw['deflate']:.2f} / {last['deflate']:.2f}",
            )
        )
    header = ("network", "zeros", "ZVC, either layout", "RLE, NCHW / channels last", "DEFLATE, NCHW / channels last")
    return f"{machine_line('cdma-cpu')}\n\n{table(header, rows)}"


def link_times() -> str:
    """Times of links of several speeds, raw and compressed, by simulation."""
    rows = []
    for row in load("link-cpu")["rows"]:
        raw, *others = row["ways"].values()
        cells = [f"{raw['seconds'] / way['seconds']:.2f}" for way in others]
        rows.append(
            (title(row["network"]), f"{row['bytes_per_second'] / 1e9:g}", f"{raw['seconds'] * 1e3:.1f}", *cells)
        )
    names = list(load("link-cpu")["rows"][0]["ways"])[1:]
    return f"{machine_line('link-cpu')}\n\n{table(('network', 'GB/s each way', 'as it is, ms', *names), rows)}"


def hiding() -> str:
    """What hides behind a link, in simulated time."""
    rows = []
    for network in load("hiding")["networks"]:
        plain = network["forward_seconds"] + network["backward_seconds"]
        for number, row in enumerate(network["rows"]):
            rows.append(
                (
                    f"{network['title']}, batch {network['batch']}" if number == 0 else "",
                    f"`{row['way'].partition(',')[0]}`{''.join(row['way'].partition(',')[1:])}",
                    f"{row['moved_nbytes'] / 2**30:.2f}",
                    f"{row['held_nbytes'] / 2**30:.2f}",
                    f"{row['seconds'] / plain:.3f}",
                    "" if row["predicted"] is None else f"{row['predicted'] / plain:.3f}",
                    f"{row['floor'] / plain:.3f}",
                    f"{max(0.0, row['seconds'] / row['floor'] - 1):.1%}",
                    "the same" if row["exact"] else "different",
                )
            )
    header = ("network", "policy", "moved, GiB", "held, GiB", "step", "predicted", "floor", "above it", "bits")
    return f"{machine_line('hiding')} Times are simulated, and over plain's.\n\n{table(header, rows)}"


def disk() -> str:
    """The disk store beside dd."""
    results = load("disk-cpu")
    speeds, shares = results["gb_per_second"], results["share_of_dd"]
    names = {"write, fresh": "write, the file grows", "write, again": "write, the file is there", "read": "read"}
    rows = [
        (
            text,
            f"{speeds[name]['median']:.2f}",
            f"{speeds[f'dd {name}']['median']:.2f}",
            f"{shares[name]['median']:.2f} ({shares[name]['q1']:.2f} to {shares[name]['q3']:.2f})",
            str(shares[name]["count"]),
        )
        for name, text in names.items()
    ]
    header = ("", "`DiskStore`, GB/s", "dd, GB/s", "store over dd (quartiles)", "rounds")
    return f"{machine_line('disk-cpu')}\n\n{table(header, rows)}"


def numbers() -> dict[str, str]:
    """Numbers of sentences."""
    (found,) = [network for network in load(_DEEP[1517])["deep"] if network["layers"] == 1517]
    by_way = {run["way"]: run for run in reversed(found["runs"])}
    shares = load("disk-cpu")["share_of_dd"]
    return {
        "deep/plain-peak": mib(by_way["plain"]["peak_nbytes"]),
        "deep/peak": f"{by_way['counted']['peak_nbytes'] / 2**20:.1f}",
        "deep/less": f"{found['cut']:.2%}",
        "deep/parameters": f"{by_way['plain']['parameter_nbytes'] // 4:,}",
        "disk/write-fresh": f"{shares['write, fresh']['median']:.2f}",
        "disk/write-again": f"{shares['write, again']['median']:.2f}",
    }


TABLES = {
    "layrub": layrub,
    "layrub-times": layrub_times,
    "layrub-link": link,
    "schedules": schedules,
    "deep-1517": deep,
    "deep-15170": deeper,
    "deep-1517-at-224": deep_224,
    "cdma": cdma,
    "link-times": link_times,
    "hiding": hiding,
    "disk": disk,
}
