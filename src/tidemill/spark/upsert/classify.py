"""The three-way rule: what a writer may do with a command at time t when the shard's upper is p (seed 001).

    t < p             BELOW  drop: a peer committed this time; its retractions can no longer be computed
    p ≤ t < through   AT     process: the mirror is complete up to p, the source up to `through`
    t ≥ through       ABOVE  keep for later

This is the only place that spells it. It is applied when commands come in and again at every drain,
because a peer may move the upper between the two. Keeping BELOW instead of dropping it pins the writer's
output frontier below the shard's upper for good: nothing is appended any more while the source goes on.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

BELOW = np.int8(-1)
AT = np.int8(0)
ABOVE = np.int8(1)


def classify(times: npt.NDArray[np.int64], upper: int, through: int) -> npt.NDArray[np.int8]:
    """BELOW, AT or ABOVE for each time (ms). `through` is exclusive; through ≤ upper means nothing is AT."""
    out = np.full(len(times), ABOVE, dtype=np.int8)
    out[times < through] = AT
    out[times < upper] = BELOW
    return out
