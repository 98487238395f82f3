"""The loss curves of long trainings: ``python -m studies.accuracy_chart FILE.json`` writes ``FILE.png`` beside it.

The file may be that of a run in progress: each training that it has is drawn.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def draw(outcomes: list[dict[str, Any]], path: Path) -> None:
    """Draws a panel for each network, with a line for each policy: its mean over the seeds, and the span of the seeds.

    Args:
        outcomes: the trainings, as the results file has them.
        path: the picture to write.
    """
    networks = list(dict.fromkeys(one["network"] for one in outcomes))
    variants = list(dict.fromkeys(one["variant"] for one in outcomes))
    figure, panels = plt.subplots(1, len(networks), figsize=(6 * len(networks), 4), squeeze=False)
    for panel, network in zip(panels[0], networks, strict=True):
        for number, variant in enumerate(variants):
            curves = [one["losses"] for one in outcomes if (one["network"], one["variant"]) == (network, variant)]
            length = min(map(len, curves), default=0)
            if not length:
                continue
            columns = [[curve[index] for curve in curves] for index in range(length)]
            share = [100 * (index + 0.5) / length for index in range(length)]
            mean = [sum(column) / len(column) for column in columns]
            colour = "black" if variant == "plain" else f"C{number % 10}"
            panel.plot(share, mean, color=colour, linewidth=1.0, label=f"{variant} ({len(curves)})")
            if len(curves) > 1:
                panel.fill_between(share, list(map(min, columns)), list(map(max, columns)), color=colour, alpha=0.1)
        panel.set(title=network, xlabel="% of the training", ylabel="loss", yscale="log")
        panel.legend(fontsize="x-small", title="policy (seeds)", title_fontsize="x-small")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        draw(json.loads(Path(name).read_text())["outcomes"], Path(name).with_suffix(".png"))
