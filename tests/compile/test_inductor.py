"""Inductor: the same bits, encodings fused with what computes and reads a value, caches that know the policy."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiled_steps import differences, gradients
from torch import Tensor, nn

from backstash import compile_backend, compile_options, policies
from backstash.papers.comet import comet
from backstash.policies import Keep, Policy, Rules

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))


class Small(nn.Module):
    """Two products with a leaky relu between: of the relu one comparison is saved, of the second product its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.leaky_relu(self.first(x), 0.1))  # type: ignore[no-any-return]


def forward(model: Any) -> Tensor:
    x = torch.linspace(-2, 2, 16 * 32).view(16, 32)
    return model(x).square().sum()  # type: ignore[no-any-return]


def stepped(policy: Any) -> tuple[list[Tensor | None], Any]:
    """The gradients of a fresh model under a policy, None for plain, and the options."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Small()
    options = {} if policy is None else compile_options(policy, min_nbytes=0)
    found = gradients(model, forward, torch.compile(model, options=options, fullgraph=True))
    return found, options


def test_the_generated_code_encodes_and_decodes_inside_its_neighbours() -> None:
    from torch._inductor.utils import run_fw_bw_and_get_code

    torch.manual_seed(0)
    model = Small()
    codes = []
    for options in ({}, compile_options("lossless", min_nbytes=0)):
        torch._dynamo.reset()
        compiled = torch.compile(model, options=options, fullgraph=True)
        _, code = run_fw_bw_and_get_code(lambda compiled=compiled: forward(compiled))
        codes.append(code)
    (plain_forward, plain_backward), (ours_forward, ours_backward) = codes
    # Plain writes the comparison as a bool for each element, and reads it in backward.
    assert "bool* out_ptr" in plain_forward
    assert "const bool* in_ptr" in plain_backward
    # Ours writes bytes of eight bits from the kernel that compares, and reads them in the kernel that multiplies.
    assert "bool*" not in ours_forward + ours_backward
    encoding = kernel_with(ours_forward, r"uint8_t\* out_ptr|uint8_t\* in_out_ptr")
    assert "const float* in_ptr" in encoding, "it reads what the comparison is computed from, not a comparison"
    decoding = kernel_with(ours_backward, r"const uint8_t\* in_ptr")
    assert "float* in_out_ptr" in decoding or "float* out_ptr" in decoding


def kernel_with(code: str, pattern: str) -> str:
    """The one C++ kernel that matches."""
    found = [kernel for kernel in code.split("async_compile.cpp")[1:] if re.search(pattern, kernel)]
    assert len(found) == 1, pattern
    return found[0]


def test_caches_know_the_policy() -> None:
    from torch._dynamo.utils import counters

    plain, _ = stepped(None)
    lossless, options = stepped("lossless")
    assert all(map(torch.equal, plain, lossless))  # type: ignore[arg-type]
    assert {row.codec for row in options.report().rows} == {"bits", "kept"}
    rounded, options = stepped(policies.quantized(2))
    rows = options.report().rows
    assert "blockquant2" in {row.codec for row in rows}
    assert not torch.equal(rounded[2], plain[2])  # type: ignore[arg-type]
    counters.clear()
    again, options = stepped(policies.quantized(2))
    assert all(map(torch.equal, rounded, again))  # type: ignore[arg-type]
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1
    assert options.report().rows == rows  # the graph that was loaded says what it saves
    assert "(from torch's cache on disk)" in str(options.report())
    once_more, _ = stepped(None)
    assert all(map(torch.equal, plain, once_more))  # type: ignore[arg-type]


@pytest.mark.parametrize("moves_bounds", [False, True])
def test_graphs_are_called_from_cpp(moves_bounds: bool) -> None:
    """Inductor writes the texts that operators have as arguments into C++, as they are."""
    found = []
    for settings in ({"cpp_wrapper": True}, {}):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Small()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        policy = comet("linear", optimizer=optimizer, every=1) if moves_bounds else "lossless"
        options = compile_options(policy, min_nbytes=0, **settings)
        compiled = torch.compile(model, options=options, fullgraph=True)
        steps = []
        for _ in range(3 if moves_bounds else 1):
            steps += gradients(model, forward, compiled)
            optimizer.step()
        found.append(steps)
        assert options.report().rows
    assert all(map(torch.equal, *found))


class Attending(nn.Module):
    """Inductor makes other loops of it where the dropout's mask is packed."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.convolution(x).flatten(2).transpose(1, 2))
        return F.dropout(F.silu(x + self.attention(x, x, x, need_weights=False)[0]), 0.1)


@pytest.mark.parametrize(
    ("policy", "emulates", "may_differ"),
    [("lossless", False, True), ("lossless", True, True), (policies.quantized(2), False, False)],
)
def test_a_report_says_where_16_bits_may_be_rounded_otherwise(policy: Any, emulates: bool, may_differ: bool) -> None:
    settings: dict[str, Any] = {"emulate_precision_casts": emulates}
    treated = compile_options(policy, min_nbytes=0, **settings)
    found = []
    for options in (settings, treated):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Attending()
        compiled = torch.compile(model, options=options, fullgraph=True)
        with torch.autocast("cpu", torch.bfloat16):
            loss = compiled(torch.randn(4, 3, 16, 16)).square().mean()
        loss.backward()
        found.append([p.grad for p in model.parameters()])
    if emulates:
        assert all(map(torch.equal, *found))  # type: ignore[arg-type]
    assert ("a gradient may differ" in " ".join(treated.report().notes)) is may_differ


class Nameless(Policy):
    def decide(self, saved: Any) -> Any:
        return Keep()


def test_fingerprints_differ_where_results_may() -> None:
    def identity(policy: Any, **settings: Any) -> bytes:
        return compile_options(policy, **settings).treatment.identity

    assert identity("lossless") == identity("lossless")
    found = {
        identity("lossless"),
        identity("lossless", min_nbytes=0),
        identity("lossless", budget="1GiB"),
        identity(policies.quantized(2)),
        identity(policies.quantized(4)),
        identity(Rules((("*", Keep()),), policies.get("lossless"))),
        identity(Nameless()),
        identity(Nameless()),  # its repr says nothing about it, so its graphs are never taken from a cache
    }
    assert len(found) == 8


@pytest.mark.parametrize("policy", ["lossless", policies.quantized(4)], ids=str)
def test_an_image_network(policy: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        nn.Hardtanh(),
        nn.Flatten(),
        nn.Linear(8 * 64, 5),
    )
    x = torch.randn(4, 3, 16, 16)

    def loss(network: Any) -> Tensor:
        return network(x).square().sum()  # type: ignore[no-any-return]

    plain = gradients(model, loss, torch.compile(model, fullgraph=True))
    torch._dynamo.reset()
    ours = compile_backend(policy, "inductor", min_nbytes=0)
    found = gradients(model, loss, torch.compile(model, backend=ours, fullgraph=True))
    assert torch.equal(found[-1], plain[-1]), "the forward pass is exact"  # type: ignore[arg-type]
    if policy == "lossless":
        assert differences(model, plain, found) == []
        assert {"bits", "integers of 4 bits"} <= {row.codec for row in ours.report().rows}
    else:
        assert float((found[-3] - plain[-3]).norm() / plain[-3].norm()) < 0.2  # type: ignore[operator, union-attr]
        # The relu's side is stored beside the rounded input of the norm, from which backward computes it again.
        assert any(row.codec.endswith("+bits") for row in ours.report().rows)
    assert ours.report().saved_nbytes > 1.05 * ours.report().stash_nbytes


@pytest.mark.slow
def test_a_budget_leaves_the_bits_as_they_are() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(16, 64, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 16, 1, bias=False)
    )
    state = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.randn(8, 16, 24, 24)

    def loss(network: Any) -> Tensor:
        return network(x).square().sum()  # type: ignore[no-any-return]

    plain = gradients(model, loss, torch.compile(model, fullgraph=True))
    torch._dynamo.reset()
    model.load_state_dict(state)
    ours = compile_backend("lossless", "inductor", budget=1000, min_nbytes=0)
    found = gradients(model, loss, torch.compile(model, backend=ours, fullgraph=True))
    assert differences(model, plain, found) == []
    assert "operators computed again" in ours.report().notes[0]


def test_dynamic_shapes() -> None:
    torch.manual_seed(0)
    model = Small()

    def loss(network: Any) -> Tensor:
        sizes = (3, 8, 13)
        return torch.stack([network(torch.ones(size, 32)).square().sum() for size in sizes]).sum()

    plain = gradients(model, loss, torch.compile(model, fullgraph=True, dynamic=True))
    torch._dynamo.reset()
    ours = compile_backend("lossless", "inductor", min_nbytes=0)
    found = gradients(model, loss, torch.compile(model, backend=ours, fullgraph=True, dynamic=True))
    assert differences(model, plain, found) == []
    assert "bits" in {row.codec for row in ours.report().rows}


def test_other_options_and_wrong_ones() -> None:
    torch.manual_seed(0)
    model = Small()
    compiled = torch.compile(model, options=compile_options("lossless", epilogue_fusion=False, min_nbytes=0))
    assert len(gradients(model, forward, compiled)) == 5
    with pytest.raises(RuntimeError, match="no_such_option"):
        torch.compile(model, options=compile_options("lossless", no_such_option=True))


@pytest.mark.parametrize("is_stepped", [False, True])
def test_a_compiled_module_is_pickled_with_its_policy(is_stepped: bool) -> None:
    torch.manual_seed(0)
    model, options = Small(), compile_options("lossless", min_nbytes=0, max_autotune=False)
    compiled = torch.compile(model, options=options, fullgraph=True)
    if is_stepped:
        gradients(model, forward, compiled)
    torch._dynamo.reset()
    loaded_options, loaded = pickle.loads(pickle.dumps((options, compiled)))
    assert dict(loaded_options).keys() == dict(options).keys()
    assert loaded_options.treatment.identity == options.treatment.identity
    assert copy.deepcopy(options).treatment is options.treatment
    found = gradients(loaded, forward)
    torch._dynamo.reset()
    assert all(map(torch.equal, found, gradients(model, forward, torch.compile(model))))  # type: ignore[arg-type]
    torch._dynamo.reset()
    other = torch.compile(Small(), options=loaded_options, fullgraph=True)
    forward(other).backward()  # type: ignore[no-untyped-call]
    assert loaded_options.report().rows


@pytest.mark.parametrize("moves_bounds", [False, True])
def test_a_policy_that_is_not_pickled_is_missed_by_the_first_step(moves_bounds: bool) -> None:
    class Local(Nameless):
        """No other process has this class."""

    options = compile_options(comet() if moves_bounds else Local())
    loaded = pickle.loads(pickle.dumps(torch.compile(Small(), options=options)))
    assert loaded.state_dict()
    with pytest.raises(Exception, match="Compile the module in it anew"):
        forward(loaded)
