"""Policies, which decide what is done with saved tensors. To add one, see CONTRIBUTING.md.

``policies.get("lossless")`` returns a policy by name. Functions such as ``policies.lossless(min_saving=0.1)`` return a
policy with other arguments. The contract of a policy is :class:`Policy`.
"""

from __future__ import annotations

from backstash.policies import comet
from backstash.policies.base import Action, Keep, Outcome, Policy, Recompute, Rules, Slice, Stash, Wrapper
from backstash.policies.gist import Gist, gist, gist_lossless
from backstash.policies.lossless import KeepAll, Lossless, lossless
from backstash.policies.offload import Offload, offload
from backstash.policies.published import Cdma, Layrub, Vdnn, VdnnDyn, cdma, layrub, vdnn
from backstash.policies.quantized import Quantized, quantized
from backstash.policies.registry import get, names, register
from backstash.policies.sliced import SlicedPeak, sliced

__all__ = [
    "Action",
    "Cdma",
    "Gist",
    "Keep",
    "KeepAll",
    "Layrub",
    "Lossless",
    "Offload",
    "Outcome",
    "Policy",
    "Quantized",
    "Recompute",
    "Rules",
    "Slice",
    "SlicedPeak",
    "Stash",
    "Vdnn",
    "VdnnDyn",
    "Wrapper",
    "cdma",
    "comet",
    "get",
    "gist",
    "gist_lossless",
    "layrub",
    "lossless",
    "names",
    "offload",
    "quantized",
    "register",
    "sliced",
    "vdnn",
]

register("lossless", Lossless)
register("lossless_stored", lambda: Lossless(recompute=False))
register("gist_lossless", Gist)
register("gist_fp16", lambda: Gist("fp16"))
register("gist_fp10", lambda: Gist("fp10"))
register("gist_fp8", lambda: Gist("fp8"))
register("sliced", SlicedPeak)
register("quantized", Quantized)
register("keep", KeepAll)
register("offload", Offload)
register("vdnn", Vdnn)
register("vdnn_conv", lambda: Vdnn("conv"))
register("cdma", Cdma)
register("layrub", Layrub)
