"""Views, layouts and types of saved tensors, several readers of one storage, and values that are not stored."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from gradient_checks import Everything, difference
from session_checks import by_policy, holds_nothing
from torch import Tensor, nn

from backstash import Policy, Session


def _quantized(x: Tensor) -> Tensor:
    return torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127).square()


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: torch.exp((x * 2)[1:3]).sum() + torch.tanh((x * 3).view(-1)[5:40]).sum(),
    "expanded": lambda x: torch.exp((x * 2)[:, :1].expand(4, 6)) * torch.tanh((x * 3)[:1].expand(8, 4, 16)[0, :, :6]),
    "stride 0": lambda x: (x * 2).sum().expand(4, 16) * torch.exp(x * 2),
    "transposed": lambda x: torch.exp((x * 2).t()) @ torch.tanh(x * 3),
    "diagonal": lambda x: torch.exp((x * 2)[:, :4].diagonal()) * torch.tanh((x * 3).diagonal(1)),
    "unfolded": lambda x: torch.exp((x * 2).unfold(1, 5, 2)).square(),
    "strided slice": lambda x: torch.exp((x * 2)[::2, 1::3]).square(),
    "flipped": lambda x: torch.exp((x * 2).flip(0)).square(),
    "channels_last": lambda x: torch.exp((x * 2).view(1, 2, 4, 8).contiguous(memory_format=torch.channels_last)),
    "scalar": lambda x: torch.exp((x * 2).sum()) * torch.tanh((x * 3)[0, 0]),
    "empty": lambda x: torch.exp((x * 2)[:0]).sum() + (x * 3)[:0].prod(),
    "complex": lambda x: torch.exp(torch.complex(x * 2, x * 3)).abs(),
    "conjugate": lambda x: (torch.complex(x * 2, x * 3).conj() * torch.complex(x * 4, x * 5)).abs(),
    "negative view": lambda x: torch.exp(torch.complex(x * 2, x * 3).conj().imag) * 2,
    "real view": lambda x: torch.view_as_real(torch.exp(torch.complex(x * 2, x * 3))).square(),
    "as another type": lambda x: torch.exp(torch.view_as_complex(torch.stack((x * 2, x * 3), -1))).real.square(),
    "sparse": lambda x: torch.sparse.mm((x * 2)[:, :4].relu().to_sparse(), torch.exp(x * 3)),
    "sparse csr": lambda x: torch.eye(4).to_sparse_csr() @ torch.exp(x * 2),
    "fake quantised": _quantized,
    "integers": lambda x: torch.gather(x * 2, 1, torch.tensor([[3, 0], [1, 2], [0, 0], [5, 6]])).exp(),
    "bool mask": lambda x: torch.where((x * 2) > 0, (x * 2).exp(), (x * 3).sin()),
    "indexed": lambda x: (x * 2)[torch.tensor([0, 2, 2])][:, torch.tensor([True, False] * 8)].exp(),
    "nested": lambda x: torch.nested.to_padded_tensor(
        torch.nested.as_nested_tensor([(x * 2)[:3], (x * 3)[:2]], layout=torch.jagged).sin(), 0.0
    ),
    "float64": lambda x: torch.exp(x.double() * 2).float(),
    "float16": lambda x: torch.exp(x.half() * 2).float(),
    "float8": lambda x: torch.exp(x.to(torch.float8_e4m3fn).float() * 2),
}


@pytest.mark.cases(40)
@by_policy
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("min_nbytes", [0, 1 << 20], ids=["all", "large only"])
@pytest.mark.parametrize("forward", KINDS.values(), ids=KINDS)
def test_kinds_of_tensors(forward: Callable[[Tensor], Tensor], min_nbytes: int, policy: str | Policy) -> None:
    x = torch.linspace(-2, 2, 64).reshape(4, 16).requires_grad_()
    expected = torch.autograd.grad(forward(x).sum(), x)[0]
    with Session(policy, min_nbytes=min_nbytes) as session:
        loss = forward(x).sum()
    assert difference(expected, torch.autograd.grad(loss, x)[0]) is None
    del loss
    assert holds_nothing(session)


def test_one_storage_with_many_views_is_stored_once() -> None:
    x = torch.randn(16, 16, requires_grad=True)

    def forward() -> Tensor:
        h = F.relu(x * 2)
        return (h.exp() @ h.t()).sum() + (h[2:5] * h[:, 3:4].expand(16, 16)[2:5]).sum() + h.view(-1)[7:90].sin().sum()

    expected = torch.autograd.grad(forward(), x)[0]
    with Session(Everything(), min_nbytes=0) as session:
        loss = forward()
    assert difference(expected, torch.autograd.grad(loss, x)[0]) is None
    (row,) = [row for row in session.report().rows if row.key == "/Relu#0:result" or "/Relu#0:result" in row.shared_by]
    assert row.need == "VALUE"
    assert row.codec == "zvc"
    assert len(row.shared_by) >= 4


def test_one_use_reads_a_sign_and_another_the_value() -> None:
    """The strongest need counts, whichever use comes first."""
    x = torch.randn(64, requires_grad=True)
    for swap in (False, True):

        def forward(swap: bool = swap) -> Tensor:
            h = x * 2
            uses = [lambda: F.leaky_relu(h).sum(), lambda: h.sin().sum()]
            first, second = reversed(uses) if swap else uses
            return first() + second()

        expected = torch.autograd.grad(forward(), x)[0]
        with Session(Everything(), min_nbytes=0) as session:
            loss = forward()
        assert difference(expected, torch.autograd.grad(loss, x)[0]) is None
        assert [(row.need, row.codec) for row in session.report().rows] == [("VALUE", "zvc")]


def test_two_uses_read_different_signs() -> None:
    x = torch.randn(64, requires_grad=True)

    def forward() -> Tensor:
        h = x * 2
        return F.leaky_relu(h).sum() + F.hardtanh(h, -0.5, 1.5).sum() + h.abs().sum()

    expected = torch.autograd.grad(forward(), x)[0]
    with Session(Everything(), min_nbytes=0) as session:
        loss = forward()
    assert difference(expected, torch.autograd.grad(loss, x)[0]) is None
    assert [row.codec for row in session.report().rows] == ["zvc"]


def test_two_uses_read_the_same_sign() -> None:
    x = torch.randn(64, requires_grad=True)

    def forward() -> Tensor:
        h = x * 2
        return F.leaky_relu(h).sum() + F.leaky_relu(h, 0.3).square().sum()

    expected = torch.autograd.grad(forward(), x)[0]
    with Session("lossless", min_nbytes=0) as session:
        loss = forward()
    assert difference(expected, torch.autograd.grad(loss, x)[0]) is None
    assert [row.codec for row in session.report().rows if row.need == "SIGN"] == ["bitmask"]


def test_a_value_that_several_nodes_read_is_encoded_once_and_decoded_in_turn() -> None:
    """Gradients of the uses arrive one after the other, and the value that was decoded first serves them all."""
    x = torch.randn(512, 512, requires_grad=True)

    def forward() -> Tensor:
        h = F.relu(x * 2)
        return (h.exp() + h.sin() + h.cos()).sum()

    expected = torch.autograd.grad(forward(), x)[0]
    with Session(Everything(), min_nbytes=0) as session:
        loss = forward()
    assert difference(expected, torch.autograd.grad(loss, x)[0]) is None
    (row,) = [row for row in session.report().rows if "/Relu#0:result" in (row.key, *row.shared_by)]
    assert row.codec == "zvc"
    assert row.decodes >= 1
    usage = session.stores["device"].usage()
    assert usage.count == 0


def test_parameters_are_kept_by_reference() -> None:
    layer = nn.Linear(32, 32)
    with Session(Everything(), min_nbytes=0) as session:
        loss = layer(torch.randn(4, 32).requires_grad_().clone()).sum() + (torch.randn(4, 32) @ layer.weight.t()).sum()
    report = session.report()
    assert report.parameter_nbytes == layer.weight.nbytes
    assert not any("32, 32" in row.spec for row in report.rows)
    loss.backward()


def test_values_that_the_program_holds_are_kept_by_reference() -> None:
    x = torch.randn(64, requires_grad=True)
    with Session(Everything(), min_nbytes=0) as session:
        held = x * 2
        loss = torch.sin(held).sum()
    (row,) = session.report().rows
    assert (row.codec, row.reason) == ("kept", "held by the program, kept by reference")
    loss.backward()
