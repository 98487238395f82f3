"""Sums of gradients: the engine adds in place where it does so in plain, and so lays out sums as in plain."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gradient_checks import Remake, differences
from torch import Tensor, nn

from backstash import Session, interpreter, saved
from backstash.redeem import exclusive
from backstash.torch_internals import storage_of, storage_use_count

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "hardtanh": F.hardtanh,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "gelu": F.gelu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "dropout": lambda x: F.dropout(x, 0.5, True),
    "softmax": lambda x: F.softmax(x, -1),
    "product": lambda x: x * torch.tanh(x),
    "row factor": lambda x: x * x.new_tensor([0.0, 1.25] * (len(x) // 2)).view(-1, *[1] * (x.dim() - 1)),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "group_norm": lambda x: F.group_norm(x, 2),
    "linear": lambda x: F.linear(x, torch.eye(x.shape[-1], requires_grad=True)),
    "twice": lambda x: F.relu(torch.tanh(F.relu(x * 2.0))),
}
POLICIES: dict[str, Callable[[], Any]] = {"lossless": lambda: "lossless", "remake": Remake}


def session_of(policy: str) -> Session:
    return Session(POLICIES[policy](), min_nbytes=0, stop_if_useless=False)


def is_added_in_place(function: Callable[[Tensor], Tensor], around: Callable[[Tensor], Tensor], session: Any) -> bool:
    """Whether the gradient of a residual is where the gradient of the result was."""
    found: list[int] = []
    x = torch.randn(64, 4, 8, 8).requires_grad_()
    with nullcontext() if session is None else session:
        y = x * 1.0
        z = around(function(y * 2.0)) + y
        z.register_hook(lambda grad: found.append(grad.data_ptr()))
        y.register_hook(lambda grad: found.append(grad.data_ptr()))
        loss = (z * 3.0).sum()
    loss.backward()
    return found[0] == found[1]


@pytest.mark.parametrize("around", [lambda x: x, lambda x: x.mT.mT])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_gradient_that_a_claims_kernel_has_read_is_added_to_in_place(
    name: str, policy: str, around: Callable[[Tensor], Tensor]
) -> None:
    plain = is_added_in_place(FUNCTIONS[name], around, None)
    session = session_of(policy)
    found = [is_added_in_place(FUNCTIONS[name], around, session) for _ in range(12)]
    assert found == [plain] * 12


@pytest.mark.skipif(interpreter.module is None, reason="without it, Python's object of the storage has to be made")
@pytest.mark.parametrize("name", ["relu", "silu", "group_norm", "product"])
def test_a_gradient_that_is_written_over_is_added_to_in_place(name: str) -> None:
    """The residual's gradient comes out of a kernel that has written over what it was given."""

    def added(session: Any) -> bool:
        found: list[int] = []
        x = torch.randn(64, 4, 8, 8).requires_grad_()
        with nullcontext() if session is None else session:
            y = x * 1.0
            z = torch.tanh(y * 2.0) + y
            loss = (FUNCTIONS[name](z) * 3.0).sum()
        z.register_hook(lambda grad: found.append(grad.data_ptr()))
        y.register_hook(lambda grad: found.append(grad.data_ptr()))
        loss.backward()
        return found[0] == found[1]

    session = session_of("lossless")
    assert [added(session) for _ in range(12)] == [added(None)] * 12


MEMORIES: dict[str, Callable[[], Tensor]] = {
    "own": lambda: torch.ones(4, 8),
    "transposed": lambda: torch.ones(4, 8).t(),
    "a part": lambda: torch.ones(4, 8)[1:],
    "a view": lambda: torch.ones(4, 8).view(-1),
    "expanded": lambda: torch.ones(4, 1).expand(4, 8),
    "resized": lambda: torch.ones(2).resize_(4, 8).fill_(1.0),
    "empty": lambda: torch.empty(0),
    "shared": lambda: torch.ones(4, 8).share_memory_(),
    "numpy": lambda: torch.from_numpy(np.ones((4, 8))),
    "dlpack": lambda: torch.from_dlpack(np.ones((4, 8))),
    "a buffer": lambda: torch.frombuffer(bytearray(32), dtype=torch.float32),
}


@pytest.mark.skipif(interpreter.module is None, reason="the interpreter of scripts is not built")
@pytest.mark.parametrize("name", MEMORIES)
def test_whose_memory_it_is_is_asked_without_an_object_of_the_storage(name: str) -> None:
    x = MEMORIES[name]()
    holders = storage_use_count(storage_of(x))
    assert interpreter.owns_memory(x) == saved.owns_memory(MEMORIES[name]())
    assert exclusive.count(x)[2] == storage_use_count(storage_of(x)) == holders
    assert saved.owns_memory(x) == (name in ("own", "transposed", "a view", "resized", "empty"))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in ("linear", "layer_norm", "softmax")])
def test_images_of_one_pixel_are_laid_out_as_in_plain(name: str, size: int, policy: str) -> None:
    """Two layouts have the same elements in the same order there, and kernels choose the order of sums by them."""

    def train(session: Session | None) -> list[Tensor | None]:
        torch.manual_seed(0)
        channels, found = 192, []
        convs = nn.ModuleList([nn.Conv2d(channels, channels, 1, bias=False) for _ in range(2)])
        norms = nn.ModuleList([nn.BatchNorm2d(channels) for _ in range(2)])
        model = nn.ModuleList([*convs, *norms, nn.Conv2d(channels, 64, 1, bias=False)])
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        for _ in range(12):
            model.zero_grad()
            x = torch.randn(2, channels, size, size).contiguous(memory_format=torch.channels_last)
            with nullcontext() if session is None else session:
                y = norms[0](convs[0](x))
                loss = model[-1](FUNCTIONS[name](norms[1](convs[1](y))) + y).square().sum()
            loss.backward()
            found += [parameter.grad for parameter in model.parameters()]
        return found

    assert differences(train(None), train(session_of(policy))) == []
