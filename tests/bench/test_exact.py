"""The measurement of exact codecs: its rows say what the codecs do with the tensors that they are given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from backstash.codecs import Exponents, Zvc
from bench import exact


def test_rows_add_up_what_was_stored_of_each_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(64, 1024, generator=generator)
    given = [dense.bfloat16(), dense, torch.where(torch.rand(64, 1024, generator=generator) < 0.2, dense, 0.0)]
    monkeypatch.setattr(exact, "network", lambda name, setting: (torch.nn.Identity(), {}))
    monkeypatch.setattr(exact, "caught", lambda model, inputs, context: given)
    path = tmp_path / "exact-2026-01-01.json"
    try:
        exact.main(
            [
                "--rounds",
                "1",
                "--threads",
                "1",
                "--json",
                str(path),
                "--parts",
                "codecs",
                "--networks",
                "ViT",
                "--settings",
                "float32",
            ]
        )
    finally:
        torch.set_num_threads(threads)
    rows = {(row["dtype"], row["codec"]): row for row in json.loads(path.read_text())["rows"]}
    assert set(rows) == {(dtype, codec) for dtype in ("bfloat16", "float32") for codec in exact.CODECS | exact.peers()}
    assert rows["bfloat16", "zvc"]["taken"] == 0 and rows["bfloat16", "zvc"]["encode"] is None
    assert rows["bfloat16", "zvc"]["ratio"] == 1.0
    stored = Zvc().encode(given[2]).nbytes
    assert rows["float32", "zvc"]["ratio"] == pytest.approx(2 * dense.nbytes / (dense.nbytes + stored))
    stored = Exponents(4).encode(given[0]).nbytes
    assert rows["bfloat16", "exponents, 4"]["ratio"] == pytest.approx(given[0].nbytes / stored)
    assert rows["bfloat16", "exponents, 4"]["decode"]["share_of_copy"]["count"] == 1
