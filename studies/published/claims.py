"""Each claim of a paper beside our figure, the command, and what differs: the tables of docs/papers/index.md.

A paper's figure is quoted only if it was read: in the paper, its abstract, its code, or in a source that reports it,
which the table says. A figure that is merely remembered is not quoted.

The file is long because all claims are in it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from studies.published import offloading
from studies.published.results import kinds, load, newest, table, title
from studies.published.trainings import best_followed, ratio_of

READ, ABSTRACT, NOTES = "read in the paper", "read in the abstract", "read in notes about the paper"
COMPUTED, ELSEWHERE = "computed from the paper's table", "read in another paper"


@dataclass(frozen=True)
class Claim:
    """A row: what a paper claims and what was measured here.

    Attributes:
        claim: in words.
        figure: the paper's.
        source: how certain that is.
        ours: computes our figure from a file of results.
        kind: of the file.
        command: what measured it, without ``python -m studies.``
        differs: the difference in conditions.
    """

    claim: str
    figure: str
    source: str
    ours: Callable[[], str]
    kind: str
    command: str
    differs: str


def _mean_of(kind: str, stage: str) -> Any:
    return {row["stage"]: row for row in load(kind)["means"]}[stage]


def _time(found: Any) -> float:
    return float(found["median"] if isinstance(found, dict) else found)


def _footprint(kind: str, stage: str) -> str:
    row = _mean_of(kind, stage)
    return f"{row['mfr_static']:.2f} at {_time(row['times_plain']):.2f} of the time"


def _most_dynamic() -> str:
    networks = load("gist-cpu")["networks"]
    most = max((row["mfr_dynamic"], network["network"]) for network in networks for row in network["rows"])
    return f"{most[0]:.2f} ({title(most[1])})"


def _gist_accuracy() -> str:
    rows = [row for row in load("gist-accuracy")["rows"] if row["variant"].startswith("gist-")]
    worst = min(rows, key=lambda row: row["versus_plain"])
    return (
        f"{100 * worst['versus_plain']:+.2f} points at worst "
        f"({worst['variant'].removeprefix('gist-')}, {title(worst['network'])})"
    )


def _trainings(kind: str, variant: str) -> list[Any]:
    return [training for training in load(kind)["trainings"] if training["variant"] == variant]


def _comet(kind: str, variant: str, field: str) -> float:
    return statistics.fmean(training[field] for training in _trainings(kind, variant))


def _ratio(network: str, variant: str = "comet-1", field: str = "conv_ratio") -> Callable[[], str]:
    return lambda: f"{_comet(f'comet-{network}-cpu', variant, field):.1f}"


def _peak(kind: str, variant: str) -> Callable[[], str]:
    return lambda: f"{_comet(kind, 'plain', 'peak_nbytes') / _comet(kind, variant, 'peak_nbytes'):.2f}"


def _step(kind: str, variant: str) -> Callable[[], str]:
    def step() -> str:
        return f"{statistics.fmean(training['overhead']['median'] for training in _trainings(kind, variant)):.2f}"

    return step


def _overheads() -> str:
    found = []
    for kind in (kind for kind in kinds() if kind.startswith("comet-224-")):
        ordinary = statistics.fmean(training["ordinary"]["median"] for training in _trainings(kind, "comet-1"))
        found.append(f"{title(load(kind)['network'])} {ordinary:.2f}")
    return ", ".join(found)


def _accuracies(variant: str) -> Callable[[], str]:
    def accuracies() -> str:
        parts = []
        for network in ("alexnet", "vgg16", "resnet18", "resnet50"):
            kind = f"comet-{network}-cpu"
            if _trainings(kind, variant):
                against = _comet(kind, variant, "accuracy") - _comet(kind, "plain", "accuracy")
                parts.append(f"{title(network)} {100 * against:+.2f}")
        return ", ".join(parts)

    return accuracies


def _error_model() -> str:
    layers = load("comet-error-resnet50-1-cpu")["layers"]
    ratios = [layer["measured"] / math.hypot(layer["own"], layer["others"]) for layer in layers]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.2f} (quartiles {low:.2f} and {high:.2f}, {len(layers)} layers)"


def _cdma(largest: bool) -> Callable[[], str]:
    def ratio() -> str:
        rows = [row for row in load("cdma-cpu")["rows"] if row["layout"] == "NCHW" and row["state"] == "trained"]
        if not largest:
            return f"{statistics.fmean(row['ratios']['zvc'] for row in rows):.2f} ({len(rows)} networks)"
        most = max(rows, key=lambda row: row["ratios"]["zvc"])
        return f"{most['ratios']['zvc']:.2f} ({title(most['network'])}, a whole network)"

    return ratio


def _link(bytes_per_second: float) -> Callable[[], str]:
    def times() -> str:
        rows = [row for row in load("link-cpu")["rows"] if row["bytes_per_second"] == bytes_per_second]
        raw = [row["ways"]["raw"]["seconds"] for row in rows]
        packed = [row["ways"]["zvc"]["seconds"] for row in rows]
        return f"{statistics.fmean(a / b for a, b in zip(raw, packed, strict=True)):.2f} ({len(rows)} networks)"

    return times


def _cut(network: str, policy: str) -> Callable[[], str]:
    def cut() -> str:
        (found,) = [one for one in offloading._networks() if one["case"]["network"] == network]
        return f"{offloading._rows(found)[policy]['cut']:.0%} less"

    return cut


def _mean_cut(policy: str, field: str) -> Callable[[], str]:
    return lambda: f"{offloading._mean(policy, field):.1%} less"


def _mean_time(policy: str) -> Callable[[], str]:
    def mean() -> str:
        times = [offloading._rows(network)[policy]["times_plain"] for network in offloading._networks()]
        return f"{statistics.fmean(times):.2f}"

    return mean


def _vgg_time() -> str:
    (found,) = [one for one in offloading._networks() if one["case"]["network"] == "vgg16"]
    return f"{offloading._rows(found)['vdnn']['times_plain']:.2f}"


def _deep() -> str:
    (found,) = [network for network in load("layrub-deep-cpu")["deep"] if network["layers"] == 1517]
    return f"{found['cut']:.2%} less"


def _not_measured() -> str:
    return "not measured"


def _deep_batches() -> str:
    """The largest batch of each stage of the deepest network, and its speed, over plain's."""
    if "gist-deep-cpu" not in kinds():
        return _not_measured()
    deepest = load("gist-deep-cpu")["deep"][-1]
    cells = (f"{row['name']} {row['ratio']:.1f}x, {row['speed']:.2f}" for row in deepest["rows"][1:])
    return f"{deepest['question']['network'].removeprefix('resnet')} layers, batch and speed: {'; '.join(cells)}"


def _trained() -> list[tuple[str, float, float]]:
    """Title, ZVC's ratio at the end and the accuracy of each network of the paper that was trained for long."""
    found = []
    for trained in best_followed():
        if trained["network"] in ("squared_relu", "spiking", "spiking_rarely"):  # not of the paper
            continue
        last = max(look["step"] for look in trained["densities"])
        looks = [look for look in trained["densities"] if look["step"] == last]
        found.append((title(trained["network"]), ratio_of(looks), trained["accuracy"]))
    return found


def _densities() -> str:
    found = [f"{name} {ratio:.2f} ({100 * accuracy:.1f} %)" for name, ratio, accuracy in _trained()]
    return f"ratio (and accuracy) at the end: {', '.join(found)}" if found else _not_measured()


def _trained_mean() -> str:
    ratios = [ratio for _, ratio, _ in _trained()]
    return f"{statistics.fmean(ratios):.2f} ({len(ratios)} networks)" if ratios else _not_measured()


def _kind(kind: str) -> str:
    """The kind, or nothing where there is no file of it yet."""
    return kind if kind in kinds() else ""


_LAYERS = "images of 32x32 to 64x64, a few hundred steps; the paper: ImageNet, whole trainings"
_LARGE = "batch 8 on a processor; the paper: batch 128 on a V100"
_MOVED = "batch 2 to 16 on a processor, the link simulated; peak without parameters"

CLAIMS: Mapping[str, tuple[Claim, ...]] = {
    "gist": (
        Claim(
            "memory footprint ratio, mean over five networks",
            "1.8 at 1.04 of the time",
            NOTES,
            lambda: _footprint("gist-cpu", "lossless"),
            "gist-cpu",
            "gist",
            "exact, no reduced precision; the paper's has FP16 or smaller. Batch 64 (VGG16: 16), a processor",
        ),
        Claim(
            "the same",
            "1.8 at 1.04 of the time",
            NOTES,
            lambda: _footprint("gist-cpu", "gist_fp16"),
            "gist-cpu",
            "gist",
            "with FP16, as the paper",
        ),
        Claim(
            "the same",
            "1.8 at 1.04 of the time",
            NOTES,
            lambda: _footprint("gist-channels_last-cpu", "lossless"),
            "gist-channels_last-cpu",
            "gist --channels-last",
            "exact; channels last, in which no reordered copies are made",
        ),
        Claim(
            "the same, with dynamic allocation and optimised software",
            "up to 4.1",
            NOTES,
            _most_dynamic,
            "gist-cpu",
            "gist",
            "the largest of five networks and all stages",
        ),
        Claim(
            "accuracy with each network's smallest format",
            "no loss",
            NOTES,
            _gist_accuracy,
            "gist-accuracy",
            "gist_accuracy",
            "two small networks on Fashion-MNIST, 400 steps; the paper: ImageNet",
        ),
        Claim(
            "deep ResNets with a larger batch: speed",
            "not available",
            "-",
            _deep_batches,
            _kind("gist-deep-cpu"),
            "gist --only deep",
            "a quarter of the published width, images of 32x32",
        ),
    ),
    "comet": (
        *(
            Claim(
                f"convolutions' inputs, {title(network)}",
                figure,
                READ,
                _ratio(network),
                f"comet-{network}-cpu",
                f"comet --network {network}",
                _LAYERS,
            )
            for network, figure in (("alexnet", "13.5"), ("vgg16", "11.1"), ("resnet18", "10.7"), ("resnet50", "11.0"))
        ),
        *(
            Claim(
                f"peak, {title(network)}",
                figure,
                COMPUTED,
                _peak(f"comet-224-{network}-cpu", "comet-1"),
                f"comet-224-{network}-cpu",
                f"comet --network {network} --size 224",
                _LARGE,
            )
            for network, figure in (("alexnet", "2.55"), ("resnet18", "3.77"), ("resnet50", "3.54"))
        ),
        Claim(
            "time of a step at the same batch",
            "1.17, mean",
            READ,
            _overheads,
            "comet-224-resnet50-cpu",
            "comet --size 224",
            "batch 8 on one thread of a processor, ordinary steps; the paper: a V100, collecting in one step of 1,000",
        ),
        Claim(
            "accuracy at a deviation of 1 %, points",
            "at most 0.14 lower",
            READ,
            _accuracies("comet-1"),
            "comet-resnet50-cpu",
            "comet",
            _LAYERS,
        ),
        Claim(
            "accuracy at a deviation of 5 %",
            "a loss that training does not recover from",
            READ,
            _accuracies("comet-5"),
            "comet-resnet50-cpu",
            "comet",
            "the paper began from 190,000 steps of AlexNet",
        ),
        Claim(
            "the error model",
            "within one deviation for 68.2 % of errors, with a fitted constant",
            READ,
            _error_model,
            "comet-error-resnet50-1-cpu",
            "comet_error",
            "measured over predicted whole error of a weight's gradient, no constant, batch norms included",
        ),
        Claim(
            "speed from the larger batch, ResNet-50",
            "1.27",
            READ,
            _not_measured,
            "",
            "",
            "a processor does not compute faster with a larger batch",
        ),
    ),
    "cdma": (
        Claim(
            "bytes on the link, mean over six networks",
            "2.6",
            ABSTRACT,
            _cdma(False),
            "cdma-cpu",
            "cdma",
            "10 to 24 steps of training; the paper: trained networks",
        ),
        Claim(
            "the same",
            "2.6",
            ABSTRACT,
            _trained_mean,
            _kind("cdma-training-cpu"),
            "cdma_training",
            "results of relus after 2,500 steps (VGG16: 1,500) on Fashion-MNIST; the paper: ImageNet",
        ),
        Claim(
            "bytes on the link, at most",
            "13.8",
            ABSTRACT,
            _cdma(True),
            "cdma-cpu",
            "cdma",
            "ours is a whole network's; whether the paper's is a layer's is not known",
        ),
        Claim(
            "speed-up over vDNN",
            "1.32 on average (first version)",
            ABSTRACT,
            _link(12.8e9),
            "link-cpu",
            "link_times",
            "time of the link alone, simulated, with two cores that compress; the paper: an engine in the device",
        ),
        Claim(
            "densities of layers over a training",
            "not available",
            "-",
            _densities,
            _kind("cdma-training-cpu"),
            "cdma_training",
            "Fashion-MNIST; the paper: ImageNet. NiN and SqueezeNet are of `cdma-training-rate-cpu`, at a lower rate; "
            "OverFeat and VGG16 have files of their own",
        ),
    ),
    "vdnn": (
        *(
            Claim(
                f"memory of {title(network)}",
                figure,
                ABSTRACT,
                _cut(network, "vdnn"),
                "layrub-cpu",
                "layrub",
                _MOVED,
            )
            for network, figure in (("alexnet", "89 % less"), ("googlenet", "95 % less"))
        ),
        Claim(
            "time of VGG-16 at batch 256",
            "18 % slower than an unlimited device",
            ABSTRACT,
            _vgg_time,
            "layrub-vgg16-cpu",
            "layrub",
            "batch 2, the link simulated at 12.8 GB/s each way",
        ),
    ),
    "layrub": (
        Claim(
            "memory, mean over networks",
            "58.2 % less",
            ABSTRACT,
            _mean_cut("layrub", "cut"),
            "layrub-cpu",
            "layrub",
            _MOVED,
        ),
        Claim(
            "the same, parameters included",
            "58.2 % less",
            ABSTRACT,
            _mean_cut("layrub", "cut_in_all"),
            "layrub-cpu",
            "layrub",
            "small batches: parameters are a large part",
        ),
        Claim(
            "memory, at most",
            "98.9 % less",
            ABSTRACT,
            _deep,
            "layrub-deep-cpu",
            "layrub --only deep",
            "ResNet of 1,517 layers, `offload`, 96x96",
        ),
        Claim(
            "time, mean",
            "1.241",
            ABSTRACT,
            _mean_time("layrub"),
            "layrub-cpu",
            "layrub",
            "over plain PyTorch; the paper: over Caffe",
        ),
    ),
    "jpeg-act": (
        Claim(
            "convolutions' inputs, ResNet-18",
            "7.3",
            f"{ELSEWHERE} (COMET)",
            _ratio("resnet18", "dct"),
            "comet-resnet18-cpu",
            "comet --network resnet18 --variants dct",
            "what a relu reads too goes through `Signed`, with exact signs; 8-bit coefficients",
        ),
        Claim(
            "convolutions' inputs, ResNet-50",
            "6.0",
            f"{ELSEWHERE} (COMET)",
            _ratio("resnet50", "dct"),
            "comet-resnet50-cpu",
            "comet --network resnet50 --variants dct",
            "the same; images of 32x32, whose last planes are smaller than a transform's block of 8x8",
        ),
        Claim(
            "training time",
            "2.4 times faster than earlier accelerators",
            ABSTRACT,
            _not_measured,
            "",
            "",
            "hardware",
        ),
    ),
    "actnn": (
        *(
            Claim(
                f"activations, 2 bits: {title(network)}",
                "12",
                "read in its code and notes",
                _ratio(network, "quantized-2", "ratio"),
                f"comet-{network}-cpu",
                f"comet --network {network} --variants quantized-2",
                "the whole stash, weights and masks apart",
            )
            for network in ("resnet18", "resnet50")
        ),
        Claim(
            "total memory, ResNet-50",
            "7.9 at batch 128",
            f"{ELSEWHERE} (DIVISION)",
            _peak("comet-resnet50-cpu", "quantized-2"),
            "comet-resnet50-cpu",
            "comet --network resnet50",
            "peak of a step without parameters, 32x32, batch 32; kernels' own memory is a large part",
        ),
        Claim(
            "time of a step, 2 bits",
            "1.4 (28 % fewer images a second)",
            "read in its code and notes",
            _step("comet-resnet18-cpu", "quantized-2"),
            "comet-resnet18-cpu",
            "comet --network resnet18",
            "a processor, 64x64; the paper: a T4",
        ),
        Claim(
            "accuracy at 2 bits, points",
            "a negligible loss",
            "read in its code and notes",
            _accuracies("quantized-2"),
            "comet-resnet50-cpu",
            "comet",
            "a few hundred steps; groups of 256, no bits by sensitivity",
        ),
    ),
}


def claims(paper: str) -> str:
    """The table of one paper."""
    rows = []
    for claim in CLAIMS[paper]:
        link = f" ([file](results:{newest(claim.kind).name}))" if claim.kind else ""
        command = f"`python -m studies.{claim.command}`" if claim.command else "-"
        rows.append((claim.claim, claim.figure, claim.source, claim.ours() + link, command, claim.differs or "-"))
    return table(("claim", "the paper", "how certain", "ours", "command", "what differs"), rows)


def _of(paper: str) -> Callable[[], str]:
    return lambda: claims(paper)


TABLES: Mapping[str, Callable[[], str]] = {f"claims-{paper}": _of(paper) for paper in CLAIMS}
