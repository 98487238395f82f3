"""Rules: actions by pattern in front of another policy."""

from __future__ import annotations

import copy
import pickle

from policy_cases import Asked, saved

import backstash as bs
from backstash import policies
from backstash.policies import Keep, Lossless, Outcome, Recompute, Rules, Stash


def test_the_first_rule_that_matches_decides() -> None:
    first, second = Keep("first"), Keep("second")
    otherwise = Asked()
    rules = Rules((("features.*/Relu#*:result", first), ("features.*", second), ("*", Stash("zvc"))), otherwise)
    assert rules.decide(saved()) is first
    assert rules.decide(saved(key="features.1/Convolution#0:input")) is second
    assert rules.decide(saved(key="head/Addmm#0:mat1")) == Stash("zvc")
    assert otherwise.asked == []


def test_a_tensor_without_a_rule_goes_to_the_other_policy() -> None:
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


def test_rules_recompute_only_if_a_rule_or_the_other_policy_does() -> None:
    stored = policies.get("lossless_stored")
    assert Rules((), stored).recomputes is False
    assert Rules((("x", Recompute()),), stored).recomputes is True
    assert Rules((), policies.get("lossless")).recomputes is True
    assert bs.Session(Rules((), stored)).recomputes is False


def test_rules_over_an_offload_fetch_as_far_ahead_as_the_offload() -> None:
    assert bs.Session(Rules((), policies.offload(ahead=1)))._live.prefetcher.ahead == 1
    assert bs.Session(Rules((), policies.offload()))._live.prefetcher.ahead is None


def test_rules_can_be_copied() -> None:
    rules = Rules((("x", Keep()),), Lossless())
    assert copy.deepcopy(rules) == rules and pickle.loads(pickle.dumps(rules)) == rules
