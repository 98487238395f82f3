"""Tables of long trainings, from whatever their results files hold: a training that is not there yet has no row."""

from __future__ import annotations

import statistics
from typing import Any

from studies.published.results import _newest, kinds, load, machine_line, newest, table, title

FIRST_RATE = 0.01
"""Learning rate of trainings whose file does not say it."""

MISSING = "Not measured yet: `{}` writes the file that this table is made of."


def accuracy() -> str:
    """Accuracy after long trainings, with its spread over the seeds, and the loss curves."""
    parts = []
    for kind in (kind for kind in kinds() if kind.startswith("accuracy-")):
        results = load(kind)
        if not results.get("outcomes"):
            continue
        picture = _newest(kind, "png")
        curves = f"\n\n![Loss over the training, by policy](results:{picture.name})" if picture else ""
        parts.append(f"{machine_line(kind)} [Results](results:{newest(kind).name}).\n\n{_accuracies(results)}{curves}")
    return "\n\n".join(parts) or MISSING.format("python -m studies.accuracy --json FILE --states FOLDER --resume")


def _accuracies(results: Any) -> str:
    """A row for each network and policy: mean and spread of the score, and the difference from plain's same seeds."""
    groups: dict[tuple[str, str], list[Any]] = {}
    for outcome in results["outcomes"]:
        groups.setdefault((outcome["network"], outcome["variant"]), []).append(outcome)
    rows = []
    for (network, variant), group in groups.items():
        is_text = network == "gpt2"
        unit = 1 if is_text else 100
        scores = [unit * outcome["score"] for outcome in group]
        plain = {outcome["seed"]: unit * outcome["score"] for outcome in groups.get((network, "plain"), ())}
        against = [unit * one["score"] - plain[one["seed"]] for one in group if one["seed"] in plain]
        ratios = [outcome["ratio"] for outcome in group if outcome["ratio"] is not None]
        rows.append(
            (
                title(network),
                variant,
                f"{group[0]['steps']:,}",
                str(len(group)),
                f"{statistics.fmean(scores):.2f}" + (f" ± {statistics.stdev(scores):.2f}" if len(scores) > 1 else ""),
                "" if variant == "plain" or not against else f"{statistics.fmean(against):+.2f}",
                f"{statistics.fmean(ratios):.2f}" if ratios else "",
                f"{statistics.fmean(outcome['losses'][-1] for outcome in group):.3f}",
            )
        )
    header = ("network", "policy", "steps", "seeds", "accuracy, % (GPT-2: perplexity)", "against plain")
    return table((*header, "stash, last step", "loss at the end"), rows)


def densities() -> str:
    """How zeros and the ratio of ZVC change over trainings: of whole networks, at five times."""
    rows = []
    for trained in _followed():
        looks: dict[int, list[Any]] = {}
        for look in trained["densities"]:
            looks.setdefault(look["step"], []).append(look)
        times = sorted(looks)
        chosen = [times[round(part * (len(times) - 1) / 4)] for part in range(5)]
        rows.append(
            (
                title(trained["network"]),
                f"{trained.get('rate', FIRST_RATE):g}",
                f"{trained['steps']:,}",
                f"{100 * trained['accuracy']:.1f}",
                *(_look(looks[step]) for step in chosen),
            )
        )
    if not rows:
        return MISSING.format("python -m studies.cdma_training --json FILE --states FOLDER --resume")
    header = ("network", "rate", "steps", "accuracy, %", "at first", "a quarter", "half", "three quarters", "at end")
    machines = "  \n".join(dict.fromkeys(machine_line(kind) for kind in _followed_kinds()))
    return f"{machines}\n\n{table(header, rows)}"


def layers() -> str:
    """The same for each layer, at the beginning and at the end, of the training in which a network learned most."""
    rows = []
    for trained in best_followed():
        steps = [look["step"] for look in trained["densities"]]
        by_layer: dict[str, dict[int, Any]] = {}
        for look in trained["densities"]:
            by_layer.setdefault(look["layer"], {})[look["step"]] = look
        name = title(trained["network"])
        for layer, looks in by_layer.items():
            first, last = looks[min(steps)], looks[max(steps)]
            rows.append((name, f"`{layer}`", _look([first]), _look([last])))
            name = ""
    if not rows:
        return MISSING.format("python -m studies.cdma_training --json FILE --states FOLDER --resume")
    return table(("network", "layer", "at first", "at the end"), rows)


def best_followed() -> list[Any]:
    """Of each network whose zeros were followed over a training, the training with the highest accuracy."""
    best: dict[str, Any] = {}
    for trained in _followed():
        if trained["accuracy"] > best.get(trained["network"], {"accuracy": -1})["accuracy"]:
            best[trained["network"]] = trained
    return list(best.values())


def _followed() -> list[Any]:
    return [trained for kind in _followed_kinds() for trained in load(kind).get("networks", ())]


def _followed_kinds() -> list[str]:
    return [kind for kind in kinds() if kind.startswith("cdma-training")]


def _look(looks: list[Any]) -> str:
    """Zeros and ratio of all activations of a step."""
    nbytes = sum(look["nbytes"] for look in looks)
    zeros = 1 - sum(look["nonzero"] * look["nbytes"] for look in looks) / nbytes
    return f"{zeros:.0%}, {ratio_of(looks):.2f}x"


def ratio_of(looks: list[Any]) -> float:
    """Dense bytes of all activations of a step over their compressed bytes."""
    return float(sum(look["nbytes"] for look in looks) / sum(look["nbytes"] / look["ratio"] for look in looks))


def deep_batches() -> str:
    """The largest batches of deep ResNets in a fixed memory."""
    found = [kind for kind in kinds() if kind.startswith("gist-deep")]
    parts = []
    for kind in found:
        for asked in load(kind).get("deep", ()):
            rows = [
                (
                    row["name"],
                    f"{row['nbytes_per_image'] / 2**20:.2f}",
                    str(row["predicted"]),
                    str(row["batch"]),
                    f"{row['ratio']:.2f}",
                    f"{row['images_per_second']['median']:.1f}",
                    f"{row['speed']:.2f}",
                )
                for row in asked["rows"]
            ]
            budget = asked["question"]["budget_nbytes"] / 2**20
            header = (
                "policy",
                "MiB an image",
                "batch, predicted",
                "batch, run",
                "over plain's",
                "images/s",
                "over plain's",
            )
            name = asked["question"]["network"].removeprefix("resnet")
            parts.append(f"**{name} layers, {budget:.0f} MiB with parameters and gradients**\n\n{table(header, rows)}")
    if not parts:
        return MISSING.format("python -m studies.gist --only deep --json FILE --resume")
    return f"{machine_line(found[0])}\n\n" + "\n\n".join(parts)


TABLES = {
    "accuracy": accuracy,
    "cdma-densities": densities,
    "cdma-layers": layers,
    "deep-batches": deep_batches,
}
