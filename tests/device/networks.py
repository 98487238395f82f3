"""Small networks with the graphs of large ones, and their training steps on the fake device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import backstash as bs
from backstash.papers.comet import comet
from tests.device import fake
from tests.networks import families
from tests.networks.resnet import resnet

MIN_NBYTES = 4096
"""As small, beside these networks' values, as the usual limit beside those of large ones."""

EVERY = 4
"""Steps between two in which Comet collects, and exact steps at first."""

Batch = Mapping[str, Tensor]


@dataclass
class Training:
    """A network, a batch and a loss, on one device."""

    model: nn.Module
    batch: Batch
    loss: Callable[[nn.Module, Batch], Tensor]
    autocast: torch.dtype | None = None
    optimizer: torch.optim.Optimizer | None = None

    def to(self, device: str) -> Training:
        """Returns a copy on a device. A copy of a network that has not trained yet has the same state."""
        batch = pytree.tree_map(lambda tensor: tensor.to(device), self.batch)
        model = copy.deepcopy(self.model).to(device)
        if hasattr(model, "tie_weights"):
            model.tie_weights()  # type: ignore[operator]  # because torch has made new parameters for this kind of device
        return Training(model, batch, self.loss, self.autocast)

    def session(self, policy: Any, **options: Any) -> bs.Session:
        """Returns a Session that goes on whatever time a step takes, so that counts do not depend on the machine."""
        return bs.Session(policy, model=self.model, min_nbytes=MIN_NBYTES, stop_if_useless=False, **options)

    def step(self, session: Any = None) -> None:
        """Computes gradients, always with the same random numbers. Nothing in it waits for the device."""
        device_type = next(iter(self.batch.values())).device.type
        self.model.zero_grad()
        torch.manual_seed(1)
        if session is not None:
            session.__enter__()
        try:
            with torch.autocast(device_type, self.autocast or torch.bfloat16, enabled=self.autocast is not None):
                loss = self.loss(self.model, self.batch)
        finally:
            if session is not None:
                session.__exit__(None, None, None)
        loss.backward()
        if self.optimizer is not None:
            self.optimizer.step()

    def gradients(self) -> list[Tensor]:
        """Returns the gradients, on the CPU."""
        return [parameter.grad.cpu() for parameter in self.model.parameters() if parameter.grad is not None]

    def comet(self, codec: str) -> bs.Session:
        """Returns a Session with bounds that follow the gradients. Its optimizer leaves the weights as they are."""
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0, momentum=0.9)
        return self.session(comet("conv", every=EVERY, codec=codec, optimizer=self.optimizer))

    def count(self, session: Any = None, steps: int = 1) -> list[fake.Counts]:
        """Returns what each of some steps asks of the device."""
        found = []
        for _ in range(steps):
            with fake.counting() as counts:
                self.step(session)
            found.append(counts)
        return found


def _of_pictures(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["pictures"]), batch["classes"])


def _of_text(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def resnet50() -> Training:
    """ResNet-50's graph, narrow, on small pictures."""
    torch.manual_seed(0)
    batch = {"pictures": torch.randn(4, 3, 64, 64), "classes": torch.randint(10, (4,))}
    return Training(resnet(num_classes=10, width=16), batch, _of_pictures)


SIZE = families.Size(layers=2, width=64, tokens=64, image=32, batch=4)


def gpt2() -> Training:
    """GPT-2, with dropout but in attention, because the CPU's fused attention has none."""
    torch.manual_seed(0)
    training = Training(*families.gpt2(SIZE), _of_text)
    for module in training.model.modules():
        if hasattr(module, "attn_dropout"):
            module.attn_dropout.p = 0.0  # type: ignore[union-attr]
    return training


def llama() -> Training:
    """A Llama under autocast to bfloat16."""
    torch.manual_seed(0)
    return Training(*families.llama(SIZE), _of_text, torch.bfloat16)


NETWORKS: dict[str, Callable[[], Training]] = {"resnet50": resnet50, "gpt2": gpt2, "llama": llama}


def same_bits(found: list[Tensor], expected: list[Tensor]) -> bool:
    """Whether all tensors have the same bits."""
    return len(found) == len(expected) and all(
        x.dtype == y.dtype and torch.equal(x.view(-1).view(torch.uint8), y.view(-1).view(torch.uint8))
        for x, y in zip(found, expected, strict=True)
    )
