from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import backstash as bs
from backstash.errors import MeasureError, UnknownNameError
from backstash.planning.measure.events import memory_profiler, roots_of
from backstash.planning.measure.record import record
from backstash.planning.model.trace import Role, Trace
from backstash.planning.search.schedule import footprint, memory_footprint_ratio
from backstash.report.meter import CountedPeak
from backstash.stores import DeviceStore, HostStore, Store
from backstash.torch_internals import profiler_event
from bench.link import FarStore

CODECS = bs.policies.lossless(recompute=False)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        *(layer for _ in range(6) for layer in (nn.Conv2d(16, 16, 3, padding=1), nn.ReLU())),
        nn.Flatten(), nn.Linear(16 * 16 * 16, 10),
    )  # fmt: skip


def training_step(model: nn.Module, x: Tensor) -> Callable[[], object]:
    def step() -> None:
        model.zero_grad(set_to_none=False)
        F.cross_entropy(model(x), torch.zeros(len(x), dtype=torch.int64)).backward()

    return step


@pytest.fixture(scope="module")
def step() -> Callable[[], object]:
    return training_step(network(), torch.randn(32, 3, 32, 32))


@pytest.fixture(scope="module")
def plain(step: Callable[[], object]) -> Trace:
    return record(step)


@pytest.fixture(scope="module")
def encoded(step: Callable[[], object]) -> Trace:
    return record(step, CODECS, min_nbytes=0)


def nbytes(trace: Trace, role: Role) -> int:
    return sum(buffer.nbytes for buffer in trace.buffers if buffer.role == role)


def test_the_peak_is_the_counted_peak(step: Callable[[], object], plain: Trace) -> None:
    with CountedPeak() as counter:
        step()
    assert plain.peak_nbytes == counter.peak_nbytes
    assert plain.live() == [alive for _, alive in counter.timeline]


def test_what_plain_holds_over_the_boundary_is_what_a_session_saw_saved(step: Callable[[], object]) -> None:
    trace = record(step)
    report = {}

    def watched() -> None:
        with bs.Session("keep", min_nbytes=0) as session:
            step()
        report["rows"] = session.report()

    watched()
    dense = sum(row.saved_nbytes for row in report["rows"].rows if "held by the program" not in row.reason)
    shapes = sum(row.saved_nbytes for row in report["rows"].rows if row.codec == "shape")
    assert abs(nbytes(trace, "stashed") - dense - shapes) < 100_000  # labels, the loss, the batch


def test_planes_are_the_stash(step: Callable[[], object], encoded: Trace) -> None:
    with bs.Session(CODECS, min_nbytes=0) as session:
        step()
    rows = session.report().rows
    planes = sum(row.stash_nbytes for row in rows if row.codec not in ("kept", "shape"))
    assert nbytes(encoded, "encoded") == planes > 0
    decoded = [decode for decode in encoded.decodes if decode.nbytes]  # the others are read as they are
    assert len(decoded) == sum(row.decodes for row in rows) > 0
    assert sum(decode.nbytes for decode in encoded.decodes) >= nbytes(encoded, "decoded") > 0


def test_recording_changes_no_operation(plain: Trace, encoded: Trace) -> None:
    assert [op.name for op in plain.ops] == [op.name for op in encoded.ops if not op.name.endswith(" (input)")]
    names = [op.name for op in plain.ops]
    boundary = plain.by_op().backward
    assert [name for name in names if name != "aten::zero_"][:3] == ["aten::conv2d", "aten::relu", "aten::max_pool2d"]
    assert "ConvolutionBackward0" in names[boundary:] and "ConvolutionBackward0" not in names[:boundary]


def test_roles_say_what_happens_when(plain: Trace, encoded: Trace) -> None:
    assert {buffer.role for buffer in plain.buffers} == {"stashed", "immediate", "workspace"}
    for trace in (plain, encoded):
        for buffer in trace.buffers:
            over = buffer.start < trace.backward <= buffer.end
            assert over if buffer.role in ("stashed", "encoded") else not over
            if buffer.role == "decoded":
                assert buffer.start >= trace.backward
    assert nbytes(encoded, "stashed") < nbytes(plain, "stashed") / 4


def test_lifetimes_by_definition_lie_within_the_real_ones(encoded: Trace) -> None:
    found = encoded.by_definition()
    real = {(b.name, b.nbytes, b.start): b for b in encoded.buffers if b.role == "encoded"}
    for buffer in found.buffers:
        if buffer.role == "encoded":
            assert buffer.end <= real[buffer.name, buffer.nbytes, buffer.start].end
    for decode in encoded.decodes:
        assert encoded.backward <= decode.start < decode.end <= encoded.end
        assert decode.planes and all(encoded.buffers[plane].role == "encoded" for plane in decode.planes)
        assert any(b.role == "decoded" and b.start <= decode.start and decode.end <= b.end for b in encoded.buffers)
    assert found.peak_nbytes <= encoded.peak_nbytes
    assert found.by_op().peak_nbytes <= encoded.by_op().peak_nbytes


def test_the_footprint_falls(plain: Trace, encoded: Trace) -> None:
    maps: tuple[Role, ...] = ("stashed", "encoded", "decoded")  # the reference's temporaries are larger than these
    for sharing in ("groups", "offsets", "dynamic"):
        assert memory_footprint_ratio(plain, encoded.by_definition(), sharing, roles=maps) > 1.5
    assert footprint(plain, "dynamic") == plain.peak_nbytes


def test_a_decoded_input_is_gone_before_its_gradient_is_made() -> None:
    model = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU())
    step = training_step(nn.Sequential(model, nn.Flatten(), nn.Linear(16 * 32 * 32, 10)), torch.randn(8, 8, 32, 32))
    trace = record(step, bs.policies.lossless(recompute=False))
    halves = [op for op in trace.ops if op.name == "ConvolutionBackward0 (input)"]
    assert len(halves) == 1  # the first convolution's input needs no gradient
    (decode,) = (one for one in trace.decodes if one.name == "ConvolutionBackward0")
    assert decode.start < decode.end <= halves[0].start
    numbers = [op.name for op in trace.ops]
    by_op = next(one for one in trace.by_definition().by_op().decodes if one.name == decode.name)
    assert by_op.end == numbers.index("ConvolutionBackward0 (input)") + 1


def test_a_small_input_is_read_until_its_node_has_run() -> None:
    """Autograd holds it, so it is given back behind both gradients."""
    layers = [layer for size in (8, 16) for layer in (nn.Conv2d(size, 16, 3, padding=1), nn.ReLU())]
    model, x = nn.Sequential(*layers, nn.Conv2d(16, 4, 3, padding=1)), torch.randn(1, 8, 32, 32)

    def step() -> None:
        model.zero_grad()
        model(x).square().mean().backward()

    trace = record(step, bs.policies.lossless(recompute=False), min_nbytes=0)
    assert any(one.name == "ConvolutionBackward0" for one in trace.decodes)
    assert all(op.name != "ConvolutionBackward0 (input)" for op in trace.ops)


def test_values_made_again_are_decoded_from_no_planes() -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 4, 3))
    step = training_step(nn.Sequential(model, nn.Flatten(), nn.Linear(4 * 28 * 28, 10)), torch.randn(32, 3, 32, 32))
    trace = record(step, bs.policies.lossless(recompute=True))
    again = [decode for decode in trace.decodes if not decode.planes]
    assert max(decode.nbytes for decode in again) == 32 * 16 * 30 * 30 * 4
    assert trace.by_definition().peak_nbytes <= trace.peak_nbytes


@pytest.mark.parametrize("store", [HostStore, FarStore])
def test_what_is_read_where_it_has_arrived_is_encoded(step: Callable[[], object], store: type[Store]) -> None:
    trace = record(step, bs.policies.vdnn(), stores={"host": store()})
    assert nbytes(trace, "encoded") > 0 == nbytes(trace, "recomputed")


def test_the_model_is_resident() -> None:
    model = network()
    trace = record(training_step(model, torch.randn(4, 3, 32, 32)), "lossless", model=model)
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    assert nbytes(trace, "parameter") == nbytes(trace, "gradient") == parameters
    assert all((b.start, b.end) == (0, trace.end) for b in trace.buffers if b.role in ("parameter", "gradient"))


def test_gradients_made_in_the_step() -> None:
    model = network()
    x = torch.randn(4, 3, 32, 32)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(x).sum().backward()

    parameters = sum(parameter.nbytes for parameter in model.parameters())
    for named in (None, model):
        trace = record(step, model=named)
        assert nbytes(trace, "gradient") == parameters
        assert all(b.start >= trace.backward for b in trace.buffers if b.role == "gradient")


def test_a_tied_parameter_counts_once() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    trace = record(lambda: model(torch.ones(2, 8)).sum().backward(), model=model)
    assert nbytes(trace, "parameter") == 8 * 8 * 4


def test_a_graph_that_is_retained() -> None:
    model, x = network(), torch.randn(8, 3, 32, 32)

    def step() -> None:
        loss = model(x).sum()
        loss.backward(retain_graph=True)
        loss.backward()

    trace = record(step, CODECS, min_nbytes=0)
    read = Counter(plane for decode in trace.decodes for plane in decode.planes)
    assert max(read.values()) >= 2
    assert trace.by_definition().peak_nbytes <= trace.peak_nbytes


def test_a_checkpoint_inside() -> None:
    model, x = network(), torch.randn(8, 3, 32, 32)
    for policy in (None, "lossless"):
        trace = record(lambda: checkpoint(model, x, use_reentrant=False).sum().backward(), policy, min_nbytes=0)
        assert trace.peak_nbytes > 0
        assert trace.by_definition().by_op().end == len(trace.ops) + 1


def test_stores_are_watched(step: Callable[[], object]) -> None:
    class Everything:
        def decide(self, saved: bs.saved.SavedTensor) -> bs.policies.Action:
            action = CODECS.decide(saved)
            return bs.Stash(action.codecs, "mine") if isinstance(action, bs.Stash) else action

        def observe(self, outcome: object) -> None: ...

    store = DeviceStore()
    trace = record(step, Everything(), stores={"mine": store}, min_nbytes=0)
    assert nbytes(trace, "encoded") > 0
    assert store.usage().peak_nbytes > 0


def test_the_step_runs_as_often_as_it_says() -> None:
    calls = []

    def step() -> None:
        calls.append(1)
        torch.ones(3, requires_grad=True).sum().backward()

    record(step, warmup=2)
    assert len(calls) == 3


def test_what_cannot_be_recorded() -> None:
    with pytest.raises(MeasureError, match=r"no autograd node ran in it\. Call backward\(\) in it"):
        record(lambda: torch.ones(3))
    with pytest.raises(MeasureError, match="asked for device='tpu'"):
        record(lambda: None, device="tpu")
    with pytest.raises(UnknownNameError):
        record(lambda: None, "best")


def test_no_allocation_is_an_outermost_event() -> None:
    """The profiler reports those of the CPU alone."""
    x = torch.ones(1000, requires_grad=True)
    with memory_profiler() as profiled:
        loss = (x * 2).exp().sum()  # what is freed here is freed in no operation
        loss.backward()
        del loss
    tags = [event.tag for event in roots_of(profiled)]
    assert profiler_event.TorchOp in tags and profiler_event.Allocation not in tags


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_on_a_gpu() -> None:
    model = network().cuda()
    x, labels = torch.randn(32, 3, 32, 32, device="cuda"), torch.zeros(32, dtype=torch.int64, device="cuda")

    def step() -> None:
        model.zero_grad(set_to_none=False)
        F.cross_entropy(model(x), labels).backward()

    plain, encoded = record(step, device="cuda"), record(step, CODECS, min_nbytes=0, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    assert plain.peak_nbytes == torch.cuda.max_memory_allocated() - before
    assert nbytes(encoded, "encoded") > 0 and nbytes(encoded, "decoded") > 0
    assert nbytes(encoded, "stashed") < nbytes(plain, "stashed")
