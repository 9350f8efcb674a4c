"""Conversion of floats to a narrower type. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from tidemill.shards.parts.arrow_rows import Mask


def narrow_to_float32(doubles: pa.Array) -> tuple[pa.Array, Mask]:
    """Convert float64s to float32s; also return a mask of the finite values that become infinite."""
    narrow = doubles.cast(pa.float32(), safe=False)
    found = is_infinite(narrow)
    return narrow, found & ~is_infinite(doubles) if found.any() else found


def is_infinite(floats: Any) -> Mask:
    """Return a mask of ±infinity."""
    found: Mask = np.isinf(floats.to_numpy(zero_copy_only=False))  # null is NaN there
    return found
