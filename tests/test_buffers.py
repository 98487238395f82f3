from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from backstash.saved import TensorSpec
from backstash.stash.buffers import LARGE, SMALLEST, Buffers


@dataclass(eq=False)
class Form:
    """Stands for an encoded value, of which the pool reads only the spec."""

    spec: TensorSpec


def form(numel: int = SMALLEST, dtype: torch.dtype = torch.float32) -> Form:
    return Form(TensorSpec.of(torch.empty(numel, dtype=dtype)))


def take(pool: Buffers, of: Form, dtype: torch.dtype | None = None) -> Tensor:
    return pool.take(of.spec, dtype or of.spec.dtype)


def held(pool: Buffers, of: Form) -> Tensor | None:
    return pool.holding(of)


def fill(pool: Buffers, of: Form, value: float, trusted: bool = True) -> Tensor:
    whole = take(pool, of)
    pool.filled(of, whole.fill_(value))
    if not trusted:
        pool.forget(of)
    return whole


def test_memory_is_used_again() -> None:
    pool, spec = Buffers(), form()
    address = take(pool, spec).data_ptr()
    for _ in range(3):
        assert take(pool, spec).data_ptr() == address
    assert pool.nbytes == 4 * SMALLEST


def test_memory_in_use_is_not_handed_out() -> None:
    pool, spec = Buffers(), form()
    first = take(pool, spec).fill_(1)
    second = take(pool, spec).fill_(2)
    assert first.data_ptr() != second.data_ptr()
    assert (first == 1).all()
    address = first.data_ptr()
    del first
    assert take(pool, spec).data_ptr() == address
    assert (second == 2).all()


READERS = [Tensor.detach, lambda x: x[5:9], lambda x: x.view(torch.int32), lambda x: x.numpy()]


@pytest.mark.parametrize("reader", READERS)
def test_whatever_reads_the_memory_keeps_it_in_use(reader: object) -> None:
    pool, spec = Buffers(), form()
    whole = fill(pool, spec, 1)
    address = whole.data_ptr()
    view = reader(whole)  # type: ignore[operator]
    del whole
    assert take(pool, spec).data_ptr() != address
    assert view is not None


@pytest.mark.parametrize("trusted", [True, False])
def test_memory_is_free_when_its_last_reader_is_gone(trusted: bool) -> None:
    pool, spec = Buffers(), form()
    whole = fill(pool, spec, 1, trusted)
    address, view = whole.data_ptr(), whole.detach()
    del whole
    other = take(pool, spec)
    assert other.data_ptr() != address
    del view
    assert take(pool, spec).data_ptr() == address


def test_what_was_decoded_last_is_held() -> None:
    pool, one, two = Buffers(), form(), form()
    assert held(pool, one) is None
    fill(pool, one, 1)
    found = held(pool, one)
    assert found is not None
    assert (found == 1).all()
    assert held(pool, two) is None


def test_a_held_value_goes_when_its_memory_is_used_again() -> None:
    pool, one, two = Buffers(), form(), form()
    fill(pool, one, 1)
    fill(pool, two, 2)
    assert held(pool, one) is None
    assert held(pool, two) is not None


def test_a_held_value_that_was_written_to_is_forgotten() -> None:
    pool, spec = Buffers(), form()
    fill(pool, spec, 1)
    found = held(pool, spec)
    assert found is not None
    found.detach().add_(1)
    assert held(pool, spec) is None


def test_what_an_untrusted_reader_got_is_forgotten() -> None:
    pool, spec = Buffers(), form()
    fill(pool, spec, 1, trusted=False)
    assert held(pool, spec) is None


def test_a_dead_form_is_not_mistaken_for_a_new_one() -> None:
    pool, old = Buffers(), form()
    fill(pool, old, 1)
    gone = weakref.ref(old)
    del old
    assert gone() is None
    assert all(held(pool, form()) is None for _ in range(20))


def test_layouts_and_dtypes() -> None:
    pool = Buffers()
    x = torch.empty(8, 32, 64, 64).to(memory_format=torch.channels_last)
    of = Form(TensorSpec.of(x))
    for dtype in (torch.float32, torch.bool, torch.float64):
        got = take(pool, of, dtype)
        assert (got.shape, got.stride(), got.dtype) == (x.shape, x.stride(), dtype)
        got.zero_()


def test_a_larger_buffer_that_is_free_is_used() -> None:
    pool = Buffers()
    address = take(pool, form(4 * SMALLEST)).data_ptr()
    assert take(pool, form(SMALLEST)).data_ptr() == address
    assert pool.nbytes == 4 * SMALLEST * 4


def test_a_buffer_a_little_too_large_is_used() -> None:
    pool = Buffers()
    address = take(pool, form(SMALLEST)).data_ptr()
    assert take(pool, form(SMALLEST - SMALLEST // 8)).data_ptr() == address


def test_small_ones_are_not_pooled() -> None:
    pool = Buffers()
    whole = fill(pool, form(SMALLEST // 4 - 1), 1)
    assert pool.nbytes == 0
    assert (whole == 1).all()


def test_clear_gives_back_what_nobody_reads() -> None:
    pool, spec = Buffers(), form()
    first = fill(pool, spec, 1).detach()  # the pool owns what it was told of: readers hold views
    fill(pool, form(), 2)
    pool.clear()
    assert pool.nbytes == 4 * SMALLEST
    assert (first == 1).all()
    del first
    pool.clear()
    assert pool.nbytes == 0
    assert held(pool, spec) is None


def test_the_pool_leaves_no_memory_behind() -> None:
    pool = Buffers()
    storage = torch.multiprocessing.reductions.StorageWeakRef(fill(pool, form(), 1).untyped_storage())
    assert not storage.expired()
    del pool
    gc.collect()
    assert storage.expired()


def test_what_is_lent_is_found_until_the_next_decoding() -> None:
    buffers, owner, whole = Buffers(), form(8), torch.ones(8)
    buffers.lend(owner, whole)
    assert buffers.holding(owner) is whole
    assert buffers.holding(form(8)) is None and buffers.nbytes == 0
    whole.add_(1)
    assert buffers.holding(owner) is None  # it was written to
    for end in (
        lambda: buffers.forget(owner),
        buffers.shrink,
        buffers.clear,
        lambda: buffers.take(TensorSpec.of(whole), torch.float32),
        lambda: buffers.lend(form(8), torch.ones(2)),
    ):
        buffers.lend(owner, torch.ones(8))
        assert buffers.holding(owner) is not None
        end()
        assert buffers.holding(owner) is None


def test_what_somebody_has_yet_to_read_may_stay_in_the_place_of_what_was_released() -> None:
    pool, source, made = Buffers(), form(LARGE // 4), form(LARGE // 4)
    leaf = fill(pool, source, 1).detach()
    fill(pool, made, 2)
    del leaf
    pool.release(made)
    assert held(pool, source) is not None and pool.nbytes == LARGE
    pool.release(object())  # who held nothing takes nothing away
    assert held(pool, source) is not None
    del source  # its node has run
    pool.shrink()
    assert pool.nbytes == 0


def test_what_nobody_reads_is_overwritten_first() -> None:
    pool, awaited = Buffers(), form()
    leaf = fill(pool, awaited, 1).detach()
    other = form()
    fill(pool, other, 2)
    del leaf, other
    fill(pool, form(), 3)
    assert held(pool, awaited) is not None


def test_where_bytes_are_planned_nothing_waits_for_the_next_layer() -> None:
    pool, decoded = Buffers(), form()
    pool.is_planned = True
    whole = take(pool, decoded)
    assert whole.shape == decoded.spec.shape and pool.nbytes == 0
    pool.filled(decoded, whole)
    assert held(pool, decoded) is None
    pool.adopt(torch.empty(LARGE))
    assert pool.nbytes == 0
