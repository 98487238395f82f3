"""A Llama of 8 billion weights in bfloat16, adapted by LoRA: what `backstash fit` is asked for before a card is rented.

    backstash fit --device h100-80gb,rtx4090-24gb examples/fit/train_llama_8b_lora.py --texts {size}

The weights are made anew: to know sizes and times, their numbers do not matter.
"""

from __future__ import annotations

import argparse

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--texts", type=int, default=1, help="texts in a batch")
parser.add_argument("--tokens", type=int, default=2048, help="tokens of a text")
parser.add_argument("--steps", type=int, default=10)
asked = parser.parse_args()

config = LlamaConfig(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=8192,
    use_cache=False,
    torch_dtype=torch.bfloat16,
)
torch.set_default_dtype(torch.bfloat16)
model = LlamaForCausalLM(config)
torch.set_default_dtype(torch.float32)
targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=targets)).train()
optimizer = torch.optim.AdamW([x for x in model.parameters() if x.requires_grad], lr=1e-4)

for _ in range(asked.steps):
    words = torch.randint(0, config.vocab_size, (asked.texts, asked.tokens))
    loss = model(input_ids=words, labels=words).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"trained on {asked.texts} texts of {asked.tokens} tokens at a time")
