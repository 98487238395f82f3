"""Makes a program from a seed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from tests.fuzz.kind import GIVEN, Kind
from tests.fuzz.kinds import COMMON, FEATURES, KINDS
from tests.fuzz.program import Program, Statement

SMALL = (2, 4, 6, 8)
POLICIES = ("lossless", "lossless_stored", "keep", "everything")
BY_NAME = (*POLICIES, "offload", "vdnn", "remake")
"""Policies that programs may be run under. ``offload`` and ``vdnn`` move values to the host; they are not drawn
at random, so that known seeds draw the programs that they drew. Nor is ``remake``, which also repeats costly calls: to
change what such a value is made of after the Session was left is an error that plain torch does not raise."""

BLOCKS = (
    "autocast",
    "no_autocast",
    "no_grad",
    "dispatch_mode",
    "function_mode",
    "anomaly",
    "in_step",
    "after_step",
    "in_variant",
    "grad_by_variant",
    "autocast_by_variant",
    "settings_by_variant",
)
BRANCHES = ("in_step", "after_step", "in_variant")
BACKWARD_BLOCKS = (
    "autocast",
    "dispatch_mode",
    "function_mode",
    "anomaly",
    "in_variant",
    "autocast_by_variant",
    "settings_by_variant",
)
PATTERNS = ("AAABAA", "AABAAB", "AAABAAC", "ABABAB", "AABBAA", "AAAABC", "ABCABC", "AABACA")
"""Variants of the steps of programs that change from step to step. Most steps repeat an earlier one."""

SHARE_CHANGING = 0.25
"""Share of programs that change from step to step, where the caller does not say."""

LATER = ("changing", "ducks", "earlier")
"""Features that are drawn from numbers of their own, so that the programs without them are the same as before."""


@dataclass
class _Scope:
    """What is known about the names at a point of the program."""

    live: list[str] = field(default_factory=list)
    tracked: set[str] = field(default_factory=set)
    low: set[str] = field(default_factory=set)
    autocast: bool = False
    varies: bool = False
    grad: bool = True
    branch: bool = False
    depth: int = 0

    def inner(self) -> _Scope:
        """A copy for a block whose names end with it."""
        return replace(self, live=list(self.live), tracked=set(self.tracked), low=set(self.low), branch=True)


def generate(
    seed: int,
    *,
    features: Collection[str] | None = None,
    off: Collection[str] = (),
    policy: str | None = None,
    shape: tuple[int, ...] = SMALL,
    length: int = 14,
    changing: bool | None = None,
) -> Program:
    """The program of that seed.

    Args:
        seed: the same seed and arguments give the same program.
        features: features that the program has beside the common ones; None draws a few.
        off: features that it does not have.
        policy: name of the policy; None draws one.
        shape: ``[N, C, H, W]`` of its values.
        length: about how many statements its forward pass has.
        changing: whether it has the feature ``changing``, which makes its steps differ; None draws it, or looks for it
            in ``features``.
    """
    if changing is None and features is None:
        # Drawn from numbers of its own, so that the programs that do not change are the same with and without it.
        changing = Random(f"changing {seed}").random() < SHARE_CHANGING
    elif changing is None:
        changing = "changing" in (features or ())
    return _Generator(seed, features, off, length, changing).program(policy, shape)


class _Generator:
    def __init__(
        self, seed: int, features: Collection[str] | None, off: Collection[str], length: int, changing: bool
    ) -> None:
        self.random = Random(seed)
        self.seed, self.length = seed, length
        optional = [name for name in FEATURES if name not in (*COMMON, *LATER)]
        drawn = [name for name in optional if self.random.random() < 0.25]
        drawn += [name for name in ("ducks", "earlier") if Random(f"{name} {seed}").random() < 0.25]
        chosen = {*COMMON, *(drawn if features is None else features), *(["changing"] if changing else [])} - set(off)
        self.features = [name for name in FEATURES if name in chosen]
        self.changing = "changing" in chosen
        self.count = 0

    def program(self, policy: str | None, shape: tuple[int, ...]) -> Program:
        random = self.random
        varies = "branches" in self.features and random.random() < 0.5
        settings = {
            "batches": (shape[0], shape[0] + 1) if varies else (shape[0],),
            "steps": random.choice((1, 2, 2, 3)),
            "optimizer": random.choice(("SGD", "SGD", "momentum", "Adam")),
            "sessions": random.choice(("each", "same", "same", "around")),
            "inside": random.random() < 0.3,
            "min_nbytes": random.choice((0, 0, 0, 0, 256, 256, None)),
        }
        drawn_policy = random.choice(POLICIES)
        if self.changing:
            settings |= self.pattern(shape)
        setup = tuple(self.make(kind, _Scope()) for kind in self.some("setup", 0, 2))
        before = tuple(self.make(kind, _Scope()) for kind in self.some("before", 1, 3)) if self.changing else ()
        scope = _Scope()
        forward = [Statement("leaf", self.name(scope, tracked=True)), Statement("data", self.name(scope))]
        while sum(1 for statement in forward for _ in statement.walk()) < self.length:
            forward += self.statement(scope)
        losses = []
        for _ in range(1 if random.random() < 0.7 else 2):
            forward.append(self.loss(scope, f"loss{len(losses)}"))
            losses.append(forward[-1].out)
        if random.random() < 0.8:
            dropped = [name for name in scope.live if random.random() < 0.85]
            if dropped:
                forward.append(Statement("drop", "", tuple(dropped)))
                scope.live = [name for name in scope.live if name not in dropped]
        return Program(
            seed=self.seed,
            shape=shape,
            policy=policy or drawn_policy,
            setup=setup,
            before=before,
            forward=tuple(forward),
            backward=tuple(self.backward(scope, losses)),
            **settings,
        )

    def pattern(self, shape: tuple[int, ...]) -> dict[str, Any]:
        """Settings of a program that changes from step to step: the variants of its steps and what they stand for."""
        random = self.random
        pattern = random.choice(PATTERNS)
        sizes = dict.fromkeys(pattern, shape[0])
        if random.random() < 0.3:
            sizes["B"] += 1
        return {
            "pattern": pattern,
            "steps": len(pattern),
            "batches": tuple(sizes[letter] for letter in pattern) if len(set(sizes.values())) > 1 else (shape[0],),
            "twice": random.choice(("", "", "", "A", "B")),
            "sessions": random.choice(("each", "same", "same", "same", "around")),
        }

    def name(self, scope: _Scope, *, tracked: bool = False, low: bool = False) -> str:
        """A new name for a value."""
        name = f"v{self.count}"
        self.count += 1
        scope.live.append(name)
        if tracked:
            scope.tracked.add(name)
        if low:
            scope.low.add(name)
        return name

    def some(self, where: str, least: int, most: int) -> list[Kind]:
        """Between ``least`` and ``most`` kinds for that section, or fewer if there are no more."""
        fitting = [kind for kind in KINDS.values() if where in kind.where and kind.feature in self.features]
        return self.random.sample(fitting, min(self.random.randint(least, most), len(fitting)))

    def draw(self, where: str, scope: _Scope) -> Kind | None:
        """A kind for that section whose operands are there: first a feature by its weight, then one of its kinds."""
        fitting: dict[str, list[Kind]] = {}
        for kind in KINDS.values():
            if where in kind.where and kind.feature in self.features and self.operands(kind, scope):
                fitting.setdefault(kind.feature, []).append(kind)
        if not fitting:
            return None
        feature = self.random.choices(list(fitting), [FEATURES[name] for name in fitting])[0]
        return self.random.choice(fitting[feature])

    def operands(self, kind: Kind, scope: _Scope) -> list[str]:
        """Names that may be the kind's operands."""
        strict = kind.strict and not (kind.lowers and scope.autocast and not scope.varies)
        return [
            name
            for name in scope.live
            if not (strict and name in scope.low) and not (kind.tracked and name not in scope.tracked)
        ] or ["x"] * (kind.operands == 0)

    def make(self, kind: Kind, scope: _Scope, operands: tuple[str, ...] | None = None) -> Statement:
        """A statement of that kind; its operands and constants are drawn."""
        if operands is None:
            names = self.operands(kind, scope)
            operands = tuple(self.random.choice(names) for _ in range(kind.operands))
        constants = tuple((hole, self.random.choice(kind.choices[hole])) for hole in kind.holes if hole not in GIVEN)
        out = ""
        if kind.assigns:
            tracked = scope.grad and not kind.detaches and (kind.trains or not scope.tracked.isdisjoint(operands))
            low = not scope.low.isdisjoint(operands) or (kind.lowers and scope.autocast)
            out = self.name(scope, tracked=tracked, low=low and not kind.exact)
        return Statement(kind.name, out, operands, constants)

    def statement(self, scope: _Scope) -> list[Statement]:
        """The next statement of the forward pass, and perhaps one that drops an old value."""
        blocks = [KINDS[name] for name in BLOCKS if KINDS[name].feature in self.features]
        if blocks and scope.depth < 2 and self.random.random() < 0.15:
            return [self.block(self.random.choice(blocks), scope)]
        kind = self.draw("forward", scope)
        assert kind is not None
        made = [self.make(kind, scope)]
        if len(scope.live) > 4 and not scope.branch and self.random.random() < 0.8:
            dropped = scope.live.pop(self.random.randrange(len(scope.live) - 1))
            made.append(Statement("drop", "", (dropped,)))
        return made

    def block(self, kind: Kind, outer: _Scope) -> Statement:
        """A block with a few statements. A branch ends by assigning its last value to a name from outside."""
        branch = kind.name in BRANCHES
        scope = outer.inner() if branch else outer
        before = scope.autocast, scope.varies, scope.grad
        autocast = {"autocast": True, "no_autocast": False, "autocast_by_variant": True}
        scope.autocast = autocast.get(kind.name, scope.autocast)
        scope.varies = kind.name == "autocast_by_variant" or (scope.varies and kind.name not in autocast)
        scope.grad = scope.grad and kind.name not in ("no_grad", "grad_by_variant")
        scope.depth += 1
        statements: list[Statement] = []
        for _ in range(self.random.randint(1, 3)):
            statements += self.statement(scope)
        scope.depth -= 1
        scope.autocast, scope.varies, scope.grad = before
        if branch:
            target, last = self.random.choice(outer.live), scope.live[-1]
            if target in outer.tracked and last not in scope.tracked:
                outer.tracked.discard(target)
            if last in scope.low:
                outer.low.add(target)
            statements.append(Statement("assign", target, (last,)))
        return Statement(kind.name, "", (), self.make(kind, scope, ()).constants, tuple(statements))

    def loss(self, scope: _Scope, name: str) -> Statement:
        """A loss over some of the values, at least one of which requires a gradient."""
        random = self.random
        terms = [value for value in scope.live if random.random() < 0.6]
        tracked = [value for value in scope.live if value in scope.tracked]
        if tracked and not scope.tracked.intersection(terms):
            terms.append(random.choice(tracked))
        kinds = ["loss", "loss_squares", "loss_stack"]
        if "subclass_dispatch" in self.features:
            kinds.append("loss_wrapped")
        kind = KINDS[random.choice(kinds)]
        constants = tuple((hole, random.choice(kind.choices[hole])) for hole in kind.holes if hole not in GIVEN)
        return Statement(kind.name, name, tuple(terms or scope.live[-1:]), constants)

    def backward(self, scope: _Scope, losses: list[str]) -> list[Statement]:
        """Backward of the losses, with changes of values and parameters in between."""
        random = self.random
        made: list[Statement] = []
        if len(losses) > 1 and random.random() < 0.25:
            made.append(Statement("drop", "", (losses.pop(random.randrange(2)),)))
        calls = [loss for loss in losses for _ in range(1 if random.random() < 0.7 else 2)]
        for number, loss in enumerate(calls):
            while random.random() < 0.35:
                kind = self.draw("between", scope)
                if kind is not None:
                    made.append(self.make(kind, scope))
                    continue
                break
            retain = number < len(calls) - 1 or random.random() < 0.05
            made.append(self.call_backward(scope, loss, retain))
        return made

    def call_backward(self, scope: _Scope, loss: str, retain: bool) -> Statement:
        """One call that runs a backward pass."""
        random = self.random
        special = [kind for kind in KINDS.values() if "backward" in kind.where and kind.feature in self.features]
        special = [kind for kind in special if kind.operands == 1 or scope.tracked.intersection(scope.live)]
        kind = random.choice(special) if special and random.random() < 0.5 else KINDS["backward"]
        operands = (loss,)
        if kind.operands == 2:
            operands = (loss, random.choice([name for name in scope.live if name in scope.tracked]))
        made = self.make(kind, scope, operands)
        constants = tuple((name, retain if name == "retain" else value) for name, value in made.constants)
        statement = Statement(kind.name, "", operands, constants)
        blocks = [KINDS[name] for name in BACKWARD_BLOCKS if KINDS[name].feature in self.features]
        if blocks and random.random() < 0.3:
            block = random.choice(blocks)
            return Statement(block.name, "", (), self.make(block, scope, ()).constants, (statement,))
        return statement
