"""Values remade for several readers are held between them, as long as that does not raise the step's peak."""

from __future__ import annotations

from backstash.stash.live import Live


def test_nothing_is_held_before_backward_has_freed_something() -> None:
    live = Live()
    live.add(100)
    live.stashed_nbytes = 100
    assert not live.may_hold(1)
    live.add(-40)
    assert live.may_hold(40) and not live.may_hold(41)


def test_there_is_room_below_what_a_larger_value_needs_later() -> None:
    live = Live()
    live.add(10)
    live.will_need(140)  # stored first, so backward reaches it last: 10 bytes are left then, and the value
    live.add(60)
    live.will_need(4)
    live.stashed_nbytes = 70
    assert live.may_hold(20)  # 70 + 20, and three of its size at work, are 150
    assert not live.may_hold(21)
    live.add_remade(20)
    assert not live.may_hold(20)
