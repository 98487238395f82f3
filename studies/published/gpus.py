"""The tables of steps on a GPU, and of what steps ask of one."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from bench.gpu import pages
from studies.published.results import ENOUGH, kinds, load, machine_line, mib, summary, table

_KIND = "gpu-cuda"

_CHOICES = ("checkpoint", "save_on_cpu", "lossless", "lossless_stored", "offload", "cdma", "quantized, 4 bits")
_COMPARED = {"resnet50": "ResNet-50, float32", "gpt2, bf16": "GPT-2, bfloat16"}


def choices() -> str:
    """Peak and time of each way, as shares of plain's, side by side for two networks."""
    networks = {network["name"]: network["rows"] for network in load(_KIND)["networks"]}
    ways = list(_CHOICES)
    ways += [row["way"] for row in networks["resnet50"] if row["way"].startswith("plan")]
    rows = []
    for way in ways:
        cells = [way if way == "plain" else f"`{way}`"]
        for name in _COMPARED:
            plain = networks[name][0]
            same = [row for row in networks[name] if row["way"] == way]
            smallest = [row for row in networks[name] if row["way"].startswith("plan, smallest")]
            row = (same or (smallest if way.startswith("plan") else []) or [None])[0]
            if row is None:
                cells += ["", ""]
                continue
            times = row["times_plain"]
            note = "" if row["way"] == way else " (smallest)"
            cells.append(f"{row['peak_nbytes'] / plain['peak_nbytes']:.2f}{note}")
            cells.append("" if times is None or times["count"] < ENOUGH else f"{times['median']:.2f}")
        rows.append(tuple(cells))
    head = ["", *(f"{words}: {what}" for words in _COMPARED.values() for what in ("peak", "step"))]
    return f"{machine_line(_KIND)} Shares of plain's.\n\n{table(head, rows)}"


_REGIMES = {
    ("gpu-g2", "resnet50/steps"): "ResNet-50, float32, 64 images: the host sets the pace",
    ("gpu-g2", "resnet50/large"): "the same, 256 images: the GPU sets the pace",
    ("gpu-g4", "resnet50"): "the same, 64 images, captured in a graph",
    ("gpu-g2", "resnet50_bf16/large"): "ResNet-50, bfloat16, channels_last, 256 images",
}
_SHOWN = ("checkpoint", "lossless", "offload", "quantized, 4 bits")


def regimes() -> str:
    """Peak and time of ways, as shares of plain's, in each regime."""
    rows = []
    for (program, prefix), words in _REGIMES.items():
        parts = load(f"{program}-cuda")["parts"]
        times = parts[f"{prefix}/times"]["result"]
        plain = parts[f"{prefix}/plain"]["result"]["peak_nbytes"]
        cells = [words]
        for way in _SHOWN:
            found = parts.get(f"{prefix}/{way}", {}).get("result")
            timed = times.get(way)
            if found is None or timed is None:
                cells.append("")
                continue
            took = timed["times_plain"] if "times_plain" in timed else _over(timed, times["plain"])
            cells.append(f"{found['peak_nbytes'] / plain:.2f} at {took['median']:.2f}")
        rows.append(tuple(cells))
    head = ("", *(f"`{way}`" for way in _SHOWN))
    about = "Peak at time of a step, as shares of plain's in the same regime."
    return f"{machine_line('gpu-g2-cuda')} {about}\n\n{table(head, rows)}"


def _over(timed: dict[str, float], plain: dict[str, float]) -> dict[str, float]:
    return {"median": timed["median"] / plain["median"]}


def steps() -> str:
    """Peaks, times and bits of every way on every network."""
    parts = [machine_line(_KIND)]
    for network in load(_KIND)["networks"]:
        plain = network["rows"][0]
        rows = [_row(row, plain) for row in network["rows"]]
        title = f"**{network['what']}, {network['saved']} saved tensors{_compared(network['unstable'])}**"
        head = ("", "peak, MiB", "predicted, MiB", "x plain", "step, x plain", "bits")
        parts.append(f"{title}\n\n{table(head, rows)}")
    return "\n\n".join(parts)


def _compared(unstable: int) -> str:
    """What is to be said of gradients that plain PyTorch itself computes differently a second time."""
    if not unstable:
        return ""
    return f"; {unstable} gradients, which plain itself computes differently a second time, are not compared"


def _predicted(row: dict[str, Any]) -> str:
    """The peak that a plan predicts; the first results hold it in the note's text."""
    if row.get("predicted_nbytes") is not None:
        return mib(row["predicted_nbytes"])
    found = re.match(r"([\d.]+) MiB predicted", row["note"])
    return "" if found is None else f"{float(found[1]):,.0f}"


def _row(row: dict[str, Any], plain: dict[str, Any]) -> tuple[str, ...]:
    times = row["times_plain"]
    bits = f"{row['differing']} gradients differ" if row["differing"] else "equal" if row["is_exact"] else "bounded"
    return (
        row["way"] if row["way"].startswith("plain") else f"`{row['way']}`",
        mib(row["peak_nbytes"]),
        _predicted(row),
        f"{row['peak_nbytes'] / plain['peak_nbytes']:.2f}",
        "" if times is None or times["count"] < ENOUGH else summary(times),
        bits,
    )


_WAYS_OF_COUNTING = "counted on a fake accelerator, so the same on every machine"

_NETWORKS = {
    "resnet50": "ResNet-50's graph, float32",
    "gpt2": "GPT-2 of 2 layers, float32",
    "llama": "a Llama of 2 layers, autocast to bfloat16",
    "resnet50+bfloat16": "ResNet-50's graph, autocast to bfloat16",
    "gpt2+bfloat16": "GPT-2 of 2 layers, autocast to bfloat16",
}


def counts() -> str:
    """Operations, allocations and waits of the steps of every network."""
    results = load("device")
    parts = [f"Medians of {results['steps']} steps, and the most where that is more; {_WAYS_OF_COUNTING}."]
    for network, rows in results["networks"].items():
        head = ("", "operations", "allocations", "waits of the host")
        parts.append(f"**{_NETWORKS[network]}**\n\n{table(head, [_counted(row) for row in rows])}")
    return "\n\n".join(parts)


def _counted(row: dict[str, Any]) -> tuple[str, ...]:
    cells = []
    for name in ("operations", "allocations", "waits"):
        usual, most = row[name], row[f"most_{name}"]
        cells.append(f"{usual:,}" if usual == most else f"{usual:,} to {most:,}")
    return (row["way"] if row["way"] == "plain" else f"`{row['way']}`", *cells)


def instructions() -> str:
    """The host's instructions in a step of every network; that they were not counted, where there are no results."""
    if "device-instructions" not in kinds():
        return "Not counted."
    results = load("device-instructions")
    about = f"Millions, medians of {results['steps']} steps with the least and the most, by {results['valgrind']}."
    parts = [f"{about} {machine_line('device-instructions')}"]
    for network, rows in results["networks"].items():
        plain = rows[0]
        cells = [
            (
                row["way"] if row["way"] == "plain" else f"`{row['way']}`",
                f"{row['instructions'] / 1e6:.1f} ({row['least'] / 1e6:.1f} to {row['most'] / 1e6:.1f})",
                f"{row['instructions'] / plain['instructions']:.2f}",
                f"{row['operations']:,}",
            )
            for row in rows
        ]
        parts.append(f"**{_NETWORKS[network]}**\n\n{table(('', 'instructions', 'x plain', 'operations'), cells)}")
    return "\n\n".join(parts)


def autocast() -> str:
    """What a policy adds to plain's instructions under autocast, as a multiple of what it adds without."""
    networks = load("device-instructions")["networks"] if "device-instructions" in kinds() else {}
    pairs = {name: f"{name}+bfloat16" for name in networks if f"{name}+bfloat16" in networks}
    if not pairs:
        return "Not counted."
    added = {
        network: {row["way"]: row["instructions"] - rows[0]["instructions"] for row in rows[1:]}
        for network, rows in networks.items()
    }
    ways = list(added[next(iter(pairs))])
    cells = [
        (f"`{way}`", *(f"{added[cast][way] / added[name][way]:.2f}" for name, cast in pairs.items())) for way in ways
    ]
    return table(("", *(_NETWORKS[cast] for cast in pairs.values())), cells)


def costs() -> str:
    """Peaks and times that the cost model predicts of the steps that were measured on a GPU."""
    results = load("costs")
    rows = [pages.prediction(row) for row in results["predictions"]]
    about = f"Predicted on a CPU for {results['card']['words']}; measured: [{results['measured']}]"
    return f"{about}(../results/{results['measured']}).\n\n{table(pages.PREDICTIONS, rows)}"


def cuda_code() -> str:
    """Kernels and bytes of the code that Inductor writes for CUDA, plain and treated."""
    results = load("cuda-code")
    parts = [f"Written for an H100 without a GPU, by torch {results['machine']['torch']}; nothing was run."]
    for network, ways in results["networks"].items():
        plain = {row["graph"]: row for row in ways["plain"]}
        rows = [pages.graph(way, row, plain[row["graph"]]) for way, each in ways.items() for row in each]
        parts.append(f"**{results.get('words', {}).get(network, network)}**\n\n{table(pages.GRAPHS, rows)}")
    return "\n\n".join(parts)


PROGRAMS = ("g1", "g2", "g3", "g4", "g5", "g6")


def program(name: str) -> str:
    """The tables of one of the programs for a GPU; that it was not run, where there are no results."""
    found = [kind for kind in kinds() if kind.startswith(f"gpu-{name}-")]
    if not found:
        return "Not measured."
    parts = [machine_line(kind) for kind in found]
    for kind in found:
        for section in pages.sections(name, load(kind)):
            parts += [f"**{section.title}**", table(section.header, section.rows), *section.notes]
    return "\n\n".join(parts)


TABLES: Mapping[str, Callable[[], str]] = {
    "gpu": steps,
    "gpu-choices": choices,
    "gpu-regimes": regimes,
    "costs": costs,
    "cuda-code": cuda_code,
    "device": counts,
    "device-instructions": instructions,
    "device-instructions-autocast": autocast,
    **{f"gpu-{name}": partial(program, name) for name in PROGRAMS},
}
