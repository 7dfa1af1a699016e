"""When requests are due: at once, or at random times of a given mean rate."""

import numpy as np


def arrival_times(
    count: int, rate: float | None, burstiness: float = 1.0, seed: int = 0
) -> list[float]:
    """Seconds after the start, ascending; the first request is due at 0.

    The gaps are gamma distributed with the shape `burstiness`, whatever happens to the requests.
    For one seed and burstiness, another rate only scales them.

    Args:
        rate: requests a second on average; None: all at once.
        burstiness: 1 is a Poisson process; below 1 requests come in bursts, above 1 more evenly.
    """
    if rate is None:
        return [0.0] * count
    gaps = np.random.default_rng([seed, 1]).gamma(burstiness, 1 / burstiness, count) / rate
    times: list[float] = (np.cumsum(gaps) - gaps[0]).tolist()
    return times
