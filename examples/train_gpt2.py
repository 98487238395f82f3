"""Trains a transformer of the size of GPT-2 with Hugging Face's Trainer, on the reference manual of Python's language.

The text is in every Python (``pydoc_data``), the model is built from a config, and a token is a byte: nothing is
downloaded. The one line that adds backstash is ``attach(trainer)``.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pydoc_data.topics import topics
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from backstash.integrations.huggingface import attach
from backstash.stash.ledger import Report


def texts(length: int) -> list[dict[str, torch.Tensor]]:
    """The manual as bytes, in pieces of ``length``."""
    manual = torch.tensor(list("\n".join(topics.values()).encode()))
    return [{"input_ids": piece, "labels": piece} for piece in manual.split(length) if len(piece) == length]


def main(arguments: Sequence[str] | None = None) -> Report | None:
    """Trains for ``--steps`` batches; returns the report of the last step, or None with ``--plain``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", action="store_true", help="without backstash")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--length", type=int, default=512, help="bytes of a text")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(arguments)

    data = texts(options.length)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256,
        n_layer=options.layers,
        n_embd=options.width,
        n_head=max(1, options.width // 64),
        n_positions=options.length,
        bos_token_id=0,
        eos_token_id=0,
    )
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder,
            max_steps=options.steps,
            per_device_train_batch_size=options.batch,
            per_device_eval_batch_size=options.batch,
            learning_rate=3e-4,
            logging_steps=max(1, options.steps // 5),
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        held_out, train = data[:4], data[4:]
        trainer: Any = Trainer(GPT2LMHeadModel(config), settings, train_dataset=train, eval_dataset=held_out)
        attachment = None if options.plain else attach(trainer)  # <- this is all
        trainer.train()
        print(f"loss on unseen text: {trainer.evaluate()['eval_loss']:.4f} nats a byte")
    return attachment.report() if attachment else None


if __name__ == "__main__":
    main()
