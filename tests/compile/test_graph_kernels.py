"""Encodings by a kernel's call: the planes of the calls of operators that they stand for, and few nodes in a graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiled_steps import gradients
from torch import Tensor, fx, nn
from torch._functorch import config as functorch
from torch._subclasses import FakeTensorMode

from backstash import compile_backend, policies
from backstash.codecs import BlockQuant, Codec, FewBit, Minifloat
from backstash.compile.forms.codecs import GraphCodec, GraphFacts, form_of
from backstash.compile.forms.kernels import decode_by_kernel, encode_by_kernel, is_for_backward_alone
from backstash.compile.graph.emit import GraphEmitter, run_now

pytestmark = pytest.mark.filterwarnings("ignore")

ROUNDING: list[Codec] = [
    *(Minifloat(name) for name in ("fp8", "fp16", "float8_e4m3fn", "float8_e5m2", "bfloat16")),
    Minifloat("float8_e4m3fn", group_size=0),
    Minifloat("float8_e5m2", group_size=64),
    *(BlockQuant(bits) for bits in (1, 2, 4, 8)),
    BlockQuant(4, 64, "nearest"),
    BlockQuant(2, 16, seed=7),
    *(FewBit("gelu", bits) for bits in (1, 2, 3, 4)),
    FewBit("silu", 3),
]
DECODED = [
    codec for codec in ROUNDING if isinstance(codec, BlockQuant) or (isinstance(codec, Minifloat) and codec.group_size)
]
SHAPES = [(8, 3, 5), (7, 37), (1000,), (3, 16, 6, 6), (2, 256), (512, 1), (1,)]


def form(codec: Codec, dtype: torch.dtype = torch.float32) -> GraphCodec:
    found = form_of(codec, GraphFacts(dtype))
    assert not isinstance(found, str)
    return found


def numbers(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    x.view(-1)[::7] = 0.0
    x.view(-1)[::11] = -0.0
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("codec", ROUNDING, ids=repr)
def test_a_kernel_has_the_planes_of_the_operators(codec: Codec, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        x, codec_form = numbers(shape, dtype), form(codec, dtype)
        by_kernel = encode_by_kernel(run_now, codec_form, x)
        expected = codec_form.encode(run_now, x)
        assert by_kernel is not None
        assert [(plane.shape, plane.dtype, plane.stride()) for plane in by_kernel] == [
            (plane.shape, plane.dtype, plane.stride()) for plane in expected
        ]
        found = codec_form.decode(run_now, by_kernel, x)
        assert torch.equal(found.view(torch.uint8), codec_form.decode(run_now, expected, x).view(torch.uint8)), shape


@pytest.mark.parametrize("codec", ROUNDING, ids=repr)
def test_the_sizes_say_what_neighbours_are_whatever_the_memory_is(codec: Codec) -> None:
    x = numbers((3, 16, 6, 6))
    expected = encode_by_kernel(run_now, form(codec), x)
    found = encode_by_kernel(run_now, form(codec), x.contiguous(memory_format=torch.channels_last))
    assert expected is not None and found is not None
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf"), 3e38])
@pytest.mark.parametrize("numel", [512, 700])
def test_a_group_that_cannot_be_rounded_is_not_decoded_to_numbers(broken: float, numel: int) -> None:
    x = numbers((numel,))
    x[300], x[301] = broken, -3e38  # the range of two finite numbers may be none
    codec = form(BlockQuant(4))
    planes = encode_by_kernel(run_now, codec, x)
    assert planes is not None
    decoded = codec.decode(run_now, planes, x)
    assert not decoded[256:512].isfinite().any()
    assert decoded[:256].isfinite().all() and decoded[512:].isfinite().all()


def graph_of(function: Any, *inputs: Tensor) -> fx.Graph:
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(function, tracing_mode="fake")(*inputs).graph


def test_what_the_forward_graph_only_returns_is_not_stored_for_a_kernel() -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        hidden = x @ w
        return hidden.sigmoid() @ w, hidden.exp(), hidden.cos().view(-1), hidden

    results = graph_of(function, numbers((4, 4)), numbers((4, 4))).find_nodes(op="output")[0].args[0]
    assert [is_for_backward_alone(node) for node in results] == [False, True, True, False]
    assert not is_for_backward_alone(results[0].args[0])  # the sigmoid, which the product reads
    assert not is_for_backward_alone(numbers((4,)))


@pytest.mark.parametrize("codec", ROUNDING, ids=repr)
def test_an_encoding_is_a_few_nodes(codec: Codec) -> None:
    graph, mode = fx.Graph(), FakeTensorMode()
    x = graph.placeholder("x")
    with mode:
        x.meta["val"] = torch.empty(8, 256)
    product = graph.call_function(torch.ops.aten.mm.default, (x, x))
    output = graph.output((product,))
    planes = encode_by_kernel(GraphEmitter(graph, output, mode), form(codec), x)
    assert planes is not None
    assert len(graph.nodes) <= 7
    expected = form(codec).encode(run_now, torch.empty(8, 256).zero_())
    assert [(plane.meta["val"].shape, plane.meta["val"].dtype) for plane in planes] == [
        (plane.shape, plane.dtype) for plane in expected
    ]


class Layers(nn.Module):
    """Layers whose inputs are rounded in every way, and what is not stored."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.norm = nn.Linear(32, 64), nn.Linear(64, 16), nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.first(self.norm(x)))
        return F.cross_entropy(self.last(hidden), torch.arange(len(x)) % 16)


POLICIES = [policies.quantized(4), policies.quantized(2), policies.gist("float8_e4m3fn"), policies.gist("fp10")]


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@pytest.mark.parametrize("dynamic", [False, True])
def test_gradients_have_the_bits_of_the_operators(policy: Any, dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(5)
    model, x = Layers(), torch.randn(24, 32)

    def step() -> list[Tensor | None]:
        torch._dynamo.reset()
        backend = compile_backend(policy, min_nbytes=0)
        return gradients(model, lambda net: net(x), torch.compile(model, backend=backend, dynamic=dynamic))

    found = step()
    monkeypatch.setattr("backstash.compile.forms.rewrite.encode_by_kernel", lambda *_: None)
    expected = step()
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert not torch.equal(found[0], gradients(model, lambda net: net(x))[0])


class Convolutions(nn.Module):
    """Convolutions, batch norms and relus: images in channels last under Inductor, and masks of rounded values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.norms = nn.ModuleList((nn.BatchNorm2d(16), nn.BatchNorm2d(16)))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.norms[0](self.first(x)))
        hidden = F.relu(self.norms[1](self.last(hidden)) + hidden)
        return hidden.mean((2, 3)).square().mean()


class Flattened(nn.Module):
    """Images of which a linear layer, a pooling and a padding of other sizes read views."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.norm, self.linear = nn.BatchNorm2d(16), nn.Linear(16 * 12 * 16, 8)
        self.attention = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.norm(self.first(x)))
        other = self.attention(hidden.flatten(2).transpose(1, 2)).transpose(1, 2).view(hidden.shape)
        hidden = F.silu(self.last(hidden) + other)
        return self.linear(hidden.flatten(1)).square().mean() + F.max_pool2d(hidden, 2).mean()


NETWORKS = {
    "flattened": (Flattened, (8, 3, 12, 16)),
    "layers": (Layers, (24, 32)),
    "convolutions": (Convolutions, (8, 3, 12, 16)),
}


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES[::2], ids=repr)
@pytest.mark.parametrize("name", NETWORKS)
def test_inductor_calls_the_kernels(name: str, policy: Any) -> None:
    torch.manual_seed(5)
    make, shape = NETWORKS[name]
    model, x = make(), torch.randn(shape)
    backends = [compile_backend(policy, inner, min_nbytes=0) for inner in ("aot_eager", "inductor")]
    found = []
    for backend in backends:
        torch._dynamo.reset()
        found.append(gradients(model, lambda net: net(x), torch.compile(model, backend=backend)))
    rounded = [row for row in backends[0].report().rows if "blockquant" in row.codec or "float8" in row.codec]
    assert len(rounded) >= 2  # Inductor may take the second graph from its cache, and then the report has no rows
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)


@pytest.mark.slow
def test_images_are_decoded_by_one_call_each() -> None:
    """In the backward graph under Inductor, and nowhere else."""
    torch.manual_seed(5)
    model, x = Convolutions(), torch.randn(8, 3, 12, 16)
    calls: dict[str, int] = {}
    for inner in ("aot_eager", "inductor"):
        torch._dynamo.reset()
        backend = compile_backend(policies.quantized(4), inner, min_nbytes=0)
        step = torch.compile(model, backend=backend)
        with functorch.patch(enable_autograd_cache=False):  # of a graph from the cache the report has no rows
            step(x).backward()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            step(x).backward()
        names = [event.key for event in profile.key_averages() for _ in range(event.count)]
        calls[inner] = names.count("backstash_graph::values_of_groups")
        values = [row.saved_nbytes for row in backend.report().rows if "blockquant" in row.codec]
    images = [nbytes for nbytes in values if nbytes == 4 * 8 * 16 * 12 * 16]  # the others are a number per channel
    assert calls == {"aot_eager": 0, "inductor": len(images)}
    assert len(images) >= 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("codec", DECODED, ids=repr)
def test_a_kernel_decodes_what_the_operators_decode(codec: Codec, dtype: torch.dtype) -> None:
    for shape in [*SHAPES, (4, 16, 8, 8), (5, 1, 8, 8), (6, 48, 1, 1), (3, 64, 32, 64), (1000, 300)]:
        x, codec_form = numbers(shape, dtype), form(codec, dtype)
        planes = codec_form.encode(run_now, x)
        expected = codec_form.decode(run_now, planes, x)
        for channels_last in (False, True)[: 1 + (x.dim() == 4)]:
            found = decode_by_kernel(run_now, codec_form, planes, x, channels_last)
            assert found is not None
            assert torch.equal(found, expected), shape
            order = torch.channels_last if channels_last else torch.contiguous_format
            assert found.is_contiguous(memory_format=order)
            assert found.dtype == dtype
