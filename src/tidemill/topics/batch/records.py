"""One decoded record of a batch. The produce and fetch paths never create these; capture and Spark do."""

from __future__ import annotations

import msgspec

Headers = tuple[tuple[str, bytes | None], ...]


class Record(msgspec.Struct, frozen=True):
    """One record. `offset` is absolute once decoded, and −1 in a record that is still to be written."""

    key: bytes | None
    value: bytes | None
    headers: Headers = ()
    timestamp_ms: int = -1
    offset: int = -1
