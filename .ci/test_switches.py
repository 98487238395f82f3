"""The tests of switches with the frameworks themselves, each in a folder of its own: ``make test-switches``.

The frameworks ask for other versions of torch and of each other than we have, so their packages are installed without
what they ask for, and what a switch needs of that is named here. ``python .ci/test_switches.py keras`` tests one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "switches"

DATASETS = ["datasets", "pyarrow", "pandas", "dill", "multiprocess", "xxhash"]
WEB = ["requests", "urllib3", "idna", "certifi", "charset-normalizer"]
PACKAGES = {
    "trl": ["trl", *DATASETS],
    "axolotl": ["axolotl==0.19.0", "addict"],
    "lightning": ["jsonargparse", "docstring-parser", "typeshed-client", "importlib_resources"],
    "hydra": ["hydra-core", "omegaconf", "antlr4-python3-runtime==4.9.3"],
    "torchtune": [
        *("torchtune", "torchao==0.10.0", "omegaconf", "antlr4-python3-runtime==4.9.3", "blobfile", "sentencepiece"),
        *("tiktoken", "kagglehub", *DATASETS, *WEB),
    ],
    "torchtitan": [
        *("torchtitan", "torchao", "torchdata", "tyro", "docstring-parser", "spmd_types", "tensorboard", "grpcio"),
        *("protobuf", "werkzeug", "absl-py", "markdown", "beartype", *DATASETS, *WEB),
    ],
    "fastai": [
        *("fastai", "fastcore", "fastprogress", "fasttransform", "fastdownload", "plum-dispatch", "beartype"),
        *("torchvision==0.28.0", "python-fasthtml", "starlette", "apswutils", "fastlite", "itsdangerous", "apsw"),
        *("oauthlib", "uvicorn", "beautifulsoup4", "soupsieve", "python-multipart", "pandas", *WEB),
    ],
    "keras": ["keras", "absl-py", "namex", "h5py", "optree", "ml-dtypes"],
}
"""What is installed for the tests whose names have this word."""


def main(asked: list[str]) -> int:
    """Installs and tests the frameworks, and returns how many have failed or were skipped."""
    failed = []
    for framework in asked or PACKAGES:
        folder = FOLDER / framework / "site-packages"  # of that name, because dill takes it for a sign of a library
        if not folder.is_dir():
            pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"]
            subprocess.run([*pip, "--target", str(folder), *PACKAGES[framework]], check=True)
        files = [f"tests/integrations/test_{name}.py" for name in ("switches", "trl")[: 1 + (framework == "trl")]]
        paths = [str(folder), os.environ.get("PYTHONPATH", "")]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:hydra_pytest", "-k", framework, *files],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
            capture_output=True,
            text=True,
            check=False,
        )
        summary = done.stdout.strip().rpartition("\n")[2]
        print(f"{framework}: {summary}")
        if done.returncode or "skipped" in summary:
            failed.append(framework)
            print(done.stdout)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
