"""What the compiled functions encode, decode and remake in one pass has the bits of what their references make."""

from __future__ import annotations

import gc
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backstash import Session
from backstash import session as sessions
from backstash.codecs import Binary, Bitmask, Csr, Zvc
from backstash.errors import NeedNotMetError
from backstash.ops.cpu import library
from backstash.policies import Policy, Stash
from backstash.saved import Mask, Need, SavedTensor, Test
from backstash.stash import compiled, fused
from backstash.stash.encode import Encoder
from backstash.stores import DeviceStore

pytestmark = pytest.mark.skipif(
    compiled.functions is None, reason="nothing is compiled: run 'python setup.py build_native'"
)

SIZES = (1, 7, 8, 9, 1000, 4095, 4096, 4097, 9000, 70_000)
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def kinds(n: int, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Tensors of every kind that codecs tell apart."""
    x = torch.randn(n)
    yield "dense", x.to(dtype)
    yield "some zeros", x.relu().to(dtype)
    yield "many zeros", ((torch.rand(n) < 0.05) * x).to(dtype)
    yield "zeros", torch.zeros(n, dtype=dtype)
    yield "one value", torch.full((n,), 1.25, dtype=dtype)
    yield "two values", ((torch.rand(n) < 0.3) * 1.25).to(dtype)
    yield "two values without zero", torch.where(torch.rand(n) < 0.5, -1.0, 3.0).to(dtype)
    late = torch.where(torch.rand(n) < 0.5, 0.0, 2.0)
    late[n // 2 : n // 2 + 1] = 7.0  # where a sample may not look
    yield "a third value", late.to(dtype)
    odd = x.clone()
    for position, number in enumerate((0.0, -0.0, math.nan, -math.nan, math.inf, -math.inf, 1e-42)):
        odd[position % n :: 11] = number
    yield "odd numbers", odd.to(dtype)
    yield "odd numbers and zeros", torch.where(torch.rand(n) < 0.7, torch.tensor(0.0), odd).to(dtype)


class Says(Policy):
    """Says the same of every value of which more is read than a sign, and stores signs as bits."""

    is_fixed = True

    def __init__(self, *codecs: Any) -> None:
        self.action, self.signs = Stash(codecs), Stash(Bitmask(Mask(Test.NOT_LE)))

    def __repr__(self) -> str:
        return "Says()"

    def decide(self, saved: SavedTensor) -> Stash:
        return self.signs if saved.need is Need.SIGN else self.action


def bits(x: Tensor) -> bytes:
    return x.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def stored(store: Any) -> list[Any]:
    """Everything that a store holds, its planes bit for bit."""
    return [
        (encoded.codec, encoded.spec, {name: bits(plane) for name, plane in encoded.planes.items()}, dict(encoded.meta))
        for _, encoded in sorted(store._values.items())
    ]


def layouts(x: Tensor) -> Iterator[Tensor]:
    yield x
    if x.numel() == 4096:
        yield x.reshape(16, 256).t()
        yield x.reshape(2, 8, 16, 16).contiguous(memory_format=torch.channels_last)


def steps(x: Tensor, policy: Policy, reads: Callable[[Tensor], Tensor]) -> list[Any]:
    """What is told of two steps in which backward reads the tensor, which nobody else holds."""
    session = Session(policy, min_nbytes=0)
    told: list[Any] = []
    for _ in range(2):
        root = torch.ones((), dtype=x.dtype, requires_grad=True)
        with session:
            y = reads(x.clone() * root)
        told.append(stored(session.stores["device"]))
        usage = session.stores["device"].usage()
        report = session.report()
        told.append([(row.codec, row.reason, row.stash_nbytes, row.store) for row in report.rows])
        told.append((usage.nbytes, usage.count, usage.peak_nbytes))
        y.sum().backward()
        assert root.grad is not None
        told.append(bits(root.grad))
        told.append([(row.codec, row.decodes) for row in session.report().rows])
        del y, root
        gc.collect()
        usage = session.stores["device"].usage()
        assert usage.nbytes == usage.count == 0
    return told


def squared(x: Tensor) -> Tensor:
    return x * x


def rectified(x: Tensor) -> Tensor:
    return x.relu()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", SIZES)
def test_the_same_is_stored(n: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(n)
    cases = [
        (name, x, policy, reads)
        for name, given in kinds(n, dtype)
        for x in layouts(given)
        for policy in (Says(Binary(), Zvc()), Says(Zvc(0.3)), Says(Binary()))
        for reads in (squared,)
    ]
    masks = [(name, x, Says(Zvc()), rectified) for name, given in kinds(n, dtype) for x in layouts(given)]
    found = [steps(x, policy, reads) for _, x, policy, reads in (*cases, *masks)]
    monkeypatch.setattr(sessions, "encode", Encoder.encode)
    expected = [steps(x, policy, reads) for _, x, policy, reads in (*cases, *masks)]
    for one, other, (name, x, policy, reads) in zip(found, expected, (*cases, *masks), strict=True):
        assert one == other, (name, tuple(x.shape), policy.action, reads.__name__)


def test_settled_steps_encode_and_decode_without_the_references(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[str] = []
    for kind, name in ((Encoder, "form"), (Encoder, "decide"), (Encoder, "store"), (Zvc, "decode"), (Binary, "decode")):
        reference = getattr(kind, name)
        monkeypatch.setattr(kind, name, lambda *args, name=name, to=reference: (left.append(name), to(*args))[1])
    session, layers = Session("lossless_stored", min_nbytes=0), [nn.Linear(64, 64) for _ in range(3)]
    x = torch.randn(64, 64)
    for step in range(6):
        left.clear()
        y = x
        with session:
            for layer in layers:
                y = F.dropout(layer(y).relu(), 0.3)
            loss = y.square().sum()
            del y
        loss.backward()
        if step == 0:
            assert left
    assert left == []
    assert {row.codec for row in session.report().rows} >= {"binary", "zvc"}


def test_other_codecs_and_stores_are_left_to_the_reference() -> None:
    x = torch.randn(4096).relu()
    for policy in (Says(Csr(), Zvc()), Says(Zvc(), Csr())):
        steps(x, policy, squared)

    class Counts(DeviceStore):
        puts = 0

        def put(self, encoded: Any) -> Any:
            Counts.puts += 1
            return super().put(encoded)

    session = Session("lossless_stored", min_nbytes=0, stores={"device": Counts()})
    for _ in range(3):
        root = torch.ones((), requires_grad=True)
        with session:
            y = squared(x.clone() * root)
        y.sum().backward()
    assert Counts.puts >= 3


# -- batch norm, a sum and an activation -------------------------------------------------------------------------------


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": F.relu,
    "relu in place": lambda x: F.relu(x, inplace=True),
    "relu6": F.relu6,
    "hardtanh": lambda x: F.hardtanh(x, -0.5, 0.75),
    "clamp": lambda x: x.clamp(max=0.5),
    "leaky": lambda x: F.leaky_relu(x, 0.2),
}


class Normed(nn.Module):
    def __init__(self, dimensions: int, affine: bool, activation: str, residual: str) -> None:
        super().__init__()
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dimensions - 1]
        norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dimensions - 1]
        self.first, self.second, self.third = (conv(a, b, 3, padding=1) for a, b in ((3, 6), (6, 6), (6, 4)))
        self.one, self.two = norm(6, affine=affine), norm(6, affine=affine)
        self.activation, self.residual = ACTIVATIONS[activation], residual

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.one(self.first(x)))
        y = self.two(self.second(x))
        if self.residual == "after":
            y = y + x
        elif self.residual == "before":
            y = x + y
        elif self.residual == "made":
            y = y + x.sigmoid()
        return self.third(self.activation(y))  # type: ignore[no-any-return]


@pytest.mark.parametrize("residual", ["none", "after", "before", "made"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_one_pass_has_the_bits_of_the_calls(activation: str, residual: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    reference = fused.affine

    def noted(*args: Any) -> Any:
        called.append(args[0].call.name)
        return reference(*args)

    monkeypatch.setattr(fused, "affine", noted)
    for dimensions, affine, last in ((2, True, False), (2, False, True), (1, True, False), (3, True, True)):
        torch.manual_seed(dimensions)
        model = Normed(dimensions, affine, activation, residual)
        x = torch.randn(4, 3, *([6] * dimensions))
        if last:
            x = x.contiguous(memory_format=torch.channels_last if dimensions == 2 else torch.channels_last_3d)
        session = Session("lossless", min_nbytes=0)

        def gradients(within: Session | None, model: nn.Module = model, x: Tensor = x) -> list[Tensor]:
            model.zero_grad()
            if within is None:
                model(x).square().sum().backward()
            else:
                with within:
                    loss = model(x).square().sum()
                loss.backward()
            return [p.grad.clone() for p in model.parameters() if p.grad is not None]

        for step in range(5):
            called.clear()
            expected = gradients(None)
            found = gradients(session)
            assert all(bits(a) == bits(b) for a, b in zip(found, expected, strict=True)), (dimensions, affine, step)
        assert called == [], "the compiled function knows them all"
        assert any(row.codec == "recompute" for row in session.report().rows)


def test_what_the_kernel_does_not_take_runs_call_by_call() -> None:
    """Double precision, a weight in another layout, images of one pixel: what is not taken is not wrong."""
    torch.manual_seed(0)
    for change in ("double", "no batch", "weights", "flat"):
        model = Normed(2, True, "relu", "after")
        x = torch.randn(4, 3, 6, 6)
        if change == "double":
            model, x = model.double(), x.double()
        elif change == "no batch":
            x = x[:1]
        elif change == "weights":
            model.one.weight.data = torch.randn(12)[::2]
        else:
            x = x[..., :1, :1]
        session = Session("lossless", min_nbytes=0)
        for _ in range(4):
            model.zero_grad()
            model(x).square().sum().backward()
            expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            model.zero_grad()
            with session:
                loss = model(x).square().sum()
            loss.backward()
            found = [p.grad for p in model.parameters() if p.grad is not None]
            assert all(bits(a) == bits(b) for a, b in zip(found, expected, strict=True)), change


def test_needs_are_those_of_the_reference() -> None:
    """A codec that does not serve a need is an error under the compiled functions as well."""

    class Wrong(Says):
        def decide(self, saved: SavedTensor) -> Stash:
            return Stash(Bitmask(Mask(Test.NOT_LE))) if saved.need is Need.VALUE else self.action

    session = Session(Wrong(Zvc()), min_nbytes=0)
    with pytest.raises(NeedNotMetError, match="preserves"), session:
        root = torch.ones(64, requires_grad=True)
        squared(root * 2.0).sum().backward()


@pytest.mark.slow
def test_kernels_of_another_version_do_not_keep_the_package_from_being_imported(tmp_path: Path) -> None:
    """The first kernel that is called says what is wrong, and until then the references serve."""
    package = Path(compiled.__file__).parents[1]
    shutil.copytree(package, tmp_path / "backstash", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "backstash" / "ops" / "cpu" / library.PATH.name).write_bytes(b"no library")
    script = "import backstash\nfrom backstash.stash import compiled\nprint(backstash.__file__, compiled.functions)"
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(tmp_path)}
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == [str(tmp_path / "backstash" / "__init__.py"), "None"]
