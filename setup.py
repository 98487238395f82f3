"""The one build step that pyproject.toml cannot say: native/*.cpp to src/backstash/ops/cpu/libbackstash_native.so.

It is optional. With no C++ compiler, or one that fails, the install goes on without the library, with one notice, and
the reference kernels serve. To build in place, for development: python setup.py build_native
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from setuptools import Command, setup
from setuptools.command.build import build

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools < 70.1
    from wheel.bdist_wheel import bdist_wheel

ROOT = Path(__file__).parent
NATIVE = ROOT / "native"
LIBRARY = "backstash/ops/cpu/libbackstash_native.so"
# Nobody reads the flags that a division by zero sets: without them GCC makes vector code of more loops, as clang does.
# A product and a sum are rounded one by one, as torch does: without the flag GCC would fuse them where it can.
FLAGS = ("-O3", "-fno-trapping-math", "-ffp-contract=off", "-std=c++17", "-fPIC", "-shared")


def compilers() -> list[list[str]]:
    """Commands to try, in order: $CXX alone where it is set."""
    asked = os.environ.get("CXX")
    candidates = [shlex.split(asked)] if asked else [["g++"], ["clang++"]]
    return [command for command in candidates if command and shutil.which(command[0])]


def compile_native(target: Path) -> str | None:
    """Compile the library to ``target``. Returns None, or why there is none now (and then not an old one either)."""
    problem = "no C++ compiler was found (CXX, g++, clang++)"
    sources = [str(path) for path in sorted(NATIVE.glob("*.cpp"))]
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        fresh = Path(scratch) / target.name
        for compiler in compilers():
            for openmp in (["-fopenmp"], []):  # Apple's clang has no OpenMP: one thread is better than none
                command = [*compiler, *FLAGS, *openmp, *sources, "-o", str(fresh)]
                result = subprocess.run(command, capture_output=True, text=True, check=False)
                if result.returncode == 0:
                    # Not written in place: a process that has the old one loaded keeps it.
                    os.replace(fresh, target)
                    print("backstash: built the native kernels:", shlex.join(command[:-2]), flush=True)
                    return None
                problem = f"{shlex.join(command)} failed:\n{result.stderr[-2000:]}"
    target.unlink(missing_ok=True)
    return problem


class BuildNative(Command):
    """Compile native/*.cpp: in place for an editable install or on its own, else into build_lib."""

    description = "compile the native CPU kernels (optional: goes on without a compiler)"
    user_options: list = []  # noqa: RUF012  the type that Command declares
    editable_mode = False

    def initialize_options(self) -> None:
        self.build_lib = None

    def finalize_options(self) -> None:
        self.set_undefined_options("build_py", ("build_lib", "build_lib"))

    def target(self) -> Path:
        in_place = self.editable_mode or "build_native" in self.distribution.commands
        return (ROOT / "src" if in_place else Path(self.build_lib)) / LIBRARY

    def run(self) -> None:
        problem = compile_native(self.target())
        if problem is not None:
            print(
                f"backstash: NOTICE: installing without the native CPU kernels, because {problem}\n"
                f"backstash works without them, on slow reference kernels. Install g++ and install again to get them.",
                file=sys.stderr,
                flush=True,
            )

    def get_source_files(self) -> list[str]:
        return [str(path.relative_to(ROOT)) for path in sorted(NATIVE.glob("*")) if path.suffix in (".cpp", ".h")]

    def get_outputs(self) -> list[str]:
        built = str(Path(self.build_lib) / LIBRARY)
        return [built] if self.target().exists() else []

    def get_output_mapping(self) -> dict[str, str]:
        return dict.fromkeys(self.get_outputs(), f"src/{LIBRARY}") if self.editable_mode else {}


class Build(build):
    """build, then the native kernels (after build_py, which may copy an old library that lies in src)."""

    sub_commands = [*build.sub_commands, ("build_native", None)]  # noqa: RUF012


class BdistWheel(bdist_wheel):
    """A wheel for this platform if it has the library, for any if not; for every Python, as the library uses none."""

    def run(self) -> None:
        self.run_command("build")
        native = self.get_finalized_command("build_native").target().exists()
        self.root_is_pure = not native
        self.distribution.has_ext_modules = lambda: native  # so that the files are filed as platform-dependent, too
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(cmdclass={"build": Build, "build_native": BuildNative, "bdist_wheel": BdistWheel})
