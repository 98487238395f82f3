"""vDNN (MICRO 2016) and cDMA (HPCA 2018): saved tensors are moved, by layers" rules, without their zeros."""

from __future__ import annotations

from backstash.papers.cdma.policy import Cdma, Vdnn, VdnnDyn, cdma, vdnn
from backstash.policies import publish, register

__all__ = ["Cdma", "Vdnn", "VdnnDyn", "cdma", "vdnn"]

publish(Cdma=Cdma, Vdnn=Vdnn, VdnnDyn=VdnnDyn, cdma=cdma, vdnn=vdnn)

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
