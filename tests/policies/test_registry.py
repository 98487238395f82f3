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
        "keep",
        "layrub",
        "lossless",
        "lossless_stored",
        "offload",
        "quantized",
        "sliced",
        "vdnn",
        "vdnn_conv",
    }


def test_a_policy_can_be_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    policies.register("asked", Asked)
    policies.register("asked", Asked)
    assert isinstance(policies.get("asked"), Policy)
    assert "asked" in policies.names()
    with pytest.raises(ValueError, match=r"register was asked to add .* as 'lossless', but that is .*Lossless"):
        policies.register("lossless", Asked)


def test_unknown_names_list_the_names() -> None:
    with pytest.raises(UnknownNameError, match=r"policy 'lossles' was asked for, but there are .*layrub, lossless"):
        policies.get("lossles")
    with pytest.raises(bs.BackstashError, match="'lossles'"):
        bs.Session("lossles")
    with pytest.raises(UnknownNameError, match=r"codec 'zcv' was asked for, but there are .*zvc"):
        Stash("zcv")


@pytest.mark.parametrize("wrong", [None, 3, object(), Keep(), Lossless], ids=["None", "int", "object", "Keep", "class"])
def test_an_object_that_is_no_policy_is_refused(wrong: object) -> None:
    with pytest.raises(TypeError, match=r"a policy was asked for, got .* Pass a name \(.*lossless.*\) or an object"):
        policies.get(wrong)  # type: ignore[arg-type]
