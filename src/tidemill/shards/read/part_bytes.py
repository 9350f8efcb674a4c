"""Bytes of parts, for synchronous readers that need some of their columns."""

from __future__ import annotations

from typing import Any

from tidemill.base.limits import MIB
from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.objects.file_adapter import ObjectFile
from tidemill.objects.store import Buffer, ObjectStore
from tidemill.objects.verified_read import read_verified
from tidemill.shards.api import Part
from tidemill.shards.parts.checksums import verify_part_bytes
from tidemill.shards.read.hash_ranges import FetchPart

WHOLE_FETCH_BYTES = 1 * MIB
"""Size up to which a part is fetched whole: its footer and columns would take several requests."""


async def read_part_bytes(objects: ObjectStore, part: Part) -> Buffer:
    """Return all bytes of a part, verified. Raises MissingError, CorruptError, UnavailableError."""
    if not part.object_key:
        return part.inline

    async def read() -> bytes:
        data = await objects.get(part.object_key)
        verify_part_bytes(part, data)
        return data

    return await read_verified(objects, part.object_key, read)


def fetch_through(portal: BlockingPortal, objects: ObjectStore, *, whole: bool) -> FetchPart:
    """Return a `FetchPart` through `portal`. If `whole`, all columns of a part are needed, so it makes one request."""

    def fetch(part: Part) -> Any:
        if not part.object_key:
            return part.inline
        if whole or part.size_bytes <= WHOLE_FETCH_BYTES:
            return portal.call(read_part_bytes(objects, part))
        return ObjectFile(portal, objects, part.object_key, part.size_bytes)

    return fetch
