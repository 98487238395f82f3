"""Activations are switched to run in place if that is legal, and refused otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rewrite_checks import Net, backward, check, conv, out_of_place, outcome, step_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from backstash import Session, measure
from backstash.report.meter import CountedPeak
from backstash.rewrites import COPYING, OVERWRITING, inplace
from backstash.testing import equal_bits
from tests import networks

# ---- what is legal -------------------------------------------------------------------------------


@pytest.mark.slow
def test_vgg_switches_every_relu_and_no_dropout() -> None:
    features = networks.vgg16().get_submodule("features")
    classifier = [nn.Linear(512, 64), nn.ReLU(), nn.Dropout(), nn.Linear(64, 10)]
    model = out_of_place(nn.Sequential(features, nn.Flatten(), *classifier))
    switched, refused = check(model, step_of(model, 2, 3, 32, 32))
    relus = [path for path, module in model.named_modules() if isinstance(module, nn.ReLU)]
    assert len(relus) == 14 and list(switched) == relus
    assert list(refused) == ["4"] and "modified by an inplace operation" in refused["4"]


@pytest.mark.parametrize("session", [None, "lossless"])
def test_resnet_switches_every_relu_also_behind_the_sum(session: str | None) -> None:
    model = out_of_place(networks.resnet_cifar(8))
    step = step_of(model, 2, 3, 16, 16)
    switched, refused = check(model, step, None if session is None else Session(session, min_nbytes=0))
    relus = [path for path, module in model.named_modules() if isinstance(module, nn.ReLU)]
    assert len(relus) == 7 and list(switched) == relus and refused == {}


def preactivated(shortcut_first: bool) -> nn.Module:
    def block(net: Any, x: Tensor) -> Tensor:
        x = net.stem(x)
        before = x + 0 if shortcut_first else x
        return before + net.second(net.inner(net.first(net.outer(x))))

    return Net(block, stem=conv(), outer=nn.ReLU(), first=conv(), inner=nn.ReLU(), second=conv())


def test_preactivation_resnet_keeps_the_input_of_the_shortcut() -> None:
    model = preactivated(shortcut_first=False)
    switched, refused = check(model, step_of(model))
    assert switched == ("inner",) and list(refused) == ["outer"]
    assert "in place, what the step returns differs by up to" in refused["outer"]
    model = preactivated(shortcut_first=True)
    assert check(model, step_of(model)) == (("outer", "inner"), {})


def test_normalised_preactivation_is_legal() -> None:
    def block(net: Any, x: Tensor) -> Tensor:
        x = net.stem(x)
        return x + net.conv(net.relu(net.norm(x)))

    model = Net(block, stem=conv(), norm=nn.BatchNorm2d(4), relu=nn.ReLU(), conv=conv())
    assert check(model, step_of(model)) == (("relu",), {})


def test_densenet_concatenations() -> None:
    def dense(net: Any, x: Tensor) -> Tensor:
        features = [net.stem(x)]
        features.append(net.one(features[0]))  # reads what is concatenated later
        features.append(net.two(torch.cat(features, 1)))
        return torch.cat(features, 1)

    one = nn.Sequential(nn.ReLU(), conv(), nn.ReLU())
    two = nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1))
    model = Net(dense, stem=conv(), one=one, two=two)
    switched, refused = check(model, step_of(model))
    assert switched == ("one.2", "two.1") and list(refused) == ["one.0"]


@pytest.mark.parametrize("residual", [False, True])
def test_a_module_called_twice_is_switched_for_both_calls_or_none(residual: bool) -> None:
    def twice(net: Any, x: Tensor) -> Tensor:
        x = net.act(net.one(x))
        y = net.two(x)
        return net.act(y) + y if residual else net.act(y)

    model = Net(twice, one=conv(), two=conv(), act=nn.ReLU())
    switched, refused = check(model, step_of(model))
    assert (switched, list(refused)) == (((), ["act"]) if residual else (("act",), []))


def test_a_leaky_relu_holds_one_tensor_instead_of_two() -> None:
    layers = [layer for _ in range(4) for layer in (conv(8), nn.LeakyReLU())]
    model = nn.Sequential(*layers, conv(8))
    batch = torch.randn(8, 8, 32, 32)

    def step() -> None:
        model(batch).sum().backward()

    step()
    plain = measure(step, repeats=1, warmup=0).peak_nbytes
    with inplace(model, step) as rewrite:
        assert rewrite.switched == ("1", "3", "5", "7")
        switched = measure(step, repeats=1, warmup=0).peak_nbytes
    assert switched <= plain - 3 * batch.nbytes
    assert measure(step, repeats=1, warmup=0).peak_nbytes == plain


SHAPES = {nn.Dropout1d: (2, 4, 8), nn.Dropout3d: (2, 4, 8, 8, 8)}
by_kind = pytest.mark.parametrize("kind", [*OVERWRITING, *COPYING, nn.ReLU6], ids=lambda kind: kind.__name__)


def made(kind: Any, place: bool) -> nn.Module:
    return nn.Threshold(0.1, 0.0, place) if kind is nn.Threshold else kind(inplace=place)


@by_kind
def test_every_kind_is_proven_or_refused(kind: type[nn.Module]) -> None:
    act = made(kind, place=False)
    model = nn.Sequential(nn.Linear(8, 8), act, nn.Linear(8, 8))
    switched, refused = check(model, step_of(model, *SHAPES.get(kind, (2, 4, 8, 8))))
    if isinstance(act, COPYING):
        assert switched == () and "makes a copy also when it runs in place" in refused["1"]
    elif isinstance(act, (nn.ReLU, nn.LeakyReLU, nn.RReLU, nn.Dropout)):
        assert switched == ("1",)
    else:
        assert (switched == ("1",)) is not ("1" in refused)


@by_kind
def test_torch_copies_where_it_is_said_to(kind: type[nn.Module]) -> None:
    taken = {}
    for place in (False, True):
        act, x = made(kind, place), torch.randn(SHAPES.get(kind, (2, 4, 8, 8)), requires_grad=True) + 0
        with CountedPeak() as counter:
            y = act(x)
        taken[place] = counter.peak_nbytes
        del y
    assert (taken[True] < taken[False]) == (kind in OVERWRITING)


# ---- what is not ---------------------------------------------------------------------------------


def test_an_input_that_is_used_again_unseen_by_autograd() -> None:
    def twice(net: Any, x: Tensor) -> Tensor:
        x = net.conv(x)
        return net.relu(x) + x

    model = Net(twice, conv=conv(), relu=nn.ReLU())
    step = step_of(model)
    model.relu.inplace = True
    step()  # torch says nothing
    model.relu.inplace = False
    switched, refused = check(model, step)
    assert switched == () and "what the step returns differs" in refused["relu"]


def test_an_input_that_is_used_again_where_this_batch_does_not_tell() -> None:
    def twice(net: Any, x: Tensor) -> Tensor:
        x = net.linear(x) ** 2  # never negative
        return net.relu(x) + x

    model = Net(twice, linear=nn.Linear(8, 8), relu=nn.ReLU())
    step = step_of(model, 4, 8)
    plain = outcome(model, step)
    model.relu.inplace = True
    assert all(equal_bits(plain[name], x) for name, x in outcome(model, step).items())
    model.relu.inplace = False
    switched, refused = check(model, step)
    assert switched == () and refused["relu"].startswith("its input is read after it has run")


def test_of_two_readers_only_the_last_may_overwrite() -> None:
    def both(net: Any, x: Tensor) -> Tensor:
        x = net.linear(x)
        return net.first(x) - 2 * net.last(x)

    model = Net(both, linear=nn.Linear(8, 8), first=nn.ReLU(), last=nn.ReLU())
    switched, refused = check(model, step_of(model, 4, 8))
    assert switched == ("last",) and refused["first"].startswith("its input is read after it has run")


@pytest.mark.parametrize("policy", [None, "lossless", "keep"])
def test_an_output_that_its_producer_saved(policy: str | None) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Sigmoid(), nn.Dropout(), nn.Linear(64, 1))
    step = step_of(model, 128, 64)
    switched, refused = check(model, step, None if policy is None else Session(policy, min_nbytes=0))
    assert switched == ()
    assert refused["2"].startswith("in place, the step raises ") and "modified by an inplace operation" in refused["2"]


def test_what_only_its_shape_is_read_of_is_not_overwritten() -> None:
    """The Session holds no data of the tensor, but raises an error where plain PyTorch raises it."""

    def branches(net: Any, x: Tensor) -> Tensor:
        x = net.conv(x)
        pooled = net.pool(x)  # plain PyTorch keeps x for this; backward reads its shape only
        return pooled + net.pool(net.tail(net.relu(x)))

    model = Net(branches, conv=conv(), pool=nn.MaxPool2d(2), relu=nn.ReLU(), tail=conv())
    step = step_of(model)
    switched, refused = check(model, step)
    assert switched == () and "modified by an inplace operation" in refused["relu"]
    for policy in ("lossless", "keep"):
        switched, refused = check(model, step, Session(policy, min_nbytes=0))
        assert switched == () and "modified by an inplace operation" in refused["relu"]


def test_data_that_the_program_holds_is_not_overwritten() -> None:
    model = nn.Sequential(nn.ReLU(), nn.Linear(8, 8), nn.Dropout(0.5))
    batch = torch.randn(4, 8)
    before = batch.clone()
    switched, refused = check(model, lambda: backward(model(batch)))
    assert switched == ("2",) and "still held when the step is over" in refused["0"]
    assert equal_bits(batch, before) and batch._version == 0
    assert check(model, lambda: backward(model(before.clone())))[0] == ("0", "2")


def test_features_that_the_program_keeps_are_not_overwritten() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    features: list[Tensor] = []
    model[0].register_forward_hook(lambda module, args, output: features.append(output.detach()))
    switched, refused = check(model, step_of(model, 4, 8))
    assert switched == () and "still held" in refused["1"]


def test_a_checkpointed_input_is_not_overwritten() -> None:
    inner = nn.Sequential(nn.LeakyReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.LeakyReLU())
    model = Net(
        lambda net, x: checkpoint(net.inner, net.head(x), use_reentrant=False), head=nn.Linear(8, 8), inner=inner
    )
    switched, refused = check(model, step_of(model, 4, 8))
    assert switched == ("inner.2", "inner.4") and list(refused) == ["inner.0"]


def test_what_the_step_does_not_call_is_refused() -> None:
    model = Net(lambda net, x: net.relu(net.conv(x)), conv=conv(), relu=nn.ReLU(), head=nn.ReLU())
    switched, refused = check(model, step_of(model))
    assert switched == ("relu",) and "did not call it" in refused["head"]


def test_the_gradient_of_the_input_counts() -> None:
    def scaled(net: Any, x: Tensor) -> Tensor:
        y = net.frozen(x)
        z = net.relu(y)
        return z * net.scale(y.detach()).mean()

    model = Net(scaled, frozen=nn.Linear(8, 8), relu=nn.ReLU(), scale=nn.Linear(8, 1))
    model.requires_grad_(False)
    batch = torch.randn(4, 8, requires_grad=True)
    batch.grad = own = torch.ones(4, 8)
    rewrite = inplace(model, lambda: model(batch).sum().backward())
    assert rewrite.switched == () and "the gradient of the model's input 0 differs" in rewrite.refused["relu"]
    assert batch.grad is own and equal_bits(own, torch.ones(4, 8))
    assert not batch._backward_hooks
