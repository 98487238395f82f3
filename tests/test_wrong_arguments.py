"""Whatever is passed for an argument of a public function: it is accepted, or refused by an error that says what to do.

A table has a row for each argument of the public surface, and a test compares it with the signatures.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import backstash as bs
from backstash.errors import BackstashError
from backstash.planning.measure import link
from backstash.policies import registry
from backstash.rewrites import channels_last, chunked_loss, chunked_rows, inplace


class Odd:
    """An object of no use here."""


MODEL = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
WRONG: list[Any] = [
    *(None, 3, -1, 1.5, True, "abc", b"x", "a\0b", [], [MODEL], {}, {"abc": 1}, (), Odd(), MODEL, nn.Linear),
    *(torch.ones(2), math.nan, math.inf, object, 10**400, 1 << 63, "60%", lambda: None, lambda x: x, len),
]


def step() -> None:
    MODEL(torch.ones(8, 64)).sum().backward()


@functools.cache
def profiled() -> Any:
    return bs.profile(step, MODEL, min_nbytes=0)


@functools.cache
def planned() -> Any:
    return bs.plan(profiled(), "200%")


def wrapped(**arguments: Any) -> Any:
    return bs.wrap(arguments.pop("model", nn.Linear(2, 2)), **arguments)


Call = Callable[..., Any]
TABLE: dict[str, tuple[Call, Call, dict[str, Any]]] = {  # the function, how it is called, what it is given beside
    "profile": (bs.profile, bs.profile, {"step": step, "model": MODEL}),
    "plan": (bs.plan, lambda **given: bs.plan(**{"profile": profiled(), "budget": "200%"} | given), {}),
    "measure": (bs.measure, bs.measure, {"step": step, "repeats": 1, "warmup": 0}),
    "verify": (bs.verify, bs.verify, {"step": step, "model": MODEL}),
    "compile_options": (bs.compile_options, bs.compile_options, {}),
    "compile_backend": (bs.compile_backend, bs.compile_backend, {}),
    "Budgeted": (bs.Budgeted, bs.Budgeted, {"budget": "60%"}),
    "Session": (bs.Session, bs.Session, {}),
    "wrap": (bs.wrap, wrapped, {}),
    "unwrap": (bs.unwrap, bs.unwrap, {}),
    "graphed": (bs.graphed, bs.graphed, {"step": step}),
    "fit_batch": (
        bs.fit_batch,
        lambda **given: bs.fit_batch(**{"make_step": lambda n: step, "budget": "1GiB", "most": 1} | given),
        {"model": MODEL},
    ),
    "register_codec": (bs.register_codec, bs.register_codec, {}),
    "Plan.from_json": (bs.Plan.from_json, bs.Plan.from_json, {}),
    "Plan.diff": (bs.Plan.diff, lambda other: planned().diff(other), {}),
    "Plan.guarded": (bs.Plan.guarded, lambda **given: planned().guarded(**given), {}),
    "Stash": (bs.Stash, bs.Stash, {"codecs": "zvc"}),
    "Recompute": (bs.Recompute, bs.Recompute, {}),
    "inplace": (inplace, inplace, {"model": MODEL, "step": step}),
    "channels_last": (channels_last, channels_last, {"model": MODEL, "step": step}),
    "chunked_loss": (chunked_loss, chunked_loss, {"model": MODEL}),
    "chunked_rows": (
        chunked_rows,
        chunked_rows,
        {"hidden": torch.ones(2, 64), "head": nn.Linear(64, 5), "target": torch.zeros(2, dtype=torch.int64)},
    ),
    "policies.get": (bs.policies.get, bs.policies.get, {}),
    "policies.register": (
        bs.policies.register,
        bs.policies.register,
        {"name": "lossless", "policy": bs.policies.Lossless},
    ),
    "codecs.get": (bs.codecs.get, bs.codecs.get, {}),
}
FREE = {  # what is only shown, or is asked when it is used: texts and switches
    *("Recompute.max_depth", "Recompute.max_inputs", "Recompute.within", "Recompute.any_producer"),
    *("Recompute.exact_roots", "Recompute.max_moved"),
    *(f"policies.register.{name}" for name in ("is_exact", "gradients", "does", "use_when", "is_candidate")),
}
ARGUMENTS = [
    (name, argument)
    for name, (function, _, _) in TABLE.items()
    for argument, parameter in inspect.signature(function).parameters.items()
    if parameter.kind is not parameter.VAR_KEYWORD and argument != "self" and f"{name}.{argument}" not in FREE
]


def test_the_table_has_the_public_functions() -> None:
    functions = {name for name in bs.__all__ if callable(getattr(bs, name))}
    no_arguments = {"BackstashError", "Codec", "Encoded", "Keep", "Need", "Plan", "Policy", "Store"}
    assert functions - no_arguments <= {name.partition(".")[0] for name in TABLE}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("name", "argument"), ARGUMENTS, ids=[".".join(each) for each in ARGUMENTS])
def test_a_wrong_argument_is_refused_by_an_error_that_says_what_to_do(
    name: str, argument: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(link, "_measured", lambda *where: None)
    for module, table in ((registry, "_REGISTRY"), (registry, "_DESCRIPTIONS"), (bs.codecs, "_REGISTRY")):
        monkeypatch.setattr(module, table, dict(getattr(module, table)))  # some names are accepted
    _, call, given = TABLE[name]
    refused = 0
    for wrong in WRONG:
        if name == "measure" and argument in ("repeats", "warmup") and wrong is WRONG[1]:
            continue  # a number
        try:
            call(**{**given, argument: wrong})
        except (BackstashError, TypeError, ValueError) as error:
            refused += 1
            said = str(error)
            assert "asked" in said, (wrong, said)
            assert said.rstrip().endswith((".", "?")), said
            assert len(said) < 1500, (wrong, len(said))
    assert refused >= 10


@pytest.mark.parametrize("call", [bs.profile, bs.measure], ids=["profile", "measure"])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda x: x, r"called without arguments, and this one has missing a required argument: 'x'\. Pass"),
        (lambda *, x: x, "missing a required"),
        (functools.partial(lambda x, y: x, 1), "missing a required argument: 'y'"),
        (MODEL, "missing a required argument: 'input'"),
        ("abc", "the step 'abc', but that cannot be called"),
        (None, "the step None, but that cannot be called"),
    ],
)
def test_a_step_that_cannot_be_called_without_arguments_is_refused(call: Any, wrong: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call(wrong)


def test_steps_of_many_kinds_are_accepted() -> None:
    class Trainer:
        def step(self, scale: float = 1.0) -> None:
            step()

        __call__ = step

    calls: list[Callable[[], object]] = [
        step,
        Trainer().step,
        Trainer(),
        lambda *args, **kwargs: step(),
        functools.partial(Trainer().step, 2.0),
        functools.partial(lambda *, x: step(), x=1),
        torch.compiler.disable(step),
    ]
    for each in calls:
        assert bs.measure(each, repeats=1, warmup=0, device="cpu").peak_nbytes > 0


def test_an_error_inside_of_a_step_stays_what_it_is() -> None:
    def broken() -> None:
        raise TypeError("of the program")

    with pytest.raises(TypeError, match=r"^of the program$"):
        bs.profile(broken, MODEL)
    with pytest.raises(TypeError, match=r"^of the program$"):
        bs.fit_batch(lambda n: broken(), "1GiB", MODEL)  # type: ignore[arg-type,return-value,func-returns-value]
