"""Nothing is left behind, nothing is held, and checksums see every bit."""

from __future__ import annotations

import gc
import json
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import backstash as bs
from backstash.capture import passes
from backstash.torch_internals import backward_engine, function_apply, hook_pushing, saved_tensor_hooks
from backstash.verifying.checksum import PIECE, checksum, numbers_of, why_unchecked
from backstash.verifying.reference import Reference
from backstash.verifying.runlog import RunLog
from backstash.verifying.watch import WatchedRun
from verify.faults import FAULTS, Block, Net, forgetful_checkpoint, plain_checkpoint, step_of

pytest_plugins = ["backstash.testing.plugin"]


def installed() -> list[Any]:
    module = torch.nn.modules.module
    return [
        hook_pushing(),
        backward_engine(),
        torch.autograd.Function.__dict__["apply"],
        bs.Session.__enter__,
        torch.no_grad.__enter__,
        torch.compile,
        torch.autograd.backward,
        list(module._global_forward_pre_hooks),
        list(module._global_forward_hooks),
        saved_tensor_hooks(True),
        list(passes._listeners),
    ]


def tensors() -> list[Tensor]:
    return [
        torch.randn(3, 5),
        torch.randn(300, 401),
        torch.randn(7, dtype=torch.float64),
        torch.randn(5, 3).to(torch.bfloat16),
        torch.randint(0, 255, (1237,), dtype=torch.uint8),
        torch.rand(17) > 0.5,
        torch.randn(4, 4, dtype=torch.complex64).conj(),
        torch.randn(64, 33).t(),
        torch.randn(4, 1).expand(4, 9),
        torch.tensor(3.0),
    ]


@pytest.mark.parametrize("place", range(len(tensors())))
def test_every_bit_and_place_counts(place: int) -> None:
    torch.manual_seed(place)
    x = tensors()[place]
    assert why_unchecked(x) is None
    whole = checksum(x)
    assert checksum(x.clone(memory_format=torch.contiguous_format)) == whole
    flat = x.resolve_conj().contiguous().reshape(-1).clone()
    for index in (0, flat.numel() // 2, flat.numel() - 1):
        for bit in (0, 7):
            changed = flat.clone()
            changed.view(torch.uint8)[index * flat.element_size()] ^= 1 << bit if flat.dtype != torch.bool else 1
            assert checksum(changed.view(x.shape)) != whole
    if flat.numel() > 1 and not torch.equal(flat[0], flat[-1]):
        swapped = flat.clone()
        swapped[0], swapped[-1] = flat[-1], flat[0]
        assert checksum(swapped.view(x.shape)) != whole


def test_changed_signs_do_not_cancel() -> None:
    for dtype in (torch.float32, torch.float64):
        x = torch.randn(512, dtype=dtype)
        assert checksum(-x) != checksum(x)
        y = x.clone()
        y[[1, 3]] *= -1
        assert checksum(y) != checksum(x)


def test_a_storage_can_be_resized_afterwards() -> None:
    x = torch.randn(64)
    checksum(x)
    x.untyped_storage().resize_(0)  # as FSDP frees what it has gathered


def test_a_large_tensor_is_summed_in_pieces() -> None:
    x = torch.arange(PIECE // 4 + 1000, dtype=torch.float32).view(2, -1)
    assert checksum(x.t().contiguous().t()) == checksum(x)
    y = x.clone()
    y[-1, -1] += 1
    assert checksum(y) != checksum(x)


def test_what_has_no_checksum_says_why() -> None:
    assert "sparse" in str(why_unchecked(torch.eye(3).to_sparse()))
    assert "meta" in str(why_unchecked(torch.empty(3, device="meta")))
    assert numbers_of([1, torch.tensor(5), 3]) == [1, 5, 3]


@pytest.mark.parametrize("context", [WatchedRun, Reference])
def test_nothing_is_left_behind(context: Any) -> None:
    before = installed()
    net = Net([Block(), Block(drop=0.2)], plain_checkpoint)
    with context():
        step_of(net)()
    assert installed() == before
    with pytest.raises(ValueError, match="from the step"), context():
        net(torch.randn(8, 16)).sum()
        raise ValueError("from the step")
    assert installed() == before


def test_a_verified_step_is_undone() -> None:
    before = installed()
    net = Net([nn.BatchNorm1d(16), Block(drop=0.2)], forgetful_checkpoint)
    optimizer = torch.optim.AdamW(net.parameters())
    x = torch.randn(8, 16)
    net(x).sum().backward()
    state = {name: each.clone() for name, each in net.state_dict().items()}
    gradients = [each.grad for each in net.parameters()]
    generator = torch.get_rng_state()

    def step() -> None:
        optimizer.zero_grad()
        net(x).sum().backward()
        optimizer.step()

    assert bs.verify(step).exit_code == 1
    assert all(torch.equal(each, state[name]) for name, each in net.state_dict().items())
    assert all(one.grad is two for one, two in zip(net.parameters(), gradients, strict=True))
    assert torch.equal(torch.get_rng_state(), generator)
    assert not optimizer.state
    assert installed() == before


def test_an_error_of_the_step_is_raised_and_all_is_undone() -> None:
    before = installed()
    net = Net([Block()])

    def step() -> None:
        net(torch.randn(8, 16)).sum().backward()
        raise ValueError("from the step")

    with pytest.raises(ValueError, match="from the step"):
        bs.verify(step)
    assert all(each.grad is None for each in net.parameters())
    assert installed() == before


def test_autograds_own_error_is_raised() -> None:
    weight = torch.randn(4, requires_grad=True)

    def step() -> None:
        y = weight.sigmoid()
        y.add_(1)
        y.sum().backward()

    found = bs.verify(step)
    assert found.first is not None and found.first.cause.kind == "in place"
    assert found.watched.error is not None and "modified by an inplace operation" in found.watched.error


def test_no_tensor_is_held() -> None:
    net = Net([Block()], plain_checkpoint)
    references = []
    with WatchedRun() as watch:
        y = net.layers[0](torch.randn(8, 16))
        references.append(weakref.ref(y))
        loss = y.sum()
        loss.backward()
        del y, loss
        gc.collect()
        assert references[0]() is None
    assert watch.log.values


def test_a_step_without_a_backward_pass_is_refused() -> None:
    with pytest.raises(bs.BackstashError, match="no backward pass"):
        bs.verify(lambda: None)
    with pytest.raises(TypeError, match="verify was asked"):
        bs.verify(3)  # type: ignore[arg-type]


def test_the_record_is_data() -> None:
    torch.manual_seed(0)
    found = bs.verify(next(iter(FAULTS))())
    text = json.dumps(json.loads(found.watched.to_json()))
    assert RunLog.from_json(text) == found.watched
    data = json.loads(found.to_json())
    assert data["verdict"] == "differs" and data["findings"][0]["cause"]["kind"] == "generator"
    assert data["fixes"] == ["pass preserve_rng_state=True to checkpoint"]


def test_a_function_that_is_recorded_sees_the_original_apply() -> None:
    assert torch.autograd.Function.__dict__["apply"] is function_apply


def test_the_fixture_passes_and_fails(verify_saved_tensors: Any) -> None:
    block = Block(drop=0.2)
    x = torch.randn(8, 16)
    found = verify_saved_tensors(lambda: checkpoint(block, x, use_reentrant=False).sum().backward())
    assert found.is_equal
    wrong = lambda: forgetful_checkpoint(block, x).sum().backward()  # noqa: E731
    with pytest.raises(pytest.fail.Exception, match="preserve_rng_state=True"):
        verify_saved_tensors(wrong)
