"""fsspec file system over a bucket, for DuckDB: it reads ranges of objects and supports nothing else."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import count
from typing import Any

from fsspec import AbstractFileSystem

from tidemill.base.errors import InvalidError
from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.objects.reads import ObjectFile
from tidemill.objects.store import ObjectStore
from tidemill.shards.api import Part
from tidemill.shards.read.verified_file import VerifiedFile

_numbers = count(1)

NEVER_CHANGES = datetime(1970, 1, 1, tzinfo=UTC)


class BucketFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """File system of one bucket.

    Paths are `PROTOCOL://SIZE.CRC.FOOTER_CRC/KEY`: the known facts of a part, so that opening it needs no request.
    DuckDB verifies no checksums, so the file does (`VerifiedFile`). `protocol` is unique in the process, because DuckDB
    caches by path.
    """

    cachable = False

    def __init__(self, portal: BlockingPortal, objects: ObjectStore) -> None:
        super().__init__()
        self.protocol = f"tidemill{next(_numbers)}"
        self._portal = portal
        self._objects = objects

    def path_of(self, part: Part) -> str:
        return f"{self.protocol}://{part.size_bytes}.{part.crc}.{part.footer_crc}/{part.object_key}"

    def _open(self, path: str, mode: str = "rb", **_: Any) -> ObjectFile | VerifiedFile:
        if mode != "rb":
            raise InvalidError(f"objects are read only: mode={mode}.")
        part = self._part_of(path)
        file = ObjectFile(self._portal, self._objects, part.object_key, part.size_bytes)
        return file if part.crc < 0 else VerifiedFile(part, file)

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        return {"name": path, "size": self._part_of(path).size_bytes, "type": "file"}

    def glob(self, path: str, **_: Any) -> list[str]:
        """Return the path itself: every path names one object."""
        return [path]

    def modified(self, path: str) -> datetime:
        """Return a constant, because objects never change."""
        return NEVER_CHANGES

    def _part_of(self, path: str) -> Part:
        """Return the part that a path describes."""
        known, _, key = path.removeprefix(f"{self.protocol}://").partition("/")
        size, crc, footer_crc = map(int, known.split("."))
        return Part(0, size, object_key=key, crc=crc, footer_crc=footer_crc)
