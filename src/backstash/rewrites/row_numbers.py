"""Numbers of rows of logits and their gradients, a few rows of logits at a time; backward computes the logits again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from backstash.rewrites.cross_entropy import accumulator, add_product, refuse_gradients_of_gradients, without_autocast
from backstash.rewrites.logit_steps import LogitFormula


@dataclass(frozen=True, eq=False)
class RowSettings:
    """How numbers of rows are computed.

    Attributes:
        rows: how many rows of logits exist at a time.
        temperature: what the logits are divided by.
        ignore_index: a target of which the log-probability is 0 and has no gradient.
        own: how the logits are computed.
        other: how the teacher's are; None without a teacher.
        with_entropy: whether the entropy is asked for.
    """

    rows: int
    temperature: float
    ignore_index: int
    own: LogitFormula
    other: LogitFormula | None = None
    with_entropy: bool = True


class RowNumbers(torch.autograd.Function):
    """Numbers of rows of logits; the logits are computed again in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor | None,
        spread: Tensor | None,
        other_hidden: Tensor | None,
        other_weight: Tensor | None,
        other_bias: Tensor | None,
        settings: RowSettings,
    ) -> tuple[Tensor | None, ...]:
        """Returns numbers of each row, each [n], or None where they are not asked for.

        They are log-probabilities, normalisers, entropies, the divergences from and to the teacher, and the sum of all
        log-probabilities times ``spread``.

        Args:
            hidden: [n, d].
            weight: [classes, d].
            bias: [classes], or None.
            target: [n], or None.
            spread: a factor for each class, [classes], or None.
            other_hidden: the teacher's, [n, d'], or None.
            other_weight: [classes, d'], or None.
            other_bias: [classes], or None.
        """
        count, own, other = hidden.shape[0], settings.own, settings.other
        normaliser = torch.empty(count, dtype=own.precise, device=hidden.device)
        log_probs = None if target is None else torch.empty_like(normaliser)
        entropy = torch.empty_like(normaliser) if settings.with_entropy or other is not None else None
        away, back = (None if other is None else torch.empty_like(normaliser) for _ in range(2))
        spread_sum = None if spread is None else torch.empty_like(normaliser)
        with without_autocast(hidden.device.type):
            cast = own.cast(weight), own.cast(bias)
            other_cast = (None, None) if other is None else (other.cast(other_weight), other.cast(other_bias))
            for begin in range(0, count, settings.rows):
                part = slice(begin, begin + settings.rows)
                logits, _ = own.logits(hidden[part], *cast, settings.temperature)
                normaliser[part] = logits.logsumexp(1)
                if target is not None and log_probs is not None:
                    kept = target[part] != settings.ignore_index
                    classes = torch.where(kept, target[part], 0).unsqueeze(1)
                    log_probs[part] = torch.where(kept, logits.gather(1, classes).squeeze(1) - normaliser[part], 0.0)
                if spread is None and entropy is None:
                    continue
                logs = logits.sub_(normaliser[part].unsqueeze(1))
                if spread is not None and spread_sum is not None:
                    spread_sum[part] = _products(spread, logs)
                if entropy is None:
                    continue
                probabilities = logs.exp()
                entropy[part] = -_products(probabilities, logs)
                if away is not None and back is not None and other is not None and other_hidden is not None:
                    others = other.logits(other_hidden[part], *other_cast, settings.temperature)[0].log_softmax(1)
                    back[part] = -entropy[part] - _products(probabilities, others)
                    away[part] = _products(others.exp(), others - logs)
                    del others
                del logits, logs, probabilities
        ctx.settings = settings
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            hidden, weight, bias, target, spread, other_hidden, other_weight, other_bias, normaliser, entropy, back
        )
        return log_probs, normaliser, entropy, away, back, spread_sum

    @staticmethod
    def backward(ctx: Any, *outer: Tensor | None) -> tuple[Tensor | None, ...]:
        """Returns the gradients of hidden, weight and bias."""
        refuse_gradients_of_gradients()
        hidden, weight, bias, target, spread, other_hidden, other_weight, other_bias, normaliser, entropy, back = (
            ctx.saved_tensors
        )
        settings: RowSettings = ctx.settings
        own, other, temperature = settings.own, settings.other, settings.temperature
        wanted = ctx.needs_input_grad[:3]
        of_log_probs, of_normaliser, of_entropy, of_away, of_back, of_spread = (
            None if x is None else x.unsqueeze(1) for x in outer
        )
        is_in_parts = settings.rows < hidden.shape[0]
        hidden_grad = torch.empty_like(hidden) if wanted[0] else None
        weight_grad = accumulator(weight, is_in_parts) if wanted[1] else None
        bias_grad = accumulator(bias, is_in_parts) if wanted[2] else None
        with without_autocast(hidden.device.type):
            cast = weight.detach().to(own.product), own.cast(bias)
            other = other if of_away is not None or of_back is not None else None
            other_cast = (None, None) if other is None else (other.cast(other_weight), other.cast(other_bias))
            for begin in range(0, hidden.shape[0], settings.rows):
                part = slice(begin, begin + settings.rows)
                x = hidden[part].to(own.product)
                logits, results = own.logits(x, *cast, temperature)
                logs = logits.sub_(normaliser[part].unsqueeze(1))
                probabilities = logs.exp()
                factors = torch.zeros_like(normaliser[part]).unsqueeze(1)  # of the probabilities
                if of_normaliser is not None:
                    factors = factors + of_normaliser[part]
                if of_log_probs is not None and target is not None:
                    kept = (target[part] != settings.ignore_index).unsqueeze(1)
                    of_chosen = of_log_probs[part] * kept
                    factors = factors - of_chosen
                if of_spread is not None and spread is not None:
                    factors = factors - of_spread[part] * spread.sum()
                others = None
                if other is not None:
                    others = other.logits(other_hidden[part], *other_cast, temperature)[0].log_softmax(1)
                if of_away is not None:
                    factors = factors + of_away[part]
                gradient = probabilities * factors
                if of_spread is not None and spread is not None:
                    gradient += of_spread[part] * spread
                if of_entropy is not None:
                    surplus = logs + entropy[part].unsqueeze(1)
                    gradient -= _times_probabilities(surplus, probabilities).mul_(of_entropy[part])
                if others is not None and of_back is not None:
                    surplus = (logs - others).sub_(back[part].unsqueeze(1))
                    gradient += _times_probabilities(surplus, probabilities).mul_(of_back[part])
                if others is not None and of_away is not None:
                    gradient -= others.exp() * of_away[part]
                if of_log_probs is not None and target is not None:
                    gradient.scatter_add_(1, torch.where(kept, target[part].unsqueeze(1), 0), of_chosen)
                del logits, logs, probabilities, others
                gradient = own.before(results, gradient, temperature)
                del results
                if hidden_grad is not None:
                    hidden_grad[part] = gradient @ cast[0]
                if weight_grad is not None:
                    add_product(weight_grad, gradient, x)
                if bias_grad is not None:
                    bias_grad += gradient.sum(0, dtype=bias_grad.dtype)
        parts = (hidden_grad, hidden), (weight_grad, weight), (bias_grad, bias)
        return *(x if x is None else x.to(of.dtype) for x, of in parts), *[None] * 6


def _products(weights: Tensor, numbers: Tensor) -> Tensor:
    """Returns the sum over classes of two [rows, classes], where 0 times an infinity is 0: [rows]."""
    return torch.where(weights == 0, 0.0, weights * numbers).sum(1)


def _times_probabilities(numbers: Tensor, probabilities: Tensor) -> Tensor:
    """Multiplies numbers by probabilities in place, where a probability of 0 times an infinity is 0."""
    return numbers.mul_(probabilities).masked_fill_(probabilities == 0, 0.0)
