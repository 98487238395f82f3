"""Log-probabilities, entropies, normalisers and divergences in chunks have the plain logits' numbers and gradients."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from backstash.errors import RewriteError
from backstash.report.meter import CountedPeak
from backstash.rewrites import LogitRows, chunked_loss, chunked_rows


def plain_rows(
    hidden: Tensor,
    head: nn.Linear,
    target: Tensor | None = None,
    *,
    temperature: float = 1.0,
    teacher: tuple[Tensor, nn.Linear] | None = None,
    ignore_index: int = -100,
) -> LogitRows:
    """The same from all logits at once."""
    logits = head(hidden) / temperature
    logs = logits.log_softmax(-1)
    log_probs = None
    if target is not None:
        kept = target != ignore_index
        log_probs = logs.gather(-1, torch.where(kept, target, 0).unsqueeze(-1)).squeeze(-1) * kept
    away = back = None
    if teacher is not None:
        others = (teacher[1](teacher[0]) / temperature).log_softmax(-1).detach()
        away = (others.exp() * (others - logs)).sum(-1)
        back = (logs.exp() * (logs - others)).sum(-1)
    return LogitRows(log_probs, logits.logsumexp(-1), -(logs.exp() * logs).sum(-1), away, back)


def log_probs(rows: LogitRows) -> Tensor:
    assert rows.log_probs is not None
    return rows.log_probs


def grpo(rows: LogitRows) -> Tensor:
    """The clipped ratio to what the sampler had, with a bonus for entropy."""
    logs = log_probs(rows)
    advantages = torch.linspace(-1, 1, logs.numel(), dtype=logs.dtype).view(logs.shape)
    ratio = (logs - logs.detach() + 0.1 * advantages).exp()
    bounded = torch.minimum(ratio * advantages, ratio.clamp(0.9, 1.1) * advantages)
    return -(bounded + 0.01 * rows.entropy).mean()


def dpo(rows: LogitRows) -> Tensor:
    better, worse = log_probs(rows).sum(-1).chunk(2)
    return -F.logsigmoid(0.1 * (better - worse)).mean()


def orpo(rows: LogitRows) -> Tensor:
    means = log_probs(rows).mean(-1) - 0.1  # a sure thing has no odds
    better, worse = (means - torch.log1p(-means.exp())).chunk(2)
    return -log_probs(rows).mean() - F.logsigmoid(better - worse).mean()


def distilled(rows: LogitRows) -> Tensor:
    assert rows.from_teacher is not None and rows.to_teacher is not None
    return 0.7 * rows.from_teacher.mean() + 0.3 * rows.to_teacher.square().sum()


LOSSES: dict[str, Callable[[LogitRows], Tensor]] = {
    "grpo": grpo,
    "dpo": dpo,
    "orpo": orpo,
    "distilled": distilled,
    "z-loss": lambda rows: -log_probs(rows).mean() + 1e-2 * rows.normaliser.square().mean(),
    "entropy": lambda rows: rows.entropy.square().sum(),
    "all": lambda rows: grpo(rows) + distilled(rows) + rows.normaliser.sin().sum(),
}


def problem(seed: int) -> tuple[list[Tensor], Tensor, nn.Linear, Tensor, tuple[Tensor, nn.Linear], float, int]:
    """What gradients are asked of, and the arguments, in float64."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    width, classes, tokens = draw.choice([1, 7, 16]), draw.choice([1, 2, 33]), draw.choice([1, 5])
    head = nn.Linear(width, classes, bias=draw.random() < 0.5).double()
    hidden = (draw.choice([0.1, 1.0, 30.0]) * torch.randn(4, tokens, width, dtype=torch.float64)).requires_grad_()
    teacher = torch.randn(4, tokens, 3, dtype=torch.float64), nn.Linear(3, classes).double()
    target = torch.randint(classes, (4, tokens))
    ignored = draw.choice([-100, 0])
    target[torch.rand(4, tokens) < 0.2] = ignored
    if draw.random() < 0.2:
        head.weight.requires_grad_(False)
    asked = [x for x in (hidden, *head.parameters()) if x.requires_grad]
    return asked, hidden, head, target, teacher, draw.choice([1.0, 0.5, 2.0]), ignored


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("seed", range(12))
def test_numbers_and_gradients_are_those_of_the_logits(seed: int, name: str) -> None:
    asked, hidden, head, target, teacher, temperature, ignored = problem(seed)
    expected = plain_rows(hidden, head, target, temperature=temperature, teacher=teacher, ignore_index=ignored)
    wanted = torch.autograd.grad(LOSSES[name](expected), asked)
    for chunk_nbytes in (1, 3 * 8 * head.weight.shape[0], 1 << 20):
        options = {"temperature": temperature, "ignore_index": ignored, "chunk_nbytes": chunk_nbytes}
        rows = chunked_rows(hidden, head, target, teacher=teacher, **options)  # type: ignore[arg-type]
        for found, known in zip(vars(rows).values(), vars(expected).values(), strict=True):
            torch.testing.assert_close(found, known, rtol=1e-10, atol=1e-10)
        for found, known in zip(torch.autograd.grad(LOSSES[name](rows), asked), wanted, strict=True):
            torch.testing.assert_close(found, known, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_gradients_are_those_of_differences(seed: int) -> None:
    _, hidden, head, target, teacher, temperature, ignored = problem(seed)
    options = {"temperature": temperature, "ignore_index": ignored, "chunk_nbytes": 600}
    head.requires_grad_()
    small = (hidden.detach() / hidden.detach().abs().max()).requires_grad_()

    def numbers(hidden: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        return tuple(vars(chunked_rows(hidden, head, target, teacher=teacher, **options)).values())  # type: ignore[arg-type]

    assert torch.autograd.gradcheck(numbers, (small, *head.parameters()))


@pytest.mark.parametrize("name", LOSSES)
def test_logits_of_a_rewritten_model_are_taken_as_they_are(name: str) -> None:
    """With what the model does to them, and with those of a teacher that has another head."""
    _, hidden, head, target, (others, other), _, ignored = problem(5)
    head = nn.Linear(head.weight.shape[1], head.weight.shape[0], bias=False).double()
    shift = torch.linspace(-1, 1, head.weight.shape[0], dtype=torch.float64)

    def numbers(of: Callable[..., LogitRows], with_heads: bool) -> list[Tensor]:
        hidden.grad = head.weight.grad = None
        logits = (head(hidden) + shift).div(2.0).tanh() * 3.0
        with torch.no_grad():
            teacher = other(others) * 0.5
        if with_heads:
            same, unit = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
            same.weight, unit.weight = (
                nn.Parameter(torch.eye(each.shape[-1], dtype=torch.float64)) for each in (logits, teacher)
            )
            rows = of(logits, same, target, teacher=(teacher, unit), ignore_index=ignored)
        else:
            rows = of(logits, target=target, teacher=teacher, ignore_index=ignored, chunk_nbytes=700)
        LOSSES[name](rows).backward()
        assert hidden.grad is not None and head.weight.grad is not None
        return [*(x for x in vars(rows).values() if x is not None), hidden.grad, head.weight.grad]

    expected = numbers(plain_rows, with_heads=True)
    with chunked_loss(head, "", evaluation=True), chunked_loss(other, "", evaluation=True):
        found = numbers(chunked_rows, with_heads=False)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", LOSSES)
def test_in_bfloat16_it_is_no_further_off_than_plain(name: str) -> None:
    torch.manual_seed(0)
    head, other = nn.Linear(16, 50).bfloat16(), nn.Linear(8, 50).bfloat16()
    hidden, others = torch.randn(4, 30, 16).bfloat16(), torch.randn(4, 30, 8).bfloat16()
    words = torch.randint(50, (4, 30))

    def gradient(of: Callable[..., LogitRows], dtype: torch.dtype, **options: int) -> Tensor:
        heads = nn.Linear(16, 50, dtype=dtype), nn.Linear(8, 50, dtype=dtype)
        for each, like in zip(heads, (head, other), strict=True):
            each.load_state_dict(like.state_dict())
        rows = of(hidden.to(dtype), heads[0], words, teacher=(others.to(dtype), heads[1]), **options)
        LOSSES[name](rows).backward()
        assert heads[0].weight.grad is not None
        return heads[0].weight.grad.double()

    exact = gradient(plain_rows, torch.float64)
    plain = (gradient(plain_rows, torch.bfloat16) - exact).norm()
    assert (gradient(chunked_rows, torch.bfloat16, chunk_nbytes=1) - exact).norm() <= 1.05 * plain + 0.01 * exact.norm()


def test_hidden_is_left_to_the_hooks_of_autograd() -> None:
    """What backward reads is saved where a Session sees it, and held in no other place."""
    head, hidden, words = nn.Linear(8, 5), torch.randn(6, 8, requires_grad=True), torch.arange(6) % 5
    middle = hidden * 2
    storage = StorageWeakRef(middle.untyped_storage())
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
        rows = chunked_rows(middle, head, words, teacher=(middle.detach(), head))
    del middle
    assert storage.expired()
    log_probs(rows).sum().backward()
    assert hidden.grad is not None


def test_the_teacher_gets_no_gradient_and_unasked_numbers_are_none() -> None:
    _, hidden, head, _, teacher, _, _ = problem(1)
    rows = chunked_rows(hidden, head, teacher=teacher)
    assert rows.log_probs is None
    distilled(rows).backward()
    assert all(parameter.grad is None for parameter in teacher[1].parameters()) and hidden.grad is not None
    assert chunked_rows(hidden, head).from_teacher is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_are_in_the_dtype_of_autocast(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    head, hidden, words = nn.Linear(32, 100), torch.randn(6, 32, requires_grad=True), torch.arange(6)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
        rows = chunked_rows(hidden, head, words, chunk_nbytes=1000)
        expected = head(hidden).float().log_softmax(-1).gather(-1, words.unsqueeze(-1)).squeeze(-1)
    assert log_probs(rows).dtype is torch.float32
    torch.testing.assert_close(log_probs(rows), expected, rtol=1e-5, atol=1e-5)
    rows.entropy.sum().backward()
    assert hidden.grad is not None and hidden.grad.dtype is torch.float32


def test_no_more_than_some_chunks_of_logits_are_there_at_a_time() -> None:
    head, hidden, words = nn.Linear(16, 5000), torch.randn(400, 16, requires_grad=True), torch.arange(400)

    def peak(of: Callable[[], LogitRows]) -> int:
        with CountedPeak() as counter:
            grpo(of()).backward()
        return counter.peak_nbytes

    logits = 400 * 5000 * 4
    assert peak(lambda: plain_rows(hidden, head, words)) > 2 * logits
    assert peak(lambda: chunked_rows(hidden, head, words, chunk_nbytes=200_000)) < 0.35 * logits


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GPT2LMHeadModel", "Gemma2ForCausalLM", "OPTForCausalLM"])
def test_a_real_step_of_a_model_of_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, name)
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
    if name == "GPT2LMHeadModel":
        sizes = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4}
    elif name == "OPTForCausalLM":
        sizes |= {"ffn_dim": 64, "word_embed_proj_dim": 32}
    else:
        sizes |= {"intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8}
    torch.manual_seed(0)
    model = kind(kind.config_class(**sizes)).double().eval()
    words = torch.randint(1, 97, (4, 12))

    def gradients(rows_of: Callable[..., LogitRows]) -> list[Tensor]:
        model.zero_grad()
        hidden = model.base_model(input_ids=words).last_hidden_state[:, :-1]
        rows = rows_of(hidden, model.get_output_embeddings(), words[:, 1:])
        (grpo(rows) + dpo(rows) + 1e-3 * rows.normaliser.square().mean()).backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    expected = gradients(plain_rows)
    found = gradients(chunked_rows)
    assert len(found) == len(expected) > 10
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_a_target_that_is_no_class_is_refused() -> None:
    with pytest.raises(IndexError, match=r"Target 5 is out of bounds\."):
        chunked_rows(torch.ones(2, 3), nn.Linear(3, 5), torch.tensor([5, 0]))


def test_logits_that_are_there_already_are_refused() -> None:
    with pytest.raises(
        RewriteError,
        match=r"hidden without a head, but it is no result of a head under chunked_loss with the classes last",
    ):
        chunked_rows(torch.ones(2, 3))


def test_a_teacher_of_other_classes_is_refused() -> None:
    with pytest.raises(RewriteError, match=r"2,\) rows of 5 classes with a teacher's \(2,\) rows of 6\. Pass the same"):
        chunked_rows(torch.ones(2, 3), nn.Linear(3, 5), teacher=(torch.ones(2, 3), nn.Linear(3, 6)))


def test_classes_that_cannot_be_have_no_gradient() -> None:
    """Their logits are minus infinity, as a model may mask words that fill up its vocabulary."""
    head, hidden = nn.Linear(8, 6), torch.randn(5, 8, requires_grad=True)
    with torch.no_grad():
        head.bias[4:] = -torch.inf
    teacher = torch.randn(5, 8), head
    rows = chunked_rows(hidden, head, torch.arange(5) % 4, teacher=teacher)
    short = nn.Linear(8, 4)
    short.weight, short.bias = nn.Parameter(head.weight[:4]), nn.Parameter(head.bias[:4])
    expected = plain_rows(hidden, short, torch.arange(5) % 4, teacher=(teacher[0], short))
    for found, known in zip(vars(rows).values(), vars(expected).values(), strict=True):
        torch.testing.assert_close(found, known)
        gradients = (torch.autograd.grad(x.square().sum(), hidden, retain_graph=True) for x in (found, known))
        torch.testing.assert_close(*gradients)


def test_gradients_of_gradients_are_refused() -> None:
    head, hidden = nn.Linear(8, 6), torch.randn(5, 8, requires_grad=True)
    with pytest.raises(RuntimeError, match="with create_graph=True, but their gradients have no gradients"):
        torch.autograd.grad(chunked_rows(hidden, head).entropy.sum(), hidden, create_graph=True)


def test_logits_with_the_classes_second_are_refused() -> None:
    head = nn.Linear(8, 6)
    with chunked_loss(head, ""), pytest.raises(RewriteError, match="under chunked_loss with the classes last"):
        chunked_rows(head(torch.ones(2, 3, 8)).transpose(1, 2))
