"""The choice of a codec for a value on an accelerator, without a wait of the host in most steps.

Note: [looks without waiting]
    Codecs look at some numbers of a value before they encode it. To see numbers of an accelerator the host has to wait
    for all that the device was told before. So only the first value of a place is looked at at once. A codec that took
    it takes the next ones without a look, as long as what it makes is no larger than the value. Those that declined it
    are asked again after some steps, at different places in different steps: the numbers are copied while the host goes
    on, and the value of the next step is judged by them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from backstash import codecs, graphs
from backstash.codecs.base import Codec, Draft, Encoded, drafting, flat, refuses_layout
from backstash.policies.base import Stash
from backstash.saved import SavedTensor, TensorSpec
from backstash.stash.drafts import Drafted

if TYPE_CHECKING:
    from backstash.stash.encode import Encoder
    from backstash.stash.place import Place
    from backstash.stash.value import Form, Saved

SPARED = 8
"""How many times codecs that have declined a value are not asked again at the same place: its numbers may change."""

ASKS = "what it would be stored as is not known, and a step that is captured cannot ask for its numbers"
"""Why a value is kept whose codecs have not been asked before the capture."""

PERIOD = 64
"""The same on an accelerator. Each look is some launches, so few places are looked at in a step, in turn."""


class Looked:
    """What is known of the codecs of one place.

    Attributes:
        action: the action whose codecs they are.
        taken: the number of the codec that takes the place's values; that of all codecs where none does.
        look: numbers on their way to the host; None where none are.
        known: by its number, what an encoding of a codec has told (Note: [drafts] in drafts.py).
    """

    __slots__ = ("_drafted", "action", "known", "look", "taken")

    def __init__(self, action: Stash) -> None:
        self.action, self.taken = action, 0
        self.look: codecs.sample.Look | None = None
        self.known: dict[int, Any] = {}
        self._drafted: Drafted | None = None

    def is_about(self, action: Stash) -> bool:
        """Whether it is what is known of that action's codecs, whatever numbers are among their arguments."""
        if self.action is not action and (_ids(self.action) != _ids(action) or self.action.store != action.store):
            return False
        self.action = action
        return True

    def draft(self, number: int, codec: Codec, x: Tensor, is_planned: bool) -> tuple[Draft, Drafted | None] | None:
        """Drafts an encoding by the codec with that number. None if too little is known for a draft.

        While a step is captured, each replay tells what becomes of the draft, and there is no Drafted.

        Args:
            number, codec: the codec.
            x: the value.
            is_planned: as in Drafted.
        """
        makes = drafting(codec)
        known = self.known.get(number)
        if makes is None or known is None:
            return None
        if graphs.capture() is not None:
            return makes.draft(x, known), None
        if codec.bound is not None and self._drafted is not None:
            self._drafted.judge()  # how much room there is decides whether a value is rounded
        draft = makes.draft(x, known)
        self._drafted = Drafted(draft, self, number, is_planned)
        return draft, self._drafted

    def learn(self, number: int, codec: Codec, encoded: Encoded) -> None:
        """Notes what an encoding has told."""
        makes = drafting(codec)
        if makes is not None:
            self.known[number] = makes.known(encoded)


def encoded(
    encoder: Encoder, place: Place, whole: Tensor, facts: SavedTensor, action: Stash, readers: list[Saved]
) -> tuple[Form | None, str]:
    """Encodes a value on an accelerator, as Encoder.form does (Note: [looks without waiting]).

    Args:
        encoder: the encoder.
        place: where the value was saved.
        whole: the value.
        facts, action, readers: as for Encoder.form.
    """
    looked = place.looked
    if graphs.capture() is not None:
        if looked is None or not looked.is_about(action) or looked.taken >= len(action.codecs):
            return None, ASKS if place.declined is None else place.declined[1]
        return encoder.form(whole, facts, action, readers, looked, looked.taken)
    if looked is None or not looked.is_about(action):
        looked = place.looked = Looked(action)
        return _all(encoder, place, looked, whole, facts, readers, 1 + next(encoder.turns) % PERIOD)
    is_renewed = looked.taken > 0 and not place.spared
    if is_renewed and looked.look is not None:
        look, looked.look = looked.look, None
        with codecs.sample.answered_by(look):
            return _all(encoder, place, looked, whole, facts, readers, PERIOD)
    if is_renewed and refuses_layout(TensorSpec.of(whole)) is None:
        looked.look, encoder.is_looking = codecs.sample.Look(flat(whole)), True
    if place.declined is not None:
        return None, place.declined[1]
    place.spared = max(0, place.spared - 1)
    form, reason = encoder.form(whole, facts, action, readers, looked, looked.taken)
    _remember(place, looked, form, reason)
    return form, reason


def _all(
    encoder: Encoder,
    place: Place,
    looked: Looked,
    whole: Tensor,
    facts: SavedTensor,
    readers: list[Saved],
    spared: int,
) -> tuple[Form | None, str]:
    """Asks all codecs, and none of those that decline for so many steps."""
    form, reason = encoder.form(whole, facts, looked.action, readers, looked)
    place.spared = spared
    _remember(place, looked, form, reason)
    return form, reason


def _ids(action: Stash) -> list[str]:
    return [codec.id for codec in action.codecs]


def _remember(place: Place, looked: Looked, form: Form | None, reason: str) -> None:
    asked = looked.action.codecs
    looked.taken = len(asked) if form is None else asked.index(form.codec)
    place.declined = (looked.action, reason) if form is None else None
