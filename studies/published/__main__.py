"""The program: rewrites the marked regions of every page, or checks them."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from studies.published import claims, compiled_models, frameworks, gpus, offloading, papers, steps, trainings
from studies.published.results import FOLDER, ROOT, kinds, load, newest, started, table

_TABLE = re.compile(r"(<!-- table: (?P<name>[\w-]+) -->\n)(?P<old>.*?)(<!-- end -->)", re.DOTALL)
_NUMBER = re.compile(r"(<!-- n: (?P<name>[\w/-]+) -->)(?P<old>[^\n]*?)(<!-- /n -->)")
_FILE = re.compile(r"(<!-- file: (?P<name>[\w-]+) -->)(?P<old>[^\n]*?)(<!-- /file -->)")
_LINK = re.compile(r"\(results:([^)]+)\)")

_ABOUT = {
    "allocator": "resident peaks and times under each allocator, plans too: `backstash bench allocator`",
    "bench": "ratios of networks, speed of codecs on real tensors, times and peaks of steps: `backstash bench run`",
    "cdma": "bytes that would cross a link, by codec: `backstash bench cdma`",
    "comet": "ratios, accuracy and time under bounds that follow the gradients: `backstash bench comet`",
    "comet-error": "whole errors of weight gradients, predicted and measured: `python -m studies.comet_error`",
    "compile": "compiled graphs, plain and treated: bytes saved, peaks, times: `python -m studies.compile`",
    "compile-frontier": "compiled graphs under budgets: peaks and times: `python -m studies.compile --frontier`",
    "costs": "peaks and times that the cost model predicts of steps measured on a GPU: `python -m bench.costs`",
    "cuda-code": "kernels and bytes of Inductor's code for CUDA, plain and treated: `python -m bench.cuda_code`",
    "density": "the share of zeros from which CSR is smaller than a bit mask: `backstash bench density`",
    "device": "operations, allocations and waits of steps on a fake accelerator: `python -m bench.device_counts`",
    "device-instructions": "the host's instructions in steps, by callgrind: `python -m bench.device_instructions`",
    "disk": "speed of the disk store beside dd: `backstash bench disk`",
    "exact": "size and speed of exact codecs on what three networks save: `python -m bench.exact`",
    "exact-families": "size of exact codecs on what ten families and a trained network save, stashes, plans, a disk: "
    "`python -m bench.exact`",
    "exact-stash": "what networks save under two policies: `python -m bench.exact --parts stash`",
    "examples": "the examples with and without backstash: `python -m studies.examples`",
    "families": "families of transformers with and without backstash: `python -m studies.families`",
    "gist": "ratios, footprints and times of Gist's stages: `backstash bench gist`",
    "accuracy": "accuracy of long trainings, by policy and seed: `python -m studies.accuracy`",
    "cdma-training": "zeros by layer over long trainings: `python -m studies.cdma_training`",
    "gist-deep": "largest batches of deep ResNets: `backstash bench gist --only deep`",
    "gist-accuracy": "accuracy with reduced precision: `backstash bench gist_accuracy`",
    "gpu": "peaks, times and bits of steps on a GPU: a forerunner of `python -m bench.gpu g2`",
    "gpu-g1": "what a step costs the host of a GPU, single calls, the link: `python -m bench.gpu g1`",
    "gpu-g2": "steps on a GPU at one size, and the largest sizes that fit: `python -m bench.gpu g2`",
    "gpu-g3": "formulas that have the bits of a GPU's kernels, speed of ours: `python -m bench.gpu g3`",
    "gpu-g4": "captured steps on a GPU: `python -m bench.gpu g4`",
    "gpu-g5": "copies to the host that hide behind computing: `python -m bench.gpu g5`",
    "gpu-g6": "compiled steps on a GPU: `python -m bench.gpu g6`",
    "hiding": "what hides behind a link, in simulated time: `python -m bench.hiding`",
    "ground": "facts about the machine that decisions rest on: `python -m studies.ground`",
    "frontier": "peak against the time of a step, plans beside checkpoints: `backstash bench frontier`",
    "hostcost": "host time per saved tensor: `backstash bench hostcost`",
    "kernels": "speed of each CPU kernel: `backstash bench kernels`",
    "layrub": "memory and time when values are moved; networks too deep for their memory: `backstash bench layrub`",
    "link": "times of a link with and without compression, simulated: `python -m studies.link_times`",
    "nodes": "time of single nodes of the backward pass: `backstash bench nodes`",
    "peak": "counted and resident peaks, and what is alive at them: `backstash bench peak`",
    "plans": "plans of programs that the planner was not built on: `python -m studies.heldout_plans`",
    "plan-times": "what plans take to make, and what they keep: `python -m studies.plan_times`",
    "plan-times-before": "the same before the search ran in C++: `python -m studies.plan_times`",
    "planner": "greedy plans beside exact ones, and time of the search: `python -m bench.planner`",
    "shapes": "plans of lengths that were never run, of language models: `python -m bench.shapes`",
    "shapes-images": "the same of networks for images: `python -m bench.shapes U-Net detector`",
    "steps": "times of steps, plain and under a policy: `backstash bench run`",
    "steptime": "times of steps of full networks under a Session: `backstash bench steptime`",
    "sz": "ratio and speed of the error-bounded coder, beside others: `backstash bench sz_table`",
    "torch-versions": "tests with each torch that we name: `python -m studies.torch_versions`",
    "verify": "processor's time and peaks of watched steps: `python -m bench.verify`",
    "zoo": "models of torchvision and timm beside plain PyTorch: `python -m studies.zoo`",
    "demos": "the largest size of a training within some memory, in its own unit: `python -m studies.demos`",
    "zoo-transformers": "architectures of transformers beside plain PyTorch: `python -m studies.zoo`",
}


def files() -> str:
    """Every file of results: what is in it, when it was measured, of which commit."""
    rows = []
    for kind in kinds():
        path, results = newest(kind), load(kind)
        about = max((name for name in _ABOUT if f"{kind}-".startswith(f"{name}-")), key=len, default="")
        commit = (results.get("machine") or {}).get("commit")
        rows.append(
            (
                f"[{kind}](results:{path.name})",
                _ABOUT.get(about, ""),
                started(results)[:10] or "-",
                f"`{commit[:12]}`" if commit else "-",
            )
        )
    return table(("file", "what, and the command", "measured", "commit"), rows)


def tables() -> Mapping[str, Callable[[], str]]:
    """Every table by name."""
    return {
        **steps.TABLES,
        **offloading.TABLES,
        **papers.TABLES,
        **claims.TABLES,
        **compiled_models.TABLES,
        **frameworks.TABLES,
        **gpus.TABLES,
        **trainings.TABLES,
        "files": files,
    }


def numbers() -> Mapping[str, str]:
    """Every number of a sentence by name."""
    return {**offloading.numbers(), **papers.numbers()}


def pages() -> list[Path]:
    """README and all pages of docs."""
    return sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


def rewritten(page: Path) -> str:
    """The text of a page with its regions filled anew.

    Raises:
        SystemExit: a region has a name that there is not, or begins and does not end.
    """
    text = page.read_text()
    begun = len(re.findall(r"<!-- (?:table|n|file): ", text))
    whole = sum(len(pattern.findall(text)) for pattern in (_TABLE, _NUMBER, _FILE))
    if begun != whole:
        raise SystemExit(f"{page.relative_to(ROOT)}: {begun} regions begin, but {whole} begin and end.")
    all_tables, all_numbers = tables(), numbers()
    to_results = os.path.relpath(FOLDER, page.parent)

    def fill(known: Mapping[str, object], make: Callable[[str], str]) -> Callable[[re.Match[str]], str]:
        def put(match: re.Match[str]) -> str:
            name = match["name"]
            if name not in known:
                raise SystemExit(f"{page.relative_to(ROOT)} asks for {name!r}; there are {', '.join(sorted(known))}.")
            return match[1] + _LINK.sub(lambda link: f"({to_results}/{link[1]})", make(name)) + match[4]

        return put

    text = _TABLE.sub(fill(all_tables, lambda name: f"\n{all_tables[name]()}\n\n"), text)
    text = _NUMBER.sub(fill(all_numbers, lambda name: all_numbers[name]), text)
    known_files = dict.fromkeys(kinds())
    return _FILE.sub(fill(known_files, lambda name: f"[{newest(name).name}](results:{newest(name).name})"), text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrites or checks the pages; returns 1 where ``--check`` finds a difference, else 0."""
    parser = argparse.ArgumentParser(prog="python -m studies.published", description=(__doc__ or "").strip())
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a page differs")
    asked = parser.parse_args(arguments)
    changed = [page for page in pages() if rewritten(page) != page.read_text()]
    for page in changed:
        print(f"{'differs' if asked.check else 'rewritten'}: {page.relative_to(ROOT)}")
        if not asked.check:
            page.write_text(rewritten(page))
    return int(bool(changed) and asked.check)


if __name__ == "__main__":
    raise SystemExit(main())
