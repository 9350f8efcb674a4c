"""Floats under a narrower type. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from tidemill.shards.parts.arrow_rows import Mask


def float32s(doubles: pa.Array) -> tuple[pa.Array, Mask]:
    """float64s as float32s, and which of them are beyond one: finite, but infinite as a float32."""
    narrow = doubles.cast(pa.float32(), safe=False)
    found = infinite(narrow)
    return narrow, found & ~infinite(doubles) if found.any() else found


def infinite(floats: Any) -> Mask:
    """Which are ±infinity."""
    found: Mask = np.isinf(floats.to_numpy(zero_copy_only=False))  # null is NaN there
    return found
