from __future__ import annotations

import json
import subprocess
import sys

import pytest
from fresh import run_fresh

import backstash

PUBLIC = [
    "BackstashError",
    "Budgeted",
    "Codec",
    "Encoded",
    "Keep",
    "Need",
    "Plan",
    "Policy",
    "Recompute",
    "Session",
    "Stash",
    "Store",
    "codecs",
    "compile_backend",
    "compile_options",
    "fit_batch",
    "graphed",
    "measure",
    "plan",
    "policies",
    "profile",
    "register_codec",
    "unwrap",
    "verify",
    "wrap",
]
HEAVY = {
    *("accelerate", "lightning", "matplotlib", "pandas", "peft", "pytorch_lightning", "rich", "sklearn"),
    *("transformers", "triton", "typer"),
}

SCRIPT = """
import json, sys, torch, warnings
warnings.simplefilter("error")
before = set(sys.modules)
import backstash, backstash.testing
print(json.dumps({"cuda": torch.cuda.is_initialized(), "modules": sorted(set(sys.modules) - before)}))
"""


def test_the_public_names_are_frozen() -> None:
    assert backstash.__all__ == PUBLIC
    assert all(hasattr(backstash, name) for name in PUBLIC)


def test_no_other_name_but_modules() -> None:
    others = {name for name in vars(backstash) if not name.startswith("_")} - set(PUBLIC)
    others -= {"load_ipython_extension", "unload_ipython_extension"}  # which IPython asks for, and nobody else
    assert all(f"backstash.{name}" in sys.modules for name in others)


def test_importing_starts_nothing_and_brings_nothing_heavy() -> None:
    done = run_fresh(SCRIPT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["cuda"] is False
    assert not HEAVY & {module.split(".")[0] for module in found["modules"]}
    assert not [module for module in found["modules"] if ".triton" in module.removeprefix("backstash.ops.triton")]
    assert not [module for module in found["modules"] if module.startswith("torch._inductor")]


@pytest.mark.slow
def test_nothing_is_printed_on_import() -> None:
    done = subprocess.run([sys.executable, "-c", "import backstash"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
