"""A script behaves under the launcher as under python itself: what it sees, prints and returns."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.overrides import _get_current_function_mode_stack

from backstash.errors import ScriptError, UnknownNameError
from backstash.integrations.launcher import INTERRUPTED, execute, launch

TRAINING = """
import sys
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    loss = model(torch.randn(256, 64)).square().mean()
    loss.backward()
    optimizer.step()
"""


def write(folder: Path, text: str, name: str = "script.py") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(text)
    return path


def by_python(script: Path | str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(script), *args], capture_output=True, text=True, check=False)


def traces() -> tuple[object, ...]:
    """Returns all global state that a Session or the launcher could leave changed."""
    hooks = torch.nn.modules.module
    return (
        sys.argv,
        list(sys.path),
        sys.modules["__main__"],
        dict(hooks._global_forward_hooks),
        dict(hooks._global_forward_pre_hooks),
        torch._C._autograd._top_saved_tensors_default_hooks(True),
        _get_current_function_mode_stack(),
    )


def test_a_script_sees_what_python_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "project", "name = 'the neighbour'", "neighbour_of_script.py")
    write(
        tmp_path / "project",
        """
import inspect, pickle, sys
import neighbour_of_script

class Batch:
    pass

def annotated(x: int) -> None: ...

print(__name__, __file__, __spec__, __doc__, type(__builtins__), type(__loader__).__name__)
print(sys.argv, sys.path[0], sorted(set(globals()) - {"__annotations__", "__cached__"}))  # these depend on the version
print(neighbour_of_script.name, sys.modules["__main__"].__dict__ is globals())
print(type(pickle.loads(pickle.dumps(Batch()))) is Batch, annotated.__annotations__, inspect.getsource(Batch))
""",
    )
    monkeypatch.chdir(tmp_path)
    before = traces()
    script, args = "project/script.py", ("--depth", "3", "--", "-v")
    assert execute(script, args) == 0
    sys.modules.pop("neighbour_of_script")
    assert capsys.readouterr().out == by_python(script, *args).stdout
    assert traces() == before


def test_a_link_to_a_script_imports_from_where_the_script_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = write(tmp_path / "real", "import sys; print(sys.path[0], sys.argv[0], __file__)")
    link = tmp_path / "link.py"
    link.symlink_to(script)
    assert execute(link) == 0
    assert capsys.readouterr().out == by_python(link).stdout


@pytest.mark.parametrize(
    "text",
    [
        "import sys; sys.exit()",
        "import sys; sys.exit(3)",
        "import sys; sys.exit(True)",
        "import sys; sys.exit('not today')",
        "print('one'); 1 / 0",
        "try:\n    {}['key']\nexcept KeyError as error:\n    raise ValueError('two') from error",
        "if True\n    pass",
        "import no_such_module",
        "raise BaseException('neither exit nor error')",
        "import sys\nsys.excepthook = lambda *_: print('its own hook', file=sys.stderr)\nraise ValueError",
    ],
    ids=["exit", "exit-3", "exit-true", "exit-text", "error", "cause", "syntax", "import", "base", "excepthook"],
)
def test_it_ends_as_under_python(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = write(tmp_path, text)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    exit_code = execute(script)
    seen, expected = capsys.readouterr(), by_python(script)
    assert (exit_code, seen.out, seen.err) == (expected.returncode, expected.stdout, expected.stderr)


def test_an_interrupted_script_ends_with_130(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(write(tmp_path, "raise KeyboardInterrupt")) == INTERRUPTED == 130
    assert "launcher.py" not in capsys.readouterr().err


def test_a_script_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ScriptError, match=r"train.py' was asked for, but there is no such file .* Give the path"):
        launch(tmp_path / "train.py")
    with pytest.raises(ScriptError, match="that is a folder"):
        launch(tmp_path)


def test_an_unknown_policy_is_refused_before_the_script_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UnknownNameError, match="policy 'fastest' was asked for, but there are"):
        launch(write(tmp_path, "print('started')"), policy="fastest")
    assert capsys.readouterr().out == ""


def test_training_runs_under_the_session_and_nothing_is_left_behind(tmp_path: Path) -> None:
    before = traces()
    launched = launch(write(tmp_path, TRAINING))
    assert launched.exit_code == 0
    assert launched.report.ratio > 1
    assert traces() == before


def test_a_script_that_fails_after_a_step_has_its_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    launched = launch(write(tmp_path, TRAINING + "\nraise ValueError('no more images')\n"))
    assert launched.exit_code == 1
    assert launched.report.ratio > 1
    assert "no more images" in capsys.readouterr().err


def test_a_script_that_fails_in_a_module_leaves_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = traces()
    assert launch(write(tmp_path, TRAINING + "\nmodel(torch.ones(1, 63))\n")).exit_code == 1
    seen = capsys.readouterr().err
    assert "mat1 and mat2" in seen
    assert seen.startswith("Traceback")
    assert "launcher.py" not in seen
    assert traces() == before


def test_evaluating_at_the_end_does_not_empty_the_report(tmp_path: Path) -> None:
    launched = launch(write(tmp_path, TRAINING + "\nwith torch.no_grad():\n    model(torch.ones(256, 64))\n"))
    assert launched.report.saved_nbytes > 0
