from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gradients.gradient_checks import Remake
from processes import (
    EXACT,
    WIDTH,
    Block,
    assert_holds_nothing,
    assert_no_weight_encoded,
    assert_no_weight_stored,
    assert_same_bits,
    batch,
    forward_of,
    local,
    loss_of,
    matrices,
    network,
    one_process_ratio,
    run_together,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from backstash import Session
from backstash.errors import SavedTensorFreedError
from backstash.stash.ledger import Report

# -- DDP ---------------------------------------------------------------------------------------------------------------


def _ddp(options: dict[str, Any]) -> None:
    def make() -> tuple[nn.Module, Callable[[int], Tensor]]:
        model = DistributedDataParallel(network(), **options)
        return model, forward_of(model, dist.get_rank())

    weights = matrices(network())
    for policy in EXACT:
        report = assert_same_bits(make, policy)
        assert_no_weight_stored(report, weights)
        assert report.ratio == pytest.approx(one_process_ratio(policy), rel=0.03)
    assert_no_weight_encoded(make, weights)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"static_graph": True}, {"gradient_as_bucket_view": True}],
    ids=["default", "static_graph", "gradient_as_bucket_view"],
)
def test_ddp_reduces_gradients_in_hooks(tmp_path: Path, options: dict[str, Any]) -> None:
    run_together(tmp_path, _ddp, options)


# -- FSDP2 -------------------------------------------------------------------------------------------------------------


class _Checkpointed(nn.Module):
    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.block, x, use_reentrant=False)
        return result


def _sharded(reshard: bool, precision: str, checkpointed: bool, each: bool) -> nn.Module:
    """The network with every block as a unit; with ``each``, every norm and linear layer as one."""
    model: nn.Module = network()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if precision == "bf16" else MixedPrecisionPolicy()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    options = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": reshard}
    if checkpointed:
        model = nn.Sequential(*(_Checkpointed(part) if isinstance(part, Block) else part for part in model))
    for module in list(model.modules()):
        if isinstance(module, (nn.LayerNorm, nn.Linear)) if each else isinstance(module, Block):
            fully_shard(module, **options)
    fully_shard(model, **options)
    return model


def _fsdp(reshard: bool, precision: str, checkpointed: bool, each: bool) -> float:
    def make() -> tuple[nn.Module, Callable[[int], Tensor]]:
        model = _sharded(reshard, precision, checkpointed, each)
        return model, forward_of(model, dist.get_rank())

    weights = matrices(network())
    for policy in EXACT:
        report = assert_same_bits(make, policy)
        assert_no_weight_stored(report, weights)
        if precision == "fp32" and not checkpointed:
            assert report.ratio == pytest.approx(one_process_ratio(policy), rel=0.05)
    if not checkpointed:
        assert_no_weight_encoded(make, weights)
    return report.ratio


@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "keep gathered"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_fsdp2_gathers_a_weight_into_a_storage_of_its_own(tmp_path: Path, reshard: bool, precision: str) -> None:
    run_together(tmp_path, _fsdp, reshard, precision, False, False)


def test_fsdp2_frees_the_norm_weight_that_a_recipe_of_another_unit_reads(tmp_path: Path) -> None:
    run_together(tmp_path, _fsdp, True, "fp32", False, True)


def test_fsdp2_with_a_checkpoint_inside_gathers_again_in_backward(tmp_path: Path) -> None:
    run_together(tmp_path, _fsdp, True, "fp32", True, False)


def _large_norms() -> None:
    """Norm weights that are too large to be copied: what they made must not be made again from freed memory."""

    def make() -> tuple[nn.Module, Callable[[int], Tensor]]:
        model = _sharded(True, "fp32", False, True)
        return model, forward_of(model, dist.get_rank())

    assert_same_bits(make, "lossless", min_nbytes=0)


def test_fsdp2_frees_a_norm_weight_that_is_too_large_to_be_copied(tmp_path: Path) -> None:
    run_together(tmp_path, _large_norms)


def _everything_remade(reshard: bool, each: bool) -> int:
    def make() -> tuple[nn.Module, Callable[[int], Tensor]]:
        model = _sharded(reshard, "fp32", False, each)
        return model, forward_of(model, dist.get_rank())

    return _remade(assert_same_bits(make, Remake()))


def _remade(report: Report) -> int:
    return sum(row.codec == "recompute" for row in report.rows)


@pytest.mark.parametrize(
    ("reshard", "each"),
    [
        pytest.param(True, True, id="layers"),
        pytest.param(True, False, id="blocks", marks=pytest.mark.slow),
        pytest.param(False, True, id="layers, keep gathered", marks=pytest.mark.slow),
    ],
)
def test_fsdp2_remakes_no_value_from_a_weight_that_it_frees(tmp_path: Path, reshard: bool, each: bool) -> None:
    assert all(remade > 0 for remade in run_together(tmp_path, _everything_remade, reshard, each))


def _first_fsdp(original: bool) -> int:
    def make() -> tuple[nn.Module, Callable[[int], Tensor]]:
        device = torch.device("cpu")
        wrapping = ModuleWrapPolicy({Block})
        model = FullyShardedDataParallel(
            network(), auto_wrap_policy=wrapping, device_id=device, use_orig_params=original
        )
        return model, forward_of(model, dist.get_rank())

    return _remade(assert_same_bits(make, Remake()))


@pytest.mark.slow
@pytest.mark.parametrize("original", [True, False], ids=["original parameters", "flat parameters"])
def test_the_first_fsdp_remakes_no_value_from_a_weight_that_it_frees(tmp_path: Path, original: bool) -> None:
    assert all(remade > 0 for remade in run_together(tmp_path, _first_fsdp, original))


def _read_after_reshard() -> None:
    model: Any = _sharded(True, "fp32", False, False)
    block = model[0]
    saved: list[Tensor] = []
    block.up.register_forward_hook(lambda module, args, output: saved.append(module.weight.t() @ module.weight))
    session = Session(min_nbytes=0)
    with session:
        model(batch(0))
    with pytest.raises(SavedTensorFreedError, match="has 0 bytes now instead of"):
        saved[0].sum().backward()
    saved.clear()
    assert_holds_nothing(session)


def test_backward_that_goes_past_the_gathering_hooks_of_fsdp2_meets_freed_memory(tmp_path: Path) -> None:
    run_together(tmp_path, _read_after_reshard)


# -- ZeRO-3 ------------------------------------------------------------------------------------------------------------


class _Product(torch.autograd.Function):
    """A linear layer that saves its weight itself, as those of ZeRO-3 do, and not a transpose of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


class _SavesItsWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _Product.apply(x, self.weight)
        return result


class _Swap:
    """Empties ``param.data`` of each layer after its forward, and gathers it into new memory before its backward."""

    def __init__(self, model: nn.Module) -> None:
        self.held: dict[nn.Parameter, Tensor] = {}
        self.gathered: list[Any] = []
        for module in model.modules():
            if list(module.parameters(recurse=False)):
                module.register_forward_pre_hook(self._gather)
                module.register_forward_hook(self._release)
                module.register_full_backward_pre_hook(self._gather)
        for parameter in model.parameters():
            self.held[parameter] = parameter.data
            parameter.data = torch.empty(0)

    def _gather(self, module: nn.Module, *args: Any) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.data = self.held[parameter].clone()

    def _release(self, module: nn.Module, *args: Any) -> None:
        for parameter in module.parameters(recurse=False):
            self.gathered.append(torch.multiprocessing.reductions.StorageWeakRef(parameter.untyped_storage()))
            parameter.data = torch.empty(0)


def _swapped_network() -> nn.Module:
    """Layers that save a weight itself, a view of it, and statistics."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for channels in (3, 8):
        layers += [nn.Conv2d(channels, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, WIDTH), _SavesItsWeight())


def _swapped_steps(session: Session | None) -> tuple[list[Tensor], int]:
    """Losses and gradients, and how many gathered weights were alive between forward and backward."""
    model = _swapped_network()
    swap = _Swap(model)
    found: list[Tensor] = []
    for step in range(3):
        images = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(step)).requires_grad_()
        with session or nullcontext():
            loss = loss_of(model(images))
        alive = sum(not known.expired() for known in swap.gathered)
        swap.gathered.clear()
        loss.backward()
        found.append(loss.detach().clone())
        for parameter, data in swap.held.items():
            assert parameter.grad is not None
            found.append(local(parameter.grad))
            data -= 0.1 * parameter.grad
            parameter.data, parameter.grad = torch.empty(0), None
    return found, alive


@pytest.mark.parametrize("policy", EXACT)
def test_zero3_swaps_the_data_of_a_saved_weight(policy: str) -> None:
    expected, alive = _swapped_steps(None)
    session = Session(policy, min_nbytes=0)
    found, alive_in_session = _swapped_steps(session)
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    assert alive_in_session <= alive, "the Session keeps gathered weights that the program has let go of"
    assert session.report().parameter_nbytes > 0
    assert_holds_nothing(session)


@pytest.mark.parametrize("policy", ["gist_fp8", "quantized"])
def test_zero3_orphans_the_memory_of_a_weight_that_must_not_be_encoded(policy: str) -> None:
    session = Session(policy, min_nbytes=0)
    _swapped_steps(session)
    assert_no_weight_stored(session.report(), matrices(_swapped_network()))
    assert_holds_nothing(session)


@pytest.mark.parametrize("view", ["t", "view", "slice", "itself"])
def test_a_weight_of_no_module_is_orphaned_before_backward(view: str) -> None:
    """Its memory is swapped away, so that nobody but autograd holds what was saved of it."""
    views: dict[str, Callable[[Tensor], Tensor]] = {
        "t": lambda weight: weight.t(),
        "view": lambda weight: weight.view(24, 16),
        "slice": lambda weight: weight[:16],
        "itself": lambda weight: weight,
    }
    for weight in (nn.Parameter(torch.randn(16, 24)), torch.randn(16, 24, requires_grad=True)):
        session = Session("gist_fp8", min_nbytes=0)
        seen = views[view](weight)
        x = torch.randn(seen.shape, requires_grad=True)
        del seen
        with session:
            loss = (x.clone() * views[view](weight)).sum()
            kept, weight.data = weight.detach().clone(), torch.zeros(16, 24)
            torch.ones(1).add(1)  # the Session looks for what is orphaned
        if view == "itself":  # what is saved is the leaf, which has other memory now, as in plain PyTorch
            weight.data = kept
        loss.backward()
        assert x.grad is not None
        assert torch.equal(x.grad, views[view](kept))
        del loss
        assert_holds_nothing(session)
