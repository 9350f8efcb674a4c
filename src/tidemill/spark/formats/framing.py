"""Confluent's framing: one byte 0, the id of the writer's schema in 4 bytes, and the data. By columns."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tidemill.spark.decode.newline_text import Places

FRAME_BYTES = 5
NOT_FRAMED = -1
NOT_FRAMED_TEXT = "not framed: a record begins with a byte 0 and the id of its schema"


def read_schema_ids(body: bytes, at: Places, sizes: Places) -> npt.NDArray[np.int64]:
    """Return the schema id of each field that starts at `at`, or NOT_FRAMED."""
    data = np.frombuffer(body, np.uint8)
    framed = sizes >= FRAME_BYTES
    begins = np.where(framed, at, 0)
    if not len(data) or not len(at):
        return np.full(len(at), NOT_FRAMED, dtype=np.int64)
    last = len(data) - 1
    ids = np.zeros(len(at), dtype=np.int64)
    for place in range(1, FRAME_BYTES):
        ids = ids << 8 | data[np.minimum(begins + place, last)]
    framed &= data[np.minimum(begins, last)] == 0
    return np.where(framed, ids, NOT_FRAMED)
