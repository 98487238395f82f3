"""The fake device itself: it computes as the CPU, counts, punishes, and refuses what it is told to refuse."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from tests.device import fake
from tests.device.networks import NETWORKS, same_bits

DEVICE = "fake"


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    assert fake.pending() == 0


def test_it_is_the_accelerator_of_the_process() -> None:
    assert torch.accelerator.current_accelerator() == torch.device(DEVICE)
    assert torch.accelerator.is_available()
    assert torch.get_device_module(DEVICE).device_count() == 1


@pytest.mark.parametrize("network", ["resnet50", "gpt2"])
def test_networks_have_the_bits_of_the_cpu(network: str) -> None:
    on_cpu = NETWORKS[network]()
    for module in on_cpu.model.modules():  # whose random numbers are others, as on any device
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    on_device = on_cpu.to(DEVICE)
    on_cpu.step()
    on_device.step()
    assert same_bits(on_device.gradients(), on_cpu.gradients())


@pytest.mark.parametrize("network", list(NETWORKS))
def test_counts_and_peaks_repeat(network: str) -> None:
    training = NETWORKS[network]().to(DEVICE)
    training.step()
    first, second, third = training.count(steps=3)
    assert first == second == third
    assert first.operations > 100 and first.allocations > 100 and first.peak > 0
    assert first.waits == first.events == first.switches == first.queries == 0


def test_a_step_of_resnet50_launches_as_many_operations_as_on_a_gpu() -> None:
    """ResNet-50 has 53 convolutions, 53 batch norms, 49 relus and 16 sums."""
    training = NETWORKS["resnet50"]().to(DEVICE)
    training.step()
    with fake.counting() as counts:
        training.step()
    names = {name.removeprefix("aten::"): count for (kind, name), count in counts.names.items() if kind == "operations"}
    assert names["convolution"] == names["convolution_backward"] == 53
    assert names["native_batch_norm"] == names["native_batch_norm_backward"] == 53
    assert names["relu_"] == names["threshold_backward"] == 49


def test_backward_runs_on_a_thread_of_the_device() -> None:
    import threading

    threads = []
    x = torch.ones(4, device=DEVICE, requires_grad=True)
    y = x * 2
    y.register_hook(lambda gradient: threads.append(threading.get_ident()))
    y.sum().backward()
    assert threads and threads[0] != threading.get_ident()


# -- counting ----------------------------------------------------------------------------------------------------------


def _item(x: torch.Tensor) -> None:
    x.sum().item()


def _to_host(x: torch.Tensor) -> None:
    x.cpu()


def _to_pageable(x: torch.Tensor) -> None:
    torch.empty(x.shape).copy_(x, non_blocking=True)


def _from_host(x: torch.Tensor) -> None:
    torch.ones(4).to(DEVICE)


def _nonzero(x: torch.Tensor) -> None:
    x.nonzero()


def _mask(x: torch.Tensor) -> None:
    x[x > 0]


def _equal(x: torch.Tensor) -> None:
    torch.equal(x, x)


def _synchronize(x: torch.Tensor) -> None:
    torch.accelerator.synchronize()


def _wait_for_event(x: torch.Tensor) -> None:
    event = torch.Event()
    event.record()
    event.synchronize()


WAITS = [_item, _to_host, _to_pageable, _from_host, _nonzero, _mask, _equal, _synchronize, _wait_for_event]


@pytest.mark.parametrize("wait", WAITS)
def test_waits_of_the_host_are_counted_with_their_line(wait: object) -> None:
    x = torch.arange(1024.0, device=DEVICE)
    with fake.counting(["waits"]) as counts:
        wait(x)  # type: ignore[operator]
    assert counts.waits == 1
    ((kind, _, site),) = counts.sites
    assert kind == "waits"
    assert site.startswith("tests/device/test_device.py:") and site.endswith(wait.__name__)  # type: ignore[attr-defined]


def _add(x: torch.Tensor) -> None:
    x + 1


def _to_pinned(x: torch.Tensor) -> None:
    x.to("cpu", non_blocking=True)  # torch pins the copy


def _index(x: torch.Tensor) -> None:
    x[torch.zeros(3, dtype=torch.long, device=DEVICE)]


def _wait_on_device(x: torch.Tensor) -> None:
    torch.Stream().wait_stream(torch.accelerator.current_stream())


@pytest.mark.parametrize("work", [_add, _to_pinned, _index, _wait_on_device])
def test_what_does_not_wait_is_not_counted_as_a_wait(work: object) -> None:
    x = torch.arange(1024.0, device=DEVICE)
    with fake.counting() as counts:
        work(x)  # type: ignore[operator]
    assert counts.waits == 0


def test_streams_and_events_are_counted() -> None:
    side = torch.Stream()
    with fake.counting() as counts:
        with side:
            event = side.record_event()
        torch.accelerator.current_stream().wait_event(event)
        event.query()
    assert (counts.events, counts.blocks, counts.switches, counts.queries) == (1, 1, 2, 1)


def test_operations_in_backward_have_the_name_of_their_node() -> None:
    x = torch.ones(8, device=DEVICE, requires_grad=True)
    y = x.exp().sum()
    with fake.counting(["operations"]) as counts:
        y.backward()
    assert any("ExpBackward0" in site for _, _, site in counts.sites)


def test_a_kernel_is_one_operation_and_allocates_what_it_leaves() -> None:
    x = torch.ones(1 << 18, device=DEVICE)

    def body() -> torch.Tensor:
        y = (x + 1) * 2
        y.sum().item()  # in a reference kernel, where a kernel of the device would not
        return y.clone()

    before = torch.accelerator.memory_allocated()
    with fake.counting() as counts:
        y = fake.as_kernel("ours", body)()
    assert (counts.operations, counts.allocations, counts.waits) == (1, 1, 0)
    assert counts.names["operations", "ours"] == 1
    assert torch.accelerator.memory_allocated() - before == counts.peak - before == y.nbytes
    del y
    assert torch.accelerator.memory_allocated() == before


# -- memory ------------------------------------------------------------------------------------------------------------


def test_memory_is_counted_in_whole_grains() -> None:
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    x = torch.empty(1000, dtype=torch.uint8, device=DEVICE)
    assert torch.accelerator.memory_allocated() - before == 1024
    del x
    assert torch.accelerator.memory_allocated() == before
    assert torch.accelerator.max_memory_allocated() - before == 1024


def test_more_than_the_limit_is_out_of_memory() -> None:
    before = torch.accelerator.memory_allocated()
    with fake.limited(before + (1 << 20)):
        x = torch.empty(1 << 20, dtype=torch.uint8, device=DEVICE)
        with pytest.raises(torch.OutOfMemoryError, match="limit"):
            torch.empty(1, device=DEVICE)
        del x
        torch.empty(1, device=DEVICE)


@pytest.mark.parametrize("network", ["resnet50", "gpt2"])
def test_a_step_fits_in_its_peak_and_not_in_less(network: str) -> None:
    training = NETWORKS[network]().to(DEVICE)
    training.step()
    (counts,) = training.count()
    with fake.limited(counts.peak):
        training.step()
    training.model.zero_grad()
    with fake.limited(counts.peak - 512), pytest.raises(torch.OutOfMemoryError):
        training.step()


def test_the_host_cannot_read_the_device() -> None:
    import subprocess
    import sys

    program = "from tests.device import fake; import torch, ctypes; x = torch.ones(4, device='fake'); "
    read = "ctypes.string_at(x.data_ptr(), 4)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
    assert subprocess.run([sys.executable, "-c", program + read]).returncode < 0  # killed by a signal


def test_storages_are_resized() -> None:
    x = torch.arange(8.0, device=DEVICE)
    x.untyped_storage().resize_(16)
    assert x[:4].tolist() == [0, 1, 2, 3]
    x.untyped_storage().resize_(0)
    x.untyped_storage().resize_(32)
    assert x.fill_(2.0).tolist() == [2.0] * 8
    assert torch.empty(0, device=DEVICE).resize_(3).fill_(1.0).tolist() == [1.0] * 3


# -- random numbers ----------------------------------------------------------------------------------------------------


def test_random_numbers_come_from_the_device_alone() -> None:
    torch.manual_seed(3)
    host = torch.get_rng_state()
    first = torch.rand(8, device=DEVICE)
    assert torch.equal(torch.get_rng_state(), host)
    second = torch.rand(8, device=DEVICE)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(8, device=DEVICE), first) and not torch.equal(first, second)
    module = torch.get_device_module(DEVICE)
    state = module.get_rng_state()
    third = F.dropout(torch.ones(64, device=DEVICE))
    module.set_rng_state(state)
    assert torch.equal(F.dropout(torch.ones(64, device=DEVICE)), third)
    given = torch.Generator(DEVICE).manual_seed(5)
    fourth = torch.rand(8, device=DEVICE, generator=given)
    assert torch.equal(torch.rand(8, device=DEVICE, generator=given.manual_seed(5)), fourth)


# -- late --------------------------------------------------------------------------------------------------------------

SEEDS = range(8)


@pytest.mark.parametrize("network", list(NETWORKS))
def test_networks_have_the_same_bits_when_operations_are_late(network: str) -> None:
    training = NETWORKS[network]().to(DEVICE)
    training.step()
    expected = training.gradients()
    for seed in SEEDS:
        with fake.late(seed):
            training.step()
            assert fake.pending() > 0
            assert same_bits(training.gradients(), expected)


def _wrong(work: object) -> int:
    """Returns under how many seeds a function returns False."""
    work()  # type: ignore[operator]  # its shapes are learned
    wrong = 0
    for seed in SEEDS:
        with fake.late(seed):
            wrong += not work()  # type: ignore[operator]
    return wrong


@pytest.mark.parametrize("waits", [True, False])
def test_a_stream_that_does_not_wait_for_another_reads_too_early(waits: bool) -> None:
    side = torch.Stream()

    def work() -> bool:
        x = torch.zeros(1024, device=DEVICE)
        for _ in range(4):
            x += 1
        if waits:
            side.wait_stream(torch.accelerator.current_stream())
        with side:
            y = x * 2
        side.synchronize()
        return bool((y.cpu() == 8).all())

    assert _wrong(work) == 0 if waits else _wrong(work) > 0


@pytest.mark.parametrize("waits", [True, False])
def test_a_host_that_does_not_wait_for_a_copy_reads_too_early(waits: bool) -> None:
    host = torch.empty(1024, pin_memory=True)

    def work() -> bool:
        host.fill_(-1.0)
        event = torch.Event()
        host.copy_(torch.full((1024,), 7.0, device=DEVICE), non_blocking=True)
        event.record()
        if waits:
            event.synchronize()
        found = bool((host == 7).all())
        torch.accelerator.synchronize()
        return found

    assert _wrong(work) == 0 if waits else _wrong(work) > 0


@pytest.mark.parametrize("waits", [True, False])
def test_pinned_memory_that_is_used_again_too_early_spoils_a_copy(waits: bool) -> None:
    host = torch.empty(1 << 16, pin_memory=True)

    def work() -> bool:
        host.fill_(1.0)
        x = torch.empty(1 << 16, device=DEVICE).copy_(host, non_blocking=True)
        if waits:
            torch.accelerator.current_stream().synchronize()
        host.fill_(2.0)
        return bool((x.cpu() == 1).all())

    assert _wrong(work) == 0 if waits else _wrong(work) > 0


@pytest.mark.parametrize("keeps", ["reference", "record_stream", "nothing"])
def test_memory_that_is_freed_while_another_stream_reads_it_is_spoiled(keeps: str) -> None:
    side = torch.Stream()

    def work() -> bool:
        x = torch.ones(1 << 14, device=DEVICE)
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            y = torch.zeros(1 << 14, device=DEVICE)
            for _ in range(4):
                y += x
        kept = x if keeps == "reference" else None
        if keeps == "record_stream":
            x.record_stream(side)
        del x
        other = torch.full((1 << 14,), 5.0, device=DEVICE)
        side.synchronize()
        assert kept is None or kept is not other
        return bool((y.cpu() == 4).all())

    assert _wrong(work) > 0 if keeps == "nothing" else _wrong(work) == 0


def test_a_copy_takes_as_long_as_the_link_needs() -> None:
    host = torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True)
    x = torch.empty(1 << 20, dtype=torch.uint8, device=DEVICE)
    times = []
    for gigabytes in (1.0, 4.0):
        with fake.late(0, delay=0.0, gigabytes_per_second=gigabytes):
            begin, end = torch.Event(enable_timing=True), torch.Event(enable_timing=True)
            begin.record()
            for _ in range(8):
                host.copy_(x, non_blocking=True)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
    assert 3.5 < times[0] / times[1] < 4.5


def test_a_seed_decides_all() -> None:
    training = NETWORKS["resnet50"]().to(DEVICE)
    training.step()

    def pending(seed: int) -> list[int]:
        found = []
        with fake.late(seed):
            for _ in range(3):
                training.step()
                found.append(fake.pending())
        return found

    assert pending(1) == pending(1) != pending(2)


# -- idle --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("network", list(NETWORKS))
def test_an_idle_device_is_asked_the_same(network: str) -> None:
    training = NETWORKS[network]().to(DEVICE)
    training.step()
    training.step()
    expected = training.gradients()
    (counts,) = training.count()
    with fake.idle():
        (idle,) = training.count()
    assert (idle.operations, idle.allocations, idle.waits, idle.peak) == (
        counts.operations,
        counts.allocations,
        counts.waits,
        counts.peak,
    )
    training.step()
    assert same_bits(training.gradients(), expected)


def test_an_idle_device_writes_nothing() -> None:
    x = torch.ones(4, device=DEVICE)
    with fake.idle():
        x += 1
        y = x * 3
        assert y.sum().item() == 0.0 and y.cpu().tolist() == [0.0] * 4
    assert x.tolist() == [1.0] * 4


# -- capturing ---------------------------------------------------------------------------------------------------------


def _query(x: torch.Tensor) -> None:
    torch.accelerator.current_stream().record_event().query()


def _pin(x: torch.Tensor) -> None:
    torch.empty(4, pin_memory=True)


def _generator(x: torch.Tensor) -> None:
    torch.get_device_module(DEVICE).get_rng_state()


@pytest.mark.parametrize("work", [*WAITS, _query, _pin, _generator])
def test_a_capture_refuses_what_a_graph_cannot_hold(work: object) -> None:
    x = torch.arange(1024.0, device=DEVICE)
    with fake.capturing(), pytest.raises(RuntimeError, match=rf"test_device.py:\d+ {work.__name__}"):  # type: ignore[attr-defined]
        work(x)  # type: ignore[operator]
    work(x)  # type: ignore[operator]


@pytest.mark.parametrize("network", list(NETWORKS))
def test_a_plain_step_can_be_captured(network: str) -> None:
    training = NETWORKS[network]().to(DEVICE)
    training.step()
    with fake.capturing():
        training.step()
