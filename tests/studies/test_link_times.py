"""Compression beside a link, simulated with measured speeds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from studies import link_times
from studies.link_times import Moved, simulate


def test_a_link_alone_takes_the_bytes_over_its_speed() -> None:
    way = simulate([Moved(600), Moved(400)], 100.0, 2)
    assert (way.nbytes, way.out_seconds, way.back_seconds, way.seconds) == (1000, 10.0, 10.0, 20.0)


def test_a_map_is_encoded_while_the_one_before_it_crosses() -> None:
    maps = [Moved(100, encode_seconds=2.0), Moved(100, encode_seconds=2.0), Moved(100, encode_seconds=6.0)]
    # Two cores encode for 1, 1 and 3 seconds; the link takes 1 second for each.
    assert simulate(maps, 100.0, 2).out_seconds == pytest.approx(6.0)
    assert simulate(maps, 25.0, 2).out_seconds == pytest.approx(13.0)


def test_a_map_is_decoded_while_the_next_one_crosses() -> None:
    maps = [Moved(100, decode_seconds=1.0), Moved(300, decode_seconds=4.0)]
    # The second map comes first, after 3 seconds; the first one has arrived when it is decoded.
    assert simulate(maps, 100.0, 1).back_seconds == pytest.approx(8.0)


def test_a_run_that_was_stopped_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "link.json"
    arguments = ["--networks", "vgg_small", "--size", "32", "--batch", "1", "--rounds", "1", "--json", str(path)]
    assert link_times.main(arguments) == 0
    first = json.loads(path.read_text())
    assert [row["bytes_per_second"] for row in first["rows"]] == [3e9, 12.8e9, 50e9]
    assert set(first["rows"][0]["ways"]) == {"raw", *link_times.CODECS}
    assert first["rows"][0]["ways"]["zvc"]["nbytes"] < first["rows"][0]["ways"]["raw"]["nbytes"]
    assert link_times.main([*arguments, "--resume"]) == 0
    assert json.loads(path.read_text())["rows"] == first["rows"]
    with pytest.raises(SystemExit, match="was to be resumed, but it was measured by"):
        link_times.main([*arguments, "--cores", "3", "--resume"])
    assert "vgg_small" in capsys.readouterr().out


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(SystemExit, match="one of each at least"):
        link_times.main(["--cores", "0"])
