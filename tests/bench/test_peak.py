"""The peak benchmark runs on small networks, and lists what is alive at the peak."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import peak


@pytest.mark.slow
def test_quick(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "peak.json"
    assert peak.main(["--quick", "--seconds", "1", "--skip-resident", "--cases", "vgg_small", "--json", str(out)]) == 0
    (case,) = json.loads(out.read_text())["cases"]
    candidates = {one["name"]: one for one in case["case"]["candidates"]}
    assert set(candidates) == {"plain", "checkpoint", "lossless", "lossless+checkpoint"}
    assert candidates["lossless"]["peak_nbytes"] < candidates["plain"]["peak_nbytes"]
    plain, lossless = case["live"]
    assert sum(row["nbytes"] for row in plain["rows"]) == plain["peak_nbytes"] > lossless["peak_nbytes"] > 0
    assert {row["role"] for row in plain["rows"]} <= set(peak.STEP)
    assert "alive at the peak, lossless" in capsys.readouterr().out
    assert out.with_name("peak-vgg_small.png").stat().st_size > 10_000


def test_a_case_that_is_not_there() -> None:
    with pytest.raises(SystemExit, match="the case 'vgg17' was asked for; there is no such case; use one of alexnet"):
        peak.main(["--cases", "vgg17"])
