"""Tables of the reproductions of Gist and COMET."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable
from typing import Any

from studies.published.results import ENOUGH, MARK, kinds, load, machine_line, newest, table, title

_STAGES = {
    "gist_lossless": "Gist's lossless rules",
    "lossless_stored": "exact, stored",
    "lossless": "exact, with recompute",
    "gist_fp16": "+ FP16",
    "gist_fp10": "+ FP10",
    "gist_fp8": "+ FP8",
}


def _gist(kind: str, stages: Iterable[str]) -> str:
    results = load(kind)
    rows = []
    for network in results["networks"]:
        name = f"{title(network['network'])}, {network['batch']}"
        rounds = network["case"]["rounds"]
        for row in network["rows"]:
            if row["stage"] in stages:
                exact = "yes" if row["exact"] else f"{row['gradient_error']:.1e}"
                few = f" {MARK}" if rounds < ENOUGH else ""
                rows.append(
                    (name, _STAGES[row["stage"]], exact, *_ratios(row), f"{_median(row['times_plain']):.2f}{few}")
                )
                name = ""
    name = f"all {len(results['networks'])}, geometric mean"
    for row in results["means"]:
        if row["stage"] in stages:
            few = f" {MARK}" if any(network["case"]["rounds"] < ENOUGH for network in results["networks"]) else ""
            rows.append((name, _STAGES[row["stage"]], "", *_ratios(row), f"{_median(row['times_plain']):.2f}{few}"))
            name = ""
    header = ("network, batch", "stage", "bits equal, or gradient error", "ratio", "MFR", "peak", "time")
    return f"{machine_line(kind)}\n\n{table(header, rows)}"


def _median(found: Any) -> float:
    return float(found["median"] if isinstance(found, dict) else found)


def _ratios(row: Any) -> tuple[str, str, str]:
    return f"{row['ratio']:.2f}", f"{row['mfr_static']:.2f} / {row['mfr_dynamic']:.2f}", f"{row['peak_ratio']:.2f}"


def gist() -> str:
    """Gist's stages on its five networks."""
    return _gist("gist-cpu", _STAGES)


def gist_channels_last() -> str:
    """Two of the stages in channels last."""
    return _gist("gist-channels_last-cpu", ("lossless", "gist_fp8"))


_VARIANTS = {
    "plain": "plain",
    "gist-fp16": "`gist_fp16`",
    "gist-fp10": "`gist_fp10`",
    "gist-fp8": "`gist_fp8`",
    "all-fp10": "everything in FP10, in the forward pass too",
    "all-fp8": "everything in FP8, in the forward pass too",
}


def gist_accuracy() -> str:
    """Accuracy after short trainings."""
    found: dict[str, dict[str, Any]] = {}
    for row in load("gist-accuracy")["rows"]:
        found.setdefault(row["variant"], {})[row["network"]] = row
    networks = list(found["plain"])
    rows = []
    for variant, by_network in found.items():
        cells = []
        for network in networks:
            row = by_network[network]
            stash = "" if row["ratio"] is None else f", stash {row['ratio']:.1f}x smaller"
            cells.append(f"{100 * row['mean']:.2f} ({100 * row['low']:.2f} to {100 * row['high']:.2f}){stash}")
        rows.append((_VARIANTS.get(variant, variant), *cells))
    header = ("accuracy, %: mean (lowest to highest seed)", *map(title, networks))
    about = load("gist-accuracy")["about"]
    return f"{about}. {machine_line('gist-accuracy')}\n\n{table(header, rows)}"


_COMET = (
    *("comet-resnet18-cpu", "comet-resnet50-cpu", "comet-vgg16-cpu", "comet-alexnet-cpu"),
    *("comet-inception-cpu", "comet-cpu"),
)


def _mean(numbers: Iterable[float | None]) -> str:
    known = list(numbers)
    found = [number for number in known if number is not None]
    return f"{statistics.fmean(found):.2f}" if found and len(found) == len(known) else "-"


def _groups(results: Any) -> dict[str, list[Any]]:
    groups: dict[str, list[Any]] = {}
    for training in results["trainings"]:
        groups.setdefault(training["variant"], []).append(training)
    return groups


def _step(group: list[Any]) -> str:
    if group[0]["overhead"] is None:
        return "1.00"
    few = f" {MARK}" if min(training["overhead"]["count"] for training in group) < ENOUGH else ""
    return f"{statistics.fmean(training['overhead']['median'] for training in group):.2f}{few}"


def _prices(group: list[Any]) -> tuple[str, str, str]:
    """The time of an ordinary step, what a collection adds, and the mean step with one collection in a hundred."""
    ordinary = statistics.fmean(training["ordinary"]["median"] for training in group)
    few = f" {MARK}" if min(training["ordinary"]["count"] for training in group) < ENOUGH else ""
    collections = [training["collection"] for training in group if training["collection"] is not None]
    if not collections:
        return f"{ordinary:.2f}{few}", "-", f"{ordinary:.2f}{few}"
    added = statistics.fmean(collections)
    return f"{ordinary:.2f}{few}", f"{added:.2f}", f"{ordinary + added / 100:.2f}{few}"


def comet(kind: str) -> str:
    """Ratios, accuracy and times of one network's trainings."""
    results = load(kind)
    groups = _groups(results)
    plain = {training["seed"]: training for training in groups["plain"]}
    rows = []
    for variant, group in groups.items():
        against = [100 * (training["accuracy"] - plain[training["seed"]]["accuracy"]) for training in group]
        span = f"{against[0]:+.2f}" if len(against) == 1 else f"{min(against):+.2f} to {max(against):+.2f}"
        cosines = [training["cosine"] for training in group if training["cosine"] is not None]
        rows.append(
            (
                variant,
                _mean(training["conv_ratio"] for training in group),
                _mean(training["norm_ratio"] for training in group),
                _mean(training["ratio"] for training in group),
                _mean(plain[training["seed"]]["peak_nbytes"] / training["peak_nbytes"] for training in group),
                f"{100 * statistics.fmean(training['accuracy'] for training in group):.2f}",
                "" if variant == "plain" else span,
                _step(group),
                _mean(training["predicted"]["median"] for training in group if training["predicted"]).strip("-"),
                f"{min(cosines):.3f}" if cosines else "",
            )
        )
    header = (
        *("policy", "convolutions' inputs", "batch norms'", "all", "peak", "accuracy, %", "against plain, by seed"),
        *("step", "measured / predicted", "least cosine"),
    )
    return f"{results['about']}. {machine_line(kind)}\n\n{table(header, rows)}"


def comet_all() -> str:
    """The trainings of every network, each under a heading."""
    parts = []
    for kind in _COMET:
        name = title(load(kind)["network"])
        parts.append(f"**{name[0].upper()}{name[1:]}** ([results](results:{newest(kind).name}))\n\n{comet(kind)}")
    return "\n\n".join(parts)


def comet_224() -> str:
    """The same at the size of ImageNet's images; too few steps for an accuracy."""
    rows = []
    for kind in (kind for kind in kinds() if kind.startswith("comet-224-")):
        groups = _groups(load(kind))
        peak = groups["plain"][0]["peak_nbytes"]
        name = f"[{title(load(kind)['network'])}](results:{newest(kind).name})"
        for variant, group in groups.items():
            if variant != "plain":
                ratios = (
                    _mean(training[field] for training in group) for field in ("conv_ratio", "norm_ratio", "ratio")
                )
                rows.append((name, variant, *ratios, f"{peak / group[0]['peak_nbytes']:.2f}", *_prices(group)))
                name = ""
    header = (
        *("network", "policy", "convolutions' inputs", "batch norms'", "all", "peak"),
        *("ordinary step", "a collection, plain steps", "with one in 100 steps"),
    )
    return f"{machine_line('comet-224-resnet50-cpu')}\n\n{table(header, rows)}"


def comet_model() -> str:
    """How well the error model predicts, and the published equation beside it."""
    rows = []
    for kind in _COMET:
        results = load(kind)
        cells = [_span([row[field] for row in results["equations"]]) for field in ("measured", "maxima", "means")]
        rows.append((title(results["network"]), *cells))
    header = ("network", "measured over wanted deviation, at our bound", "equation 3 over ours, maxima", "means")
    return f"{machine_line('comet-resnet18-cpu')}\n\n{table(header, rows)}"


def comet_error() -> str:
    """The whole error of weight gradients: by the error model, and measured."""
    summary, stages = [], []
    for kind in (kind for kind in kinds() if kind.startswith("comet-error-")):
        results = load(kind)
        size = f"{results['size']}x{results['size']}, {results['steps']} steps"
        name = f"[{title(results['network'])}](results:{newest(kind).name}), {100 * results['sigma']:g} %, {size}"
        layers = results["layers"]
        ratios = [layer["measured"] / math.hypot(layer["own"], layer["others"]) for layer in layers]
        cosines = f"{min(layer['cosine'] for layer in layers):.4f}"
        stash = f"{results['ratio']:.1f}"
        summary.append((name, stash, str(len(layers)), *_errors(layers), _quartiles(ratios), cosines))
        if kind == "comet-error-resnet50-1-cpu":
            groups: dict[tuple[str, str], list[Any]] = {}
            for layer in layers:
                stage = re.sub(r"^stages\.(\d)\..*", lambda found: f"stage {int(found[1]) + 1}", layer["weight"])
                groups.setdefault((stage.split(".")[0], layer["kind"]), []).append(layer)
            for (stage, layer_kind), group in groups.items():
                cosine = f"{min(layer['cosine'] for layer in group):.5f}"
                stages.append((stage, f"{layer_kind}, {len(group)}", *_errors(group), cosine))
    errors = ("wanted", "own, predicted", "others', predicted", "whole, predicted", "whole, measured")
    first = table(
        ("network, sigma", "stash", "layers", *errors, "measured / predicted: quartiles", "least cosine"), summary
    )
    second = table(("ResNet-50, 1 %", "layers", *errors, "least cosine"), stages)
    return f"{machine_line('comet-error-resnet50-1-cpu')}\n\n{first}\n\n{second}"


def _errors(layers: list[Any]) -> tuple[str, ...]:
    """Medians of the layers' errors, in percent of the gradients."""
    parts = [[layer[field] for layer in layers] for field in ("target", "own", "others")]
    parts.append([math.hypot(layer["own"], layer["others"]) for layer in layers])
    parts.append([layer["measured"] for layer in layers])
    return tuple(f"{100 * statistics.median(part):.2f} %" for part in parts)


def _quartiles(numbers: list[float]) -> str:
    low, middle, high = statistics.quantiles(numbers, n=4)
    return f"{low:.2f}, {middle:.2f}, {high:.2f}"


def _span(numbers: list[float]) -> str:
    digits = 2 if max(numbers) < 3 else 1
    return f"{min(numbers):.{digits}f} to {max(numbers):.{digits}f}"


_PUBLISHED = {"alexnet": 13.5, "vgg16": 11.1, "resnet18": 10.7, "resnet50": 11.0}
"""COMET's own ratios (PVLDB 15(4), 2022) of what convolutions read, on ImageNet, for a deviation of 1 %."""


def comet_sigma() -> str:
    """Ratios of what convolutions read, by the deviation that is allowed, beside the paper's."""
    found: dict[str, list[float]] = {}
    for network in _PUBLISHED:
        groups = _groups(load(f"comet-{network}-cpu"))
        for variant in ("comet-1", "comet-5", "comet-10"):
            found.setdefault(variant, []).append(statistics.fmean(one["conv_ratio"] for one in groups[variant]))
    rows = [
        (
            f"{variant.removeprefix('comet-')} %",
            *(f"{ratio:.1f}" for ratio in ratios),
            f"{statistics.fmean(ratios):.1f}",
        )
        for variant, ratios in found.items()
    ]
    quoted = _PUBLISHED.values()
    rows.append(("the paper, 1 %", *(f"{ratio:.1f}" for ratio in quoted), f"{statistics.fmean(quoted):.1f}"))
    return table(("deviation", *map(title, _PUBLISHED), "mean"), rows)


def signed() -> str:
    """Bits per element of what a relu and a convolution read."""
    found: dict[tuple[str, float], list[Any]] = {}
    for row in load("sz-cpu")["networks"]:
        found.setdefault((row["network"], row["share"]), []).append(row)
    rows = [
        (title(network), f"{share:g}", *(f"{statistics.fmean(row[field] for row in group):.2f}" for field in _SIGNED))
        for (network, share), group in sorted(found.items(), key=lambda item: (item[0][0] != "small_vgg", *item[0]))
    ]
    return f"{machine_line('sz-cpu')}\n\n" + table(("network", "bound", *_SIGNED.values()), rows)


_SIGNED = {
    "szp": "`Szp`",
    "signed": "`Signed(Sz)`",
    "beside": "`Sz` of everything, and a bit",
    "signed_blockquant": "`Signed(BlockQuant(2))`",
}


def coders() -> str:
    """The error-bounded coder beside others, within 1 % of the range."""
    rows = [
        (
            row["values"],
            row["codec"],
            f"{row['ratio']:.1f}" + ("" if row["entropy_ratio"] is None else f" (entropy: {row['entropy_ratio']:.1f})"),
            f"{row['encode']:.1f}",
            f"{row['decode']:.1f}",
        )
        for row in load("sz-cpu")["codecs"]
        if row["bound"] == 0.01 and row["values"].startswith("float32")
    ]
    header = ("values", "coder", "ratio", "encode, GB/s", "decode, GB/s")
    return f"{machine_line('sz-cpu')}\n\n{table(header, rows)}"


def numbers() -> dict[str, str]:
    """Numbers of sentences; those of the papers themselves with their source."""
    means = {row["stage"]: row for row in load("gist-cpu")["means"]}
    paper = load("gist-cpu")["paper"]  # Gist, ISCA 2018, section 5
    return {
        "gist/ratio-exact": f"{means['lossless']['ratio']:.2f}",
        "gist/ratio-fp8": f"{means['gist_fp8']['ratio']:.2f}",
        "gist/mfr-exact": f"{means['lossless']['mfr_static']:.2f}",
        "gist/paper-mfr": f"{paper['mfr_average']:.1f}",
        "gist/paper-mfr-most": f"{paper['mfr_most']:.1f}",
        "gist/paper-time": f"{paper['time_average']:.2f}",
        "density/crossing": f"{load('density-cpu')['csr_smaller_from_zeros']['float32']:.1%}",
        "layrub/paper-less": "58.2 %",  # Layrub, TACO 15(4), 2018: mean over its networks
        "layrub/paper-time": "1.241",
        "cdma/paper-mean": "2.6",  # cDMA, HPCA 2018
        "cdma/paper-most": "13.8",
        "comet/paper-time": "17 %",  # COMET, PVLDB 15(4), 2022: mean overhead on a GPU
    }


TABLES = {
    "gist": gist,
    "gist-channels-last": gist_channels_last,
    "gist-accuracy": gist_accuracy,
    "comet": comet_all,
    "comet-224": comet_224,
    "comet-error": comet_error,
    "comet-model": comet_model,
    "comet-sigma": comet_sigma,
    "signed": signed,
    "coders": coders,
}
