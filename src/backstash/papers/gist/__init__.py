"""Gist (ISCA 2018): a bit for a relu, sparse storage, numbers of few bits."""

from __future__ import annotations

from functools import partial

from backstash.papers.gist.policy import Gist, gist, gist_lossless
from backstash.policies import publish, register

__all__ = ["Gist", "gist", "gist_lossless"]

publish(Gist=Gist, gist=gist, gist_lossless=gist_lossless)

register(
    "gist_lossless",
    Gist,
    is_exact=True,
    does="Gist's rules (ISCA 2018): a bit per element for a relu, sparse storage; remakes the rest if it can",
    use_when="you want Gist's encodings",
)
for _format, _bits in (("fp16", 16), ("fp10", 10), ("fp8", 8)):
    register(
        f"gist_{_format}",
        partial(Gist, _format),
        gradients=f"off by the rounding to {_bits} bits",
        does=f"as gist_lossless, and stored numbers have {_bits} bits, but for divisors and what is compared",
        use_when="the gradients may change a little, and more than lossless has to be saved",
        is_candidate=True,
    )
register(
    "gist_paper",
    lambda: Gist(recompute=False),
    is_exact=True,
    does="Gist's exact rules as the paper has them, which remakes nothing",
    use_when="you compare with Gist's paper",
)
