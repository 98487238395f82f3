"""Policies, which decide what is done with saved tensors. To add one, see CONTRIBUTING.md.

``policies.get("lossless")`` returns a policy by name. Functions such as ``policies.lossless(min_saving=0.1)`` return a
policy with other arguments. The contract of a policy is :class:`Policy`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from backstash.facade import on_demand
from backstash.policies.base import Action, Keep, Outcome, Policy, Recompute, Slice, Stash, Wrapper
from backstash.policies.registry import Description, describe, descriptions, get, names, register, require

if TYPE_CHECKING:
    from backstash.papers import comet as comet
    from backstash.papers.cdma import Cdma, Vdnn, VdnnDyn, cdma, vdnn
    from backstash.papers.gist import Gist, gist, gist_lossless
    from backstash.papers.layrub import Layrub, layrub
    from backstash.planning.run.hidden import OffloadHidden, offload_hidden
    from backstash.policies.exact import KeepAll, Lossless, lossless
    from backstash.policies.offloading import Offload, offload
    from backstash.policies.quantizing import Quantized, quantized
    from backstash.policies.rules import Rules
    from backstash.policies.slicing import SlicedPeak, sliced

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
    "OffloadHidden",
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
    "offload_hidden",
    "publish",
    "quantized",
    "register",
    "require",
    "sliced",
    "vdnn",
]

_HOMES = {
    "KeepAll": "exact",
    "Lossless": "exact",
    "Offload": "offloading",
    "Quantized": "quantizing",
    "Rules": "rules",
    "SlicedPeak": "slicing",
    "lossless": "exact",
    "offload": "offloading",
    "quantized": "quantizing",
    "sliced": "slicing",
}

__getattr__, __dir__ = on_demand(__name__, _HOMES)


def publish(**members: Any) -> None:
    """Makes public names of a package that stands on this one names of ``backstash.policies`` as well.

    ``backstash.papers`` does so when ``backstash`` is imported, since nothing here imports it. Type checkers know its
    names from the imports above.

    Args:
        members: classes, functions and modules by their names. A module can be imported by that name too.
    """
    for name, member in members.items():
        globals()[name] = member
        if isinstance(member, ModuleType):
            sys.modules[f"{__name__}.{name}"] = member


register(
    "lossless",
    "backstash.policies.exact:Lossless",
    is_exact=True,
    does="stores what backward reads in the smallest exact form, or remakes it",
    use_when="always first: no gradient changes, and most networks gain",
    is_candidate=True,
)
register(
    "lossless_stored",
    lambda: __getattr__("Lossless")(recompute=False),
    is_exact=True,
    does="as lossless, but remakes nothing",
    use_when="remaking takes too long, or an extension changes memory unseen",
    is_candidate=True,
)
register(
    "sliced",
    "backstash.policies.slicing:SlicedPeak",
    gradients="sums in another order",
    does="as lossless; the largest convolutions run their backward in slices of the batch",
    use_when="the backward pass of a convolution is the peak",
    is_candidate=True,
)
register(
    "offload",
    "backstash.policies.offloading:Offload",
    is_exact=True,
    does="moves what lossless stores to host memory or to another store",
    use_when="the device is too small, and the host or a disk has room",
    is_candidate=True,
)
register(
    "quantized",
    "backstash.policies.quantizing:Quantized",
    gradients="off by a share of their length",
    does="2 to 8 bits by group where the readers bear it (ActNN, ICML 2021), else as lossless",
    use_when="lossless does not suffice and the gradients may change: check by how much",
    is_candidate=True,
)
register(
    "keep",
    "backstash.policies.exact:KeepAll",
    is_exact=True,
    does="stores everything as it is, and reports what that is",
    use_when="you only want to know what there is",
)
