"""When requests arrive in an open loop: endless, seeded offsets in seconds from the start."""

import itertools
from collections.abc import Iterator
from random import Random


def constant(rate: float) -> Iterator[float]:
    return (number / rate for number in itertools.count())


def gamma(rate: float, burstiness: float, rng: Random) -> Iterator[float]:
    """Gaps from a gamma distribution with mean 1/rate and shape `burstiness`; 1 is a Poisson process.

    Their coefficient of variation is 1/sqrt(burstiness): below 1, requests come in bursts.
    """
    gaps = (rng.gammavariate(burstiness, 1 / (rate * burstiness)) for _ in itertools.repeat(None))
    return itertools.accumulate(gaps)


def poisson(rate: float, rng: Random) -> Iterator[float]:
    return itertools.accumulate(rng.expovariate(rate) for _ in itertools.repeat(None))


def delayed(offsets: Iterator[float], seconds: float) -> Iterator[float]:
    return (offset + seconds for offset in offsets)
