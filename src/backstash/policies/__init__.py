"""Policies, which decide what is done with saved tensors. To add one, see CONTRIBUTING.md.

``policies.get("lossless")`` returns a policy by name. Functions such as ``policies.lossless(min_saving=0.1)`` return a
policy with other arguments. The contract of a policy is :class:`Policy`.
"""

from __future__ import annotations

from functools import partial

from backstash.policies import comet
from backstash.policies.base import Action, Keep, Outcome, Policy, Recompute, Slice, Stash, Wrapper
from backstash.policies.gist import Gist, gist, gist_lossless
from backstash.policies.lossless import KeepAll, Lossless, lossless
from backstash.policies.offload import Offload, offload
from backstash.policies.published import Cdma, Layrub, Vdnn, VdnnDyn, cdma, layrub, vdnn
from backstash.policies.quantized import Quantized, quantized
from backstash.policies.registry import Description, describe, descriptions, get, names, register, require
from backstash.policies.rules import Rules
from backstash.policies.sliced import SlicedPeak, sliced

__all__ = [
    "Action",
    "Cdma",
    "Description",
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
    "describe",
    "descriptions",
    "get",
    "gist",
    "gist_lossless",
    "layrub",
    "lossless",
    "names",
    "offload",
    "quantized",
    "register",
    "require",
    "sliced",
    "vdnn",
]

register(
    "lossless",
    Lossless,
    is_exact=True,
    does="stores what backward reads in the smallest exact form, or remakes it",
    use_when="always first: no gradient changes, and most networks gain",
    is_candidate=True,
)
register(
    "lossless_stored",
    lambda: Lossless(recompute=False),
    is_exact=True,
    does="as lossless, but remakes nothing",
    use_when="remaking takes too long, or an extension changes memory unseen",
    is_candidate=True,
)
register(
    "sliced",
    SlicedPeak,
    gradients="sums in another order",
    does="as lossless; the largest convolutions run their backward in slices of the batch",
    use_when="the backward pass of a convolution is the peak",
    is_candidate=True,
)
register(
    "offload",
    Offload,
    is_exact=True,
    does="moves what lossless stores to host memory or to another store",
    use_when="the device is too small, and the host or a disk has room",
    is_candidate=True,
)
register(
    "quantized",
    Quantized,
    gradients="off by a share of their length",
    does="2 to 8 bits by group where the readers bear it (ActNN, ICML 2021), else as lossless",
    use_when="lossless does not suffice and the gradients may change: check by how much",
    is_candidate=True,
)
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
        does=f"as gist_lossless, and every stored number has {_bits} bits",
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
register(
    "vdnn",
    Vdnn,
    is_exact=True,
    does="moves what the layers that extract features save (vDNN, MICRO 2016)",
    use_when="you compare with vDNN's paper",
)
register(
    "vdnn_conv",
    lambda: Vdnn("conv"),
    is_exact=True,
    does="as vdnn, for the inputs of convolutions only",
    use_when="you compare with vDNN's paper",
)
register(
    "cdma",
    Cdma,
    is_exact=True,
    does="as vdnn, without the zeros (cDMA, HPCA 2018)",
    use_when="you compare with cDMA's paper",
)
register(
    "layrub",
    Layrub,
    is_exact=True,
    does="moves the inputs of all but the outermost layers, and masks (Layrub, TACO 2018)",
    use_when="you compare with Layrub's paper",
)
register(
    "keep",
    KeepAll,
    is_exact=True,
    does="stores everything as it is, and reports what that is",
    use_when="you only want to know what there is",
)
