"""Policies by name."""

from __future__ import annotations

import pytest
from policy_cases import Asked

import backstash as bs
from backstash import policies
from backstash.errors import UnknownNameError
from backstash.policies import Keep, KeepAll, Lossless, Policy, Stash, registry


def test_policies_by_name() -> None:
    assert policies.get("lossless") == Lossless()
    assert policies.get("keep") == KeepAll()
    own = KeepAll()
    assert policies.get(own) is own
    assert all(isinstance(policies.get(name), Policy) for name in policies.names())
    assert set(policies.names()) == {
        "cdma",
        "gist_fp10",
        "gist_fp16",
        "gist_fp8",
        "gist_lossless",
        "gist_paper",
        "keep",
        "layrub",
        "lossless",
        "lossless_stored",
        "offload",
        "offload_hidden",
        "quantized",
        "sliced",
        "vdnn",
        "vdnn_conv",
    }


def test_a_policy_can_be_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    monkeypatch.setattr(registry, "_DESCRIPTIONS", dict(registry._DESCRIPTIONS))
    policies.register("asked", Asked)
    policies.register("asked", Asked)
    assert isinstance(policies.get("asked"), Policy)
    assert "asked" in policies.names()
    described = policies.describe("asked")
    assert (described.is_exact, described.gradients) == (False, "may differ")
    assert described.does == (Asked.__doc__ or "").partition("\n")[0].rstrip(".")
    with pytest.raises(ValueError, match=r"register was asked to add .* as 'lossless', but that is .*Lossless"):
        policies.register("lossless", Asked)


def test_unknown_names_list_the_names() -> None:
    with pytest.raises(UnknownNameError, match=r"policy 'lossles' was asked for, but there are .*layrub, lossless"):
        policies.get("lossles")
    with pytest.raises(UnknownNameError, match=r"Did you mean 'lossless'\?"):
        policies.get("losless")
    with pytest.raises(UnknownNameError, match=r"vdnn_conv\.$"):
        policies.get("something else")
    with pytest.raises(bs.BackstashError, match="'lossles'"):
        bs.Session("lossles")
    with pytest.raises(UnknownNameError, match=r"codec 'zcv' was asked for, but there are .*zvc"):
        Stash("zcv")


@pytest.mark.parametrize("wrong", [None, 3, object(), Keep(), Lossless], ids=["None", "int", "object", "Keep", "class"])
def test_an_object_that_is_no_policy_is_refused(wrong: object) -> None:
    with pytest.raises(TypeError, match=r"a policy was asked for, got .* Pass a name \(.*lossless.*\) or an object"):
        policies.get(wrong)  # type: ignore[arg-type]


def test_every_policy_says_what_it_does_and_when_to_use_it() -> None:
    listed = policies.descriptions()
    assert listed[0].name == "lossless" and {one.name for one in listed} == set(policies.names())
    for one in listed:
        assert one.does and one.use_when and not one.does.endswith("."), one.name
        assert one.is_exact == (one.gradients == "the same bits"), one.name
