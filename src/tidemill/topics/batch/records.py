"""One record of a batch, decoded. The produce and fetch paths never make these; capture and Spark do."""

from __future__ import annotations

import msgspec

Headers = tuple[tuple[str, bytes | None], ...]


class Record(msgspec.Struct, frozen=True):
    """`offset` is absolute once decoded and −1 in a record that is still to be written."""

    key: bytes | None
    value: bytes | None
    headers: Headers = ()
    timestamp_ms: int = -1
    offset: int = -1
