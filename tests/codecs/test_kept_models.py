"""A codec that is given the model of earlier tensors surveys a tensor only if the model does not fit any more."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from backstash.codecs import Signed, Sz
from backstash.codecs.sz.codec import KeptModel


def surveys(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts in how many tensors a model was made."""
    made: list[int] = []
    original = Sz._model

    def counted(self: Sz, x: Tensor, blocks: list[int]) -> object:
        made.append(x.numel())
        return original(self, x, blocks)

    monkeypatch.setattr(Sz, "_model", counted)
    return made


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(*(shape or (4, 16, 24, 24)), generator=torch.Generator().manual_seed(seed))


def test_the_next_tensors_of_a_place_are_not_surveyed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = surveys(monkeypatch)
    codec = Sz(0.05, kept=KeptModel())
    for seed in range(5):
        x = noise(seed)
        assert codec.declines(x) is None
        encoded = codec.encode(x)
        assert torch.equal(Sz(0.05).decode(encoded), Sz(0.05).decode(Sz(0.05).encode(x)))
    assert len(made) == 1 + 5  # and those of the codecs that keep nothing


def test_what_it_takes_is_near_what_a_fresh_model_takes() -> None:
    codec = Sz(0.05, kept=KeptModel())
    scale = 1.0
    for seed in range(30):
        scale *= 1.02
        x = noise(seed) * scale
        assert codec.encode(x).nbytes < 1.03 * Sz(0.05).encode(x).nbytes


def test_a_tensor_that_takes_much_more_is_encoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = Sz(0.05, kept=KeptModel())
    codec.encode(noise(0))
    x = noise(1) * 40
    made = surveys(monkeypatch)
    encoded = codec.encode(x)
    assert len(made) == 1
    assert encoded.nbytes == Sz(0.05).encode(x).nbytes


def test_a_tensor_that_takes_less_has_the_next_one_surveyed(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = Sz(0.05, kept=KeptModel())
    codec.encode(noise(0))
    made = surveys(monkeypatch)
    codec.encode(noise(1) * 0.3)
    assert len(made) == 0
    codec.encode(noise(2) * 0.3)
    assert len(made) == 1
    codec.encode(noise(3) * 0.3)
    assert len(made) == 1


@pytest.mark.parametrize(
    ("codec", "x"),
    [
        (Sz(0.1), noise(1)),
        (Sz(0.05, nonzero=True), noise(1)),
        (Sz(0.05), noise(1).bfloat16()),
        (Sz(0.05), noise(1, 4, 16, 20, 20)),
    ],
)
def test_another_bound_dtype_or_shape_is_surveyed(codec: Sz, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = KeptModel()
    Sz(0.05, kept=kept).encode(noise(0))
    made = surveys(monkeypatch)
    again = Sz(codec.error, nonzero=codec.nonzero, kept=kept)
    decoded = again.decode(again.encode(x))
    assert len(made) == 1
    assert torch.equal(decoded, codec.decode(codec.encode(x)))


@pytest.mark.parametrize("error", [0.045, 0.06, 0.07])
def test_a_bound_of_about_that_size_is_not_surveyed(error: float, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = KeptModel()
    Sz(0.05, kept=kept).encode(noise(0))
    made = surveys(monkeypatch)
    encoded = Sz(error, kept=kept).encode(noise(1))
    assert len(made) == 0
    fresh = Sz(error).encode(noise(1))
    assert torch.equal(Sz(error).decode(encoded), Sz(error).decode(fresh))
    assert encoded.nbytes < 1.03 * fresh.nbytes


def test_the_gathered_values_of_a_relu_have_one_model_whatever_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    made = surveys(monkeypatch)
    codec = Signed(Sz(0.05, nonzero=True, kept=KeptModel()))
    fresh = Signed(Sz(0.05, nonzero=True))
    for seed in range(4):
        x = noise(seed).relu()
        kept = codec.decode(codec.encode(x))
        assert len(made) == seed + 1
        assert torch.equal(kept, fresh.decode(fresh.encode(x)))


def test_a_share_of_the_range_and_empty_tensors_keep_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = surveys(monkeypatch)
    codec = Sz(0.01, mode="rel", kept=KeptModel())
    for seed in range(2):
        x = noise(seed)
        assert float((codec.decode(codec.encode(x)) - x).abs().max()) <= 0.01 * float(x.max() - x.min())
    assert len(made) == 2
    empty = Sz(0.01, kept=KeptModel())
    assert empty.decode(empty.encode(torch.empty(0, 3))).shape == (0, 3)


def test_a_codec_that_keeps_models_is_the_same_codec() -> None:
    assert Sz(0.1, kept=KeptModel()) == Sz(0.1) and hash(Sz(0.1, kept=KeptModel())) == hash(Sz(0.1))
    assert repr(Sz(0.1, kept=KeptModel())) == repr(Sz(0.1))
