"""The core alone: a Session without what makes values again, reads planes in backward, or replays steps."""

from __future__ import annotations

import json
from pathlib import Path

from fresh import run_fresh

SOURCE = Path(__file__).parents[1] / "src" / "backstash"
PLUGGED_IN = {"remake", "redeem", "replay"}
ABOVE = PLUGGED_IN | {"planning", "compile", "papers", "integrations", "report", "rewrites", "verifying", "cli"}
"""Rooms that stand on the core."""

ALONE = """
import json, sys, types
from contextlib import nullcontext
package = types.ModuleType("backstash")  # whose own file would plug in everything
package.__path__ = [{source!r}]
sys.modules["backstash"] = package
import torch
from torch import nn
from backstash.session import Session
imported = sum(name.startswith("backstash.") for name in sys.modules)

def steps(session):
    torch.manual_seed(0)
    block = lambda i, o: (nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU())
    model = nn.Sequential(
        *block(3, 8), nn.MaxPool2d(2), *block(8, 8), nn.Dropout(0.5), nn.Flatten(), nn.Linear(512, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(6):
        x = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        with session or nullcontext():
            loss = model(x).logsumexp(1).mean()
        loss.backward()
        yield [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()

session = Session("lossless", min_nbytes=0)
is_equal = all(
    torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    for found, expected in zip(list(steps(session)), list(steps(None)), strict=True)
    for a, b in zip(found, expected, strict=True)
)
report = session.report()
loaded = sorted(name.removeprefix("backstash.") for name in sys.modules if name.startswith("backstash."))
print(json.dumps([is_equal, sorted({{row.codec for row in report.rows}}), report.ratio, imported, loaded]))
"""

IMPORTED = 60
"""The most modules of the package that importing a Session may load."""

USED = 96
"""The most that have been loaded when the network has been trained."""


def alone() -> tuple[bool, list[str], float, int, list[str]]:
    """Trains a network with the core alone.

    Returns:
        Whether all bits are equal, the codecs, the ratio, how many modules importing the Session has loaded, and which
        ones were loaded in the end.
    """
    script = ALONE.format(source=str(SOURCE))
    ran = run_fresh(script)
    assert ran.returncode == 0, ran.stderr
    is_equal, codecs, ratio, imported, loaded = json.loads(ran.stdout)
    return is_equal, codecs, ratio, imported, loaded


def test_the_core_trains_without_what_is_plugged_into_it() -> None:
    is_equal, codecs, ratio, imported, loaded = alone()
    assert is_equal
    assert {"bitmask", "narrow", "zvc"} <= set(codecs) and "recompute" not in codecs
    assert ratio > 1.5
    assert {name.split(".")[0] for name in loaded} & ABOVE == set()
    assert imported <= IMPORTED and len(loaded) <= USED, loaded
    idle = {"blockquant", "csr", "deflate", "fewbit", "rle", "signed", "sz", "szp"}
    assert not {f"codecs.{name}" for name in idle} & set(loaded), "codecs that no value was stored with"
