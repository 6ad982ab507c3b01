"""How often to save where failures come at a known rate: Young and Daly.

Both suppose failures that come at random at a constant rate, at any moment.
"""

from __future__ import annotations

import math

from portus.cadence.steps import not_negative, over_zero


def young_s(cost_s: float, mtbf_s: float) -> float:
    """Seconds of work between saves that lose the least time, to first order.

    cost_s: what a save adds to the time of training (not its whole duration); 0 or more.
    mtbf_s: mean time between failures of the whole job; over 0.

    Source: J. W. Young, CACM 17(9), 1974: the square root of 2 * cost * mtbf. Good while the cost
    is far under the mtbf. Raises ``UsageError`` outside these ranges.
    """
    not_negative("cost_s", cost_s, "seconds")
    return math.sqrt(2 * cost_s * over_zero("mtbf_s", mtbf_s, "seconds"))


def daly_s(cost_s: float, mtbf_s: float) -> float:
    """The same to higher order; good while the cost is under half of the mtbf, and the mtbf beyond.

    Source: J. T. Daly, Future Generation Computer Systems 22(3), 2006, equation 37.
    """
    first = young_s(cost_s, mtbf_s)
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return first * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def slowdown(interval_s: float, cost_s: float, mtbf_s: float, restart_s: float = 0.0) -> float:
    """Wall time for each second of work, if a save follows each ``interval_s`` of it; at least 1.

    restart_s: from a failure until training goes on. A save counts once it is over.

    Source: Daly (2006), equation 20: the expected time under exponential failures, exact where
    failures also hit saves and restarts.
    """
    over_zero("interval_s", interval_s, "seconds")
    not_negative("cost_s", cost_s, "seconds")
    over_zero("mtbf_s", mtbf_s, "seconds")
    not_negative("restart_s", restart_s, "seconds")
    tries = math.expm1((interval_s + cost_s) / mtbf_s)
    return mtbf_s * math.exp(restart_s / mtbf_s) * tries / interval_s
