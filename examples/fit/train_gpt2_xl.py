"""GPT-2 XL, 1.5 billion weights, trained by AdamW under autocast to bfloat16.

backstash fit --device h100-80gb,rtx4090-24gb examples/fit/train_gpt2_xl.py --texts {size}
"""

from __future__ import annotations

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel

parser = argparse.ArgumentParser()
parser.add_argument("--texts", type=int, default=1, help="texts in a batch")
parser.add_argument("--tokens", type=int, default=1024, help="tokens of a text")
parser.add_argument("--steps", type=int, default=10)
asked = parser.parse_args()

config = GPT2Config(n_embd=1600, n_layer=48, n_head=25, n_positions=asked.tokens, use_cache=False)
model = GPT2LMHeadModel(config).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

for _ in range(asked.steps):
    words = torch.randint(0, config.vocab_size, (asked.texts, asked.tokens))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=words, labels=words).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"trained on {asked.texts} texts of {asked.tokens} tokens at a time")
