"""Programs that differentiate a backward pass: never more memory than plain PyTorch, and the same bits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
import torch.nn.functional as F
from gradient_checks import differences
from session_checks import holds_nothing
from torch import Tensor, nn

from backstash import Policy, Session, measure
from backstash.policies import gist_lossless

CHANNELS, SIZE, BATCH = 8, 16, 16


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.Linear(CHANNELS, 3 * CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.heads(F.avg_pool2d(x, 2).flatten(2).transpose(1, 2)).chunk(3, dim=-1)
        weights = F.softmax(query @ key.transpose(1, 2) / CHANNELS**0.5, dim=-1)
        mixed = (weights @ value).transpose(1, 2).reshape(len(x), CHANNELS, SIZE // 2, SIZE // 2)
        return x + F.interpolate(mixed, scale_factor=2)


class TokenNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.movedim(1, -1)).movedim(-1, 1).tanh()


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "relu in place": lambda: nn.ReLU(inplace=True),
    "leaky relu": lambda: nn.LeakyReLU(0.2),
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
    "softplus": nn.Softplus,
    "pooling": lambda: nn.Sequential(nn.ReLU(), nn.MaxPool2d(2), nn.Upsample(scale_factor=2)),
    "dropout": lambda: nn.Sequential(nn.ReLU(), nn.Dropout(0.3)),
    "batch norm": lambda: nn.Sequential(nn.BatchNorm2d(CHANNELS), nn.ReLU()),
    "layer norm": TokenNorm,
    "group norm": lambda: nn.Sequential(nn.GroupNorm(2, CHANNELS), nn.LeakyReLU(0.1)),
    "attention": Attention,
}

Step = Callable[[nn.Module, Tensor, AbstractContextManager[object]], None]


def gradient_penalty(model: nn.Module, x: Tensor, session: AbstractContextManager[object]) -> None:
    with session:
        y = model(x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (y.mean() + slope.square().mean()).backward()


def critic(model: nn.Module, x: Tensor, session: AbstractContextManager[object]) -> None:
    """WGAN-GP: two losses and the penalty at points between, all inside of the Session."""
    with session:
        loss = model(x.detach().flip(0)).mean() - model(x.detach()).mean()
        between = x.detach().lerp(x.detach().flip(0), 0.3).requires_grad_()
        (slope,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
        loss = loss + (slope.flatten(1).norm(dim=1) - 1).square().mean()
    loss.backward()


def real_penalty(model: nn.Module, x: Tensor, session: AbstractContextManager[object]) -> None:
    """R1: the penalty's backward pass runs inside, like all of the step."""
    with session:
        scores = model(x).mean(dim=(1, 2, 3))
        (slope,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
        (F.softplus(-scores).mean() + 5.0 * slope.square().sum(dim=(1, 2, 3)).mean()).backward()


def hessian_product(model: nn.Module, x: Tensor, session: AbstractContextManager[object]) -> None:
    parameters = list(model.parameters())
    with session:
        loss = model(x).square().mean()
    slopes = torch.autograd.grad(loss, parameters, create_graph=True)
    products = torch.autograd.grad(slopes, parameters, [torch.ones_like(p) for p in parameters], retain_graph=True)
    for parameter, product in zip(parameters, products, strict=True):
        assert parameter.grad is not None
        parameter.grad += product


def inner_loop(model: nn.Module, x: Tensor, session: AbstractContextManager[object]) -> None:
    """MAML: the loss after two updates, whose gradients have graphs."""
    weights = dict(model.named_parameters())
    with session:
        for _ in range(2):
            loss = torch.func.functional_call(model, weights, (x,)).square().mean()
            slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
            weights = {name: w - 0.1 * slope for (name, w), slope in zip(weights.items(), slopes, strict=True)}
        loss = torch.func.functional_call(model, weights, (x,)).mean()
    loss.backward()


def jacobian_penalty(model: nn.Module, x: Tensor, session: AbstractContextManager[object]) -> None:
    """Two projections of the Jacobian, from one retained graph."""
    with session:
        y = model(x)
        penalty = y.square().mean()
        for number in range(2):
            direction = torch.randn(y.shape, generator=torch.Generator().manual_seed(number))
            (slope,) = torch.autograd.grad(y, x, direction, create_graph=True, retain_graph=True)
            penalty = penalty + slope.square().mean()
    penalty.backward()


def smoothed_input(model: nn.Module, x: Tensor, session: AbstractContextManager[object]) -> None:
    """The gradient of the loss by the input is itself an input of a second pass (double backpropagation)."""
    with session:
        loss = model(x).square().mean()
        loss.backward(create_graph=True, inputs=[x])
        assert x.grad is not None
        penalty = x.grad.square().mean()
        x.grad = None
        (loss + penalty).backward()


def two_passes(model: nn.Module, x: Tensor, session: AbstractContextManager[object]) -> None:
    with session:
        y = model(x)
    y.square().mean().backward(retain_graph=True)
    y.mean().backward()


def vector_products(model: nn.Module, x: Tensor, session: AbstractContextManager[object]) -> None:
    """An implicit layer's backward: products with one Jacobian, again and again, before the last pass."""
    with session:
        y = model(x)
    vector = torch.ones_like(y)
    for _ in range(3):
        (product,) = torch.autograd.grad(y, x, vector, retain_graph=True)
        vector = 1.0 + 0.1 * product
    y.backward(vector)


STEPS: dict[str, Step] = {
    "gradient penalty": gradient_penalty,
    "critic": critic,
    "real penalty": real_penalty,
    "hessian product": hessian_product,
    "inner loop": inner_loop,
    "jacobian penalty": jacobian_penalty,
    "smoothed input": smoothed_input,
    "two passes": two_passes,
    "vector products": vector_products,
}
POLICIES: dict[str, str | Policy] = {
    "lossless": "lossless",
    "lossless_stored": "lossless_stored",
    "gist_lossless": gist_lossless(),
    "gist_fp16": "gist_fp16",
}
LOSSY = frozenset({"gist_fp16"})


def network(layer: str) -> nn.Sequential:
    """Layers enough that what they save less outweighs one operator's encoded operands, which last while it runs."""
    torch.manual_seed(3)
    blocks = [nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), LAYERS[layer]()) for _ in range(5)]
    return nn.Sequential(*blocks, nn.Conv2d(CHANNELS, CHANNELS, 1))


def run(layer: str, step: str, session: Session | None) -> tuple[int, list[Tensor | None]]:
    """The counted peak of a step, and the gradients of the steps before it."""
    model = network(layer)
    x = torch.randn(BATCH, CHANNELS, SIZE, SIZE, generator=torch.Generator().manual_seed(4)).requires_grad_()
    x.grad = torch.zeros_like(x)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def once() -> None:
        torch.manual_seed(5)
        STEPS[step](model, x, nullcontext() if session is None else session)

    def tidy() -> None:
        model.zero_grad(set_to_none=False)
        if x.grad is None:
            x.grad = torch.zeros_like(x)
        x.grad.zero_()

    gradients = []
    for _ in range(2):
        tidy()
        once()
        gradients += [None if each.grad is None else each.grad.clone() for each in (x, *model.parameters())]

    def again() -> None:
        once()
        tidy()

    return measure(again, repeats=1, warmup=2).peak_nbytes, gradients


@pytest.mark.cases(6)
@pytest.mark.filterwarnings("ignore:Using backward")  # its graph is freed with the gradient
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("step", STEPS)
def test_it_never_takes_more_than_plain(step: str, layer: str, policy: str) -> None:
    plain_nbytes, plain = run(layer, step, None)
    session = Session(POLICIES[policy], min_nbytes=4096)
    nbytes, gradients = run(layer, step, session)
    assert nbytes <= 1.01 * plain_nbytes
    if policy not in LOSSY:
        assert not differences(plain, gradients)
    assert holds_nothing(session)


def test_requires_grad_that_changes_after_a_call_is_for_all_hooks_as_it_was_at_the_call() -> None:
    def of_weight(context: AbstractContextManager[object]) -> Tensor:
        torch.manual_seed(0)
        norm, x = nn.BatchNorm2d(4), torch.randn(2, 4, 6, 8).requires_grad_()
        norm.weight.requires_grad_(False)
        with context:
            loss = norm(x).sin().mean()
            norm.weight.requires_grad_(True)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (found,) = torch.autograd.grad(slope.square().sum(), norm.weight, allow_unused=True)
        return torch.zeros(4) if found is None else found

    def identity(x: Tensor) -> Tensor:
        return x

    with_hooks = of_weight(torch.autograd.graph.saved_tensors_hooks(identity, identity))
    assert of_weight(Session("lossless", min_nbytes=0)).equal(with_hooks)
    assert not of_weight(nullcontext()).equal(with_hooks), "torch's hooks have become like plain: say so in hazards.md"
