"""A collecting step reads a part of the pixels of large images, which tells what all of them would."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from backstash.papers.comet.layers import BatchNorm, layer_of, thinned


def images(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("size", [(112, 112), (56, 56), (105, 105), (64, 96), (300, 7), (40, 90)])
def test_pixels_come_from_all_rows_and_columns(size: tuple[int, int], layout: torch.memory_format) -> None:
    rows, columns = torch.meshgrid(torch.arange(size[0]), torch.arange(size[1]), indexing="ij")
    for what, count in ((rows, size[0]), (columns, size[1])):
        x = what.expand(24, 3, *size).float().contiguous(memory_format=layout)
        few = thinned(x)
        assert few.shape[:2] == (24, 3)
        assert x[0, 0].numel() * 24 <= 2 * 8192 or few[:, 0].numel() >= 8192
        assert len(few.unique()) == count
        assert few.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_small_images_and_rows_are_read_as_a_whole() -> None:
    for x in (images(8, 4, 16, 16), images(1000, 64), images(0, 3, 200, 200)):
        assert thinned(x) is x


def test_shares_of_zeros_and_spreads_are_those_of_all_pixels() -> None:
    x = images(8, 6, 120, 120).relu() * torch.arange(1, 7).view(1, 6, 1, 1)
    every_other = torch.zeros(8, 6, 120, 120)
    every_other[..., ::2, ::2] = images(8, 6, 60, 60)
    for whole in (x, every_other):
        few = thinned(whole)
        assert few.numel() < whole.numel() / 8
        for a, b in zip((few != 0).float().mean((0, 2)), (whole != 0).float().mean((0, 2, 3)), strict=True):
            assert float(a) == pytest.approx(float(b), rel=0.05)
        for a, b in zip(few.std((0, 2)), whole.std((0, 2, 3)), strict=True):
            assert float(a) == pytest.approx(float(b), rel=0.05)


def test_what_is_estimated_of_layers_is_about_what_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = images(8, 4, 100, 100).relu()
    x = whole.clone().requires_grad_()
    nodes = nn.Conv2d(4, 3, 3)(x).grad_fn, nn.BatchNorm2d(4)(x).grad_fn
    for node in nodes:
        estimated, exact = layer_of(node, whole, False), layer_of(node, whole)
        monkeypatch.setattr("backstash.papers.comet.layers.thinned", lambda x: x)
        computed = layer_of(node, whole)
        monkeypatch.undo()
        assert estimated.shares.tolist() == pytest.approx(computed.shares.tolist(), rel=0.05)
        assert float(estimated.spread(whole)) == pytest.approx(float(computed.spread(whole)), rel=0.05)
        if isinstance(exact, BatchNorm) and isinstance(computed, BatchNorm) and isinstance(estimated, BatchNorm):
            assert torch.equal(exact.mean, computed.mean) and torch.equal(exact.scale, computed.scale)
            assert estimated.scale.tolist() == pytest.approx(computed.scale.tolist(), rel=0.05)
    assert isinstance(estimated, BatchNorm)
