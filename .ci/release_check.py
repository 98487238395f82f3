"""Checks all that has to be right before a release, and prints one line for each step: ok, or failed and what to do.

``make release-check`` runs it; CONTRIBUTING.md describes the steps. The exit code is 1 if a step has failed. What
long steps print lies in ``build/release-check``, one file a step.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import re
import shlex
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

APACHE = "283ea6cc2997a1a70da0049e09adf9317bb60ca1b51279b65196b83a69e1996b"
"""SHA-256 of the official text of the Apache License 2.0, without white space at its ends."""


_OF_MAKE = re.compile(r"make(\[\d+\])?: ")
"""How lines begin that make itself prints after what has failed."""


class StepError(Exception):
    """A step has failed; the text says what was found and what to do."""


@dataclass(frozen=True)
class Release:
    """What is to be released.

    Attributes:
        root: the repository.
        make: the command that runs make.
    """

    root: Path
    make: str = "make"

    def text(self, name: str) -> str:
        """The content of a file of the repository.

        Raises:
            StepError: there is none.
        """
        file = self.root / name
        if not file.is_file():
            raise StepError(f"there is no {name}. Add it.")
        return file.read_text(encoding="utf-8")

    def project(self) -> dict[str, object]:
        """The table ``project`` of pyproject.toml.

        Raises:
            StepError: there is none.
        """
        try:
            found = tomllib.loads(self.text("pyproject.toml")).get("project")
        except tomllib.TOMLDecodeError as error:
            raise StepError(f"pyproject.toml cannot be read: {error}. Repair it.") from None
        if not isinstance(found, dict):
            raise StepError("pyproject.toml has no table [project]. Add it.")
        return found

    def version(self) -> str:
        """The version in pyproject.toml.

        Raises:
            StepError: there is none.
        """
        found = self.project().get("version")
        if not isinstance(found, str) or not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", found):
            raise StepError(f"pyproject.toml has the version {found!r}. Give it one such as '1.2.3' or '1.2.3rc1'.")
        return found

    def run(self, step: str, command: Sequence[str], do: str) -> None:
        """Runs a command in the repository, with its output in a file.

        Args:
            step: the name of the file, in ``build/release-check``.
            command: the command.
            do: what to do if it fails.

        Raises:
            StepError: it has failed.
        """
        log = self.root / "build" / "release-check" / f"{step}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as output:
            try:
                done = subprocess.run(command, cwd=self.root, stdout=output, stderr=subprocess.STDOUT, check=False)
            except OSError as error:
                raise StepError(f"{shlex.join(command)} could not be started: {error}. Install it.") from None
        if done.returncode:
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            last = next((line for line in reversed(lines) if not _OF_MAKE.match(line)), "nothing was printed")
            where = log.relative_to(self.root)
            raise StepError(
                f"{shlex.join(command)} ended with {done.returncode}: {last.strip()[:200]}. See {where}. {do}"
            )


def check_versions(release: Release) -> str:
    """Checks that all files that name the version name the same one."""
    version = release.version()
    found = {
        "src/backstash/version.py": _match(release, "src/backstash/version.py", r'^__version__ = "(.*)"$'),
        "CITATION.cff": _match(release, "CITATION.cff", r"^version: *[\"']?([^\"'\s]+)[\"']?$"),
    }
    other = {name: text for name, text in found.items() if text != version}
    if other:
        shown = ", ".join(f"{name} has {text or 'none'}" for name, text in other.items())
        raise StepError(f"pyproject.toml has the version {version}, but {shown}. Write {version} there.")
    return version


def check_changelog(release: Release) -> str:
    """Checks that CHANGELOG.md has an entry for the version, in which something stands."""
    version = release.version()
    entries = re.split(r"^## ", release.text("CHANGELOG.md"), flags=re.MULTILINE)[1:]
    named = [
        entry for entry in entries if re.search(rf"(?<![\w.]){re.escape(version)}(?![\w.])", entry.partition("\n")[0])
    ]
    if not named:
        raise StepError(f"CHANGELOG.md has no entry for {version}. Add a heading such as '## {version} (2030-01-31)'.")
    changes = len(re.findall(r"^\* ", named[0], re.MULTILINE))
    if not changes:
        raise StepError(f"the entry for {version} in CHANGELOG.md is empty. List what has changed, one '* ' a change.")
    return f"{changes} changes under '{named[0].partition(chr(10))[0].strip()}'"


def check_licence(release: Release) -> str:
    """Checks that the licence's text is the official one, and that all files name it."""
    text = release.text("LICENSE").strip()
    if hashlib.sha256(text.encode()).hexdigest() != APACHE:
        raise StepError("LICENSE is not the official text of the Apache License 2.0. Put that text there, unchanged.")
    project = release.project()
    named = {
        "pyproject.toml": project.get("license"),
        "CITATION.cff": _match(release, "CITATION.cff", r"^license: *(\S+)$"),
    }
    other = [f"{name} has {found!r}" for name, found in named.items() if found != "Apache-2.0"]
    if other:
        raise StepError(f"LICENSE is Apache-2.0, but {' and '.join(other)}. Write Apache-2.0 there.")
    if project.get("license-files") != ["LICENSE"]:
        raise StepError('the packages would lack LICENSE. Add license-files = ["LICENSE"] to pyproject.toml.')
    return "Apache-2.0"


def check_tree(release: Release) -> str:
    """Checks that what is released is what is committed."""
    command = ["git", "status", "--porcelain"]
    done = subprocess.run(command, cwd=release.root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise StepError(f"git cannot tell what is committed: {done.stderr.strip()[:200]}. Run this in a clone.")
    changed = done.stdout.splitlines()
    if changed:
        raise StepError(
            f"{len(changed)} files are not as committed, such as {changed[0][3:]}. Commit them, or remove them."
        )
    return "as committed"


def check_packages(release: Release) -> str:
    """Builds the sdist and both wheels, and tries each in an environment of its own."""
    release.run("packages", [*shlex.split(release.make), "wheel"], "Repair what it names.")
    return ", ".join(path.name for path in _packages(release))


def check_twine(release: Release) -> str:
    """Checks that the packages can be uploaded."""
    files = [str(path) for path in _packages(release)]
    command = [sys.executable, "-m", "twine", "check", "--strict", *files]
    release.run("twine", command, "Repair the metadata in pyproject.toml, or README.md.")
    return f"{len(files)} packages"


def check_docs(release: Release) -> str:
    """Builds the site."""
    release.run("docs", [*shlex.split(release.make), "docs"], "Repair the page that it names.")
    return "build/site"


def check_torch(release: Release) -> str:
    """Runs the tests of ``make test`` with the oldest and the newest torch that the library names."""
    versions = tested_torch(release)
    for version in dict.fromkeys((versions[0], versions[-1])):
        command = [*shlex.split(release.make), "test-torch", f"TORCH={version}"]
        release.run(f"torch-{version}", command, f"Repair it, or name other versions than {', '.join(versions)}.")
    return f"{versions[0]} and {versions[-1]}"


def tested_torch(release: Release) -> tuple[str, ...]:
    """The versions of torch that the library names, oldest first.

    Raises:
        StepError: it names none, or older ones than pyproject.toml allows.
    """
    for node in ast.parse(release.text("src/backstash/torch_internals.py")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "TESTED":
            found = tuple(str(version) for version in ast.literal_eval(node.value))
            needs = [str(one) for one in release.project().get("dependencies", ())]  # type: ignore[attr-defined]
            oldest = next((one.partition(">=")[2] for one in needs if one.startswith("torch>=")), None)
            if not found or oldest is None or not f"{found[0]}.".startswith(f"{oldest}."):
                raise StepError(
                    f"TESTED begins with {found[:1]}, but pyproject.toml asks for torch>={oldest}. Make them agree."
                )
            return found
    raise StepError("src/backstash/torch_internals.py names no TESTED versions of torch. Add them.")


STEPS: dict[str, Callable[[Release], str]] = {
    "versions": check_versions,
    "changelog": check_changelog,
    "licence": check_licence,
    "tree": check_tree,
    "packages": check_packages,
    "twine": check_twine,
    "docs": check_docs,
    "torch": check_torch,
}
"""Every step by name, in the order in which they run: short ones first."""


def _match(release: Release, name: str, pattern: str) -> str | None:
    found = re.search(pattern, release.text(name), re.MULTILINE)
    return found[1] if found else None


def _packages(release: Release) -> list[Path]:
    found = sorted((release.root / "build" / "dist").glob("backstash-*"))
    version = release.version()
    if len(found) != 3 or any(f"-{version}" not in path.name for path in found):
        names = ", ".join(path.name for path in found) or "nothing"
        raise StepError(
            f"build/dist has {names}, but an sdist and two wheels of {version} were asked for. Run make wheel."
        )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the steps; returns 1 if one has failed, else 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip(), formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--skip", action="append", default=[], choices=STEPS, help="leaves a step out; may be repeated")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1], help="the repository")
    parser.add_argument("--make", default="make", help="the command that runs make")
    asked = parser.parse_args(arguments)
    release, failed = Release(asked.root, asked.make), 0
    for name, step in STEPS.items():
        started = time.monotonic()
        if name in asked.skip:
            outcome, text = "left out", "--skip"
        else:
            try:
                outcome, text = "ok", step(release)
            except StepError as error:
                outcome, text, failed = "failed", str(error), failed + 1
        print(f"{name:<10}{outcome:<10}{time.monotonic() - started:5.0f} s  {text}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
