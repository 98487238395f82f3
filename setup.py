"""Compiles native/*.cpp to src/backstash/ops/cpu/libbackstash_native.so: the build step that pyproject.toml cannot say.

And native/replay/*.cpp to src/backstash/interpreter/_replay.*.so, a module of Python that runs settled passes. It reads
torch's own objects, so it fits one Python and one torch, and is only built where that torch is there: without build
isolation.

And native/launch/*.cpp to src/backstash/ops/_launch.abi3.so, a module that launches CUDA kernels, in the limited API of
Python 3.11, so that it fits every later Python too. And native/onepass/kernels.cu to
src/backstash/ops/cuda/kernels.fatbin, for GPUs of compute capability 8.0 to 12.0: only where nvcc is, and not for an
editable install.

The step is optional. If there is no C++ compiler, or if it fails, the install goes on without what it could not compile
and prints a notice; backstash then uses its references in Python. To compile in place, for development:
python setup.py build_native

Each source file is compiled on its own, as many at a time as there are processors (MAX_JOBS sets another number).

BACKSTASH_BUILD=pure compiles nothing, whatever compilers there are: a wheel for every platform.
BACKSTASH_BUILD=portable leaves out what fits one Python and one torch: a wheel for every Python and torch.
"""

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Command, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build

ROOT = Path(__file__).parent
NATIVE = ROOT / "native"
LIBRARY = "backstash/ops/cpu/libbackstash_native.so"
REPLAY = f"backstash/interpreter/_replay{sysconfig.get_config_var('EXT_SUFFIX')}"
LAUNCHER = "backstash/ops/_launch.abi3.so"
FATBIN = "backstash/ops/cuda/kernels.fatbin"
ARCHITECTURES = (80, 86, 89, 90, 100, 120)  # as in ops/cuda/launcher.py
FILES = (LIBRARY, REPLAY, LAUNCHER, FATBIN)
# Nobody reads the flags that a division by zero sets: without them GCC makes vector code of more loops, as clang does.
# A product and a sum are rounded one by one, as torch does: without the flag GCC would fuse them where it can.
FLAGS = ("-O3", "-fno-trapping-math", "-ffp-contract=off", "-std=c++17", "-fPIC")


def say(line: str) -> None:
    """Prints to stderr, which pip shows with --verbose, and in every case when the build fails."""
    print(f"backstash: {line}", file=sys.stderr, flush=True)


def compilers() -> list[list[str]]:
    """Commands to try, in order: $CXX alone where it is set."""
    asked = os.environ.get("CXX")
    candidates = [shlex.split(asked)] if asked else [["g++"], ["clang++"]]
    return [command for command in candidates if command and shutil.which(command[0])]


def build_asked() -> str:
    """What is to be compiled: nothing (``pure``), what fits every torch (``portable``), or everything (empty)."""
    found = os.environ.get("BACKSTASH_BUILD", "")
    if found not in ("", "pure", "portable"):
        raise SystemExit(
            f"BACKSTASH_BUILD={found!r} was asked for, but there are 'pure' and 'portable'. Leave it out to compile."
        )
    return found


def jobs() -> int:
    """How many files are compiled at a time."""
    asked = os.environ.get("MAX_JOBS", "")
    return max(1, int(asked)) if asked.isdigit() else os.cpu_count() or 1


def work(source: Path) -> int:
    """Bytes of a source and of the kernels that it instantiates: a guess at how long it takes to compile."""
    kernels = source.with_name(f"{source.stem}_kernels.h")
    return source.stat().st_size + (kernels.stat().st_size if kernels.exists() else 0)


def run(command: list[str]) -> str | None:
    """Runs a command. Returns None, or what it printed if it failed."""
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if result.returncode == 0 else f"{shlex.join(command)} failed:\n{result.stderr[-2000:]}"


def compile_with(compiler: list[str], openmp: list[str], folder: Path, library: Path) -> str | None:
    """Compiles every source to an object file in ``folder`` and links them. Returns None, or why that failed."""
    flags = [*compiler, *FLAGS, *openmp]
    sources = sorted(NATIVE.glob("*.cpp"), key=work, reverse=True)  # the longest first, so that none is left at the end
    objects = [str(folder / f"{source.stem}.o") for source in sources]
    commands = [[*flags, "-c", str(source), "-o", file] for source, file in zip(sources, objects, strict=True)]
    with ThreadPoolExecutor(jobs()) as pool:
        problems = [problem for problem in pool.map(run, commands) if problem]
    return problems[0] if problems else run([*flags, "-shared", *objects, "-o", str(library)])


def compile_native(target: Path) -> str | None:
    """Compiles the library to ``target``. Returns None, or why there is none now (and then not an old one either)."""
    problem = "no C++ compiler was found (CXX, g++, clang++)"
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".build-", dir=target.parent) as scratch:
        fresh = Path(scratch) / target.name
        for compiler in compilers():
            for openmp in (["-fopenmp"], []):  # Apple's clang has no OpenMP: one thread is better than none
                started = time.monotonic()
                say(f"compiling the native CPU kernels with {shlex.join([*compiler, *FLAGS, *openmp])}")
                say(f"this takes a minute or two; {jobs()} files are compiled at a time (MAX_JOBS)")
                failure = compile_with(compiler, openmp, Path(scratch), fresh)
                if failure is None:
                    # Not written in place: a process that has the old library loaded keeps it.
                    os.replace(fresh, target)
                    say(f"compiled the native CPU kernels in {time.monotonic() - started:.0f} s")
                    return None
                problem = failure
    target.unlink(missing_ok=True)
    return problem


def compile_launcher(target: Path) -> str | None:
    """Compiles the launcher of CUDA kernels to ``target``. Returns None, or why there is none now."""
    problem = "no C++ compiler was found (CXX, g++, clang++)"
    target.parent.mkdir(parents=True, exist_ok=True)
    undefined = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []  # Python itself has the symbols
    with tempfile.TemporaryDirectory(prefix=".build-", dir=target.parent) as scratch:
        fresh = Path(scratch) / target.name
        for compiler in compilers():
            command = [*compiler, *FLAGS, "-fvisibility=hidden", f"-I{sysconfig.get_path('include')}", "-shared"]
            sources = map(str, sorted((NATIVE / "launch").glob("*.cpp")))
            failure = run([*command, *undefined, *sources, "-o", str(fresh)])
            if failure is None:
                os.replace(fresh, target)
                return None
            problem = failure
    target.unlink(missing_ok=True)
    return problem


def compile_fatbin(target: Path) -> str | None:
    """Compiles the CUDA kernels to ``target``. Returns None, or why there are none now."""
    target.unlink(missing_ok=True)
    compiler = shutil.which(os.environ.get("NVCC", "nvcc"))
    if compiler is None:
        return "there is no nvcc"
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".build-", dir=target.parent) as scratch:
        fresh = Path(scratch) / target.name
        code = [f"-gencode=arch=compute_{each},code=sm_{each}" for each in ARCHITECTURES]
        flags = ["-O3", "-std=c++17", "-fmad=false", f"--threads={jobs()}", "-Xfatbin=-compress-all"]
        say(f"compiling the CUDA kernels for {', '.join(map(str, ARCHITECTURES))}; this takes a minute")
        failure = run([compiler, "-fatbin", *flags, *code, str(NATIVE / "onepass" / "kernels.cu"), "-o", str(fresh)])
        if failure is None:
            os.replace(fresh, target)
    return failure


def torch_flags() -> list[str] | None:
    """Where torch's headers and libraries are; None where there is no torch."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    folder = Path(found.origin).parent
    include, lib = folder / "include", folder / "lib"
    if not (include / "torch").is_dir():
        return None
    headers = [f"-I{path}" for path in (include, include / "torch" / "csrc" / "api" / "include")]
    return [*headers, f"-L{lib}", "-ltorch_python", "-ltorch_cpu", "-lc10"]


def compile_replay(target: Path) -> str | None:
    """Compiles what reads torch's objects to ``target``. Returns None, or why there is none now."""
    target.unlink(missing_ok=True)
    flags = torch_flags()
    if flags is None:
        return "there is no torch here to build it for"
    problem = "no C++ compiler was found (CXX, g++, clang++)"
    target.parent.mkdir(parents=True, exist_ok=True)
    undefined = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
    for compiler in compilers():
        with tempfile.TemporaryDirectory(prefix=".build-", dir=target.parent) as scratch:
            fresh = Path(scratch) / target.name
            # As one file: torch's headers take longer than all that is ours.
            sources = sorted((NATIVE / "replay").glob("*.cpp"))
            whole = Path(scratch) / "whole.cpp"
            whole.write_text("".join(f'#include "{source.resolve()}"\n' for source in sources), encoding="utf-8")
            command = [*compiler, "-O2", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-shared", *undefined]
            failure = run([*command, f"-I{sysconfig.get_path('include')}", str(whole), *flags, "-o", str(fresh)])
            if failure is None:
                os.replace(fresh, target)
                return None
            problem = failure
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

    def target(self, file: str = LIBRARY) -> Path:
        in_place = self.editable_mode or "build_native" in self.distribution.commands
        return (ROOT / "src" if in_place else Path(self.build_lib)) / file

    def run(self) -> None:
        if build_asked() == "pure":
            for file in FILES:
                self.target(file).unlink(missing_ok=True)  # build_py may have copied one
            say("NOTICE: nothing is compiled, because BACKSTASH_BUILD=pure. Slow reference kernels serve.")
            return
        problem = compile_native(self.target())
        if problem is not None:
            say(f"NOTICE: installing without the native CPU kernels, because {problem}")
            say("It works without them, on slow reference kernels. Install g++ and install again to get them.")
        problem = compile_launcher(self.target(LAUNCHER))
        if problem is not None:
            say(f"NOTICE: installing without the launcher of CUDA kernels, because {problem}")
        if not self.editable_mode:  # a developer's install is not kept waiting: python setup.py build_native has it
            problem = compile_fatbin(self.target(FATBIN))
            if problem is not None:
                say(f"installing without the CUDA kernels, because {problem}; Triton's serve on GPUs")
        if build_asked() == "portable":
            self.target(REPLAY).unlink(missing_ok=True)  # build_py may have copied one
            say("NOTICE: nothing that reads torch's own objects is compiled, because BACKSTASH_BUILD=portable")
            return
        problem = compile_replay(self.target(REPLAY))
        if problem is not None:
            say(f"NOTICE: installing without what reads torch's own objects, because {problem}")
            say(
                "It works without it; a saved tensor takes twice the time. Install with --no-build-isolation to get it."
            )

    def get_source_files(self) -> list[str]:
        return [
            str(path.relative_to(ROOT)) for path in sorted(NATIVE.rglob("*")) if path.suffix in (".cpp", ".cu", ".h")
        ]

    def get_outputs(self) -> list[str]:
        return [str(Path(self.build_lib) / file) for file in FILES if self.target(file).exists()]

    def get_output_mapping(self) -> dict[str, str]:
        if not self.editable_mode:
            return {}
        return {str(Path(self.build_lib) / file): f"src/{file}" for file in FILES if self.target(file).exists()}


class Build(build):
    """Runs ``build``, then compiles the kernels: after build_py, which may copy an old library that lies in src."""

    sub_commands = [*build.sub_commands, ("build_native", None)]  # noqa: RUF012


class BdistWheel(bdist_wheel):
    """Builds a wheel for this platform if it holds what was compiled, else for any; that fits every Python."""

    def run(self) -> None:
        self.run_command("build")
        build_native = self.get_finalized_command("build_native")
        native = any(build_native.target(file).exists() for file in FILES)
        self.root_is_pure = not native
        self.distribution.has_ext_modules = lambda: native  # so that the files are filed as platform-dependent, too
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(cmdclass={"build": Build, "build_native": BuildNative, "bdist_wheel": BdistWheel})
