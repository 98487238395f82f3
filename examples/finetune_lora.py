"""Trains LoRA adapters of a Llama with peft and accelerate, on the reference manual of Python's language.

With LoRA hardly any weight has a gradient, so activations are most of the memory. The model is built from a config, and
a token is a byte: nothing is downloaded. The one line that adds backstash is ``attach(accelerator, model)``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pydoc_data.topics import topics
from typing import Any

import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from backstash.integrations.accelerate import attach
from backstash.stash.ledger import Report


def main(arguments: Sequence[str] | None = None) -> Report | None:
    """Trains for ``--steps`` batches; returns the report of the last step, or None with ``--plain``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", action="store_true", help="without backstash")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--length", type=int, default=512, help="bytes of a text")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=2, help="batches of a step of the optimizer")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=options.width,
        intermediate_size=3 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=max(1, options.width // 64),
        max_position_embeddings=options.length,
    )
    adapters = LoraConfig(r=8, lora_dropout=0.05, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"])
    accelerator = Accelerator(gradient_accumulation_steps=options.accumulate)
    model: Any = get_peft_model(LlamaForCausalLM(config), adapters)
    model.print_trainable_parameters()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(trained, lr=1e-3))
    attachment = None if options.plain else attach(accelerator, model)  # <- this is all

    manual = torch.tensor(list("\n".join(topics.values()).encode()))
    for step in range(1, options.steps * options.accumulate + 1):
        starts = torch.randint(len(manual) - options.length, (options.batch,))
        tokens = torch.stack([manual[start : start + options.length] for start in starts]).to(accelerator.device)
        with accelerator.accumulate(model):
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if step % max(1, options.steps * options.accumulate // 5) == 0:
            accelerator.print(f"batch {step:4}  loss {loss.item():.4f}")
    if attachment is None:
        return None
    attachment.print_report()
    return attachment.report()


if __name__ == "__main__":
    main()
