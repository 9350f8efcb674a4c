"""Validation of batches. Pure, without Python code per row: a batch is checked in a few loops in C."""

from __future__ import annotations

from collections.abc import Sequence

from tidemill.base.errors import InvalidError
from tidemill.base.limits import (
    METASTORE_BATCH_BYTES,
    METASTORE_BATCH_ROWS,
    METASTORE_KEY_BYTES,
    METASTORE_VALUE_BYTES,
)


def batch_bytes(keys: Sequence[bytes], values: Sequence[bytes]) -> int:
    """Return the size of all keys and values. Raises InvalidError for a batch that is empty, too large or has
    different numbers of keys and values, for an empty key, and for a key or value above its limit. Of a key that occurs
    twice the last row counts.
    """
    rows = len(keys)
    if not rows:
        raise InvalidError("a batch needs at least one row: rows=0.", fix="Add rows, or apply no batch.")
    if rows != len(values):
        raise InvalidError(
            f"a batch needs one value for each key: keys={rows} values={len(values)}.",
            fix="Pass a value for each key, the empty one to delete it.",
        )
    if not all(keys):
        raise InvalidError(
            f"a key must not be empty: row={list(map(len, keys)).index(0)}.", fix="Give every row a key."
        )
    if rows == 1:
        keys_bytes, values_bytes = len(keys[0]), len(values[0])
    else:
        keys_bytes, values_bytes = len(b"".join(keys)), len(b"".join(values))
    # If the sum is within the limit of one, none needs to be checked individually.
    if keys_bytes > METASTORE_KEY_BYTES and (longest := max(map(len, keys))) > METASTORE_KEY_BYTES:
        raise InvalidError(
            f"a key is too long: size_bytes={longest} limit_bytes={METASTORE_KEY_BYTES}.", fix="Use a shorter key."
        )
    if values_bytes > METASTORE_VALUE_BYTES and (largest := max(map(len, values))) > METASTORE_VALUE_BYTES:
        raise InvalidError(
            f"a value is too large: size_bytes={largest} limit_bytes={METASTORE_VALUE_BYTES}.",
            fix="Store it in an object and keep the object's name.",
        )
    if keys_bytes + values_bytes > METASTORE_BATCH_BYTES or rows > METASTORE_BATCH_ROWS:
        raise InvalidError(
            f"a batch is too large: size_bytes={keys_bytes + values_bytes} limit_bytes={METASTORE_BATCH_BYTES} "
            f"rows={rows} limit_rows={METASTORE_BATCH_ROWS}.",
            fix="Split it, if its rows need not become visible together.",
        )
    return keys_bytes + values_bytes
