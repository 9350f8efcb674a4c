"""Three-way rule: the action for a command at time t when the shard's upper is p.

    t < p             BELOW  drop: a peer committed this time; its retractions can no longer be computed
    p ≤ t < through   AT     process: the mirror is complete up to p, the source up to `through`
    t ≥ through       ABOVE  stash for later

This is its only implementation. It is applied when commands are ingested and again at every drain, because a peer may
move the upper between the two. If a BELOW command were stashed instead of dropped, it would pin the writer's output
frontier below the shard's upper permanently: nothing would be appended any more while the source advances.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

BELOW = np.int8(-1)
AT = np.int8(0)
ABOVE = np.int8(1)


def classify(times: npt.NDArray[np.int64], upper: int, through: int) -> npt.NDArray[np.int8]:
    """Return BELOW, AT or ABOVE for each time (ms). `through` is exclusive; if through ≤ upper, nothing is AT."""
    out = np.full(len(times), ABOVE, dtype=np.int8)
    out[times < through] = AT
    out[times < upper] = BELOW
    return out
