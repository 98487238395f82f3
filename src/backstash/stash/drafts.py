"""Values of an accelerator that were encoded before the host knows whether their planes are whole.

Note: [drafts]
    How much room a codec needs, and whether it can take a value at all, is often known only after it has run. To ask
    the device, the host would wait for all that the device was told before. So where a codec has taken a value of the
    same place before, it makes a draft: planes with as much room as that one needed and some more, and numbers that
    tell whether they are whole. The numbers are copied while the host goes on. Until they have arrived, the value is
    held dense beside its planes. If they say that something is missing, it is held dense for good, and the next draft
    has more room. So no value is lost.

    The dense values that are held take memory as long as the device is behind. So there are no more than so many bytes
    of them: beyond that the host waits for the oldest one, and the device has work for all that while.

    Backward may read a value before its numbers have arrived. From an exact codec it is given the dense one. Where the
    codec has an error the host waits, because gradients must not depend on how far behind the device is.

    What has a budget makes no drafts (Encoder.makes_drafts): a plan has measured the planes as large as they are.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from backstash.codecs.base import Codec, Draft, Encoded, Judged
from backstash.codecs.numbers import Numbers
from backstash.codecs.raw import Raw
from backstash.saved import Mask
from backstash.stash.value import Form, Value
from backstash.stores import DeviceStore, Store

if TYPE_CHECKING:
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

    def hold_dense(self) -> None:
        """Is a form of the dense value from now on."""
        assert self.dense is not None
        self.store.drop(self.ticket)
        self.codec, self.store, self.tag, self.planes, self.cut = Raw(), _HELD, None, None, None
        self.ticket = _HELD.put(Raw().adopt(self.dense))
        self.dense = self.drafted = None


class Drafted:
    """A draft whose numbers are on their way.

    Args:
        draft: the draft.
        looked: what is known of the codecs of its place.
        number: of its codec.
    """

    __slots__ = ("_form", "_judge", "_looked", "_number", "_value", "is_judged", "nbytes", "numbers")

    def __init__(self, draft: Draft, looked: Looked, number: int) -> None:
        self._judge, self._looked, self._number = draft.judge, looked, number
        self.numbers = Numbers(draft.numbers)
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
        if judged.refusal is not None:
            self.hold_dense(form, judged.refusal)
        else:
            form.cut, form.dense, form.drafted = judged.cut, None, None

    def hold_dense(self, form: DraftedForm, reason: str) -> None:
        """Has the value held as it is, and says so in its account."""
        form.hold_dense()
        value = None if self._value is None else self._value()
        if value is None:
            return
        account = value.account
        before = account.device_nbytes
        account.stash_nbytes, account.store = form.ticket.nbytes, "device"
        account.codec, account.reason = "kept", reason
        value.live.add(account.device_nbytes - before)


class Drafts:
    """The drafts of a Session that are not judged yet, the oldest first."""

    def __init__(self) -> None:
        self._waiting: deque[Drafted] = deque()
        self._nbytes = 0

    def add(self, value: Value, form: DraftedForm) -> None:
        """Has a draft judged when its numbers have arrived."""
        drafted = form.drafted
        assert drafted is not None
        drafted.of(value, form)
        self._waiting.append(drafted)
        self._nbytes += drafted.nbytes
        self.look()
        while self._nbytes > IN_FLIGHT and len(self._waiting) > 1:
            self._judge_oldest()

    def look(self) -> None:
        """Judges the drafts whose numbers have arrived."""
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
