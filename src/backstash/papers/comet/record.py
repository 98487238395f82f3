"""The findings of collections about a layer, and the memory of it from one collection to the next."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Record:
    """The findings of one collection about one layer, and the decision.

    Attributes:
        bound: the bound from now on; None: stored exactly.
        target: the wanted standard deviation of the weight gradient's error.
        predicted: the standard deviation in this step by the error model; None if the input was exact.
        measured: the standard deviation that was measured; None if the layer was not sampled.
        cosine: cosine between the weight gradient and that of the exact input; None if the layer was not sampled.
        passed: the share of the input's gradient that is off by the error model, for a layer whose input's gradient
            reads the input. This error goes on to the layers below.
        note: anything out of the ordinary that was done about it.
    """

    step: int
    key: str
    bound: float | None
    target: float
    predicted: float | None = None
    measured: float | None = None
    cosine: float | None = None
    passed: float = 0.0
    note: str = ""


@dataclass(slots=True)
class Known:
    """What is known of a layer from one collection to the next.

    Attributes:
        bound: the bound that the layer needs; None: exact.
        magnitude: running mean of the weight gradient's magnitude.
        scale: what becomes of the weight gradient before the optimizer gets it (see momentum.py).
        ratio: ratio of the predicted to the measured deviation.
        caution: factor of the bound, below 1 after the weight gradient pointed elsewhere.
        sampled: the last step in which the layer was compared.
    """

    bound: float | None = None
    magnitude: float | None = None
    scale: float = 1.0
    ratio: float = 1.0
    caution: float = 1.0
    sampled: int = 0
