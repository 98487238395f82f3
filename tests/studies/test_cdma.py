from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from backstash.codecs import Encoded, Raw
from backstash.errors import StoreError
from studies import cdma, cdma_training


def test_it_weighs_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cdma.json"
    arguments = ["--networks", "vgg_small", "--size", "32", "--steps", "1", "--seconds", "1", "--json", str(file)]
    assert cdma.main(arguments) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [(row["state"], row["layout"]) for row in rows] == [
        (state, layout) for state in ("initial", "trained") for layout in ("NCHW", "channels_last")
    ]
    assert rows[0]["nbytes"] == rows[1]["nbytes"] > 0
    assert rows[0]["zeros"] == pytest.approx(rows[1]["zeros"], abs=0.01)
    assert all(0 < row["zeros"] < 1 and row["ratios"]["zvc"] > 1 for row in rows)
    assert "1 steps of 8 images" in capsys.readouterr().out


def test_a_value_is_weighed_as_the_policy_would_send_it() -> None:
    scale = cdma.Scale()
    x = torch.zeros(1 << 16)
    x[::8] = 1.0
    dense: Encoded = Raw().encode(torch.randn(1000))
    for encoded in (Raw().encode(x), dense, Raw().encode(torch.arange(10))):
        scale.put(encoded)
    assert (scale.nbytes, scale.index_nbytes, scale.zeros) == ((1 << 18) + 4000, 80, 7 << 13)
    assert scale.sent["zvc"] == (1 << 15) + (1 << 13) + 8 * 16 + 4000  # values, mask, offsets; dense ones as they are
    with pytest.raises(StoreError, match="it holds none"):
        scale.get(scale.put(dense))


def test_each_network_gets_images_that_its_poolings_leave_something_of() -> None:
    assert {name: cdma_training.fitting(name, 64) for name in cdma_training.NETWORKS if name in ("nin", "vgg16")} == {
        "nin": 80,
        "vgg16": 64,
    }
    assert all(cdma_training.fitting(name, 224) == 224 for name in cdma_training.NETWORKS)
