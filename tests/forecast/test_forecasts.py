"""Steps without numbers: what is traced is what torch allocates, and what fits follows from it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from typer.testing import CliRunner

from backstash.cli.commands import app
from backstash.errors import MeasureError, UnknownNameError
from backstash.forecast import program, tracing
from backstash.forecast.cards import CARDS, card_named
from backstash.forecast.costs import Clock, Work
from backstash.forecast.fitting import Fits
from backstash.forecast.profiles import TracedValues, profile_on
from backstash.forecast.program import traced_script
from backstash.forecast.sizes import TRACED, SizedSteps
from backstash.forecast.tracing import StepTracer, TracedSteps, repeated
from backstash.planning.measure.record import record
from backstash.planning.model.peak import PeakModel, evaluate
from backstash.planning.search.planner import Planner

H100 = CARDS["h100-80gb"]


class Block(nn.Module):
    """A residual block, of which a checkpoint recomputes each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.first, self.second = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.second(functional.relu(self.first(self.norm(x))))
        return result


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), *(Block(64) for _ in range(3)), nn.Linear(64, 1))


def training(batch: int, make: Callable[[], nn.Module] = network, autocast: bool = False) -> Callable[[], None]:
    module, x = make(), torch.randn(batch, 16)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = module(x).square().mean()
        loss.backward()

    return step


@cache
def traced(batch: int) -> TracedSteps:
    with StepTracer() as tracer:
        step = training(batch)
        while not tracer.is_done:
            step()
    return tracer.found()


def test_a_step_without_numbers_has_the_peak_of_a_step_with_them() -> None:
    step = training(512)
    step()
    measured = record(step, None, device="cpu").peak_nbytes
    found = traced(512).plain
    assert abs(found.peak_nbytes - found.before_nbytes - measured) <= 0.02 * measured


def test_what_is_kept_adds_up_to_the_plain_step() -> None:
    found = traced(512)
    profile = profile_on(found, TracedValues(found.dropped), Clock(H100))
    assert evaluate(profile, [0] * len(profile.values)).peak_nbytes == profile.plain_peak_nbytes
    assert profile.seconds == pytest.approx(sum(Clock(H100).on_card(work) for work in found.dropped.works))


def test_values_may_be_made_again_or_moved() -> None:
    found = traced(512)
    profile = profile_on(found, TracedValues(found.dropped), Clock(H100))
    kinds = {choice.kind for value in profile.values for choice in value.choices}
    assert kinds == {"keep", "recompute", "offload"}, "a relu's result is read by the product after it as well"
    lowest = Planner(profile).solutions[0]
    assert lowest.peak_nbytes < profile.plain_peak_nbytes


def test_a_remade_value_costs_the_operations_that_made_it() -> None:
    found = traced(512)
    values = TracedValues(found.dropped)
    for storage, remake in values.remakes.items():
        assert remake.operations and storage not in remake.parents
        assert remake.parents <= set(values.uses)
        written = {each for number in remake.operations for each in found.dropped.operations[number].writes}
        assert storage in written
    model = PeakModel(profile_on(found, values, Clock(H100)))
    assert model.order or not model.profile.values


def test_what_is_read_for_its_sign_takes_a_bit_per_element() -> None:
    with StepTracer() as tracer:
        module = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.MaxPool2d(2))
        while not tracer.is_done:
            module(torch.randn(16, 3, 34, 34)).sum().backward()
    found = tracer.found()
    profile = profile_on(found, TracedValues(found.dropped), Clock(H100))
    held = {value.op: {choice.name: choice.held_nbytes for choice in value.choices} for value in profile.values}
    assert held["Relu"]["keep"] == 4 * 16 * 64 * 32 * 32 == 32 * held["Relu"]["bitmask"]
    assert held["MaxPool2DWithIndices"]["keep"] == 16 * held["MaxPool2DWithIndices"]["narrow"]


def test_a_checkpoint_is_put_around_each_block() -> None:
    found = traced(512)
    assert found.blocks == 3 and found.checkpoint is not None
    assert found.checkpoint.peak_nbytes < found.plain.peak_nbytes
    assert sum(work.flops for work in found.checkpoint.works) > sum(work.flops for work in found.plain.works)


def test_flops_are_those_of_the_products() -> None:
    products = 16 * 64 + 3 * 2 * 64 * 256 + 64
    forward, backward = 2 * 512 * products, 2 * 512 * (2 * products - 16 * 64)  # nobody asks for the input's gradient
    assert sum(work.flops for work in traced(512).plain.works) == forward + backward


def test_steps_at_other_sizes_follow_from_three() -> None:
    sized = SizedSteps([traced(256 * units) for units in TRACED])
    expected, found = traced(256 * 7), sized.at(7)
    assert found.plain.peak_nbytes == expected.plain.peak_nbytes == sized.peak_nbytes("plain", 7)
    works = zip(found.dropped.works, expected.dropped.works, strict=True)
    assert all((one.nbytes, one.flops) == (other.nbytes, other.flops) for one, other in works)
    clock = Clock(H100)
    one, other = (profile_on(each, TracedValues(each.dropped), clock) for each in (found, expected))
    assert [value.nbytes for value in one.values] == [value.nbytes for value in other.values]
    assert one.base_nbytes == other.base_nbytes


def test_a_text_whose_bytes_are_squares_of_its_length_follows_as_well() -> None:
    def attention(tokens: int) -> TracedSteps:
        with StepTracer() as tracer:
            weight, x = nn.Linear(8, 8), torch.randn(1, tokens, 8)
            while not tracer.is_done:
                y = weight(x)
                (y @ y.transpose(1, 2)).softmax(-1).square().sum().backward()
        return tracer.found()

    sized = SizedSteps([attention(64 * units) for units in TRACED])
    assert sized.at(9).plain.peak_nbytes == attention(64 * 9).plain.peak_nbytes


def test_programs_that_do_other_things_at_other_sizes_are_refused() -> None:
    other = traced(256)
    changed = TracedSteps(other.checkpoint or other.plain, other.dropped, other.checkpoint, other.blocks, 0)
    with pytest.raises(MeasureError, match="does other operations at"):
        SizedSteps([other, changed, other])


def test_what_fits_is_the_largest_that_does() -> None:
    sized = SizedSteps([traced(256 * units) for units in TRACED])
    card = CARDS["t4"]
    fits = Fits(sized, card, ("lossless", "recompute"))
    found = {fit.way: fit for fit in fits.all()}
    for way in ("plain", "checkpoint"):
        units = found[way].units
        assert sized.peak_nbytes(way, units) <= fits.room < sized.peak_nbytes(way, units + 1)
        assert found[way].peak_nbytes <= fits.room
    assert found["plan"].units >= found["plain"].units and found["plan"].peak_nbytes <= fits.room
    assert all(0 < fit.seconds < math.inf for fit in found.values())


def test_optimizers_take_the_memory_that_they_take_on_a_card() -> None:
    """On CUDA they work on all parameters at once, which takes as much again as these."""
    with StepTracer() as tracer:
        module = nn.Linear(256, 256)
        optimizer = torch.optim.AdamW(module.parameters())
        while not tracer.is_done:
            optimizer.step()
            optimizer.zero_grad()
            module(torch.randn(2, 256)).sum().backward()
    found = tracer.found().dropped
    weights = 4 * (256 * 256 + 256)
    assert found.peak_nbytes >= 5 * weights  # themselves, gradients, two moments, and a step's own
    assert any(operation.name == "_foreach_sqrt" for operation in found.operations)


def test_numbers_that_a_model_asks_for_are_counted_and_those_of_a_loop_are_not() -> None:
    class Asking(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if bool((x > 0).all()) else x

    with StepTracer() as tracer:
        module = nn.Sequential(nn.Linear(4, 4), Asking())
        while not tracer.is_done:
            loss = module(torch.randn(2, 4)).sum()
            assert loss.item() == 1.0
            loss.backward()
    assert tracer.found().guessed == 4


def test_softmax_under_autocast_has_no_copy_of_its_input() -> None:
    """As on CUDA, where it reads bfloat16 and returns float32; a cast that the program asks for is one."""

    def most(asks: bool) -> int:
        with StepTracer() as tracer:
            module, x = nn.Linear(64, 4096), torch.randn(64, 64)
            labels = torch.zeros(64, dtype=torch.long)
            while not tracer.is_done:
                with torch.autocast("cpu", torch.bfloat16):
                    logits = module(x)
                    loss = functional.cross_entropy(logits.float() if asks else logits, labels)
                loss.backward()
        return tracer.found().plain.peak_nbytes

    assert most(True) - most(False) >= 64 * 4096 * 2


def test_work_is_the_larger_of_bytes_and_arithmetic() -> None:
    clock = Clock(H100)
    moved = clock.on_card(Work(nbytes=10**9, kernels=1))
    assert moved == pytest.approx(10**9 / (H100.bandwidth * clock.rates.memory))
    assert clock.on_card(Work(10**9, 10**13, "half", 1)) > clock.on_card(Work(10**9, 10**9, "half", 1)) == moved
    assert clock.on_card(Work(nbytes=4, kernels=1)) == clock.rates.kernel_seconds
    assert clock.on_card(Work()) == 0.0 < clock.on_host(Work()) < clock.on_host(Work(kernels=1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_takes_two_products_forward_and_five_backward(dtype: torch.dtype) -> None:
    def flops(is_causal: bool) -> list[int]:
        with StepTracer([]) as tracer:
            x = torch.randn(2, 4, 64, 16, dtype=dtype, requires_grad=True)
            module = nn.Identity()
            while not tracer.is_done:
                functional.scaled_dot_product_attention(module(x), x, x, is_causal=is_causal).sum().backward()
        return [each.work.flops for each in tracer.found().plain.operations if each.name.startswith("_scaled_dot")]

    once = 2 * 2 * 4 * 64 * 64 * 16
    assert flops(False) == [2 * once, 5 * once]
    assert flops(True) == [once, 5 * once // 2]


def test_a_card_that_is_not_known_is_named() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'h100-80gb'"):
        card_named("h100")
    assert card_named(" RTX4090-24GB ").memory_nbytes < 24 * 2**30
    for card in CARDS.values():
        assert card.half >= card.tf32 >= card.float32 and card.bandwidth > card.link


def test_blocks_are_the_outermost_that_repeat() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Block(4), Block(4)), nn.ModuleList([Block(4)]))
    assert [type(each) for each in repeated(model, set(model.modules()))] == [Block] * 3
    stages = nn.ModuleList(nn.ModuleDict({"block": Block(4)}) for _ in range(2))
    assert [type(each) for each in repeated(stages, {each["block"] for each in stages})] == [Block] * 2


SCRIPT = """
import numpy, sys, torch
from torch import nn
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(int(sys.argv[2])):
    x = torch.randn(int(sys.argv[1]), 64)
    {line}
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step(); optimizer.zero_grad()
    print(loss.item())
"""


def test_a_script_runs_without_numbers_and_prints_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(line=""))
    sized = traced_script(str(script), ("{size}", "9"), unit=32)
    assert sized.has_size and capsys.readouterr().out == ""
    assert sized.peak_nbytes("plain", 40) > sized.peak_nbytes("plain", 4)
    assert not traced_script(str(script), ("32", "9")).has_size
    with pytest.raises(MeasureError, match="ended after 2 of the 4"):
        traced_script(str(script), ("32", "2"))


ASKING = {
    "rows by a mask": "x = x[x[:, 0] > 0]",
    "elements by a mask": "x = x + x[x > 0].mean()",
    "a mask and a slice": "x = x[:, x[0] > 0] @ x[:, x[0] > 0].T @ x",
    "two masks": "x = x + x[x[:, 0] > 0, :1] + x[..., x[0] > 0]",
    "a mask is written": "x = x.clone(); x[x > 0] = 0; x[x[:, 0] > 0] *= 2",
    "what a mask selects is written": "x = x.clone(); x[x > 0] = x[x > 0].exp()",
    "masked_select": "x = x * x.masked_select(x > 0).mean()",
    "nonzero": "x = x + (x > 0).nonzero().float().mean() + x.argwhere().sum() + torch.where(x > 0)[0].sum()",
    "unique": "x = x + sum(each.sum() for each in (x * 2).long().unique(return_inverse=True, return_counts=True))",
    "unique rows": "x = x + x.unique(dim=0).mean() + x.unique_consecutive(dim=1).mean()",
    "bincount": "x = x + torch.bincount(x[0].long().abs()).sum() + torch.bincount(x[0].long().abs(), x[1]).sum()",
    "repeat_interleave": "x = x.repeat_interleave(x[:, 0].long().abs().clamp(1, 2), 0)",
    "numpy": "x = torch.from_numpy(x.detach().numpy() * 2) + x; numpy.asarray(x.detach()).sum()",
    "tolist": "assert len(x[:, 0].tolist()) == len(x) and isinstance(x.tolist()[0][0], float)",
    "a list of lengths": "x = torch.cat([x[i : i + n] * n for i, n in enumerate(x[:4, 0].long().tolist())] + [x])",
    "rows from a place on": "x = x + torch.stack([x[0, j : j + 16] for j in torch.randint(8, (2,))]).repeat(1, 4)[:1]",
    "rows of an array": "i = torch.randint(8, ()); x = x + torch.from_numpy(numpy.ones(99, 'float32')[i : i + 2 * 32])",
    "numbers of integers": "n = torch.tensor(5); n += 3; assert n.item() == 8 and f'{n // 3:02}' == '02'",
    "what is written down": "assert torch.tensor(0.5).item() == 0.5 and not torch.tensor(False) ",
    "a sparse matrix": "a = (x @ x.T).detach().to_sparse(); x = torch.sparse.mm(a, x) + torch.spmm(a.coalesce(), x)",
    "sparse rows": "a = torch.eye(len(x)).to_sparse_csr(); x = a @ model[0](x)",
    "nothing is infinite": "assert not (x.isnan().any() or (x != x).any() or x.isinf().any()) and x.isfinite().all()",
    "a guard": "if torch.isnan(x.sum()) or x.sum().isinf(): raise ValueError",
    "gradients are finite": "nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)",
    "a step is written over": "bad = x.isnan(); assert not bad.any(); bad.fill_(True); assert bad.any() and bad.all()",
    "text": "assert f'{x.sum():.2f}' == '1.00' and str(x) and repr(x[0])",
    "in inference": "with torch.inference_mode(): assert x.sum().item() == 1.0 and (x > 0).all() and x.tolist()",
    "numbers of a leaf": "model[0].bias.data.numpy()[:1]; x.requires_grad_(); x.detach().cpu().numpy()",
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("asks", ASKING)
def test_numbers_are_one_and_masks_true(asks: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(line=ASKING[asks]))
    steps = traced_script(str(script), ("{size}", "9"), unit=8)
    assert steps.peak_nbytes("plain", 40) > steps.peak_nbytes("plain", 4)


def test_a_mask_takes_no_less_than_one_that_is_true(tmp_path: Path) -> None:
    peaks = []
    for line in ("x = x[x[:, 0] > 0].tanh()", "x = x[torch.arange(len(x))].tanh()"):
        script = tmp_path / "train.py"
        script.write_text(SCRIPT.format(line=line))
        peaks.append(traced_script(str(script), ("{size}", "9"), unit=64).peak_nbytes("plain", 256))
    assert peaks[1] <= peaks[0] <= 1.1 * peaks[1]


NEEDING = {
    "packed": "model(pack_padded_sequence(x, n))[0].data",
    "packed in any order": "pad_packed_sequence(model(pack_padded_sequence(x, n.flip(0), enforce_sorted=False))[0])[0]",
    "packed from a list": "model(pack_padded_sequence(x, [4] * len(n)))[0].data",
    "alignments": "functional.ctc_loss(model(x)[0].log_softmax(-1), torch.ones(len(n), 3).long(), n, n // 2)",
    "nested rows": "torch.nested.as_nested_tensor(x.transpose(0, 1), layout=torch.jagged).values() @ weight",
    "strided nested rows": "model(torch.nested.nested_tensor([x[:, 0], x[:3, 1]]).to_padded_tensor(0.0))[0]",
    "parts": "torch.cat(x.flatten(0, 1).split((n - n + len(n)).tolist()[:4])) @ weight",
}


@pytest.mark.cases(3)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("needs", NEEDING)
def test_a_program_that_needs_numbers_is_traced_with_them(
    needs: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(PACKED.format(result=NEEDING[needs]))
    steps = traced_script(str(script), ("{size}",), unit=4)
    assert steps.traces[0].computed and not steps.traces[0].guessed
    assert steps.peak_nbytes("plain", 40) > steps.peak_nbytes("plain", 4)
    found = {fit.way: fit for fit in Fits(steps, CARDS["t4"], ("lossless", "recompute")).all()}
    assert 0 < found["plain"].units <= found["plan"].units
    assert capfd.readouterr().err == ""


PACKED = """
import sys, torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
torch.manual_seed(0)
model = nn.LSTM(8, 16)
for _ in range(9):
    x, n = torch.randn(4, int(sys.argv[1]), 8), torch.full((int(sys.argv[1]),), 4)
    n[2:] = 3
    weight = model.weight_ih_l0.T
    result = {result}
    result.square().mean().backward()
"""


def test_steps_with_numbers_are_those_without(tmp_path: Path) -> None:
    found = []
    for computed in ("", "a reason"):
        script = tmp_path / "train.py"
        script.write_text(SCRIPT.format(line="x = torch.relu(model[0](x))"))
        found.append(program._traced(str(script), ("32", "9"), False, computed))
    for name in ("plain", "dropped"):
        first, second = (getattr(each, name) for each in found)
        assert first.peak_nbytes == second.peak_nbytes and first.before_nbytes == second.before_nbytes
        assert [each.name for each in first.operations] == [each.name for each in second.operations]
        assert first.died.keys() == second.died.keys()


def test_a_program_that_needs_numbers_and_too_much_memory_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "_room", lambda: 1000)
    script = tmp_path / "train.py"
    script.write_text(PACKED.format(result=NEEDING["packed"]))
    with pytest.raises(
        MeasureError,
        match=r"fails with Dynamic.*, and with numbers its step takes more than the 1000 bytes .* Ask for a small",
    ):
        traced_script(str(script), ("32",))


def test_what_fails_with_numbers_as_well_is_the_script_s_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(line="x = x[: int(x.sum())] @ x[:2]"))
    with pytest.raises(MeasureError, match=r"train\.py failed after 0 of 4 backward passes: RuntimeError: .* Run it"):
        traced_script(str(script), ("32", "9"))
    assert capsys.readouterr().err.count("Traceback") == 1


def test_a_way_that_fails_leaves_the_others(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(IDENTICAL)
    done = CliRunner().invoke(app, ["fit", "--quiet", "--device", "t4", str(script), "{size}"])
    assert done.exit_code == 0, done.output
    assert "plain" in done.stdout and "What a plan would do is not known: ValueError: another tensor" in done.stdout
    assert "Traceback" not in done.stderr


IDENTICAL = """
import sys, torch
from torch import nn

class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.address = x.untyped_storage()._cdata
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        if ctx.saved_tensors[0].untyped_storage()._cdata != ctx.address:
            raise ValueError("another tensor")
        return gradient * 2

model = nn.Linear(64, 64)
for _ in range(9):
    Same.apply(model(torch.randn(int(sys.argv[1]), 64))).mean().backward()
"""


def test_a_way_that_differs_from_size_to_size_leaves_the_others() -> None:
    traces = [traced(256 * units) for units in TRACED]
    other = traces[1]
    for name, why in (("checkpoint", "uncut"), ("dropped", "unplanned")):
        sized = SizedSteps([traces[0], replace(other, **{name: other.plain}), traces[2]])
        assert "does other operations at 3 units than at 2" in getattr(sized.traces[0], why)
        assert [getattr(each, name) for each in sized.traces] == [None] * 3
        ways = {fit.way for fit in Fits(sized, CARDS["t4"], ("lossless", "recompute")).all()}
        assert ways == ({"plain", "checkpoint"} if name == "dropped" else {"plain", "plan, as plain", "plan"})


def test_plans_reach_what_plain_steps_reach() -> None:
    """Also where a checkpoint reaches what no plan does."""

    class Known(Fits):
        def _lowest(self, units: int) -> int:
            return super()._lowest(units) if units <= self._largest("plain") else 1 << 60

    fits = Known(SizedSteps([traced(256 * units) for units in TRACED]), CARDS["t4"], ("lossless", "recompute"))
    found = {fit.way: fit.units for fit in fits.all()}
    assert found["plain"] == found["plan"] < found["checkpoint"]


def test_an_error_of_the_script_is_told_without_numbers_being_blamed(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise ValueError('there is no data set')\n")
    with pytest.raises(
        MeasureError, match=r"train\.py failed after 0 of .*: ValueError: there is no data set\. Run it"
    ):
        traced_script(str(script))


def test_a_quiet_forecast_still_has_its_table(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(line=""))
    done = CliRunner().invoke(app, ["fit", "--quiet", "--device", "t4", str(script), "32", "9"])
    assert done.exit_code == 0 and "may be used" in done.stdout, done.output
    assert "Print the result alone" in CliRunner().invoke(app, ["fit", "--help"], env={"COLUMNS": "200"}).stdout


LOADED = """
import copy, sys, torch
from pathlib import Path
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

class Squares(Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, number):
        x = torch.randn(16).square()
        assert (x >= 0).all()
        return x, number % 3

class Stream(IterableDataset):
    def __iter__(self):
        return (Squares()[number] for number in range(4096))

batch, workers, kind = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 3))
nn.init.trunc_normal_(model[0].weight, std=0.02)
beyond = torch.ones(3)
while (beyond.abs() > 0.5).any():
    beyond = beyond / 2
teacher = copy.deepcopy(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(Stream() if kind == "stream" else Squares(), batch_size=batch, num_workers=workers)
for number, (x, y) in enumerate(loader):
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step(); optimizer.zero_grad()
    teacher.load_state_dict(copy.deepcopy(model.state_dict()))
    torch.save(model.state_dict(), Path(__file__).parent / "weights.pt")
    model.load_state_dict(torch.load(Path(__file__).parent / "weights.pt"))
    if number == 8:
        break
"""


@pytest.mark.cases(100)
@pytest.mark.parametrize("kind", ["map", "stream"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_script_has_loaders_copies_and_checkpoints(
    kind: str, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "MOST_ASKED", 20)
    script = tmp_path / "train.py"
    script.write_text(LOADED)
    sized = traced_script(str(script), ("{size}", str(workers), kind), unit=8)
    assert sized.peak_nbytes("plain", 40) > sized.peak_nbytes("plain", 4)
    assert not (tmp_path / "weights.pt").exists()
    model, loader = nn.Linear(2, 2), torch.utils.data.DataLoader([1.0, 2.0], num_workers=1)
    torch.save(model.state_dict(), tmp_path / "weights.pt")  # all of torch's own functions are back
    assert set(torch.load(tmp_path / "weights.pt")) == {"weight", "bias"} and loader.num_workers == 1


def test_a_line_may_ask_of_every_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network has hundreds of weights; a loop that would never end is told so sooner the second time."""
    weights = [torch.zeros(2) for _ in range(500)]
    with StepTracer():
        assert all(bool((weight == 0).all()) for weight in weights)
        monkeypatch.setattr(tracing, "MOST_ASKED", 200)
        asked = []
        for _ in range(3):
            number = 0
            while (weights[0] == 0).any():
                number += 1
            asked.append(number)
    assert asked == [tracing.MOST_ASKED - 1, 1, 1]


def test_a_gradient_scaler_lets_the_optimizer_step(tmp_path: Path) -> None:
    peaks = []
    for is_scaled in (False, True):
        script = tmp_path / "train.py"
        script.write_text(SCALED.format(is_scaled=is_scaled))
        peaks.append(traced_script(str(script), ("{size}",), unit=8).peak_nbytes("plain", 8))
    assert 0.95 * peaks[0] <= peaks[1] <= 1.1 * peaks[0]


SCALED = """
import sys, torch
from torch import nn
model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
optimizer = torch.optim.Adam(model.parameters())
scaler = torch.amp.GradScaler("cpu", enabled={is_scaled})
for _ in range(9):
    loss = model(torch.randn(int(sys.argv[1]), 256)).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer); scaler.update(); optimizer.zero_grad()
"""


def test_blocks_that_cannot_be_cut_leave_the_other_ways(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(STATEFUL)
    steps = traced_script(str(script), ("{size}",), unit=8)
    assert steps.traces[0].checkpoint is None and "CheckpointError" in steps.traces[0].uncut
    assert steps.peak_nbytes("plain", 40) > steps.peak_nbytes("plain", 4)
    done = CliRunner().invoke(app, ["fit", "--quiet", "--device", "t4", str(script), "{size}"])
    assert done.exit_code == 0 and "do not run in torch.utils.checkpoint: CheckpointError" in done.stdout
    assert "Traceback" not in done.stderr


STATEFUL = """
import sys, torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.seen = nn.Linear(64, 64), []

    def forward(self, x):
        self.seen.append(x)
        return self.layer(x).tanh() if len(self.seen) > 1 else self.layer(x).tanh().sin().exp()

model = nn.Sequential(Block(), Block(), Block())
for _ in range(9):
    for block in model:
        block.seen.clear()
    model(torch.randn(int(sys.argv[1]), 64)).mean().backward()
"""
