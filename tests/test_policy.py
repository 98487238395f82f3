from __future__ import annotations

import copy
import inspect
import pickle
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

import backstash as bs
from backstash import policies, session
from backstash.codecs import Binary, Bitmask, BlockQuant, FewBit, Narrow, Shape, Zvc
from backstash.errors import UnknownNameError
from backstash.policies import KeepAll, Lossless
from backstash.policy import OPTIONAL, Keep, Outcome, Policy, Recompute, Rules, Stash, optional
from backstash.saved import Effect, Mask, Need, PoolWindow, SavedTensor, TensorSpec, Test

WINDOW = PoolWindow((4, 4), (2, 2), (2, 2), (0, 0), (1, 1))
MASK = Mask(Test.NOT_LE)


def saved(
    need: Need = Need.VALUE,
    dtype: torch.dtype = torch.float32,
    key: str = "features.0/Relu#0:result",
    mask: Mask | None = None,
    window: PoolWindow | None = None,
) -> SavedTensor:
    spec = TensorSpec.of(torch.empty(2, 3, dtype=dtype))
    return SavedTensor(key, "Relu", "result", "features.0", spec, need, mask, window)


class Asked:
    """Keeps, and remembers what it was asked and told."""

    def __init__(self) -> None:
        self.asked: list[SavedTensor] = []
        self.told: list[Outcome] = []

    def decide(self, saved: SavedTensor) -> Keep:
        self.asked.append(saved)
        return Keep("asked")

    def observe(self, outcome: Outcome) -> None:
        self.told.append(outcome)


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (saved(Need.SHAPE), (Shape(),)),
        (saved(Need.SHAPE, torch.int64), (Shape(),)),
        (saved(Need.SHAPE, torch.complex64), (Shape(),)),
        (saved(Need.SIGN, mask=MASK), (Bitmask(MASK),)),
        (saved(Need.SIGN, torch.bfloat16, mask=MASK), (Bitmask(MASK),)),
        (saved(Need.SIGN), (Binary(), Zvc(0.02))),
        (saved(Need.INDEX, torch.int64, window=WINDOW), (Narrow(WINDOW), Narrow())),
        (saved(Need.INDEX, torch.int64), (Narrow(),)),
        *[(saved(dtype=dtype), (Narrow(),)) for dtype in (torch.int32, torch.int8, torch.uint8, torch.bool)],
        *[
            (saved(dtype=dtype), (Binary(), Zvc(0.02)))
            for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16)
        ],
    ],
)
def test_lossless_takes_the_smallest_exact_form(tensor: SavedTensor, expected: tuple[object, ...]) -> None:
    action = Lossless(recompute=False).decide(tensor)
    assert action == Stash(expected)
    assert all(tensor.need in codec.preserves for codec in action.codecs)
    recomputed = Binary() in action.codecs
    assert Lossless().decide(tensor) == (Recompute(action) if recomputed else action)


@pytest.mark.parametrize("wrong", [{"max_depth": 0}, {"otherwise": Recompute()}, {"otherwise": Zvc()}])
def test_a_recompute_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"Recompute was asked for .*, but it takes a depth of 1 or more"):
        Recompute(**wrong)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn, torch.uint16])
def test_lossless_keeps_what_no_codec_takes(dtype: torch.dtype) -> None:
    assert Lossless().decide(saved(dtype=dtype)) == Keep(f"no exact codec takes {dtype}")


def test_lossless_passes_its_saving_on() -> None:
    action = policies.lossless(min_saving=0.3).decide(saved())
    assert isinstance(action, Recompute)
    assert isinstance(action.otherwise, Stash)
    assert Zvc(0.3) in action.otherwise.codecs


def test_keep_keeps() -> None:
    assert all(KeepAll().decide(saved(need)) == Keep() for need in Need)


def test_policies_by_name() -> None:
    assert policies.get("lossless") == Lossless()
    assert policies.get("keep") == KeepAll()
    own = Asked()
    assert policies.get(own) is own
    assert all(isinstance(policies.get(name), Policy) for name in policies.POLICIES)


def test_unknown_names_list_the_names() -> None:
    with pytest.raises(UnknownNameError, match=r"policy 'lossles' was asked for, but there are .*layrub, lossless"):
        policies.get("lossles")
    with pytest.raises(bs.BackstashError, match="'lossles'"):
        bs.Session("lossles")
    with pytest.raises(UnknownNameError, match=r"codec 'zcv' was asked for, but there are .*zvc"):
        Stash("zcv")


@pytest.mark.parametrize("wrong", [None, 3, object(), Keep(), Lossless], ids=["None", "int", "object", "Keep", "class"])
def test_what_is_no_policy_is_refused(wrong: object) -> None:
    with pytest.raises(TypeError, match=r"a policy was asked for, got .* Pass a name \(.*lossless.*\) or an object"):
        policies.get(wrong)  # type: ignore[arg-type]


def test_stash_takes_names_codecs_and_several() -> None:
    assert Stash("zvc") == Stash(Zvc()) == Stash((Zvc(),))
    assert Stash(["binary", Zvc(0.5)]).codecs == (Binary(), Zvc(0.5))
    assert Stash("zvc").store == "device"
    assert Stash("zvc", store="host") != Stash("zvc")
    assert hash(Stash("zvc")) == hash(Stash(Zvc()))


@pytest.mark.parametrize("wrong", [3, None, (Zvc(), 3), Zvc])
def test_stash_of_what_is_no_codec_is_refused(wrong: object) -> None:
    with pytest.raises(TypeError, match="codec"):
        Stash(wrong)  # type: ignore[arg-type]


def test_actions_are_frozen() -> None:
    for action in (Keep(), Stash("zvc")):
        with pytest.raises(AttributeError):
            action.store = "host"  # type: ignore[misc,union-attr]


def test_the_first_rule_that_matches_decides() -> None:
    first, second = Keep("first"), Keep("second")
    otherwise = Asked()
    rules = Rules((("features.*/Relu#*:result", first), ("features.*", second), ("*", Stash("zvc"))), otherwise)
    assert rules.decide(saved()) is first
    assert rules.decide(saved(key="features.1/Convolution#0:input")) is second
    assert rules.decide(saved(key="head/Addmm#0:mat1")) == Stash("zvc")
    assert otherwise.asked == []


def test_what_no_rule_matches_goes_on() -> None:
    otherwise = Asked()
    rules = Rules((("classifier.*", Keep()),), otherwise)
    tensor = saved()
    assert rules.decide(tensor) == Keep("asked")
    outcome = Outcome(tensor, None, 24, "asked")
    rules.observe(outcome)
    assert (otherwise.asked, otherwise.told) == ([tensor], [outcome])


def test_patterns_mind_case_and_match_whole_keys() -> None:
    rules = Rules((("FEATURES*", Keep("upper")), ("Relu", Keep("part"))), Asked())
    assert rules.decide(saved()) == Keep("asked")


def test_gist_binarises_and_stores_sparse_values() -> None:
    for policy in (policies.gist("fp8"), policies.gist_lossless()):
        assert policy.decide(saved(Need.SHAPE)) == Stash(Shape())
        assert policy.decide(saved(Need.SIGN, mask=MASK)) == Stash(Bitmask(MASK))
        assert policy.decide(saved(Need.INDEX, torch.int64, window=WINDOW)) == Stash((Narrow(WINDOW), Narrow()))
    exact = policies.gist_lossless().decide(saved())
    assert isinstance(exact, Stash)
    assert [codec.id for codec in exact.codecs] == ["binary", "csr", "zvc"]
    assert all(codec.bound is None for codec in exact.codecs)


@pytest.mark.parametrize("format", ["fp16", "fp10", "fp8", "float8_e4m3fn"])
def test_gist_reduces_sparse_and_dense_values(format: str) -> None:
    action = policies.gist(format).decide(saved())
    assert isinstance(action, Stash)
    labels = [getattr(codec, "label", codec.id) for codec in action.codecs]
    assert labels == ["binary", f"csr+{format}", f"zvc+{format}", format, f"zvc+{format}", "csr", "zvc"]


def rounded(effect: Effect = Effect.LINEAR, row: int = 256, **facts: Any) -> SavedTensor:
    return replace(saved(**facts), effect=effect, row=row)


@pytest.mark.parametrize(
    ("readers", "expected"),
    [
        ([rounded()], "blockquant2 of 256"),
        ([rounded(row=96)], "blockquant2 of 256"),
        ([rounded(row=192)], "blockquant2 of 64"),
        ([rounded(row=192), rounded(Effect.NORMALISED, row=128)], "blockquant2 of 128"),
        ([rounded(Effect.NORMALISED, row=49)], "blockquant8 of 256"),
        ([rounded(Effect.SENSITIVE)], "blockquant8 of 256"),
        ([rounded(), rounded(Effect.SENSITIVE, row=64)], "blockquant8 of 64"),
        ([replace(rounded(Effect.SENSITIVE), function="silu")], "silu3"),
        ([replace(rounded(Effect.SENSITIVE), function="silu"), rounded()], "blockquant8 of 256"),
        ([rounded(), rounded(Effect.UNKNOWN)], "exact"),
    ],
)
def test_quantized_rounds_as_all_readers_bear_it(readers: list[SavedTensor], expected: str) -> None:
    action = policies.quantized(2).decide_together(readers[0], readers)
    assert isinstance(action, Recompute) and isinstance(action.otherwise, Stash)
    codec = next((codec for codec in action.otherwise.codecs if codec.bound is not None), None)
    group = f" of {codec.group_size}" if isinstance(codec, BlockQuant) else ""
    assert (f"{codec.label}{group}" if isinstance(codec, BlockQuant | FewBit) else "exact") == expected


def test_quantized_rounds_values_and_nothing_else() -> None:
    action = policies.quantized(4).decide(rounded())
    assert isinstance(action, Recompute) and isinstance(action.otherwise, Stash)
    assert [getattr(codec, "label", codec.id) for codec in action.otherwise.codecs] == [
        "binary",
        "blockquant4",
        "signed blockquant4",
        "zvc",
    ]
    loss = SavedTensor("/LogSoftmax#0:result", "LogSoftmax", "result", "", saved().spec, Need.VALUE)
    for exact in (saved(Need.SIGN, mask=MASK), saved(Need.SHAPE), rounded(dtype=torch.float64), loss, saved()):
        assert policies.quantized(4).decide(exact) == Lossless().decide(exact)
    with pytest.raises(ValueError, match=r"bits=3, but the choices are 1, 2, 4, 8"):
        policies.quantized(3)


def test_gist_leaves_losses_and_narrow_numbers_exact() -> None:
    loss = SavedTensor("/LogSoftmax#0:result", "LogSoftmax", "result", "", saved().spec, Need.VALUE)
    for exact in (policies.gist("fp8").decide(loss), policies.gist("fp16").decide(saved(dtype=torch.float16))):
        assert isinstance(exact, Stash)
        assert all(codec.bound is None for codec in exact.codecs)


@pytest.mark.parametrize("arguments", [("fp7",), ("fp8", 5)])
def test_gist_of_an_unknown_format_lists_the_formats(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match=r"there are fp8, fp10, fp16|the choices are 1, 2, 3 and 4"):
        policies.gist(*arguments)


class Wishes(Asked):
    """A policy with every optional member."""

    ahead = 1
    recomputes = False

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def begin_step(self) -> None:
        self.calls.append("begin_step")

    def watch(self, *arguments: object) -> None:
        self.calls.append("watch")

    def trace(self, *arguments: object) -> None:
        self.calls.append("trace")


def test_rules_pass_on_every_optional_member() -> None:
    otherwise, rules = Wishes(), Rules((("x", Keep()),), Wishes())
    for name in OPTIONAL:
        assert hasattr(otherwise, name), f"{name} is missing in this test"
        assert getattr(optional(rules, name), "__func__", optional(rules, name)) == getattr(
            getattr(otherwise, name), "__func__", getattr(otherwise, name)
        )
    bare = Rules((), Asked())
    assert {name: optional(bare, name) for name in OPTIONAL} == OPTIONAL
    with pytest.raises(AttributeError, match="'Rules' object has no attribute 'begun'"):
        bare.begun  # noqa: B018


def test_a_session_asks_a_policy_for_optional_members_in_one_way() -> None:
    """What it read with getattr, a policy in front of another one could forget to pass on."""
    source = inspect.getsource(session)
    assert not re.findall(r"(?:getattr|hasattr)\(\s*self\.policy", source)
    assert set(re.findall(r'optional\(self\.policy, "(\w+)"\)', source)) == set(OPTIONAL)


def test_rules_note_recipes_only_where_somebody_asks_for_them() -> None:
    stored = policies.get("lossless_stored")
    assert Rules((), stored).recomputes is False
    assert Rules((("x", Recompute()),), stored).recomputes is True
    assert Rules((), policies.get("lossless")).recomputes is True
    assert bs.Session(Rules((), stored)).recomputes is False


def test_rules_over_an_offload_fetch_as_far_ahead_as_it() -> None:
    assert bs.Session(Rules((), policies.offload(ahead=1)))._live.prefetcher.ahead == 1
    assert bs.Session(Rules((), policies.offload()))._live.prefetcher.ahead is None


def test_rules_can_be_copied() -> None:
    rules = Rules((("x", Keep()),), Lossless())
    assert copy.deepcopy(rules) == rules and pickle.loads(pickle.dumps(rules)) == rules
