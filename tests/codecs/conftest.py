from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile(
    "backstash",
    settings.get_profile("ci" if "CI" in os.environ else "default"),
    max_examples=60,
    deadline=None,  # the first call of an op costs more than all the others
)
settings.load_profile("backstash")
