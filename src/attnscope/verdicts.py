"""Stage 4: what samples say. Pure; reads plain times, writes Verdict; imports no torch and no later stage."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from attnscope.records import Verdict
from attnscope.units import median, quantile

SAME_WITHIN = math.log(1.01)
TOO_CLOSE = "too close to call"
TRIM = 0.2
LEAST_PAIRS = 2

# Two-sided 95 % quantile of Student's t for 1..30 degrees of freedom (any table of the distribution).
_STUDENT_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def noise_fraction(times: Sequence[float]) -> float:
    """Half the way from the 20th to the 80th percentile, over the median: 0.01 reads as ± 1 %."""
    return (quantile(times, 0.8) - quantile(times, 0.2)) / (2 * median(times))


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """(centre, low, high): the mean of the middle 60 % and its 95 % interval, so that outliers count but do not rule.

    The interval is Student's on the winsorised variance (Tukey and McLaughlin, Sankhya A 25, 1963). Of one
    value there is none: it reaches from minus to plus infinity.
    """
    n = len(values)
    cut = int(TRIM * n)
    ordered = sorted(values)
    kept = ordered[cut : n - cut]
    centre = sum(kept) / len(kept)
    if n < LEAST_PAIRS:
        return centre, -math.inf, math.inf
    winsorised = [kept[0]] * cut + kept + [kept[-1]] * cut
    mean = sum(winsorised) / n
    variance = sum((value - mean) ** 2 for value in winsorised) / (n - 1)
    freedom = len(kept) - 1
    t = _STUDENT_T[min(freedom, len(_STUDENT_T)) - 1]
    half = t * math.sqrt(variance / n) * n / len(kept)
    return centre, centre - half, centre + half


def word_for(low: float, high: float) -> str:
    """What an interval of log(time / rival's time) says: same if it lies within ± 1 %, else its side of zero."""
    if -SAME_WITHIN <= low and high <= SAME_WITHIN:
        return "same"
    if high < 0:
        return "faster"
    return "slower" if low > 0 else TOO_CLOSE


def verdict_on(
    direction: str,
    name: str,
    rival: str,
    isolated: Sequence[tuple[float, float]],
    sustained: Sequence[tuple[float, float]] = (),
) -> Verdict:
    """The verdict on ``name`` against ``rival`` from (time, rival's time) pairs of the same round or block.

    Sustained pairs are few (one a pass of the blocks), so each of them must say the word; where they say another word
    than the isolated ones, or only one round holds both rivals, the verdict is too close to call.
    """
    logs = [math.log(time / other) for time, other in isolated]
    centre, low, high = mean_interval(logs)
    word = word_for(low, high)
    if math.isinf(low):
        low, high = min(logs), max(logs)
    sustained_ratio = None
    if sustained:
        blocks = [math.log(time / other) for time, other in sustained]
        sustained_ratio = math.exp(sum(blocks) / len(blocks))
        if word_for(min(blocks), max(blocks)) != word:
            word = TOO_CLOSE
    return Verdict(direction, name, rival, word, math.exp(centre), math.exp(low), math.exp(high), sustained_ratio)


def verdicts_of(
    direction: str,
    isolated: Mapping[str, Mapping[int, float]],
    sustained: Mapping[str, Mapping[int, float]],
    ours: Collection[str] = (),
) -> list[Verdict]:
    """Each rival against the best other one, by median isolated time. Times are by name, then by round or block.

    Who is among ``ours`` is also judged against the best one that is not, so that two kernels of our own never stand
    beside each other alone. A rival without a sustained time is judged on isolated rounds alone.
    """
    ranked = sorted(isolated, key=lambda name: median(list(isolated[name].values())))
    found = []
    for name in isolated:
        best = next((other for other in ranked if other != name), None)
        theirs = next((other for other in ranked if other not in ours), None) if name in ours else None
        for rival in dict.fromkeys((best, theirs)):
            pairs = _pairs(isolated, name, rival) if rival else []
            if rival and pairs:
                found.append(verdict_on(direction, name, rival, pairs, _pairs(sustained, name, rival)))
    return found


def _pairs(times: Mapping[str, Mapping[int, float]], name: str, rival: str) -> list[tuple[float, float]]:
    mine, others = times.get(name, {}), times.get(rival, {})
    return [(mine[key], others[key]) for key in mine if key in others]
