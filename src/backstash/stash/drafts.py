"""Values of an accelerator that were encoded before the host knows whether their planes are whole.

Note: [drafts]
    How much room a codec needs, and whether it can take a value at all, is often known only after it has run. To ask
    the device, the host would wait for all that the device was told before. So where a codec has taken a value of the
    same place before, it makes a draft: planes with as much room as that one needed and some more, and numbers that
    tell whether they are whole. The numbers are copied while the host goes on. Until they have arrived, the value is
    held dense beside its planes. If they say that something is missing, it is held dense for good, and the next draft
    has more room. So no value is lost. Under a plan, which has no bytes for that, it is encoded once more, with all the
    room that it needs.

    The dense values that are held take memory as long as the device is behind. So there are no more than so many bytes
    of them: beyond that the host waits for the oldest one, and the device has work for all that while. A plan says how
    many (Policy.in_flight_for). A value that is larger than that is encoded at once, and the host waits for it.

    Backward may read a value before its numbers have arrived. From an exact codec it is given the dense one. Where the
    codec has an error the host waits, because gradients must not depend on how far behind the device is.

    While a step is captured in a graph the planes alone are held: a replay whose planes are not whole is an error,
    which names the value (Note: [captured steps] in graphs.py).
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from backstash import codecs, graphs
from backstash.codecs.base import Codec, Draft, Encoded, Judged, adopt
from backstash.errors import CodecRefusedError, GraphError
from backstash.saved import Mask
from backstash.stash.value import Form, Value
from backstash.stores import DeviceStore, Store

if TYPE_CHECKING:
    from backstash.stash.accounts import Account
    from backstash.stash.looking import Looked

IN_FLIGHT = 256 << 20
"""Bytes of dense values that may be held until it is known that their planes are whole. One value always may."""

_HELD = DeviceStore()
"""Holds what a draft lacked room for."""


class DraftedForm(Form):
    """A form whose planes may lack something.

    Attributes:
        dense: the value; None once that is known.
        drafted: what will tell; None once it has.
        cut: takes from the planes what was room to spare.
    """

    __slots__ = ("cut", "dense", "drafted")

    def __init__(
        self, codec: Codec, mask: Mask | None, draft: Draft, store: Store, dense: Tensor, drafted: Drafted
    ) -> None:
        super().__init__(codec, mask, draft.encoded.spec, store, store.put(draft.encoded))
        self.dense: Tensor | None = dense
        self.drafted: Drafted | None = drafted
        self.cut: Callable[[Encoded], Encoded] | None = None

    def hold(self, codec: Codec) -> None:
        """Is a form of the dense value by that codec from now on.

        Raises:
            CodecRefusedError: the codec refuses the value. Nothing has changed then.
        """
        assert self.dense is not None
        encoded = adopt(codec, self.dense)
        self.store.drop(self.ticket)
        self.codec, self.store, self.tag, self.planes, self.cut = codec, _HELD, None, None, None
        self.ticket = _HELD.put(encoded)
        self.dense = self.drafted = None


class Drafted:
    """A draft whose numbers are on their way.

    Args:
        draft: the draft.
        looked: what is known of the codecs of its place.
        number: of its codec.
        is_planned: whether there are bytes for its planes alone, and none for the dense value.
    """

    __slots__ = ("_form", "_is_planned", "_judge", "_looked", "_number", "_value", "is_judged", "nbytes", "numbers")

    def __init__(self, draft: Draft, looked: Looked, number: int, is_planned: bool) -> None:
        self._judge, self._looked, self._number, self._is_planned = draft.judge, looked, number, is_planned
        self.numbers = codecs.numbers.Numbers(draft.numbers)
        self.nbytes = draft.encoded.spec.nbytes
        self.is_judged = False
        self._form: weakref.ref[DraftedForm] | None = None
        self._value: weakref.ref[Value] | None = None

    def of(self, value: Value, form: DraftedForm) -> None:
        """Notes whose draft it is."""
        self._value, self._form = weakref.ref(value), weakref.ref(form)

    def judge(self) -> None:
        """Does what the numbers say. The host waits for them if they have not arrived."""
        if self.is_judged:
            return
        judged: Judged = self._judge(self.numbers.get())
        self.is_judged = True
        self._looked.known[self._number] = judged.known
        form = None if self._form is None else self._form()
        if form is None or form.drafted is not self:
            return
        if judged.refusal is None:
            form.cut, form.dense, form.drafted = judged.cut, None, None
        elif not self._is_planned or judged.known is None or not self._encode_again(form):
            self.hold_dense(form, judged.refusal)

    def _encode_again(self, form: DraftedForm) -> bool:
        """Has the value encoded with all the room that it needs; whether its codec takes it at all."""
        try:
            form.hold(form.codec)
        except CodecRefusedError:
            return False
        self._account(form)
        return True

    def hold_dense(self, form: DraftedForm, reason: str) -> None:
        """Has the value held as it is, and says so in its account."""
        form.hold(codecs.Raw())
        account = self._account(form)
        if account is not None:
            account.codec, account.reason = "kept", reason

    def _account(self, form: DraftedForm) -> Account | None:
        """Notes how many bytes the value takes on the device now; the account, if the value is still there."""
        value = None if self._value is None else self._value()
        if value is None:
            return None
        value.take(form.ticket.nbytes)
        return value.account


def expect_whole(captured: graphs.Capture, draft: Draft, looked: Looked, number: int, key: str) -> None:
    """Has each replay of a graph tell whether the planes of a draft are whole.

    Args:
        captured: the graph.
        draft: the draft.
        looked: what is known of the codecs of its place.
        number: of its codec.
        key: of the value.
    """
    judge = draft.judge

    def error(numbers: list[int]) -> GraphError | None:
        judged = judge(numbers)
        if judged.refusal is None:
            return None
        looked.known[number] = judged.known
        return GraphError(
            f"a replay of a captured step was to encode {key} as the steps before the capture did, but "
            f"{judged.refusal}. Gradients were computed from what was stored of it: do not use those of that step. The "
            "step is captured again by what was learned. If that happens often, use a policy that stores the value in "
            "another way."
        )

    captured.expect(draft.numbers, error)


class Drafts:
    """The drafts of a Session that are not judged yet, the oldest first.

    Attributes:
        limit: how many bytes of dense values may be held for them; None for as many as are usual.
    """

    def __init__(self) -> None:
        self.limit: int | None = None
        self._waiting: deque[Drafted] = deque()
        self._nbytes = 0

    def admits(self, nbytes: int) -> bool:
        """Whether a value of so many bytes may be drafted."""
        return self.limit is None or nbytes <= self.limit

    def add(self, value: Value, form: DraftedForm) -> None:
        """Has a draft judged when its numbers have arrived."""
        drafted = form.drafted
        assert drafted is not None
        drafted.of(value, form)
        self._waiting.append(drafted)
        self._nbytes += drafted.nbytes
        self.keep_within(max(IN_FLIGHT, drafted.nbytes) if self.limit is None else self.limit)

    def keep_within(self, limit: int) -> None:
        """Judges the drafts whose numbers have arrived, and the oldest ones until no more bytes are held for others."""
        self.look()
        while self._nbytes > limit and graphs.capture() is None:
            self._judge_oldest()

    def look(self) -> None:
        """Judges the drafts whose numbers have arrived."""
        if graphs.capture() is not None:
            return
        while self._waiting and (self._waiting[0].is_judged or self._waiting[0].numbers.have_arrived()):
            self._judge_oldest()

    def _judge_oldest(self) -> None:
        drafted = self._waiting.popleft()
        self._nbytes -= drafted.nbytes
        drafted.judge()


def make_certain(form: Form | None) -> None:
    """Sees to it that what is read of a form is the value (Note: [drafts])."""
    if type(form) is not DraftedForm or form.drafted is None:
        return
    drafted = form.drafted
    if form.codec.bound is None and not drafted.numbers.have_arrived():
        drafted.hold_dense(form, "backward reads it before it is known whether its planes are whole")
    else:
        drafted.judge()
