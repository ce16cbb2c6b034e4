"""Figures of a distribution."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Samples = Sequence[float] | NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Percentiles are interpolated linearly between samples. Unit: that of the samples."""

    count: int
    mean: float
    std: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, samples: Samples) -> "Distribution | None":
        values = np.asarray(samples, dtype=np.float64)
        if values.size == 0:
            return None
        p50, p90, p99 = (float(value) for value in np.percentile(values, [50, 90, 99]))
        return cls(
            count=int(values.size),
            mean=float(values.mean()),
            std=float(values.std()),
            p50=p50,
            p90=p90,
            p99=p99,
            max=float(values.max()),
        )
