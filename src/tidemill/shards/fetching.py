"""The bytes of parts, for synchronous readers that want some of their columns."""

from __future__ import annotations

from typing import Any

from tidemill.base.limits import MIB
from tidemill.base.portal import Portal
from tidemill.objects.files import ObjectFile
from tidemill.objects.store import ObjectStore
from tidemill.shards.front import Part
from tidemill.shards.ranges import Fetch

WHOLE_BYTES = 1 * MIB
"""A part of at most this is fetched whole: its footer and columns would be several requests."""


def fetching(portal: Portal, objects: ObjectStore, *, whole: bool) -> Fetch:
    """`whole`: every column of a part is wanted, so it is one request."""

    def fetch(part: Part) -> Any:
        if not part.object_key:
            return part.inline
        if whole or part.size_bytes <= WHOLE_BYTES:
            return portal.call(objects.get(part.object_key))
        return ObjectFile(portal, objects, part.object_key, part.size_bytes)

    return fetch
