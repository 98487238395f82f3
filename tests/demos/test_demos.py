"""Demonstrations: the search for the largest size, the networks, the picture and the command."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from typer.testing import CliRunner

from backstash.cli.commands import app
from backstash.demos import demonstrations, picture, reaching
from backstash.demos.demonstrations import DEMONSTRATIONS, Demonstration, Way
from backstash.demos.networks import Llama, LoraLayer, Spiking, UNet, add_lora, resnet
from backstash.demos.reaching import Largest, largest_counted, reach

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


@given(
    at_start=st.integers(0, 1000),
    rise=st.integers(1, 100),
    start=st.integers(1, 20),
    grain=st.integers(1, 9),
    power=st.sampled_from([1, 3]),
    limit=st.integers(1, 100_000),
    second=st.integers(0, 50),
    off=st.integers(-3000, 3000),
)
def test_the_largest_size_fits(
    at_start: int, rise: int, start: int, grain: int, power: int, limit: int, second: int, off: int
) -> None:
    asked: list[int] = []
    sure: dict[int, int] = {}

    def counted(size: int) -> int:
        sure[size] = at_start + rise * size**power
        return sure[size]

    def predicted(size: int) -> int:
        asked.append(size)
        return max(0, at_start + rise * size**power + off)

    found = largest_counted(predicted, counted, limit, start, grain, power, second)
    refuted = sum(nbytes > limit for nbytes in sure.values())
    assert len(asked) == len(set(asked)) < reaching.MOST_SIZES + refuted
    assert all((size - start) % grain == 0 and size > start for size in asked)
    if found == 0:
        assert list(sure) == [start] and sure[start] > limit
    else:
        assert sure[found] <= limit, "what is returned was counted"
        enough = len(asked) + 1 >= reaching.MOST_SIZES + refuted or predicted(found) >= reaching.NEAR * limit
        if not enough and sure[found] < reaching.NEAR * limit:
            next_nbytes = at_start + rise * (found + grain) ** power
            assert next_nbytes + max(off, 0) > limit, "the next size does not fit, or was predicted not to"


def test_peaks_that_do_not_grow_end_the_search() -> None:
    asked: list[int] = []

    def least(size: int) -> int:
        asked.append(size)
        return 7

    assert largest_counted(least, least, 10, 1, 1, 1) == max(asked)


def test_no_size_beyond_the_largest_is_tried() -> None:
    asked: list[int] = []

    def counted(size: int) -> int:
        asked.append(size)
        return size

    assert largest_counted(counted, counted, 1000, 2, 3, 1, second=5, largest=23) == 23
    assert max(asked) == 23
    assert largest_counted(counted, counted, 1000, 2, 3, 1, second=50, largest=23) == 23, "the second may be beyond it"
    assert largest_counted(counted, counted, 10, 2, 3, 1, largest=23) == 8, "less than that fits"


def test_a_demonstration_can_reach_its_largest_size() -> None:
    for each in DEMONSTRATIONS.values():
        assert each.most is None or (each.most - each.start) % each.grain == 0, each.name
    deep = DEMONSTRATIONS["deep"]
    model, _ = deep.make(deep.most or 0, "full")
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    projections = 3  # of shortcuts, which do not count
    assert deep.most == len(convolutions) - projections == 1517


def small(name: str, ways: Callable[[Way], bool] = lambda way: True) -> Demonstration:
    """A demonstration at sizes for a test: a network of 64 KiB for each unit."""

    def make(size: int, training: str) -> tuple[nn.Module, Callable[[], object]]:
        model: nn.Module = nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(64, 64), nn.ReLU())))
        model = model if training == "full" else add_lora(model)
        x = torch.randn(256 * size, 64)
        return model, lambda: model(x).square().mean().backward()

    found = DEMONSTRATIONS[name]
    chosen = tuple(way for way in found.ways if ways(way))
    return replace(found, make=make, start=1, grain=1, power=1, nbytes=2 << 20, blocks=(nn.ReLU,), ways=chosen)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["unet", "lora"])
def test_each_way_is_shown_with_the_bits_of_plain(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaching, "MOST_SIZES", 3)
    told: list[str] = []
    demonstration = small(name)
    found = list(reach(demonstration, told=told.append))
    assert [row.label for row in found] == [way.label for way in demonstration.ways]
    assert all(row.is_equal and 0 < row.peak_nbytes <= demonstration.nbytes for row in found)
    plan = next(row for row in found if "plan" in row.label)
    assert plan.size >= max(row.size for row in found if "plain" in row.label)
    assert told and all(demonstration.unit in text for text in told)
    text = picture.text_picture(demonstration, demonstration.nbytes, found)
    assert "All gradients have the same bits" in text and f"{plan.size:,}" in text


def test_what_is_on_a_disk_leaves_room_for_the_largest_size() -> None:
    """The memory in which a store collects what it writes counts: 8 MiB, which torch does not know of."""

    def make(size: int, training: str) -> tuple[nn.Module, Callable[[], object]]:
        model = nn.Sequential(*(part for _ in range(size) for part in (nn.Linear(64, 64), nn.ReLU())))
        x = torch.randn(1024, 64)  # 256 KiB, and as much in each layer
        return model, lambda: model(x).square().mean().backward()

    chosen = tuple(way for way in DEMONSTRATIONS["deep"].ways if way.saver in ("plain", "disk"))
    asked = replace(DEMONSTRATIONS["deep"], make=make, start=10, grain=1, most=80, ways=chosen)
    plain, disk = reach(asked, 11 << 20)
    assert plain.size < disk.size == 80
    assert disk.is_equal and 8 << 20 < disk.peak_nbytes <= 11 << 20


def test_memory_that_is_too_small_shows_nothing_that_fits() -> None:
    demonstration = small("unet", lambda way: way.saver == "plain")
    found = list(reach(demonstration, 1000))
    assert [row.size for row in found] == [0]
    text = picture.text_picture(demonstration, 1000, found)
    assert "Nothing fits: 1 voxels along each edge, the smallest size, take" in text and "--memory" in text
    assert "All gradients" not in text, "which were those of a size that does not fit"


NETWORKS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "resnet": lambda: (resnet((1, 1), 8), torch.randn(2, 3, 32, 32)),
    "adapted": lambda: (add_lora(resnet((1, 1), 8)), torch.randn(2, 3, 32, 32)),
    "llama": lambda: (Llama(2, 64, 2, 32), torch.randint(32, (2, 16))),
    "adapted llama": lambda: (add_lora(Llama(2, 64, 2, 32)), torch.randint(32, (2, 16))),
    "unet": lambda: (UNet(2), torch.randn(1, 1, 8, 8, 8)),
    "spiking": lambda: (Spiking(4, 3), torch.randn(2, 3, 16, 16)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_train_what_they_are_to_train(name: str) -> None:
    torch.manual_seed(0)
    model, x = NETWORKS[name]()
    model(x).square().mean().backward()
    trained = {key for key, weight in model.named_parameters() if weight.requires_grad}
    assert {key for key, weight in model.named_parameters() if weight.grad is not None} == trained
    if "adapted" in name:
        assert any(isinstance(module, LoraLayer) for module in model.modules())
        assert all(".down." in key or ".up." in key or key.startswith(("head", "8.")) for key in trained), trained


def test_a_decoder_is_a_llama_layer() -> None:
    """Beside transformers' own, with the same weights."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=64, intermediate_size=160, num_hidden_layers=1, num_attention_heads=2
    )
    torch.manual_seed(0)
    other, ours = transformers.LlamaForCausalLM(config).eval(), Llama(1, 64, 2, 32)
    names = {
        "model.embed_tokens": "embedding",
        "model.layers.0.self_attn.o_proj": "layers.0.out",
        "model.layers.0.self_attn.": "layers.0.",
        "model.layers.0.mlp.": "layers.0.",
        "model.layers.0.input_layernorm": "layers.0.norm",
        "model.layers.0.post_attention_layernorm": "layers.0.gated_norm",
        "model.norm": "norm",
        "lm_head": "head",
    }
    state = {}
    for key, value in other.state_dict().items():
        old, new = next((old, new) for old, new in names.items() if key.startswith(old))
        state[key.replace(old, new).replace("_proj", "")] = value
    ours.load_state_dict(state, strict=False)
    for module in ours.modules():
        if isinstance(module, nn.RMSNorm):
            module.eps = config.rms_norm_eps
    words = torch.randint(32, (2, 16))
    expected = other(input_ids=words).logits[:, :-1].flatten(0, 1)
    torch.testing.assert_close(ours(words), functional.cross_entropy(expected, words[:, 1:].flatten()))


def run(monkeypatch: pytest.MonkeyPatch, *args: str, **found: Any) -> Any:
    monkeypatch.setitem(demonstrations.DEMONSTRATIONS, "unet", small("unet", lambda way: way.saver != "plan"))
    return CliRunner().invoke(app, ["demo", *args], catch_exceptions=False)


def test_the_command_shows_bars_and_writes_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    done = run(monkeypatch, "unet", "--memory", "1MiB", "--out", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert "voxels along each edge in 1.0 MiB" in done.stdout and "█" in done.stdout
    assert done.stderr == "", "nothing moves where nobody looks on"
    written = json.loads((tmp_path / "unet.json").read_text())
    assert written["nbytes"] == 1 << 20 and written["ways"][0]["label"] == "plain PyTorch"
    assert (tmp_path / "unet.png").read_bytes().startswith(b"\x89PNG")


def test_what_there_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    done = run(monkeypatch, "yolo")
    assert done.exit_code == 2 and "there are lora, lora-lm" in done.stderr
    done = run(monkeypatch, "unet", "--memory", "0")
    assert done.exit_code == 2 and "every step takes some memory" in done.stderr


def test_ctrl_c_shows_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from backstash.cli import demonstrating

    def interrupted(*args: Any) -> Any:
        yield Largest("plain PyTorch", 12, 1 << 20, 0.1, 12, True)
        raise KeyboardInterrupt

    monkeypatch.setattr(demonstrating, "reach", interrupted)
    done = run(monkeypatch, "unet")
    assert done.exit_code == 130
    assert "12" in done.stdout and "interrupted; this is what was found by then: 1 of 3 ways" in done.stderr
