"""A wrapped model trains bit for bit as it does without, in every surrounding that a loop has."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import re
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from integration_checks import (
    FEATURES,
    ROWS,
    Noting,
    assert_equal_bits,
    batches,
    installed,
    network,
    parameters_of,
)
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import backstash as bs
from backstash.errors import IntegrationError, SessionError, UnknownNameError
from backstash.integrations.loop import session_of
from backstash.papers.comet import comet
from backstash.planning.measure.profiling import profile
from backstash.planning.search.planner import plan

X = batches(1)[0][0]


def train(model: nn.Module, steps: int = 4, call: Callable[[nn.Module, Tensor], Tensor] | None = None) -> list[Tensor]:
    """Losses, gradients and final parameters of a plain loop."""
    call = call or (lambda model, x: model(x))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(3)
    found = []
    for x, y in batches(steps):
        optimizer.zero_grad()
        loss = functional.cross_entropy(call(model, x), y)
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
    return found + parameters_of(model)


@pytest.mark.parametrize("policy", ["lossless", "keep", "gist_lossless", "offload"])
def test_a_wrapped_model_trains_to_the_same_bits(policy: str) -> None:
    model = bs.wrap(network(), policy, min_nbytes=0)
    assert_equal_bits(train(network()), train(model))
    assert model.was_open == [True] * 4
    assert installed() == []
    report = session_of(model).report()
    assert report.steps == 4
    assert policy != "lossless" or report.ratio > 1.5


def test_wrap_returns_the_model_and_changes_neither_class_nor_state() -> None:
    model = network()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    names = [name for name, _ in model.named_modules()]
    wrapped = bs.wrap(model)
    assert wrapped is model
    assert type(model) is Noting
    assert [name for name, _ in model.named_modules()] == names
    assert list(model.state_dict()) == list(before)
    assert_equal_bits(before.values(), model.state_dict().values())
    assert not model._forward_hooks and not model._forward_pre_hooks


def test_keys_of_the_report_start_from_the_model() -> None:
    model = bs.wrap(network(), min_nbytes=0)
    model(X).sum().backward()
    assert all(row.key.startswith(("up/", "norm/", "drop/", "down/", "/")) for row in session_of(model).report().rows)


def test_unwrap_leaves_the_model_as_it_was() -> None:
    model = network()
    before = dict(model.__dict__)
    assert bs.unwrap(bs.wrap(model)) is model
    assert model.__dict__ == before
    model(X).sum().backward()
    assert model.was_open == [False]


def test_evaluation_and_no_grad_open_nothing() -> None:
    model = bs.wrap(network())
    with torch.no_grad():
        model(X)
    with torch.inference_mode():
        model(X)
    model.eval()
    model(X).sum().backward()
    assert model.was_open == [False] * 3
    model.train()
    model(X).sum().backward()
    assert model.was_open[3:] == [True]
    assert "nothing was saved" not in str(session_of(model).report())


def test_text_generation_opens_nothing() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=1, n_embd=16, n_head=2, vocab_size=32, n_positions=16, bos_token_id=0, eos_token_id=1
    )
    model = transformers.GPT2LMHeadModel(config)
    start = torch.tensor([[2, 3]])
    plain = model.eval().generate(start, max_new_tokens=4, do_sample=False)
    bs.wrap(model.train())
    torch.manual_seed(0)
    model.generate(start, max_new_tokens=4, do_sample=False)  # in training mode, without grad mode
    assert session_of(model).report().steps == 0
    assert torch.equal(plain, model.eval().generate(start, max_new_tokens=4, do_sample=False))
    assert session_of(model).report().steps == 0


class Recursive(nn.Module):
    """Calls itself, and a part that may be wrapped as well."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()
        self.back = nn.Linear(5, FEATURES)

    def forward(self, x: Tensor, again: bool = True) -> Tensor:
        """Maps [N, FEATURES] to [N, CLASSES]."""
        y: Tensor = self.inner(x)
        return self(self.back(y), again=False) if again else y


def test_of_nested_calls_the_outermost_opens() -> None:
    def make() -> Recursive:
        torch.manual_seed(5)
        return Recursive()

    model = make()
    bs.wrap(model.inner, "keep")
    bs.wrap(model, "lossless", min_nbytes=0)
    assert_equal_bits(train(make()), train(model))
    assert model.inner.was_open == [True] * 8
    assert session_of(model.inner).report().steps == 0
    assert session_of(model).report().steps == 4


def test_a_session_around_the_loop_treats_the_values() -> None:
    model = bs.wrap(network())
    with bs.Session("lossless", min_nbytes=0) as session:
        found = train(model)
    assert_equal_bits(train(network()), found)
    assert session.report().steps == 4
    assert session_of(model).report().steps == 0


@pytest.mark.parametrize("error", [RuntimeError("stop"), KeyboardInterrupt()], ids=["error", "ctrl-c"])
def test_nothing_is_left_behind_when_the_forward_pass_is_interrupted(error: BaseException) -> None:
    plain, model = network(), bs.wrap(network(), min_nbytes=0)
    for network_ in (plain, model):
        network_.error = error
        torch.manual_seed(0)
        with pytest.raises(type(error)):
            network_(X)
        network_.error = None
    assert installed() == []
    assert_equal_bits(train(plain), train(model))


def test_an_exception_in_the_loss_leaves_nothing_behind() -> None:
    model = bs.wrap(network(), min_nbytes=0)
    with pytest.raises(KeyboardInterrupt):
        loss_without_backward(model)
    assert installed() == []
    assert_equal_bits(train(network())[:1], train(bs.wrap(network(), min_nbytes=0))[:1])


def loss_without_backward(model: nn.Module) -> None:
    functional.cross_entropy(model(X), batches(1)[0][1])
    raise KeyboardInterrupt


def test_a_deep_copy_is_wrapped_and_has_a_session_of_its_own() -> None:
    model = bs.wrap(network(), min_nbytes=0)
    model(X).sum().backward()
    model.zero_grad()
    other = copy.deepcopy(model)
    assert session_of(other) is not session_of(model)
    other(X).sum().backward()
    assert session_of(other).report().ratio > 1
    assert all(p.grad is None for p in model.parameters())
    bs.unwrap(other)
    assert session_of(model).report().steps == 1


def test_a_copy_with_averaged_weights_trains_to_the_same_bits() -> None:
    def averaged(model: nn.Module) -> list[Tensor]:
        ema = torch.optim.swa_utils.AveragedModel(model)
        found = train(model)
        ema.update_parameters(model)
        ema.eval()
        return [*found, *parameters_of(ema), ema(X)]

    assert_equal_bits(averaged(network()), averaged(bs.wrap(network(), min_nbytes=0)))


@pytest.mark.parametrize("policy", ["lossless", "quantized", "comet with an optimizer"])
def test_a_pickle_and_a_saved_model_are_loaded_wrapped(policy: str) -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    model = bs.wrap(model, comet(sigma=0.02, optimizer=optimizer) if "comet" in policy else policy, min_nbytes=0)
    train(model)
    for parameter in model.parameters():
        parameter.grad = None
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)):
        assert session_of(other) is not session_of(model)
        if policy != "quantized":  # comet is exact at first
            assert_equal_bits(train(copy.deepcopy(bs.unwrap(copy.deepcopy(model)))), train(other))
        else:
            train(other)
        assert session_of(other).report().ratio > 1
        assert repr(session_of(other).policy) == repr(session_of(model).policy)


def test_a_copy_of_comet_begins_anew_without_the_optimizer() -> None:
    model = network()
    policy = comet("conv+norm", 0.02, 7, "sz", torch.optim.Adam(model.parameters()), cosine=0.9, samples=1)
    for other in (copy.deepcopy(policy), pickle.loads(pickle.dumps(policy)), copy.copy(policy)):
        assert repr(other) == repr(policy) and other.optimizer is None
        assert (other.cosine, other.samples, other.recomputes) == (0.9, 1, True)
        assert not other.bounds and not other.history


def test_a_shallow_copy_runs_itself_and_not_the_model_that_it_was_copied_from() -> None:
    model = bs.wrap(network(), min_nbytes=0)
    other = copy.copy(model)
    other.forward = lambda x: functional.relu(x @ weight)  # type: ignore[method-assign]
    weight = torch.randn(X.shape[-1], 64, requires_grad=True)
    expected = functional.relu(X @ weight)
    assert_equal_bits([expected], [other(X)])
    assert session_of(other) is not session_of(model)
    assert session_of(other).report().saved_nbytes > 0
    bs.unwrap(other)
    session_of(model)


def test_a_shallow_copy_outlives_the_model_that_it_was_copied_from() -> None:
    model = bs.wrap(nn.Sequential(nn.Flatten(), nn.Linear(X[0].numel(), 4)), min_nbytes=0)
    expected = model(X)
    other = copy.copy(model)
    del model
    assert_equal_bits([expected], [other(X)])
    copied = copy.deepcopy(other)
    other(X).sum().backward()
    assert_equal_bits([expected], [copied(X)])
    assert all(parameter.grad is None for parameter in copied.parameters())


def test_a_replica_of_data_parallel_runs_itself_and_opens_nothing() -> None:
    model = bs.wrap(network(), min_nbytes=0)
    replica = model._replicate_for_data_parallel()
    replica.forward = lambda x: x
    assert replica(X) is X
    assert session_of(model).report().saved_nbytes == 0


def test_a_traced_graph_is_pickled_and_copied() -> None:
    model = bs.wrap(torch.fx.symbolic_trace(nn.Sequential(nn.Flatten(), nn.Linear(X[0].numel(), 4))), min_nbytes=0)
    expected = model(X)
    assert_equal_bits([expected], [pickle.loads(pickle.dumps(model))(X)])
    assert_equal_bits([expected], [copy.deepcopy(model)(X)])


def test_a_plan_from_a_budget_is_a_policy() -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(4)
        convolution = nn.Conv2d(1, 16, 3, padding=1)
        return nn.Sequential(
            convolution, nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * 36, 5)
        )

    x = torch.randn(ROWS, 1, 12, 12)
    model = make()
    made = plan(profile(lambda: model(x).square().mean().backward(), model), "90%")
    bs.wrap(model, made)
    expected = make()
    for trained in (expected, model):
        trained(x).square().mean().backward()
    assert_equal_bits(*([p.grad for p in trained.parameters()] for trained in (expected, model)))
    assert made.unknown == ()
    assert session_of(model).report().ratio > 1
    assert session_of(copy.deepcopy(model)).policy is not made


def test_a_wrapped_model_is_freed_when_its_last_reference_goes() -> None:
    model = bs.wrap(network(), min_nbytes=0)
    train(model)
    gone = weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


def test_a_state_dict_goes_both_ways() -> None:
    plain, model = network(), bs.wrap(network())
    train(model, steps=1)
    plain.load_state_dict(model.state_dict(), strict=True)
    assert_equal_bits(parameters_of(plain), parameters_of(model))
    model.load_state_dict(plain.state_dict(), strict=True)


def test_wrapping_twice_says_what_to_do() -> None:
    model = bs.wrap(network())
    with pytest.raises(IntegrationError, match=r"wrapped already, with Lossless.*unwrap"):
        bs.wrap(model)
    bs.wrap(bs.unwrap(model), "keep")
    budgeted = bs.wrap(network(), budget="60%")
    with pytest.raises(IntegrationError, match=r"wrapped already, with KeepFor\w+\(\)\. Call"):
        bs.wrap(budgeted)
    assert re.fullmatch(r"KeepFor\w+\(\)", session_of(budgeted).report().policy)


@pytest.mark.parametrize("name", ["allow", "error_limit", "agree", "strict", "offload_to"])
def test_how_to_keep_a_budget_needs_one(name: str) -> None:
    given: dict[str, Any] = {name: True}
    with pytest.raises(IntegrationError, match=rf"{name}=True was asked for without a budget, but .* Pass budget="):
        bs.wrap(network(), **given)


def test_what_is_not_wrapped_says_what_to_do() -> None:
    with pytest.raises(IntegrationError, match=r"unwrap was asked for a Noting that is not wrapped; call backstash"):
        bs.unwrap(network())
    outer = nn.Sequential(bs.wrap(network()))
    with pytest.raises(IntegrationError, match="its part '0' is: pass that one"):
        session_of(outer)


def test_wrong_arguments_raise_at_once() -> None:
    with pytest.raises(TypeError, match=r"asked for a function, but it wraps a torch\.nn\.Module"):
        bs.wrap(train)  # type: ignore[type-var]
    model = network()
    with pytest.raises(UnknownNameError):
        bs.wrap(model, "losless")
    with pytest.raises(IntegrationError, match="budget='6GiB' was asked for"):
        bs.wrap(model, "keep", budget="6GiB")
    with pytest.raises(TypeError):
        bs.wrap(model, colour="blue")
    bs.wrap(model)


class Checkpointed(nn.Module):
    """Runs its first part under a checkpoint."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.last = network(), nn.Linear(5, 5)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        """Maps [N, FEATURES] to [N, CLASSES]."""
        result: Tensor = self.last(checkpoint(self.first, x.requires_grad_(), use_reentrant=self.reentrant))
        return result


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inner", [False, True], ids=["outer", "outer and inner"])
def test_a_checkpoint_inside(reentrant: bool, inner: bool) -> None:
    def make() -> Checkpointed:
        torch.manual_seed(7)
        return Checkpointed(reentrant)

    model = bs.wrap(make(), min_nbytes=0)
    if inner:
        bs.wrap(model.first, min_nbytes=0)
    assert_equal_bits(train(make()), train(model))
    assert installed() == []


def test_a_checkpoint_around_a_wrapped_model_says_what_to_do() -> None:
    model = bs.wrap(network())
    with pytest.raises(SessionError, match="a checkpoint inside a Session works"):
        checkpoint(model, X, use_reentrant=False)
    assert installed() == []


def test_two_calls_before_one_backward_pass() -> None:
    def twice(model: nn.Module, x: Tensor) -> Tensor:
        first: Tensor = model(x)
        return first + model(-x)

    assert_equal_bits(train(network(), call=twice), train(bs.wrap(network(), min_nbytes=0), call=twice))


def test_two_models_with_a_session_each() -> None:
    """A GAN's step: a wrapped generator inside the step of a wrapped discriminator."""

    def play(generator: nn.Module, judge: nn.Module) -> list[Tensor]:
        torch.manual_seed(3)
        ways = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (generator, judge)]
        for x, _ in batches(3):
            made = generator(x)
            judge(made.detach()).square().mean().backward()
            ways[1].step()
            judge.zero_grad()
            (1 - judge(made)).square().mean().backward()
            ways[0].step()
            generator.zero_grad()
        return parameters_of(generator) + parameters_of(judge)

    def make() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(9)
        return nn.Sequential(nn.Linear(FEATURES, 40), nn.ReLU(), nn.Linear(40, FEATURES)), network()

    wrapped = [bs.wrap(model, min_nbytes=0) for model in make()]
    assert_equal_bits(play(*make()), play(*wrapped))


def test_mixed_precision() -> None:
    def call(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            result: Tensor = model(x)
        return result.float()

    assert_equal_bits(train(network(), call=call), train(bs.wrap(network(), min_nbytes=0), call=call))


def test_hooks_of_the_program_run_inside() -> None:
    model = bs.wrap(network())
    seen = []
    model.register_forward_pre_hook(lambda *_: seen.append(len(installed()) > 0))
    model.register_forward_hook(lambda *_: seen.append(len(installed()) > 0))
    model(X).sum().backward()
    assert seen == [True, True]
    assert installed() == []


def test_other_threads_have_their_own_models() -> None:
    found: list[list[Tensor]] = []
    models = [bs.wrap(network(), min_nbytes=0) for _ in range(2)]
    threads = [threading.Thread(target=lambda model=model: found.append(gradients(model))) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = gradients(network())
    assert_equal_bits(expected, found[0])
    assert_equal_bits(expected, found[1])


def gradients(model: Noting) -> list[Tensor]:
    model.drop.p = 0.0
    model(X).square().sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_a_model_that_is_compiled_in_place_says_what_to_do() -> None:
    model = network()
    model.compile(backend="eager")
    with pytest.raises(IntegrationError, match="compiled in place"):
        bs.wrap(model)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore:.*TorchScript.*")
def test_transforms_and_traces_open_nothing() -> None:
    model = bs.wrap(network())
    model.drop.p, model.norm = 0.0, nn.Identity()  # torch.func refuses running statistics
    weights = dict(model.named_parameters())
    of_sum = torch.func.grad(lambda weights: torch.func.functional_call(model, weights, X).sum())
    found = of_sum(weights)
    bs.unwrap(model)
    assert_equal_bits(of_sum(weights).values(), found.values())
    bs.wrap(model)
    torch.jit.trace(model, X, check_trace=False)
    assert not any(model.was_open)
    assert installed() == []


@pytest.mark.slow
def test_a_wrapped_model_is_exported() -> None:
    model = bs.wrap(nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU()))
    for strict in (False, True):
        exported = torch.export.export(model, (X,), strict=strict).module()
        assert_equal_bits([model(X)], [exported(X)])
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("order", ["wrap inside", "wrap outside"])
def test_compiled_models_train_to_the_same_bits(order: str) -> None:
    torch._dynamo.reset()
    expected = train(torch.compile(network(), backend="aot_eager"))
    torch._dynamo.reset()
    if order == "wrap inside":
        model = torch.compile(bs.wrap(network(), min_nbytes=0), backend="aot_eager")
    else:
        model = bs.wrap(torch.compile(network(), backend="aot_eager"), min_nbytes=0)
    assert_equal_bits(expected, train(model))
    assert installed() == []
    torch._dynamo.reset()
