"""A model that accelerate has prepared trains bit for bit as it does without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from integration_checks import Noting, assert_equal_bits, batches, installed, network, parameters_of
from torch import Tensor
from torch.nn import functional

pytest.importorskip("accelerate")
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.tracking import GeneralTracker
from accelerate.utils import DistributedType

import backstash as bs
from backstash.errors import IntegrationError
from backstash.integrations.accelerate import AcceleratorAttachment, attach


@pytest.fixture(autouse=True)
def _accelerate_forgets() -> Iterator[None]:
    """Accelerate keeps its settings for the whole process."""
    forget()
    yield
    forget()


def forget() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def train(accelerator: Accelerator, policy: str | bs.Policy | None, steps: int = 4) -> tuple[list[Tensor], Any, Noting]:
    """Losses and final parameters, the attachment if there is one, and the network."""
    inner = network()
    model, optimizer = accelerator.prepare(inner, torch.optim.AdamW(inner.parameters(), lr=0.01))
    attachment = None if policy is None else attach(accelerator, model, policy, min_nbytes=0)
    torch.manual_seed(6)
    losses = []
    for x, y in batches(steps):
        with accelerator.accumulate(model):
            loss = functional.cross_entropy(model(x).float(), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    assert installed() == []
    return [*losses, *parameters_of(inner)], attachment, inner


@pytest.mark.parametrize("policy", ["lossless", "offload"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"gradient_accumulation_steps": 2}, {"mixed_precision": "bf16"}],
    ids=["plain", "accumulate", "bf16"],
)
def test_training_gives_the_same_bits(policy: str, settings: dict[str, Any]) -> None:
    accelerator = Accelerator(cpu=True, **settings)
    expected, _, _ = train(accelerator, None)
    found, attachment, inner = train(accelerator, policy)
    assert_equal_bits(expected, found)
    assert inner.was_open == [True] * 4
    assert attachment.report().steps == 4
    assert policy != "lossless" or attachment.report().ratio > 1.5


def test_evaluation_opens_nothing_and_detach_undoes_all() -> None:
    accelerator = Accelerator(cpu=True)
    _, attachment, inner = train(accelerator, "lossless", steps=1)
    x = batches(1)[0][0]
    with torch.no_grad():
        attachment.model(x)
    attachment.model.eval()
    attachment.model(x)
    attachment.model.train()
    attachment.detach()
    attachment.model(x).sum().backward()
    assert inner.was_open == [True, False, False, False]
    with pytest.raises(IntegrationError, match="not wrapped"):
        attachment.detach()


@pytest.mark.parametrize("error", [RuntimeError("stop"), KeyboardInterrupt()], ids=["error", "ctrl-c"])
def test_an_interrupted_step_leaves_nothing_behind(error: BaseException) -> None:
    accelerator = Accelerator(cpu=True)
    inner = network()
    model = accelerator.prepare(inner)
    attach(accelerator, model, min_nbytes=0)
    inner.error = error
    with pytest.raises(type(error)):
        model(batches(1)[0][0])
    assert installed() == []
    inner.error = None
    with pytest.raises(type(error)):
        loss_without_backward(model, error)
    assert installed() == []


def loss_without_backward(model: Any, error: BaseException) -> None:
    model(batches(1)[0][0]).sum()
    raise error


class Tracker(GeneralTracker):  # type: ignore[misc]
    """Keeps what is logged."""

    name = "list"
    requires_logging_directory = False
    main_process_only = True

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[dict[str, float], int | None]] = []

    @property
    def tracker(self) -> Tracker:
        return self

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        pass

    def log(self, values: dict[str, float], step: int | None = None, **kwargs: Any) -> None:
        self.logged.append((values, step))


def test_figures_go_to_the_trackers_and_the_report_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = Tracker()
    accelerator = Accelerator(cpu=True, log_with=tracker, project_dir=tmp_path)
    accelerator.init_trackers("project")
    _, attachment, _ = train(accelerator, "lossless")
    found = attachment.log(step=3)
    assert found["backstash/ratio"] == pytest.approx(attachment.report().ratio)
    assert 0 < found["backstash/stash_mib"] < found["backstash/peak_mib"]
    assert tracker.logged == [(found, 3)]
    attachment.print_report()
    assert str(attachment.report()).splitlines()[0] in capsys.readouterr().out


def test_nothing_is_logged_before_the_first_step() -> None:
    accelerator = Accelerator(cpu=True)
    attachment = attach(accelerator, accelerator.prepare(network()))
    assert isinstance(attachment, AcceleratorAttachment)
    assert attachment.log() == {}


def test_what_cannot_be_attached_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(IntegrationError, match=r"Noting that no accelerator has prepared. Call model = accelerator"):
        attach(accelerator, network())
    with pytest.raises(IntegrationError, match=r"asked for a Noting, .* Call attach\(accelerator, model\)"):
        attach(network(), accelerator)  # type: ignore[arg-type]
    model = accelerator.prepare(network())
    with pytest.raises(IntegrationError, match="budget='1GiB' was asked for"):
        attach(accelerator, model, "keep", budget="1GiB")
    attach(accelerator, model)
    with pytest.raises(IntegrationError, match="wrapped already"):
        attach(accelerator, model)
    monkeypatch.setattr(Accelerator, "distributed_type", DistributedType.MEGATRON_LM)
    with pytest.raises(IntegrationError, match=r"distributed_type='MEGATRON_LM'.*Train with DDP or FSDP"):
        attach(accelerator, model)


@pytest.mark.slow
def test_a_compiled_model_is_warned_of_and_gives_the_same_bits() -> None:
    torch._dynamo.reset()
    accelerator = Accelerator(cpu=True, dynamo_backend="aot_eager")
    expected, _, _ = train(accelerator, None)
    torch._dynamo.reset()
    with pytest.warns(UserWarning, match="dynamo_backend='AOT_EAGER'"):
        found, _, _ = train(accelerator, "lossless")
    assert_equal_bits(expected, found)
    torch._dynamo.reset()
