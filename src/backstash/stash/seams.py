"""The rooms that are plugged into a Session, which runs without each of them.

The package plugs in its own when it is imported: ``remake`` makes values again, ``redeem`` has backward kernels that
read planes, and ``replay`` runs steps that repeat themselves. A Session takes what is here when it is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from backstash.stash.producer import NoProducer, ProducerFactory
from backstash.stash.readers import NO_READERS, Readers

Replays = Callable[[Any, Any, Callable[[Tensor], Any], Callable[[Any], Tensor]], Any]
"""Returns what replays a Session's passes, or None; is given the Session, its Forward, and how it packs and reads."""

producer: ProducerFactory = NoProducer
readers: Readers = NO_READERS
replays: Replays | None = None
