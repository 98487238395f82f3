"""Classifies images of clothes with Lightning: Fashion-MNIST if it is on the machine, else scikit-learn's digits.

The one line that adds backstash is the callback. The network and the images are those of ``train_images.py``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import lightning
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from train_images import enlarge, load, resnet

from backstash.integrations.lightning import BackstashCallback
from backstash.stash.ledger import Report

UNSEEN = 256
"""Images of the test set that the accuracy is computed of."""


class Classifier(lightning.LightningModule):
    """A ResNet of six blocks for one-channel images."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.network, self.size = resnet(classes=10), size

    def forward(self, images: Tensor) -> Tensor:
        """Maps bytes [N, H, W] to scores [N, 10]."""
        scores: Tensor = self.network(enlarge(images, self.size).to(memory_format=torch.channels_last))
        return scores

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """The loss of a batch."""
        loss = functional.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        """The share of images that are classified right."""
        self.log("accuracy", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD with momentum."""
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


def main(arguments: Sequence[str] | None = None) -> Report | None:
    """Trains for ``--steps`` batches; returns the report of the last step, or None with ``--plain``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", action="store_true", help="without backstash")
    parser.add_argument("--data", type=Path, help="folder of Fashion-MNIST's files")
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args(arguments)

    lightning.seed_everything(0, verbose=False)
    name, train, test = load(options.data)
    print(f"{name}, batches of {options.batch}x{options.image_size}x{options.image_size}")
    callback = None if options.plain else BackstashCallback()  # <- this is all, and passing it on
    trainer = lightning.Trainer(
        max_steps=options.steps,
        callbacks=[callback] if callback else [],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    model = Classifier(options.image_size).to(memory_format=torch.channels_last)
    trainer.fit(model, DataLoader(TensorDataset(*train), options.batch, shuffle=True))
    unseen = TensorDataset(test[0][:UNSEEN], test[1][:UNSEEN])
    accuracy = trainer.validate(model, DataLoader(unseen, options.batch), verbose=False)[0]["accuracy"]
    print(f"accuracy on {len(unseen)} unseen images: {accuracy:.1%}")
    return callback.report() if callback else None


if __name__ == "__main__":
    main()
