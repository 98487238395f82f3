from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gradients.gradient_checks import bits
from processes import (
    EXACT,
    INNER,
    LOSSY,
    ROWS,
    WIDTH,
    WORLD,
    assert_holds_nothing,
    assert_no_weight_encoded,
    assert_no_weight_stored,
    assert_same_bits,
    batch,
    forward_of,
    loss_of,
    matrices,
    network,
    run_together,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from backstash import Session
from backstash.errors import SavedTensorModifiedError


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (WORLD,))


def _columns_and_rows(mesh: DeviceMesh) -> nn.Module:
    model = network()
    for block in model[:2]:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def _sequence(mesh: DeviceMesh) -> nn.Module:
    """The rows of the batch are sharded between the linear layers, so that the norms read DTensors."""
    model = network()
    for block in model[:2]:
        plan: dict[str, Any] = {
            "norm": SequenceParallel(sequence_dim=0),
            "up": ColwiseParallel(input_layouts=Shard(0)),
            "down": RowwiseParallel(output_layouts=Shard(0)),
        }
        parallelize_module(block, mesh, plan)
    return model


def _whole_dtensors(mesh: DeviceMesh) -> nn.Module:
    """Everything between the linear layers of a block is a DTensor: relu's mask is saved of one."""
    model = network()
    for block in model[:2]:
        plan: dict[str, Any] = {
            "up": ColwiseParallel(use_local_output=False),
            "down": RowwiseParallel(),
        }
        parallelize_module(block, mesh, plan)
    return model


_PLANS: dict[str, Callable[[DeviceMesh], nn.Module]] = {
    "columns and rows": _columns_and_rows,
    "sequence": _sequence,
    "whole dtensors": _whole_dtensors,
}


def _tensor_parallel(plan: str) -> dict[str, float]:
    mesh = _mesh()

    def make() -> tuple[nn.Module, Callable[[int], Tensor]]:
        model = _PLANS[plan](mesh)
        if plan == "sequence":
            return model, lambda step: loss_of(model(batch(step)[mesh.get_local_rank() :: WORLD].contiguous()))
        return model, forward_of(model, 0)

    weights = matrices(make()[0])
    ratios = {}
    for policy in EXACT:
        report = assert_same_bits(make, policy)
        assert_no_weight_stored(report, weights)
        ratios[policy] = report.ratio
    assert ratios["lossless"] > 1.3, ratios
    assert_no_weight_encoded(make, weights)
    return ratios


def _parallel_loss(sizes: tuple[int, ...]) -> None:
    """A loss of logits that are sharded over the classes, whose backward is not that of the operator of its node."""
    mesh = _mesh()
    classes = torch.randint(INNER, (ROWS, *sizes), generator=torch.Generator().manual_seed(3))

    def make() -> tuple[nn.Module, Callable[[int], Tensor]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, INNER), nn.ReLU(), nn.Linear(INNER, INNER))
        plan: dict[str, Any] = {"2": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
        parallelize_module(model, mesh, plan)

        def forward(step: int) -> Tensor:
            x = batch(step) if not sizes else batch(step).unsqueeze(1).expand(-1, *sizes, -1)
            logits = model(x)
            return F.cross_entropy(logits.flatten(0, -2), classes.flatten(), ignore_index=1, label_smoothing=0.0)

        return model, forward

    with loss_parallel():
        for policy in (*EXACT, "lossless_stored"):
            assert_same_bits(make, policy, min_nbytes=0)


@pytest.mark.parametrize("sizes", [(), (4,)])
def test_losses_of_sharded_logits(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    run_together(tmp_path, _parallel_loss, sizes)


@pytest.mark.parametrize("plan", list(_PLANS))
def test_tensor_parallel_saves_dtensors(tmp_path: Path, plan: str) -> None:
    run_together(tmp_path, _tensor_parallel, plan)


def _with_fsdp() -> None:
    """Rows of the mesh share the data, columns the weights; one of two processes each way."""
    for shape in ((WORLD, 1), (1, WORLD)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))

        def make(mesh: DeviceMesh = mesh) -> tuple[nn.Module, Callable[[int], Tensor]]:
            model = _columns_and_rows(mesh["tensor"])
            for block in model[:2]:
                fully_shard(block, mesh=mesh["data"])
            fully_shard(model, mesh=mesh["data"])
            return model, forward_of(model, mesh["data"].get_local_rank())

        weights = [(WIDTH, INNER // shape[1]), (WIDTH, INNER)]
        report = assert_same_bits(make, "lossless")
        assert_no_weight_stored(report, weights)
        assert report.ratio > 1.3
        assert_no_weight_encoded(make, weights)


def test_two_dimensions_of_fsdp2_and_tensor_parallel(tmp_path: Path) -> None:
    run_together(tmp_path, _with_fsdp)


def _autocast() -> None:
    mesh = _mesh()

    def make() -> tuple[nn.Module, Callable[[int], Tensor]]:
        model = _columns_and_rows(mesh)

        def forward(step: int) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return loss_of(model(batch(step)))

        return model, forward

    weights = matrices(make()[0])
    assert_no_weight_stored(assert_same_bits(make, "lossless"), weights)
    assert_no_weight_encoded(make, weights)


def test_autocast_copies_a_weight_of_tensor_parallel(tmp_path: Path) -> None:
    run_together(tmp_path, _autocast)


def _change(which: str) -> None:
    mesh = _mesh()
    x = DTensor.from_local(torch.randn(ROWS, WIDTH), mesh, [Shard(0)]).requires_grad_()
    session = Session(min_nbytes=0)
    with session:
        y = x * 1.5
        z = y.exp()  # saves its result
        if which == "wrapper":
            z.add_(1)
        elif which == "view":
            z.view(-1).mul_(2)
        else:
            z._local_tensor.add_(1)
        loss = z.to_local().sum()
        del z, y
    with pytest.raises(SavedTensorModifiedError, match="is at version 1; expected version 0"):
        loss.backward()
    del loss
    assert_holds_nothing(session)


@pytest.mark.parametrize("which", ["wrapper", "view", "inner"])
def test_change_of_a_saved_dtensor_raises(tmp_path: Path, which: str) -> None:
    run_together(tmp_path, _change, which)


def _partial_sums() -> None:
    """The sign of a sum over ranks is not the sign of a summand: a mask of the summand would be wrong."""
    mesh = _mesh()

    def run(session: Session | None) -> list[Tensor]:
        torch.manual_seed(mesh.get_local_rank())
        summand = torch.randn(ROWS, WIDTH, requires_grad=True)
        if session is not None:
            session.__enter__()
        x = DTensor.from_local(summand * 1, mesh, [Partial()])
        loss = sum(
            (f(x * 1).redistribute(mesh, [Replicate()]).to_local() * torch.arange(WIDTH)).sum()
            for f in (F.leaky_relu, F.relu, F.silu, F.gelu, torch.tanh)
        )
        if session is not None:
            session.__exit__(None, None, None)
        assert isinstance(loss, Tensor)
        loss.backward()
        assert summand.grad is not None
        return [loss.detach(), summand.grad]

    expected = run(None)
    for policy in EXACT:
        session = Session(policy, min_nbytes=0)
        for one, other in zip(expected, run(session), strict=True):
            assert torch.equal(bits(one), bits(other))
        assert_holds_nothing(session)


def test_the_sign_of_a_partial_sum_is_not_known(tmp_path: Path) -> None:
    run_together(tmp_path, _partial_sums)


def _kept_gradients() -> None:
    """Gradients of DTensors that a hook keeps must not be overwritten by kernels that reuse dead gradients."""
    mesh = _mesh()

    def run(session: Session | None) -> list[Tensor]:
        torch.manual_seed(0)
        kept: list[Any] = []
        x = DTensor.from_local(torch.randn(ROWS, WIDTH), mesh, [Shard(0)]).requires_grad_()
        if session is not None:
            session.__enter__()
        hidden = x * 1
        for function in (F.relu, F.gelu, F.silu, torch.tanh, torch.sigmoid):
            hidden = function(hidden)
            hidden.register_hook(kept.append)
        loss = hidden.to_local().square().sum()
        del hidden
        if session is not None:
            session.__exit__(None, None, None)
        loss.backward()
        assert x.grad is not None
        return [x.grad.to_local(), *(grad.to_local() for grad in kept)]

    expected = run(None)
    for policy in EXACT:
        session = Session(policy, min_nbytes=0)
        for one, other in zip(expected, run(session), strict=True):
            assert torch.equal(bits(one), bits(other))
        assert_holds_nothing(session)


def test_a_hook_keeps_the_gradient_of_a_dtensor(tmp_path: Path) -> None:
    run_together(tmp_path, _kept_gradients)


# -- other wrappers ----------------------------------------------------------------------------------------------------


class _Wrapper(torch.Tensor):
    """A traceable wrapper of one tensor, or of that and a scale."""

    inner: Tensor
    scale: Tensor | None

    @staticmethod
    def __new__(cls, inner: Tensor, scale: Tensor | None = None) -> _Wrapper:
        made: _Wrapper = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )
        made.inner, made.scale = inner, scale
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"] if self.scale is None else ["inner", "scale"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], context: None, shape: Any, stride: Any) -> _Wrapper:
        return _Wrapper(parts["inner"], parts.get("scale"))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        scale = next((arg.scale for arg in args if isinstance(arg, _Wrapper)), None)
        plain = [arg.inner if isinstance(arg, _Wrapper) else arg for arg in args]
        made = func(*plain, **(kwargs or {}))
        return _Wrapper(made, scale) if isinstance(made, Tensor) else made


def _wrapped_steps(scale: Tensor | None, order: str, session: Session | None) -> list[Tensor]:
    x = torch.randn(64, 48, generator=torch.Generator().manual_seed(0))
    x = _Wrapper(x.t() if order == "transposed" else x, scale).requires_grad_()
    if session is not None:
        session.__enter__()
    hidden = torch.relu(x * 2)
    loss = (hidden * hidden.exp().tanh().t().t()).sum()
    del hidden
    if session is not None:
        session.__exit__(None, None, None)
    loss.backward()
    assert isinstance(x.grad, _Wrapper)
    assert isinstance(loss, _Wrapper)
    return [loss.inner.detach(), x.grad.inner]


@pytest.mark.parametrize("order", ["rows", "transposed"])
@pytest.mark.parametrize("inner_tensors", [1, 2])
@pytest.mark.parametrize("policy", [*EXACT, *LOSSY])
def test_a_wrapper_subclass_is_kept_unless_it_wraps_one_tensor(policy: str, inner_tensors: int, order: str) -> None:
    scale = torch.ones(()) if inner_tensors == 2 else None
    expected = _wrapped_steps(scale, order, None)
    session = Session(policy, min_nbytes=0)
    found = _wrapped_steps(scale, order, session)
    if policy in EXACT or inner_tensors == 2:
        for one, other in zip(expected, found, strict=True):
            assert one.stride() == other.stride()
            assert torch.equal(bits(one), bits(other))
    assert any(row.codec != "kept" for row in session.report().rows) == (inner_tensors == 1 and policy != "keep")
    gc.collect()
    assert_holds_nothing(session)
