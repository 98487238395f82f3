"""Error bounds in a compiled graph: they hold, they move without a compilation, and COMET's loop runs on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiled_steps import gradients
from torch import Tensor, nn

from backstash import compile_backend, compile_options, policies
from backstash.codecs import Szp
from backstash.compile.forms.bounded import GraphSzp
from backstash.compile.forms.bounds import BLOCK, BoundedValue, ValueFacts, loop_of
from backstash.compile.graph.emit import run_now
from backstash.papers.comet import comet
from backstash.policies import Policy, Stash
from backstash.policies.base import Outcome
from backstash.saved import Need, SavedTensor, TensorSpec

pytestmark = pytest.mark.filterwarnings("ignore")
SHAPES = [(8, 3, 5), (7, 37), (1000,), (3, 16, 6, 6)]


class Within(Policy):
    """Everything within one bound, which a program may move."""

    def __init__(self, codec: Szp | None) -> None:
        self.codec = codec
        self.asked = 0
        self.steps = 0
        self.told: list[Outcome] = []
        self._revision = object()

    def __repr__(self) -> str:
        return "Within()"

    @property
    def revision(self) -> object:  # type: ignore[override]  # read-only here
        return self._revision

    def move(self, codec: Szp | None) -> None:
        self.codec, self._revision = codec, object()

    def begin_step(self) -> None:
        self.steps += 1

    def may_bound(self, readers: Any) -> bool:
        return True

    def observe(self, outcome: Outcome) -> None:
        self.told.append(outcome)

    def decide(self, saved: SavedTensor) -> Any:
        self.asked += 1
        return Stash("zvc" if self.codec is None else self.codec)


def coded(codec: Szp | None, x: Tensor, bits: int) -> tuple[Tensor, float]:
    """What a graph decodes, and how far off the loop says it can be."""
    policy = Within(codec)
    loop = loop_of(policy, f"test {id(policy)}")
    saved = SavedTensor("key", "Mm", "self", "", TensorSpec.of(x), Need.VALUE)
    form = GraphSzp(bits, BoundedValue(loop.name, "graph", ValueFacts(saved, (saved,)).text()))
    planes = form.encode(run_now, x)
    assert sum(plane.nbytes for plane in planes) <= form.nbytes(tuple(x.shape), x.dtype)
    (bounded,) = loop.values.values()
    return form.decode(run_now, planes, x), bounded.error


def values(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    flat = x.view(-1)
    flat[::17] = 0.0
    flat[1::29] = -0.0
    flat[2::31] *= 1e-4
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("error", [1.0, 0.03, 1e-4])
def test_the_error_stays_within_what_is_said(dtype: torch.dtype, bits: int, error: float) -> None:
    for shape in SHAPES:
        x = values(shape, dtype)
        found, said = coded(Szp(error), x, bits)
        off = float((found.double() - x.double()).abs().max())
        assert found.dtype == dtype
        assert off <= max(said, error)
        levels = (2**bits - 4) * error * (1.9 if dtype == torch.float32 else 0.9)
        if float(x.max() - x.min()) < levels:  # the bound holds in every block
            assert said <= error
            assert off <= error
        assert torch.equal(found == 0, x == 0)
        assert torch.equal(found.sign(), x.sign())


def test_where_the_bound_holds_the_bits_are_those_of_the_eager_codec() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = values((4, 512), dtype)
        codec = Szp(0.05)
        found, _ = coded(codec, x, 8)
        eager = codec.decode(codec.encode(x))
        # Where a block does not become smaller, the eager codec stores it exactly.
        assert bool(((found == eager) | (eager == x)).all())
        assert not torch.equal(found, x)


def test_values_far_from_zero_stay_within_what_is_said() -> None:
    x = 1000 + torch.rand(512) * 1e-3
    found, said = coded(Szp(1e-5), x, 8)
    assert said > 1e-5, "float32 cannot tell as many steps from each other"
    assert float((found.double() - x.double()).abs().max()) <= said


def test_a_block_that_is_not_finite_is_not_decoded_to_numbers() -> None:
    for broken in (float("nan"), float("inf"), -float("inf")):
        x = torch.ones(2 * BLOCK)
        x[BLOCK + 5] = broken
        found, _ = coded(Szp(0.01), x, 8)
        assert bool((found[:BLOCK] - 1).abs().max() <= 0.01)
        assert not found[BLOCK:].isfinite().any()


def test_zeros_alone() -> None:
    for codec in (None, Szp(0.1), Szp(0.1, "rel")):
        found, _ = coded(codec, torch.zeros(300), 8)
        assert torch.equal(found, torch.zeros(300))


def test_inductor_has_a_lowering_for_every_operator() -> None:
    from torch._inductor.lowering import lowerings

    policy, used = Within(Szp(0.1)), set()
    loop = loop_of(policy, "lowerings")
    x = values((7, 37), torch.bfloat16)
    saved = SavedTensor("key", "Mm", "self", "", TensorSpec.of(x), Need.VALUE)
    form = GraphSzp(4, BoundedValue(loop.name, "graph", ValueFacts(saved, (saved,)).text()))

    def note(op: Any, *args: Any, **kwargs: Any) -> Any:
        used.add(op)
        return op(*args, **kwargs)

    form.decode(note, form.encode(note, x), x)
    assert not {op for op in used if op not in lowerings and "backstash_graph" not in str(op)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8 * 64, 32)
        self.last = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.second(F.relu(self.first(x))))
        return self.last(F.relu(self.head(x.flatten(1))))  # type: ignore[no-any-return]


def images() -> Tensor:
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def loss_of(model: Any) -> Tensor:
    return model(images()).square().sum()  # type: ignore[no-any-return]


def off(found: list[Any], expected: list[Any]) -> float:
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_bound_moves_without_a_compilation(inner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    model = Net()
    plain = gradients(model, loss_of, torch.compile(model, backend=inner, fullgraph=True))
    torch._dynamo.reset()
    policy = Within(Szp(1e-3))
    ours = compile_backend(policy, inner, min_nbytes=0)
    compiled = torch.compile(model, backend=ours, fullgraph=True)
    first = off(gradients(model, loss_of, compiled), plain)
    identity, before, asked = ours.treatment.identity, dict(counters["stats"]), policy.asked
    again = off(gradients(model, loss_of, compiled), plain)
    assert policy.asked == asked, "the revision is the same"
    policy.move(Szp(0.3))
    coarse = off(gradients(model, loss_of, compiled), plain)
    policy.move(None)
    finest = off(gradients(model, loss_of, compiled), plain)
    assert finest > 0
    assert 0 < first == again < coarse / 20
    assert dict(counters["stats"]) == before
    assert len(ours.treatment.graphs) == 1
    assert ours.treatment.identity == identity
    assert policy.steps == 4
    assert any(row.codec.startswith("szp8") for row in ours.report().rows)
    assert "have no bound yet" in str(ours.report().notes)


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("bits", "codec"), [(4, Szp(1e-3)), (8, None)], ids=str)
def test_the_policy_is_told_the_bytes_that_the_graph_saves(
    inner: str, bits: int, codec: Szp | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    policy = Within(codec)
    ours = compile_backend(policy, inner, min_nbytes=0, bounded_bits=bits)
    gradients(Net(), loss_of, torch.compile(Net(), backend=ours, fullgraph=True))
    (graph,) = ours.treatment.graphs
    saved = [row.stash_nbytes for row in graph.rows if row.codec.startswith("szp")]
    assert sorted(outcome.nbytes for outcome in policy.told) == sorted(saved)
    if inner == "inductor":
        assert any(row.codec.endswith("+bits") for row in graph.rows), "a relu's result is compared with zero"
    assert [outcome.codec for outcome in policy.told] == [None if codec is None else "szp"] * len(saved)


def test_the_report_says_where_the_bits_do_not_suffice() -> None:
    model = Net()
    ours = compile_backend(Within(Szp(1e-6)), min_nbytes=0, bounded_bits=4)
    gradients(model, loss_of, torch.compile(model, backend=ours, fullgraph=True))
    assert any("did not suffice" in note for note in ours.report().notes)
    with pytest.raises(ValueError, match="bounded_bits"):
        compile_options("lossless", bounded_bits=3)


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_comet_finds_the_bounds_that_it_finds_in_a_session(
    inner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._dynamo.utils import counters

    from backstash import Session

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def train(compile_it: bool) -> tuple[Any, Any, dict[str, int]]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 1e-4, momentum=0.9)
        policy = comet("conv+linear", sigma=0.05, every=2, optimizer=optimizer)
        ours = compile_backend(policy, inner, min_nbytes=0)
        net = torch.compile(model, backend=ours, fullgraph=True) if compile_it else model
        before: dict[str, int] = {}
        for step in range(12):
            optimizer.zero_grad()
            if compile_it:
                loss_of(net).backward()
            else:
                with Session(policy, min_nbytes=0):
                    loss_of(net).backward()
            optimizer.step()
            before = before or dict(counters["stats"])
            assert not compile_it or dict(counters["stats"]) == before, step
        return policy, ours, dict(counters["stats"])

    eager, _, _ = train(False)
    graph, ours, _ = train(True)
    assert eager.bounds
    wanted = {key.replace("Addmm#0:mat1", "Mm#0:self"): bound for key, bound in eager.bounds.items()}
    # The first layer's input is the batch, which the program holds anyway.
    assert set(graph.bounds) == {key for key in wanted if not key.startswith("first/")}
    for key, bound in graph.bounds.items():
        assert 0.2 < bound / wanted[key] < 5.0, key
    assert any(record.measured for record in graph.history)
    assert any("values have bounds from" in note for note in ours.report().notes)


def test_two_policies_that_look_alike_are_told_apart() -> None:
    first, second = (compile_backend(comet()).treatment for _ in range(2))
    assert first.identity != second.identity
    same = [compile_backend(policies.quantized(4)).treatment.identity for _ in range(2)]
    assert same[0] == same[1]


def test_a_graph_whose_policy_is_gone_says_so() -> None:
    with pytest.raises(RuntimeError, match="Keep what they returned"):
        torch.ops.backstash_graph.step(torch.ones(4), [], "nobody", "graph", "value")
