"""Families of transformers under a policy: ``python -m studies.families [--json FILE]``.

Each family is trained for three steps with and without the policy, from the same weights and random numbers. Losses and
all gradients of all steps are compared bit for bit; in the last step every byte that torch allocates is counted. The
exit code is 1 if any bit differs under a policy that is exact.

Then a GPT-2 whose loss is outside of the model is trained with the Session around the model's call alone, around the
call and the loss, and around the backward pass as well: how much does a Session gain by staying open?
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from backstash import Session, unwrap, wrap
from backstash.bits import equal_bits
from backstash.integrations.loop import session_of
from backstash.report.meter import CountedPeak
from backstash.stash.ledger import Report
from backstash.stash.tables import mib
from bench.results import Results
from bench.rounds import table
from tests.networks.families import FAMILIES, TABLE, TINY, Size, gpt2_of, make

STEPS = 3


@dataclass(frozen=True)
class Row:
    """One family under the policy, beside plain PyTorch.

    Attributes:
        family: the family's name.
        parameters: number of parameters.
        saved_nbytes: bytes that autograd saves, without parameters.
        stash_nbytes: bytes that are held for them.
        ratio: the one divided by the other.
        plain_peak_nbytes: the most bytes alive in a step of plain PyTorch above those alive at its start.
        peak_nbytes: the same under the policy.
        losses_equal: whether all losses have the same bits.
        gradients_equal: whether all gradients of all steps have the same bits.
    """

    family: str
    parameters: int
    saved_nbytes: int
    stash_nbytes: int
    ratio: float
    plain_peak_nbytes: int
    peak_nbytes: int
    losses_equal: bool
    gradients_equal: bool


@dataclass(frozen=True)
class Run:
    """What a training gave: losses, the gradients of all steps, the counted peak, and the Session's report."""

    losses: list[Tensor]
    gradients: list[Tensor]
    peak_nbytes: int
    report: Report | None
    parameters: int


def train(family: str, size: Size, policy: str | None, min_nbytes: int | None = None) -> Run:
    """Trains a family for a few steps, plainly or under a policy."""
    model, inputs = make(family, size)
    if policy is not None:
        wrap(model, policy, min_nbytes=min_nbytes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses: list[Tensor] = []
    gradients: list[Tensor] = []
    torch.manual_seed(1)
    counter = CountedPeak()
    for step in range(STEPS):
        is_counted = step == STEPS - 1
        if is_counted:
            counter.__enter__()
        loss = model(**inputs).loss
        loss.backward()
        losses.append(loss.detach())
        del loss
        if is_counted:
            counter.__exit__(None, None, None)
        gradients += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)  # the counted step finds its gradients there, as most steps do
    report = None
    if policy is not None:
        report = session_of(model).report()
        unwrap(model)
    return Run(losses, gradients, counter.peak_nbytes, report, sum(p.numel() for p in model.parameters()))


def compare(family: str, size: Size, policy: str = "lossless", min_nbytes: int | None = None) -> Row:
    """Trains a family with and without a policy."""
    plain, found = train(family, size, None), train(family, size, policy, min_nbytes)
    assert found.report is not None
    return Row(
        family,
        plain.parameters,
        found.report.saved_nbytes,
        found.report.stash_nbytes,
        found.report.ratio,
        plain.peak_nbytes,
        found.peak_nbytes,
        _equal(plain.losses, found.losses),
        _equal(plain.gradients, found.gradients),
    )


@dataclass(frozen=True)
class Window:
    """What a Session gains by staying open.

    Attributes:
        around: what the Session is open around.
        saved_nbytes, stash_nbytes: of what the Session has seen.
        peak_nbytes: the most bytes alive in a step above those alive at its start.
    """

    around: str
    saved_nbytes: int
    stash_nbytes: int
    peak_nbytes: int


AROUND = ("nothing", "the call", "the call and the loss", "the whole step")


def windows(size: Size, words: int, policy: str = "lossless", min_nbytes: int | None = None) -> list[Window]:
    """Trains a GPT-2 with its loss outside, with the Session open for longer and longer."""
    found = []
    for last, around in enumerate(AROUND):
        model, inputs = gpt2_of(size, words)
        session = Session(policy, model=model, min_nbytes=min_nbytes)
        torch.manual_seed(1)
        for step in range(STEPS):
            counter = CountedPeak() if step == STEPS - 1 else nullcontext()
            with counter, ExitStack() as left_last:
                with ExitStack() as left_after_the_loss, ExitStack() as left_after_the_call:
                    stacks = (None, left_after_the_call, left_after_the_loss, left_last)
                    if stack := stacks[last]:
                        stack.enter_context(session)
                    scores = model(inputs["input_ids"]).logits
                    left_after_the_call.close()
                    loss = cross_entropy(scores[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())
                    del scores
                loss.backward()
                del loss
            model.zero_grad(set_to_none=False)
        report = session.report()
        assert isinstance(counter, CountedPeak)
        found.append(Window(around, report.saved_nbytes, report.stash_nbytes, counter.peak_nbytes))
    return found


def _equal(expected: Sequence[Tensor], found: Sequence[Tensor]) -> bool:
    return len(expected) == len(found) and all(equal_bits(*pair) for pair in zip(expected, found, strict=True))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints a table, writes the JSON."""
    parser = argparse.ArgumentParser(prog="python -m studies.families", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--policy", default="lossless", help="an exact policy (default: lossless)")
    parser.add_argument("--only", choices=sorted(FAMILIES), nargs="+", help="these families only")
    parser.add_argument("--tiny", action="store_true", help="the sizes of the tests, which show bits and no ratios")
    parser.add_argument("--json", type=Path, help="file to write")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)  # more threads may add in another order from run to run
    size = TINY if asked.tiny else TABLE
    results = Results("studies.families", asked.json, arguments, policy=asked.policy, size=asdict(size))
    rows: list[Row] = []
    for family in asked.only or FAMILIES:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rows.append(compare(family, size, asked.policy))
        print(f"{family}: ratio {rows[-1].ratio:.2f}", flush=True)
        results.write(families=rows)
    found = windows(size, 64 if asked.tiny else 8192, asked.policy)
    results.write(windows=found)
    print(
        table(
            ("Session around", "saved", "stash", "peak"),
            [(row.around, mib(row.saved_nbytes), mib(row.stash_nbytes), mib(row.peak_nbytes)) for row in found],
        )
    )
    print(
        table(
            ("family", "saved", "ratio", "peak, plain", "peak", "losses", "gradients"),
            [
                (
                    row.family,
                    mib(row.saved_nbytes),
                    f"{row.ratio:.2f}",
                    mib(row.plain_peak_nbytes),
                    mib(row.peak_nbytes),
                    "same bits" if row.losses_equal else "DIFFER",
                    "same bits" if row.gradients_equal else "DIFFER",
                )
                for row in rows
            ],
        )
    )
    return int(not all(row.losses_equal and row.gradients_equal for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
