"""Compiled models whose saved values are treated: the same gradients, bit for bit, from fewer bytes."""

from __future__ import annotations

import copy
import importlib
import pickle
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiled_steps import compare, differences, gradients
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from backstash import Session, compile_backend, policies
from backstash.compile import patch_compile
from backstash.compile.budget.splitting import parse_graph_budget
from backstash.compile.graph.effect import forward_can_compute
from backstash.errors import UnknownNameError
from backstash.policies import Keep, Policy, Rules
from backstash.report.meter import CountedPeak
from backstash.saved import Effect, Need, SavedTensor
from backstash.torch_internals import mode_options
from tests import networks

pytestmark = pytest.mark.filterwarnings("ignore")


class Mixed(nn.Module):
    """A network with every kind of saved value that has a form in a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.third, self.norm = nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)
        self.head = nn.Linear(8 * 6 * 6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        x = F.max_pool2d(x, 3, 2, 1)
        x = F.dropout(F.relu6(self.second(x)), 0.3, self.training)
        x = F.hardsigmoid(F.leaky_relu(self.third(x), 0.1))
        x = torch.where(x > 0.4, x, x * 0.5)
        values, _ = x.topk(6, dim=2)
        return self.head(values.flatten(1))  # type: ignore[no-any-return]


def images(batch: int = 4, size: int = 16) -> Tensor:
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(0))


def loss_of(x: Tensor) -> Any:
    def forward(model: Any) -> Tensor:
        found = model(x)
        return found.float().square().sum() if isinstance(found, Tensor) else found.logits.float().square().sum()

    return forward


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Mixed()


def test_gradients_have_the_bits_of_compiled_plain(model: nn.Module) -> None:
    report = compare(model, loss_of(images()), steps=2).report()
    assert report.saved_nbytes > 1.5 * report.stash_nbytes
    forms = {"bits", "bitmask", "integers of 4 bits", "integers of 8 bits", "kept"}
    assert {row.codec for row in report.rows} == forms


def test_the_stash_counted_by_a_session_around_is_what_the_report_says(model: nn.Module) -> None:
    ours = compile_backend("lossless", min_nbytes=0)
    compiled = torch.compile(model, backend=ours, fullgraph=True)
    with Session("keep", min_nbytes=0) as session:
        loss = loss_of(images())(compiled)
    loss.backward()
    seen, said = session.report(), ours.report()
    stash = sum(row.stash_nbytes for row in seen.rows if "Pow" not in row.key)  # the loss is not compiled
    assert stash + seen.parameter_nbytes == said.stash_nbytes + said.parameter_nbytes


@pytest.mark.slow
def test_channels_last(model: nn.Module) -> None:
    model = model.to(memory_format=torch.channels_last)
    compare(model, loss_of(images().contiguous(memory_format=torch.channels_last)))


def test_evaluation_mode_and_frozen_layers(model: nn.Module) -> None:
    model.eval()
    model.first.requires_grad_(False)  # type: ignore[union-attr]
    compare(model, loss_of(images()))


def test_autocast(model: nn.Module) -> None:
    def forward(model: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(images()).float().square().sum()  # type: ignore[no-any-return]

    compare(model, forward)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.5)), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Any = checkpoint(self.inner, x, use_reentrant=False)
        return self.head(F.relu(found))  # type: ignore[no-any-return]


def test_a_checkpoint_inside() -> None:
    torch.manual_seed(0)
    compare(Checkpointed(), loss_of(torch.randn(8, 16)))


@pytest.mark.slow
def test_dynamic_shapes(model: nn.Module) -> None:
    def forward(model: Any) -> Tensor:
        losses: list[Tensor] = [model(images(batch)).square().sum() for batch in (4, 5, 7)]
        return torch.stack(losses).sum()

    report = compare(model, forward, dynamic=True).report()
    assert report.steps == 1, "one graph serves every batch size"
    assert {"bits", "bitmask"} <= {row.codec for row in report.rows}


@pytest.mark.slow
def test_a_symbolic_batch_of_rows_that_no_byte_divides() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(5, 333), nn.Linear(333, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(F.dropout(F.relu(self.first(x)), 0.5))  # type: ignore[no-any-return]

    torch.manual_seed(0)

    def forward(model: Any) -> Tensor:
        losses: list[Tensor] = [model(torch.ones(batch, 5)).square().sum() for batch in (3, 4, 11)]
        return torch.stack(losses).sum()

    report = compare(Odd(), forward, dynamic=True).report()
    assert {"bits"} <= {row.codec for row in report.rows}
    quantized = compile_backend(policies.quantized(4), min_nbytes=0)
    model = Odd()
    gradients(model, forward, torch.compile(model, backend=quantized, dynamic=True))
    assert any(row.codec.startswith("blockquant") for row in quantized.report().rows)


def test_nothing_is_compiled_again_from_step_to_step(model: nn.Module) -> None:
    from torch._dynamo.utils import counters

    ours = compile_backend("lossless", min_nbytes=0)
    compiled = torch.compile(model, backend=ours, fullgraph=True)
    gradients(model, loss_of(images()), compiled)
    before = dict(counters["stats"])
    for _ in range(3):
        gradients(model, loss_of(images()), compiled)
    assert dict(counters["stats"]) == before
    assert len(ours.treatment.graphs) == 1


def test_two_backward_passes_through_one_graph(model: nn.Module) -> None:
    compiled = torch.compile(model, backend=compile_backend("lossless", min_nbytes=0), fullgraph=True)
    with torch._functorch.config.patch(donated_buffer=False):  # else torch refuses retain_graph
        loss = loss_of(images())(compiled)
        loss.backward(retain_graph=True)
        first = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        model.zero_grad()
        loss.backward()
    second = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("squeezenet1_1", marks=pytest.mark.slow),
        pytest.param("googlenet", marks=pytest.mark.slow),
        pytest.param("mobilenet_v2", marks=pytest.mark.slow),
        pytest.param("resnet_cifar20", marks=pytest.mark.slow),
    ],
)
def test_networks_of_the_benchmarks(name: str) -> None:
    torch.manual_seed(0)
    network = networks.build(name, 10)
    ratio = compare(network, loss_of(images(2, 32 if "cifar" in name else 64))).report().ratio
    assert ratio > {"googlenet": 1.2, "mobilenet_v2": 1.4, "resnet_cifar20": 1.0, "squeezenet1_1": 1.2}[name]


@pytest.mark.slow
def test_compiled_autograd(model: nn.Module) -> None:
    expected = gradients(model, loss_of(images()), torch.compile(model, backend="aot_eager"))
    torch._dynamo.reset()
    treated = torch.compile(model, backend=compile_backend("lossless", min_nbytes=0))

    @torch.compile(backend="aot_eager")
    def run_backward(loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.manual_seed(3)
        model.zero_grad()
        run_backward(loss_of(images())(treated))
    found = [parameter.grad for parameter in model.parameters()]
    assert differences(model, expected[:-1], found) == []


def test_a_comparison_behind_random_numbers_is_not_computed_again() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    random = graph.call_function(torch.ops.aten.rand_like.default, (x,))
    sure = graph.call_function(torch.ops.aten.gt.Scalar, (graph.call_function(torch.ops.aten.neg.default, (x,)), 0))
    unsure = graph.call_function(torch.ops.aten.gt.Tensor, (x, random))
    assert forward_can_compute(sure)
    assert not forward_can_compute(unsure)


def test_a_value_that_the_program_holds_is_kept() -> None:
    class Returned(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            found = F.relu(x)
            return found, found.sum()

    x = torch.randn(64, requires_grad=True)
    ours = compile_backend("lossless", min_nbytes=0)
    _, total = torch.compile(Returned(), backend=ours, fullgraph=True)(x)
    total.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, (x > 0).float())
    (row,) = ours.report().rows
    assert row.codec == "kept"
    assert "the program holds it too" in row.reason


def test_the_report_names_modules_and_says_why_nothing_was_treated() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x)  # type: ignore[no-any-return]

    model = Named()
    ours = compile_backend("lossless", min_nbytes=0)
    assert "no graph with a backward pass has been compiled yet" in str(ours.report())
    gradients(model, loss_of(torch.randn(4, 8)), torch.compile(model, backend=ours, fullgraph=True))
    assert [row.key for row in ours.report().rows] == ["graph 0/body.1/tanh#0:tanh"]
    assert ours.report().notes == (
        "graph 0: 0 of 1 values treated, because: 1 kept because binary, zvc: the codec's size depends on the data",
    )


def test_a_policy_without_a_use_in_a_graph_says_so(model: nn.Module) -> None:
    ours = compile_backend("offload", min_nbytes=0)
    gradients(model, loss_of(images()), torch.compile(model, backend=ours, fullgraph=True))
    assert ": 0 of " in ours.report().notes[0]
    assert "a graph cannot reach the store" in ours.report().notes[0]


def test_a_tensor_subclass_is_kept() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.relu(x.sin()).sum()

    x = torch.randn(16)
    expected = x.clone().requires_grad_()
    Net()(expected).backward()
    both = TwoTensor(x.clone(), x.clone()).requires_grad_()
    torch.compile(Net(), backend=compile_backend("lossless", min_nbytes=0))(both).backward()
    assert both.grad is not None
    assert torch.equal(both.grad.a, expected.grad)


@pytest.mark.parametrize("policy", ["quantized", "gist_fp8", policies.quantized(8)], ids=str)
def test_rounding_policies_come_close(model: nn.Module, policy: Any) -> None:
    expected = gradients(model, loss_of(images()), torch.compile(model, backend="aot_eager"))
    ours = compile_backend(policy, min_nbytes=0)
    found = gradients(model, loss_of(images()), torch.compile(model, backend=ours, fullgraph=True))
    report = ours.report()
    assert report.saved_nbytes > 3 * report.stash_nbytes
    assert torch.equal(found[-1], expected[-1]), "the forward pass is exact"  # type: ignore[arg-type]
    weight, exact = found[0], expected[0]
    assert weight is not None
    assert exact is not None
    limit = {"quantized": 1.0, "gist_fp8": 0.1}.get(str(policy), 0.05)
    assert float((weight - exact).norm() / exact.norm()) < limit
    assert differences(model, found, expected)


class OnlyUnknown(Policy):
    """Rounds exactly the values of which the effect of an error is not known."""

    def decide(self, saved: SavedTensor) -> Any:
        unknown = saved.need is Need.VALUE and saved.effect is Effect.UNKNOWN
        return policies.Stash("minifloat") if unknown else Keep()


def test_no_policy_rounds_a_value_whose_effect_is_not_known() -> None:
    class Logarithm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(16, 16) + 0.5)

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.weight).log().sum()

    ours = compare(Logarithm(), lambda model: model(torch.rand(16, 16) + 0.5), OnlyUnknown())
    (row,) = ours.report().rows
    assert "it is not known what an error does" in row.reason


def test_rules_reach_values_by_module_path(model: nn.Module) -> None:
    rules = Rules((("*native_dropout*", Keep("a rule says so")),), otherwise=policies.get("lossless"))
    rows = compare(model, loss_of(images()), rules).report().rows
    assert [row.codec for row in rows if "native_dropout#1" in row.key] == ["kept"]
    assert any(row.codec == "bitmask" for row in rows)


def test_small_values_are_kept(model: nn.Module) -> None:
    report = compare(model, loss_of(images()), min_nbytes=8192).report()
    assert all(row.codec == "kept" for row in report.rows if row.saved_nbytes < 8192)
    assert any(row.codec != "kept" for row in report.rows)


def test_bad_arguments() -> None:
    with pytest.raises(UnknownNameError):
        compile_backend("losless")
    with pytest.raises(ValueError, match="'aot_eager' and 'inductor'"):
        compile_backend("lossless", inner="eager")
    with pytest.raises(ValueError, match="min_nbytes"):
        compile_backend("lossless", min_nbytes=-1)


def test_a_program_that_knows_nothing_of_it_is_treated(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []

    def recorded(model: Any = None, **keywords: Any) -> Any:
        seen.append(keywords)
        return model

    monkeypatch.setattr(torch, "compile", recorded)
    with patch_compile("lossless", min_nbytes=0) as patched:
        assert patched.report() is None
        net = nn.Linear(2, 2)
        torch.compile(net)
        torch.compile(net, mode="max-autotune-no-cudagraphs", options=None)
        torch.compile(net, backend="eager")
        torch.compile(net, options={"custom_partitioner_fn": None})
        torch.compile(net, mode="reduce-overhead", options={"epilogue_fusion": False})
    assert torch.compile is recorded
    first, second, other, own, refused = seen
    assert refused == {"backend": "inductor", "mode": "reduce-overhead", "options": {"epilogue_fusion": False}}
    assert patched.options is not None
    partitioner = patched.options["custom_partitioner_fn"]
    assert first["options"]["custom_partitioner_fn"] is second["options"]["custom_partitioner_fn"] is partitioner
    assert second["options"]["max_autotune"] is True
    assert "mode" not in second
    assert "options" not in other
    assert own["options"] == {"custom_partitioner_fn": None}
    assert "no graph with a backward pass" in str(patched.report())


@pytest.mark.slow
def test_a_budget_recomputes_and_rounds_only_as_far_as_it_must() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.LayerNorm(64)) for _ in range(3)))
    x = torch.randn(256, 64)

    def step(policy: Any, budget: Any) -> tuple[list[Tensor | None], Any]:
        torch._dynamo.reset()
        ours = compile_backend(policy, budget=budget, min_nbytes=0)
        return gradients(model, loss_of(x), torch.compile(model, backend=ours, fullgraph=True)), ours.report()

    plain, whole = step("keep", None)
    found, report = step(policies.quantized(4), "1GiB")
    assert differences(model, plain, found) == []
    assert report.stash_nbytes == whole.stash_nbytes
    assert any("it fits into the budget" in row.reason for row in report.rows)
    found, report = step(policies.quantized(4), 1000)
    assert report.stash_nbytes < whole.stash_nbytes / 2
    assert "No way was found to stay below the budget" in report.notes[0]
    found, exact = step("lossless", 1000)
    assert differences(model, plain, found) == []
    assert exact.saved_nbytes <= whole.saved_nbytes
    peaks = [float(re.findall(r"a peak of ([\d.]+) KiB", each.notes[0])[0]) for each in (report, exact)]
    assert peaks[0] < peaks[1]


def test_the_estimated_peak_is_near_the_counted_one() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
    x = torch.randn(4096, 64)
    ours = compile_backend("lossless", budget="1GiB", min_nbytes=0)
    compiled = torch.compile(model, backend=ours, fullgraph=True)
    gradients(model, lambda net: net(x).sum(), compiled)
    model.zero_grad()
    with CountedPeak() as counted:
        compiled(x).sum().backward()
    (estimated,) = re.findall(r"a peak of ([\d.]+) MiB", ours.report().notes[0])
    assert abs(float(estimated) - counted.peak_nbytes / 2**20) < 2.0


@pytest.mark.parametrize("budget", [0, -1, "", "many", "3 parsecs", 1.5, True, "0%", "-5%", "%", "50 % of it", "0 MiB"])
def test_a_budget_that_is_none(budget: Any) -> None:
    with pytest.raises(ValueError, match="budget=.*600MiB.*60%"):
        compile_backend("lossless", budget=budget)


def test_budgets_are_read_as_people_write_them() -> None:
    texts = {"600MiB": 600 << 20, "1.5 GiB": 3 << 29, "4096": 4096, "1 kB": 1000, 5: 5, ".5kib": 512, "2.MB": 2 * 10**6}
    shares = {"50%": 500, " 12.5 % ": 125, "120%": 1200, "0.001%": 1}
    assert {text: parse_graph_budget(text, 1000) for text in texts | shares} == texts | shares


@pytest.mark.slow
def test_a_share_is_one_of_what_is_estimated_for_compiled_plain() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Sigmoid()) for _ in range(4)))
    x = torch.randn(4096, 64)
    peaks = {}
    for budget in (None, "100%", "80%"):
        torch._dynamo.reset()
        ours = compile_backend("lossless", budget=budget, min_nbytes=0)
        compiled = torch.compile(model, backend=ours, fullgraph=True)
        gradients(model, lambda net: net(x).sum(), compiled)
        model.zero_grad()
        with CountedPeak() as counted:
            compiled(x).sum().backward()
        peaks[budget] = counted.peak_nbytes
        if budget is not None:
            (note,) = ours.report().notes
            ((asked, share),) = re.findall(r"asked for ([\d.]+) MiB, (\d+%) of compiled plain's", note)
            assert share == budget
            assert "No way" not in note
            assert float(asked) == pytest.approx(float(share[:-1]) / 100 * peaks[None] / 2**20, rel=0.2)
    assert peaks["100%"] <= peaks[None]
    assert peaks["80%"] < peaks[None]


def test_a_copy_of_a_compiled_module_has_its_graphs_and_its_report() -> None:
    from torch._dynamo.utils import counters

    model, x = nn.Sequential(nn.Linear(32, 64), nn.LeakyReLU(0.1), nn.Linear(64, 8)), torch.randn(16, 32)
    ours = compile_backend("lossless", min_nbytes=0)
    compiled = torch.compile(model, backend=ours)
    counters.clear()
    for each in (compiled, copy.deepcopy(compiled)):
        each(x).square().sum().backward()
    assert counters["stats"]["unique_graphs"] == 1
    assert len(ours.report().rows) == 2


@pytest.mark.parametrize("is_stepped", [False, True])
def test_a_compiled_module_is_pickled_with_its_policy(is_stepped: bool) -> None:
    model, x = nn.Sequential(nn.Linear(32, 64), nn.LeakyReLU(0.1), nn.Linear(64, 8)), torch.randn(16, 32)
    ours = compile_backend(policies.quantized(bits=4), min_nbytes=0, budget="60%")
    compiled = torch.compile(model, backend=ours)
    if is_stepped:
        compiled(x).square().sum().backward()
        model.zero_grad()
    loaded_backend, loaded = pickle.loads(pickle.dumps((ours, compiled)))
    for each in (compiled, loaded):
        each(x).square().sum().backward()
    assert all(map(torch.equal, gradients_of(model), gradients_of(loaded)))
    assert repr(loaded_backend) == repr(ours)
    assert loaded_backend.treatment.identity == ours.treatment.identity
    assert len(loaded_backend.report().rows) == len(ours.report().rows) > 0


def gradients_of(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


class Norms(nn.Module):
    """Norms that compute in float32, as those of Llamas do, between products in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            wide = x.float()
            x = x + layer((wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype))
        return x.square().sum()


def test_copies_in_float32_of_bfloat16_numbers_are_not_saved() -> None:
    """Backward converts the bfloat16 numbers once more."""
    saved: list[torch.dtype] = []

    def pack(x: Tensor) -> Tensor:
        if x.numel() == 128 * 64:
            saved.append(x.dtype)
        return x

    torch.manual_seed(0)
    model = Norms().bfloat16()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        torch.compile(model, backend=compile_backend(min_nbytes=0))(torch.randn(128, 64).bfloat16()).backward()
    assert saved and set(saved) == {torch.bfloat16}


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune-no-cudagraphs", "default"])
def test_a_mode_reaches_inductor_through_a_backend(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch hands the words of ``mode`` on to a backend that is no name."""
    compile_fx, given = importlib.import_module("torch._inductor.compile_fx"), dict[str, Any]()

    def compiled(graph: Any, inputs: Any, **keywords: Any) -> Any:
        given.update(keywords)
        return graph.forward

    monkeypatch.setattr(compile_fx, "compile_fx", compiled)
    net = nn.Linear(4, 4)
    torch.compile(net, backend=compile_backend("lossless", inner="inductor"), mode=mode)(torch.ones(2, 4))
    assert given.keys() == {"config_patches"}
    expected = {} if mode == "default" else mode_options(mode, None)
    assert expected.items() <= given["config_patches"].items()
    torch._dynamo.reset()
