"""Peak and time of a language model's head and loss: ``python -m bench.logits --rows 8192 --words 152064``.

Each way runs in a process of its own: plain, ``chunked_loss``, ``chunked_rows`` (log-probabilities, entropy and
normaliser), and ``liger``, the fused loss of liger-kernel, where that is installed and there is a GPU. A line of JSON
says the counted peak above what was held before the step, the bytes of all logits, and the shortest time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backstash.report.meter import CountedPeak
from backstash.rewrites import chunked_loss, chunked_rows

WAYS = ("plain", "chunked_loss", "plain rows", "chunked_rows", "liger")


def step_of(way: str, hidden: Tensor, head: nn.Linear, words: Tensor) -> Callable[[], Tensor]:
    """Returns the step of one way, which leaves gradients of ``hidden`` [n, d] and of the head behind."""

    def entropy() -> Tensor:
        loss: Tensor = F.cross_entropy(head(hidden).float(), words)
        return loss

    def plain_rows() -> Tensor:
        logs = head(hidden).float().log_softmax(-1)
        chosen = logs.gather(-1, words.unsqueeze(-1))
        loss: Tensor = -(chosen.mean() + 0.01 * -(logs.exp() * logs).sum(-1).mean())
        return loss

    def rows() -> Tensor:
        found = chunked_rows(hidden, head, words)
        assert found.log_probs is not None
        return -(found.log_probs.mean() + 0.01 * found.entropy.mean())

    def liger() -> Tensor:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss  # type: ignore[import-not-found]

        loss: Tensor = LigerFusedLinearCrossEntropyLoss()(head.weight, hidden, words)
        return loss

    if way == "chunked_loss":
        chunked_loss(head, "")
    return {"plain rows": plain_rows, "chunked_rows": rows, "liger": liger}.get(way, entropy)


def measure(way: str, asked: argparse.Namespace) -> dict[str, object]:
    """Returns the peak and the time of one way."""
    torch.manual_seed(0)
    dtype = getattr(torch, asked.dtype)
    head = nn.Linear(asked.width, asked.words, bias=False, device=asked.device, dtype=dtype)
    hidden = torch.randn(asked.rows, asked.width, device=asked.device, dtype=dtype, requires_grad=True)
    words = torch.randint(asked.words, (asked.rows,), device=asked.device)
    step = step_of(way, hidden, head, words)
    seconds = []
    for round_ in range(1 + asked.rounds):
        hidden.grad = head.weight.grad = None
        if round_:
            begun = time.perf_counter()
            step().backward()  # type: ignore[no-untyped-call]
            if asked.device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begun)
        elif asked.device == "cuda":
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            step().backward()  # type: ignore[no-untyped-call]
            peak_nbytes = torch.cuda.max_memory_allocated() - before
        else:
            with CountedPeak() as counter:
                step().backward()  # type: ignore[no-untyped-call]
            peak_nbytes = counter.peak_nbytes
    found: dict[str, object] = {"way": way, "rows": asked.rows, "words": asked.words, "width": asked.width}
    found |= {"dtype": asked.dtype, "device": asked.device, "peak_mib": round(peak_nbytes / 2**20, 1)}
    found |= {"logits_float32_mib": round(4 * asked.rows * asked.words / 2**20, 1)}
    gradients = asked.words * asked.width * dtype.itemsize + hidden.nbytes
    return found | {"gradients_mib": round(gradients / 2**20, 1), "seconds": min(seconds, default=None)}


def main() -> None:
    """Reads the command line, and measures each way in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--words", type=int, default=152_064)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=0, help="timed rounds; 0 for the peak alone")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(measure(asked.one, asked)))
        return
    for way in asked.ways.split(","):
        done = subprocess.run(
            [sys.executable, "-m", "bench.logits", *sys.argv[1:], "--one", way],
            capture_output=True,
            text=True,
            check=False,
        )
        failed = {"way": way, "failed": (done.stderr.strip().splitlines() or ["killed"])[-1]}
        print(done.stdout.strip() if done.returncode == 0 else json.dumps(failed), flush=True)


if __name__ == "__main__":
    main()
