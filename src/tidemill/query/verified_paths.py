"""Paths of parts for engines that open files themselves and do not verify checksums, when the bucket is a directory.

A file is verified as a whole once per process: an object never changes, and its key is never reused in its bucket.
"""

from __future__ import annotations

from collections import OrderedDict

from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.objects.store import ObjectStore
from tidemill.shards.api import Part
from tidemill.shards.read.part_reader import read_part_bytes

_verified: OrderedDict[str, None] = OrderedDict()
"""Paths of parts that this process has verified. The bucket of a restored cluster may have the same keys."""
VERIFIED_MAX = 8192


def verified_path(portal: BlockingPortal, objects: ObjectStore, directory: str, part: Part) -> str:
    """Return the path of a part below the bucket's directory. Raises CorruptError, MissingError, UnavailableError."""
    path = f"{directory}/{part.object_key}"
    if part.crc >= 0 and path not in _verified:
        portal.call(read_part_bytes(objects, part))
        _verified[path] = None
        if len(_verified) > VERIFIED_MAX:
            _verified.popitem(last=False)
    return path
