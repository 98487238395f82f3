"""The accounts of the step in progress: numbers that the hot path changes, of which reports are made when asked for."""

from __future__ import annotations

from dataclasses import dataclass, field

from backstash.saved import UNKNOWN_OP, Effect, SavedTensor
from backstash.stash.regions import RegionCall, region_names


@dataclass(slots=True)
class Entry:
    """One stored value: a storage that one or more saved tensors view.

    Attributes:
        key: key of the saved tensor whose need is strongest.
        shared_by: keys of the other saved tensors that view the same storage.
        need: the strongest need.
        spec: dtype and shape, as text.
        saved_nbytes: bytes that plain PyTorch would hold.
        stash_nbytes: bytes held instead, in whichever store.
        codec: id of the codec, or ``"kept"``.
        reason: why it was kept.
        encode_seconds, decode_seconds: host time spent on it.
        decodes: how often it was decoded.
        store: name of the store that holds it.
        stall_seconds: time that this store took to bring it back, where it is not the device.
        effect: what an error in the value would do to the gradients, as saved.Effect names it; empty if it is unknown.
        remake_seconds: how long the function took that made the value, when the Session learned what it does; a budget
            may have it run again. 0.0 where that is not known, or nothing can make the value again.
    """

    key: str
    need: str
    spec: str
    saved_nbytes: int
    stash_nbytes: int = 0
    codec: str = "kept"
    reason: str = ""
    shared_by: list[str] = field(default_factory=list)
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0
    decodes: int = 0
    store: str = "device"
    stall_seconds: float = 0.0
    effect: str = ""
    remake_seconds: float = 0.0

    @property
    def device_nbytes(self) -> int:
        """Bytes held on the device."""
        return self.stash_nbytes if self.store == "device" else 0


HELD = "held by the program, kept by reference"
"""The reason of a value that the program itself holds, as far as is known."""


class Account:
    """What became of one storage in the step in progress; :meth:`row` makes the report's Entry of it.

    Attributes:
        facts: of the saved tensor whose need is strongest.
        shared_by: facts of the other saved tensors that view the storage.
        saved_nbytes, stash_nbytes, codec, reason, encode_seconds, decode_seconds, decodes, store, stall_seconds,
            remake_seconds: as in Entry.
        is_of_region: whether a row of a compiled region has it.
        is_exposed: whether the program could change what the value was, or would have been, made from.
    """

    __slots__ = (
        "codec",
        "decode_seconds",
        "decodes",
        "encode_seconds",
        "facts",
        "is_exposed",
        "is_of_region",
        "reason",
        "remake_seconds",
        "saved_nbytes",
        "shared_by",
        "stall_seconds",
        "stash_nbytes",
        "store",
    )

    def __init__(self, facts: SavedTensor, saved_nbytes: int, codec: str) -> None:
        self.facts = facts
        self.shared_by: list[SavedTensor] | None = None
        self.saved_nbytes, self.stash_nbytes = saved_nbytes, 0
        self.codec, self.store = codec, "device"
        self.reason = ""
        self.encode_seconds = self.decode_seconds = self.stall_seconds = 0.0
        self.decodes = 0
        self.remake_seconds = 0.0
        self.is_of_region = self.is_exposed = False

    @property
    def device_nbytes(self) -> int:
        """Bytes held on the device."""
        return self.stash_nbytes if self.store == "device" else 0

    def share(self, facts: SavedTensor) -> None:
        """One more saved tensor views the storage."""
        others = self.shared_by = self.shared_by or []
        if self.facts.need.value < facts.need.value:
            others.append(self.facts)
            self.facts = facts
        else:
            others.append(facts)

    def row(self) -> Entry:
        """The account as a report shows it."""
        facts = self.facts
        return Entry(
            facts.key,
            facts.need.name,
            str(facts.spec),
            self.saved_nbytes,
            self.stash_nbytes,
            self.codec,
            self.reason,
            [other.key for other in self.shared_by or ()],
            self.encode_seconds,
            self.decode_seconds,
            self.decodes,
            self.store,
            self.stall_seconds,
            "" if facts.effect is Effect.UNKNOWN else facts.effect.value,
            self.remake_seconds,
        )


class Step:
    """The accounts of the step in progress.

    Attributes:
        accounts: of the storages that were saved, in order.
        calls: of compiled regions, in order.
        small: bytes of storages that were too small to be looked at, by their addresses.
        parameters: bytes of parameters and buffers that were saved, by storage or by saved tensor.
        proven, repeated: how many recipes were proven in this step for the first time, and once more.
        named: how many saved tensors were named.
        recognised: how many of these were named as in an earlier step, and treated so.
        is_whole: whether the Session was not left by an error in this step; else nothing is learned of it.
        dropped: what was saved before this step and is gone without a backward pass, as a generator's graph behind
            ``detach()``: by the keys with the specs. It is noted where somebody watches, until it is taken.
    """

    __slots__ = (
        "__weakref__",
        "_taken",
        "accounts",
        "calls",
        "dropped",
        "is_whole",
        "named",
        "parameters",
        "proven",
        "recognised",
        "repeated",
        "small",
    )

    def __init__(self) -> None:
        self.accounts: list[Account] = []
        self.calls: list[RegionCall] = []
        self.small: dict[int, int] = {}
        self.parameters: dict[int, int] = {}
        self.proven = self.repeated = 0
        self.named = self.recognised = 0
        self.is_whole = True
        self.dropped: dict[str, str] = {}
        self._taken = 0  # accounts that were

    def take_saved(self) -> dict[str, str]:
        """What was saved or dropped since it was asked last, by the keys with the specs.

        Behind a graph that was dropped, places are counted anew. So a value of it may have the key of one of those that
        follow; if it looks otherwise, its spec is in its key as well.
        """
        accounts, dropped = self.accounts[self._taken :], self.dropped
        self._taken, self.dropped = len(self.accounts), {}
        facts = (each for account in accounts for each in (account.facts, *(account.shared_by or ())))
        saved = {each.key: str(each.spec) for each in facts}
        return saved | {key if saved.get(key, spec) == spec else f"{key} {spec}": spec for key, spec in dropped.items()}

    def open(self, facts: SavedTensor, saved_nbytes: int, codec: str) -> Account:
        """An account for a storage that was not saved before in this step."""
        account = Account(facts, saved_nbytes, codec)
        self.accounts.append(account)
        return account

    def begin_again(self) -> None:
        """Another pass has the same accounts: nothing was proven in it yet, and all of it was seen before."""
        self.proven = self.repeated = self._taken = 0
        self.recognised, self.is_whole = self.named, True

    @property
    def small_nbytes(self) -> int:
        """Bytes of storages that were too small to be looked at."""
        return sum(self.small.values())

    @property
    def saved_nbytes(self) -> int:
        """Bytes of all values."""
        return sum(account.saved_nbytes for account in self.accounts) + self.small_nbytes

    @property
    def freed_nbytes(self) -> int:
        """Bytes that plain PyTorch would hold and the Session does not."""
        return sum(account.saved_nbytes - account.device_nbytes for account in self.accounts)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was saved but parameters."""
        return not self.accounts and not self.small and not self.calls

    def notes(self, is_idle: bool, kept_below: int | None, elsewhere: bool, compiled: bool) -> tuple[str, ...]:
        """What a reader of the step's report should know before the numbers.

        Args:
            is_idle: whether the step was only counted.
            kept_below: tensors below this size were kept because a step saves little; None if that is not so.
            elsewhere: whether a module ran on another thread.
            compiled: whether the process has compiled anything.
        """
        notes = []
        unnamed = (each for each in self.accounts if each.facts.op == UNKNOWN_OP and not each.is_of_region)
        read_at_once = sum(each.saved_nbytes for each in unnamed) if compiled else 0
        if 2 * read_at_once > self.saved_nbytes:
            notes.append(
                f"compiled functions have saved {read_at_once / 2**20:.1f} MiB of this, and each of them reads all "
                f"that it has saved before its backward begins, so the peak of a model that is compiled as a whole is "
                f"no lower: compile with options=backstash.compile_options()"
            )
        if is_idle:
            notes.append("there is nothing to do, so this step was only counted: the rows are those of an earlier one")
        if kept_below is not None:
            notes.append(
                f"a step saves little, so tensors below {kept_below >> 10} KiB are kept and nothing is made "
                f"again, which takes time: Session(min_nbytes=...) changes that"
            )
        if elsewhere:
            notes.append(
                "a module ran with grad mode on another thread, which this Session does not see: open a Session on "
                "that thread"
            )
        if self.is_empty:
            notes.append(
                "nothing was saved: no forward pass with grad mode ran inside the Session, on the thread that "
                "entered it, outside of compiled functions"
            )
        names = region_names(self.calls)
        notes += dict.fromkeys(f"compiled {names[id(call.region)]}: {call.region.note}" for call in self.calls)
        return tuple(notes)

    def rows(self) -> tuple[Entry, ...]:
        """What a report shows; it does not change later."""
        rows: list[Entry] = []
        calls, names = list(self.calls), region_names(self.calls)
        for number in range(len(self.accounts) + 1):
            while calls and calls[0].place == number:
                call = calls.pop(0)
                rows += call.rows(names[id(call.region)])
            if number < len(self.accounts) and not self.accounts[number].is_of_region:
                rows.append(self.accounts[number].row())
        small = self.small_nbytes
        if small:
            rows.append(Entry("(below min_nbytes)", "", "", small, small, reason="small"))
        return tuple(rows)
