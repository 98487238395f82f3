"""Predictions of the cost model for steps that were measured on a GPU, beside their times: ``python -m bench.costs``.

The steps are traced without numbers, on a CPU (see backstash/forecast). Each row of a file with measurements that is a
plain step, or one with torch's checkpoint, is predicted by the facts of the card that it names. Nothing is fitted here:
the shares of a card's peaks are those in forecast/costs.py, which were chosen with the first file at hand.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from backstash.forecast.cards import CARDS, Card
from backstash.forecast.costs import Clock
from backstash.forecast.profiles import TracedValues, profile_on
from backstash.forecast.tracing import StepTracer, TracedSteps
from backstash.planning.model.peak import evaluate
from bench.cases import segments
from bench.gpu import pages
from bench.results import Results
from bench.rounds import table
from tests.networks.resnet import resnet

MEASURED = Path(__file__).parents[1] / "docs" / "results" / "gpu-cuda-2026-11-23.json"

PLAIN, CHECKPOINT = "plain", "checkpoint"

Made = tuple[nn.Module, Callable[[], Tensor], Sequence[nn.Module]]
"""A network, its forward pass, and the modules that a checkpoint recomputes."""


def _images(batch: int, is_channels_last: bool) -> Made:
    module = resnet(num_classes=10, width=64)
    images, labels = torch.randn(batch, 3, 224, 224), torch.zeros(batch, dtype=torch.long)
    if is_channels_last:
        module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # the stubs lack it
        images = images.contiguous(memory_format=torch.channels_last)
    blocks = [part for part, is_recomputed in segments(module) if is_recomputed]
    return module, lambda: functional.cross_entropy(module(images), labels), blocks


def _words(batch: int, tokens: int) -> Made:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_positions=tokens, n_embd=768, n_layer=4, n_head=12, use_cache=False)
    module: Any = GPT2LMHeadModel(config).train()
    words = torch.randint(config.vocab_size, (batch, tokens))
    following = functional.pad(words[:, 1:], (0, 1), value=-100).flatten()

    def loss() -> Tensor:
        return functional.cross_entropy(module(words).logits.flatten(0, 1), following)

    return module, loss, list(module.transformer.h)


NETWORKS: dict[str, tuple[Callable[[], Made], bool]] = {
    "resnet50": (lambda: _images(64, False), False),
    "gpt2, bf16": (lambda: _words(16, 512), True),
    "resnet50, bf16, channels_last": (lambda: _images(128, True), True),
}
"""The networks of the measured file, and whether they run under autocast to bfloat16."""


def traced(make: Callable[[], Made], autocast: bool) -> TracedSteps:
    """Returns the steps of a network as the file has measured them: gradients are set to zero one by one, and stay."""
    blocks: list[nn.Module] = []
    with StepTracer(blocks) as tracer:
        module, loss, found = make()
        blocks += found
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        while not tracer.is_done:
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.grad.zero_()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                found_loss = loss()
            torch.autograd.backward([found_loss])
    return tracer.found()


@dataclass(frozen=True)
class Prediction:
    """A row that was measured, and what the model says of it.

    Attributes:
        network, way: of the row.
        peak_nbytes, predicted_nbytes: of a step, above what is held before it.
        seconds, predicted_seconds: of a step.
        card_seconds, host_seconds: what the kernels would take, and what the host would.
        rounds: in how many rounds the seconds were measured.
    """

    network: str
    way: str
    peak_nbytes: int
    predicted_nbytes: int
    seconds: float
    predicted_seconds: float
    card_seconds: float
    host_seconds: float
    rounds: int


def predict(network: str, rows: Sequence[dict[str, Any]], steps: TracedSteps, card: Card) -> list[Prediction]:
    """Returns the rows that the model knows, with its predictions."""
    clock = Clock(card)
    assert steps.dropped is not None
    found = []
    for row in rows:
        step = {PLAIN: steps.plain, CHECKPOINT: steps.checkpoint}.get(row["way"])
        if step is None or row["seconds"] is None:
            continue
        hooked = len(steps.dropped.uses) if row["way"] == CHECKPOINT else 0
        on_card = sum(clock.on_card(work) for work in step.works)
        on_host = sum(clock.on_host(work) for work in step.works) + hooked * clock.rates.hook_seconds
        found.append(
            Prediction(
                network,
                row["way"],
                row["peak_nbytes"],
                step.peak_nbytes - step.before_nbytes,
                row["seconds"]["median"],
                clock.step(step.works, hooked),
                on_card,
                on_host,
                row["seconds"]["count"],
            )
        )
    return found


def off_by(steps: TracedSteps, card: Card) -> int:
    """Returns by how many bytes the profile that plans are made of misses plain's peak when everything is kept.

    A batch that the step before still holds may be in one of them and not in the other.
    """
    assert steps.dropped is not None
    profile = profile_on(steps, TracedValues(steps.dropped), Clock(card))
    return evaluate(profile, [0] * len(profile.values)).peak_nbytes - profile.plain_peak_nbytes


def main(arguments: Sequence[str] | None = None) -> None:
    """Predicts, compares and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="the file to write")
    parser.add_argument("--measured", type=Path, default=MEASURED, help="what was measured on a GPU")
    parser.add_argument("--card", choices=list(CARDS), default="h100-80gb", help="on which card")
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    options = parser.parse_args(arguments)
    card = CARDS[options.card]
    measured = {each["name"]: each["rows"] for each in json.loads(options.measured.read_text())["networks"]}
    results = Results("bench.costs", options.json, arguments, card=asdict(card), measured=options.measured.name)
    found: list[dict[str, Any]] = []
    for name in options.networks:
        steps = traced(*NETWORKS[name])
        found += [asdict(each) for each in predict(name, measured.get(name, ()), steps, card)]
        results.write(predictions=found, rates=asdict(Clock(card).rates))
        off = off_by(steps, card)
        print(f"{name}: everything kept, the profile misses plain's peak by {off:,} bytes", flush=True)
    print(table(pages.PREDICTIONS, [pages.prediction(row) for row in found]))
    print(results.close())


if __name__ == "__main__":
    main()
