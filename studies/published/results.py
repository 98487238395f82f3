"""The files in docs/results: the newest of each kind, and what all of them have in common."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
"""The repository."""

FOLDER = ROOT / "docs" / "results"

ENOUGH = 5
"""A time of fewer rounds than this is marked: it shows an order of magnitude, and is not a result."""

MARK = "†"

_NAME = re.compile(r"(?P<kind>.+?)-(?P<date>\d{4}-\d{2}-\d{2})(?P<rest>-.+)?\.(?P<end>json|png)")

MIB = 2**20


def _newest(kind: str, end: str, rest: str = "") -> Path | None:
    """The file ``KIND-DATE[REST].END`` with the latest date, or None."""
    found = {}
    for path in FOLDER.iterdir():
        match = _NAME.fullmatch(path.name)
        if match and (match["kind"], match["rest"] or "", match["end"]) == (kind, rest, end):
            found[match["date"]] = path
    return found[max(found)] if found else None


def newest(kind: str) -> Path:
    """The newest JSON file of a kind.

    Args:
        kind: the file's name up to the date, such as ``"peak-cpu"``.

    Raises:
        FileNotFoundError: there is none.
    """
    path = _newest(kind, "json")
    if path is None:
        raise FileNotFoundError(f"results of kind {kind!r} were asked for, but docs/results has no {kind}-DATE.json.")
    return path


def picture(kind: str, rest: str) -> Path:
    """The newest picture ``KIND-DATE-REST.png``.

    Raises:
        FileNotFoundError: there is none.
    """
    path = _newest(kind, "png", f"-{rest}")
    if path is None:
        raise FileNotFoundError(f"a picture was asked for, but docs/results has no {kind}-DATE-{rest}.png.")
    return path


def kinds() -> list[str]:
    """Every kind of which there are results, sorted."""
    matches = (_NAME.fullmatch(path.name) for path in FOLDER.glob("*.json"))
    return sorted({match["kind"] for match in matches if match})


@cache
def _load(path: Path) -> Any:
    return json.loads(path.read_text())


def load(kind: str) -> Any:
    """The content of the newest file of a kind."""
    return _load(newest(kind))


def started(results: Any) -> str:
    """When the measurement was started, ISO 8601; density's first format did not note it."""
    return str(results.get("started") or results.get("date") or "")


def machine_line(kind: str) -> str:
    """Machine, versions and date of a file, as a line above its table."""
    results = load(kind)
    machine = results.get("machine")
    if machine is None:
        return "The same on every machine."
    version = machine.get("torch") or machine["packages"]["torch"]
    of = results.get("files_of") or machine.get("commit")  # a lent machine has files and no history of their commit
    commit = f", commit `{of[:12]}`" if of else ""
    for run in results.get("resumed", ()):
        commit += f", resumed {run['started'][:10]}" + (f" at `{run['commit'][:12]}`" if run["commit"] else "")
    threads = "" if machine["threads"] == machine["cores"] else ", 1 thread"
    cores = f"{machine['cores']} core{'s' if machine['cores'] > 1 else ''}{threads}"
    gpu = f"{machine['gpu']}; " if results.get("device", "cpu") != "cpu" else ""
    return f"{gpu}{machine['cpu']}, {cores}, torch {version}, {started(results)[:10]}{commit}."


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; with a note where a cell has the mark of a time of too few rounds."""
    lines = [f"| {' | '.join(header)} |", "| " + " | ".join("---" for _ in header) + " |"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    if any(MARK in line for line in lines):
        lines += ["", f"{MARK} Fewer than {ENOUGH} rounds: an indication, not a result."]
    return "\n".join(lines)


def mib(nbytes: float) -> str:
    """Bytes as whole MiB; small amounts with a decimal."""
    amount = nbytes / MIB
    return f"{amount:,.0f}" if amount >= 10 else f"{amount:.1f}"


def summary(found: Any, digits: int = 2) -> str:
    """A median with its quartiles, or with the mark where there are too few rounds."""
    median = f"{found['median']:.{digits}f}"
    if found["count"] < ENOUGH:
        return f"{median} {MARK}"
    return f"{median} ({found['q1']:.{digits}f} to {found['q3']:.{digits}f})"


_TITLES = {
    "alexnet": "AlexNet",
    "vgg16": "VGG16",
    "nin": "NiN",
    "spiking": "spiking neurons",
    "squared_relu": "squared relus",
    "spiking_rarely": "spiking neurons, higher threshold",
    "overfeat": "OverFeat",
    "googlenet": "GoogLeNet",
    "squeezenet1_0": "SqueezeNet",
    "wrn_28_10": "WRN-28-10",
    "wide_resnet28_10": "WRN-28-10",
    "mobilenet_v2": "MobileNetV2",
    "densenet121": "DenseNet-121",
    "resnet_cifar20": "CIFAR ResNet-20",
    "convnext_tiny": "ConvNeXt-T",
    "vit_b16": "ViT-B/16",
    "swin_tiny": "Swin-T",
    "gpt2": "GPT-2",
    "gpt2_words": "GPT-2, 4 layers, 50,257 words",
    "small_vgg": "five convolutions in the manner of VGG",
    "small_inception": "mixed blocks with batch norm",
}


def title(network: str) -> str:
    """A network's name as people write it."""
    return _TITLES.get(network, re.sub(r"^resnet(\d+)$", r"ResNet-\1", network))


def case_title(case: Any) -> str:
    """Network, batch and layout of a case of a step."""
    size = f"{case['batch']} x {case['size']} tokens" if case["network"].startswith("gpt") else f"batch {case['batch']}"
    return f"{title(case['network'])}, {size}" + (", channels last" if case["channels_last"] else "")
