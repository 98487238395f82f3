"""Breaks the core in twenty-odd places, one at a time, and shows that a test of ``make test`` fails for each.

Run ``python -m tests.mutants``, with numbers for some. Each is tried on a copy of the sources; the files of tests that
are named beside it run as ``make test`` runs them. Prints a line for each; exits with 1 if one is not noticed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "backstash"
CASES = "2"
"""As many cases of a test as ``make test`` runs (--cases)."""


@dataclass(frozen=True)
class Mutant:
    """A change of the sources that makes them wrong.

    Attributes:
        what: what is wrong then.
        file: the file below ``src/backstash``.
        before: a text that is there once.
        after: what it becomes.
        tests: files of tests below ``tests``, one of which has to fail.
        reference: whether the interpreter and the kernels in C++ are left out, because they do the same thing rightly.
    """

    what: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]
    reference: bool = False


def _never(condition: str) -> tuple[str, str]:
    """A condition that becomes false."""
    return f"if {condition}:", f"if False and ({condition}):"


MUTANTS = (
    Mutant(
        "a relu's mask takes NaN for negative",
        "formulas.py",
        "return Mask(Test.NOT_LE, 0.0)",
        "return Mask(Test.GT, 0.0)",
        ("gradients/test_needs.py",),
    ),
    Mutant(
        "a pooling without a stride steps by 1",
        "formulas.py",
        'stride=each(scalars("stride"), kernel)',
        'stride=each(scalars("stride"), (1,))',
        ("gradients/test_needs.py",),
    ),
    Mutant(
        "indices count as shapes",
        "policies/exact.py",
        "if saved.need is Need.SHAPE:",
        "if saved.need in (Need.SHAPE, Need.INDEX):",
        ("gradients/test_needs.py", "policies/test_decisions.py"),
    ),
    Mutant(
        "a change in place of what an idle Session holds is not noticed",
        "stash/held.py",
        *_never("held._version != version"),
        ("gradients/test_idle.py", "gradients/test_changes_after_save.py"),
        reference=True,
    ),
    Mutant(
        "a change in place of a saved tensor is not noticed",
        "stash/decode.py",
        *_never("held is not None and held._version != saved.origin.version"),
        ("gradients/test_changes_after_save.py",),
        reference=True,
    ),
    Mutant(
        "what the program holds is encoded at once",
        "stash/pending.py",
        "    if count > len(members):\n        return False\n",
        "    if count > len(members):\n        return True\n",
        ("gradients/test_changes_after_save.py", "test_pending.py"),
        reference=True,
    ),
    Mutant(
        "one storage that is seen as two dtypes is encoded under one",
        "stash/encode.py",
        *_never("any(saved.spec.dtype is not facts.spec.dtype for saved in fresh if saved.spec)"),
        ("gradients/test_lifetimes.py",),
        reference=True,
    ),
    Mutant(
        "a lossy codec serves a reader of signs",
        "stash/encode.py",
        *_never("facts.need is Need.SIGN and (facts.mask is None or not base.keeps(codec, facts.mask))"),
        ("gradients/test_lossy.py",),
    ),
    Mutant(
        "a remade value is not compared with its sample",
        "stash/sample.py",
        "return not torch.equal(bits_of(elements), bits_of(self.bits))",
        "return False",
        ("gradients/test_unseen_changes.py", "gradients/test_recompute.py"),
    ),
    Mutant(
        "a change of a leaf is not followed by storing what leans on it",
        "remake/leaning.py",
        *_never("value is not None and value.state.recipe is not None"),
        ("gradients/test_unseen_changes.py", "gradients/test_leaving.py", "gradients/test_recompute.py"),
    ),
    Mutant(
        "a recipe reads what its call read before it was changed",
        "remake/contents.py",
        "        self._snapshots.pop(storage._cdata, None)\n        for held in",
        "        for held in () and",
        ("gradients/test_recompute.py", "gradients/test_unseen_changes.py", "gradients/test_any_producer.py"),
    ),
    Mutant(
        "a call that draws is repeated without its generator's state",
        "repeatable.py",
        "    if not draws(function, args, kwargs):\n        return None\n    given",
        "    return None\n    given",
        ("gradients/test_recompute.py", "gradients/test_any_producer.py"),
    ),
    Mutant(
        "a function in place is taken for one that changes nothing",
        "capture/side_effects.py",
        "return SideEffect.CHANGES_SELF if getattr(Tensor, name, None) is function else SideEffect.CHANGES",
        "return SideEffect.NONE",
        ("gradients/test_unseen_changes.py", "gradients/test_recompute.py", "gradients/test_any_producer.py"),
    ),
    Mutant(
        "a part of a storage is read from its beginning",
        "stash/decode.py",
        "return whole.as_strided(spec.shape, spec.stride, saved.offset)",
        "return whole.as_strided(spec.shape, spec.stride, 0)",
        ("gradients/test_kinds_of_tensors.py", "gradients/test_random_programs.py", "gradients/test_lifetimes.py"),
        reference=True,
    ),
    Mutant(
        "a gradient that somebody holds is written over",
        "redeem/exclusive.py",
        "    if counts != _alone.get((call, len(counts) > 4)) or ",
        "    if ",
        ("gradients/test_seen_by_hooks.py", "gradients/test_claims.py", "gradients/test_consumers.py"),
        reference=True,
    ),
    Mutant(
        "a product is put off although its slices have other bits",
        "redeem/accumulation.py",
        "torch.equal(bits_of(whole[begin : begin + self.step]), bits_of(self.rows(begin)))",
        "True",
        ("gradients/test_accumulation.py",),
    ),
    Mutant(
        "a block that was read from the wrong place is decoded",
        "stores/disk.py",
        *_never("zlib.crc32(data) != value.checksums[block]"),
        ("stores/test_disk.py", "stores/test_disk_faults.py"),
    ),
    Mutant(
        "a plan that was edited is followed",
        "planning/model/sealed.py",
        *_never('document.get("checksum") != checksum'),
        ("planning/test_damaged_plans.py", "planning/test_plan_files.py"),
    ),
    Mutant(
        "the model of a step forgets what it takes to encode",
        "planning/model/peak.py",
        "        np.add.at(live, self.born, self.encode[rows])\n        np.add.at(live, start",
        "        np.add.at(live, start",
        ("planning/test_peak_model.py",),
    ),
    Mutant(
        "a guard does not count what was not planned",
        "planning/run/guard.py",
        "self.excess += above - self._above.get(key, 0)",
        "self.excess += 0",
        ("planning/test_guard.py",),
    ),
    Mutant(
        "the generators are not restored after a trial",
        "rewrites/state.py",
        "random.setstate(self._python)",
        "pass",
        ("test_rewrites.py", "test_rewrites_undone.py"),
    ),
    Mutant(
        "a draft that lacks a part of its value is taken for whole",
        "stash/drafts.py",
        "if judged.refusal is None:",
        "if True:",
        ("test_on_a_device.py",),
    ),
    Mutant(
        "two tensors that an op saves are given each other's role",
        "capture/naming.py",
        "found.append((role, saved))",
        'found.append(("self" if role == "other" else role, saved))',
        ("gradients/test_needs.py", "gradients/test_factors.py", "gradients/test_recognised.py"),
        reference=True,
    ),
)


def notice(mutant: Mutant, copy: Path) -> str:
    """Returns the first test that fails with a mutant, or "" if none does.

    Args:
        mutant: the change.
        copy: a copy of the sources, which is as before when this returns.

    Raises:
        ValueError: the text that is to be changed is not there, or more than once.
    """
    path = copy / "backstash" / mutant.file
    text = path.read_text()
    if text.count(mutant.before) != 1:
        raise ValueError(f"{mutant.file} was asked for one {mutant.before!r}, got {text.count(mutant.before)}.")
    path.write_text(text.replace(mutant.before, mutant.after))
    environment = {**os.environ, "PYTHONPATH": f"{copy}{os.pathsep}{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}
    if mutant.reference:
        environment["BACKSTASH_KERNELS"] = "reference"
    arguments = ("-q", "-x", "-m", "not slow", "--cases", CASES, "-p", "no:cacheprovider", "--no-header")
    try:
        ran = subprocess.run(
            [sys.executable, "-m", "pytest", *arguments, *(f"tests/{file}" for file in mutant.tests)],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
        )
    finally:
        path.write_text(text)
    failed = [line for line in ran.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0] if ran.returncode == 1 and failed else ""


def main(numbers: list[int]) -> int:
    """Tries the mutants of these numbers, or all; returns the exit status."""
    unnoticed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "src"
        shutil.copytree(ROOT / "src", copy, ignore=shutil.ignore_patterns("__pycache__"))
        for number, mutant in enumerate(MUTANTS):
            if numbers and number not in numbers:
                continue
            found = notice(mutant, copy)
            unnoticed += not found
            print(f"{number:3} {mutant.what}: {found or 'NOT NOTICED'}", flush=True)
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main([int(argument) for argument in sys.argv[1:]]))
