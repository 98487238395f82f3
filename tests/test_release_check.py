"""The check before a release finds what is wrong, and says what to do. The long steps are imitated."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
FILES = ("pyproject.toml", "CITATION.cff", "CHANGELOG.md", "LICENSE", "src/backstash/version.py")
TORCH = "src/backstash/torch_internals.py"
LONG = ("tree", "packages", "twine", "docs", "torch")


def loaded(name: str) -> ModuleType:
    """A program of the folder .ci, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # a dataclass looks its module up
    spec.loader.exec_module(module)
    return module


check = loaded("release_check")
wheels = loaded("check_wheel")


@pytest.fixture
def release(tmp_path: Path) -> object:
    """A copy of what the short steps read."""
    for name in (*FILES, TORCH):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    return check.Release(tmp_path)


def change(release: object, name: str, old: str, new: str) -> None:
    file = release.root / name  # type: ignore[attr-defined]
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))


def run(root: Path, *options: str) -> int:
    return check.main(["--root", str(root), *options])  # type: ignore[no-any-return]


def skipped(*names: str) -> list[str]:
    return [word for name in names for word in ("--skip", name)]


def test_the_repository_passes_the_short_steps(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(ROOT, *skipped(*LONG)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(check.STEPS)
    assert [line.split()[1] for line in lines[:3]] == ["ok", "ok", "ok"]


BROKEN: list[tuple[str, str, str, str, str]] = [
    ("versions", "src/backstash/version.py", '__version__ = "0.1.0"', '__version__ = "0.2.0"', "version.py has 0.2.0"),
    ("versions", "CITATION.cff", "version: 0.1.0", "version: 0.0.9", "CITATION.cff has 0.0.9. Write 0.1.0 there"),
    ("versions", "CITATION.cff", "version: 0.1.0", "", "CITATION.cff has none"),
    ("versions", "pyproject.toml", 'version = "0.1.0"', 'version = "new"', "such as '1.2.3'"),
    ("versions", "pyproject.toml", "[project]", "[project", "cannot be read"),
    ("changelog", "CHANGELOG.md", "(0.1.0)", "(10.1.0)", "no entry for 0.1.0. Add a heading"),
    ("changelog", "CHANGELOG.md", "\n* ", "\n+ ", "is empty"),
    ("licence", "LICENSE", "perpetual", "temporary", "not the official text"),
    ("licence", "pyproject.toml", 'license = "Apache-2.0"', 'license = "MIT"', "pyproject.toml has 'MIT'"),
    ("licence", "CITATION.cff", "license: Apache-2.0", "", "CITATION.cff has None"),
    ("licence", "pyproject.toml", 'license-files = ["LICENSE"]', "", "would lack LICENSE"),
]


@pytest.mark.parametrize(("step", "name", "old", "new", "said"), BROKEN)
def test_a_broken_file_is_found(
    step: str, name: str, old: str, new: str, said: str, release: object, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check.STEPS[step](release)
    change(release, name, old, new)
    others = [other for other in check.STEPS if other != step]
    assert run(release.root, *skipped(*others)) == 1  # type: ignore[attr-defined]
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "left out" not in line]
    assert line.startswith(f"{step} ") and " failed " in line and said in line


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_found(name: str, release: object, capsys: pytest.CaptureFixture[str]) -> None:
    (release.root / name).unlink()  # type: ignore[attr-defined]
    assert run(release.root, *skipped(*LONG)) == 1  # type: ignore[attr-defined]
    assert f"there is no {name}. Add it." in capsys.readouterr().out


def test_all_steps_run_though_one_fails(release: object, capsys: pytest.CaptureFixture[str]) -> None:
    change(release, "LICENSE", "perpetual", "temporary")
    change(release, "CITATION.cff", "version: 0.1.0", "version: 3")
    assert run(release.root, *skipped(*LONG)) == 1  # type: ignore[attr-defined]
    outcomes = {line.split()[0]: line.split()[1] for line in capsys.readouterr().out.splitlines()}
    assert [outcomes[name] for name in ("versions", "changelog", "licence")] == ["failed", "ok", "failed"]


def test_a_tree_that_is_not_committed_is_found(release: object) -> None:
    root = release.root  # type: ignore[attr-defined]
    with pytest.raises(check.StepError, match="git cannot tell"):
        check.check_tree(release)
    for command in (["init", "-q"], ["add", "-A"]):
        subprocess.run(["git", *command], cwd=root, check=True)
    me = ["-c", "user.name=a", "-c", "user.email=a@b.example", "commit", "-qm", "all"]
    subprocess.run(["git", *me], cwd=root, check=True)
    assert check.check_tree(release) == "as committed"
    change(release, "LICENSE", "perpetual", "temporary")
    with pytest.raises(check.StepError, match="1 files are not as committed, such as LICENSE"):
        check.check_tree(release)


def with_make(release: object, make: Callable[[], str]) -> object:
    """The same with another make, a program of one line."""
    return check.Release(release.root, f"{sys.executable} -c {make()!r}")  # type: ignore[attr-defined]


def test_a_command_that_fails_is_told_with_its_last_line(release: object) -> None:
    failing = with_make(
        release, lambda: "import sys; print(1); print('no page of that name'); print('make[1]: Error 1'); sys.exit(3)"
    )
    with pytest.raises(check.StepError, match=r"ended with 3: no page of that name. See build/release-check/docs.log"):
        check.check_docs(failing)
    with pytest.raises(check.StepError, match="could not be started"):
        check.check_docs(check.Release(release.root, "no-such-make"))  # type: ignore[attr-defined]
    assert check.check_docs(with_make(release, lambda: "pass")) == "build/site"


def test_packages_of_another_version_are_found(release: object) -> None:
    dist = release.root / "build" / "dist"  # type: ignore[attr-defined]
    dist.mkdir(parents=True)
    made = with_make(release, lambda: "pass")
    with pytest.raises(check.StepError, match="build/dist has nothing"):
        check.check_packages(made)
    names = ("backstash-0.1.0.tar.gz", "backstash-0.1.0-py3-none-any.whl", "backstash-0.1.0-py3-none-linux_x86_64.whl")
    for name in names:
        (dist / name).touch()
    assert check.check_packages(made) == ", ".join(sorted(names))
    (dist / names[0]).rename(dist / "backstash-0.0.9.tar.gz")
    with pytest.raises(check.StepError, match="an sdist and two wheels of 0.1.0"):
        check.check_packages(made)


def test_torch_is_tried_as_old_and_as_new_as_we_say(release: object) -> None:
    noting = "import sys; open('asked', 'a').write(sys.argv[-1] + chr(10))"
    versions = check.tested_torch(release)
    assert check.check_torch(with_make(release, lambda: noting)) == f"{versions[0]} and {versions[-1]}"
    asked = (release.root / "asked").read_text().split()  # type: ignore[attr-defined]
    assert asked == [f"TORCH={versions[0]}", f"TORCH={versions[-1]}"]
    change(release, "pyproject.toml", "torch>=2.11", "torch>=2.1")
    with pytest.raises(check.StepError, match="asks for torch>=2.1. Make them agree"):
        check.tested_torch(release)
    change(release, TORCH, "TESTED = ", "TRIED = ")
    with pytest.raises(check.StepError, match="names no TESTED"):
        check.tested_torch(release)


def package(file: Path, *names: str) -> Path:
    import tarfile
    import zipfile

    if file.suffix == ".whl":
        with zipfile.ZipFile(file, "w") as archive:
            for name in names:
                archive.writestr(name, "")
    else:
        with tarfile.open(file, "w:gz") as archive:
            for name in names:
                archive.addfile(tarfile.TarInfo(name))
    return file


def test_a_package_without_licence_or_with_the_wrong_code_is_refused(tmp_path: Path) -> None:
    licence, code = "backstash-1.dist-info/licenses/LICENSE", "backstash/stash/_held.abi3.so"
    pure, native = tmp_path / "backstash-1-py3-none-any.whl", tmp_path / "backstash-1-py3-none-linux_x86_64.whl"
    wheels.check_contents(package(pure, licence))
    wheels.check_contents(package(native, licence, code))
    for file, names, said in (
        (pure, (licence, code), "does not go with its name"),
        (native, (licence,), "has no native code"),
        (native, (licence, "backstash/interpreter/_replay.cpython-311-x86_64-linux-gnu.so"), "for one Python alone"),
        (pure, (), "lacks licenses/LICENSE"),
        (tmp_path / "backstash-1.tar.gz", ("backstash-1/LICENSE", f"backstash-1/src/{code}"), "are no sources"),
        (tmp_path / "backstash-1.tar.gz", ("backstash-1/LICENSE", "backstash-1/README.md"), "lacks CHANGELOG.md"),
    ):
        with pytest.raises(SystemExit, match=said):
            wheels.check_contents(package(file, *names))


def test_an_unknown_kind_of_build_is_refused() -> None:
    environment = {"BACKSTASH_BUILD": "fast", "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "setup.py", "-q", "build_native"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "BACKSTASH_BUILD='fast'" in done.stderr


def test_the_versions_of_torch_that_we_name_are_in_order() -> None:
    from backstash.torch_internals import TESTED

    assert check.tested_torch(check.Release(ROOT)) == TESTED
    assert sorted(TESTED, key=lambda version: [int(part) for part in version.split(".")]) == list(TESTED)
    assert f"for version in {TESTED[0]} {TESTED[-1]};" in (ROOT / "Makefile").read_text()
