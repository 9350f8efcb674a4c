"""Files of one domain in its bucket: their names, and put, read, list, delete. `sst` defines their content.

<prefix>sst/<epoch, 20 digits>-<number, 12 digits>-<nonce>.sst      prefix = metastore/<domain uuid>/

Invariant: a name is never reused. The epoch separates leaders, the nonce separates attempts.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Sequence
from functools import lru_cache

import msgspec

from tidemill.base.errors import CorruptError, InvalidError, MissingError
from tidemill.metastore.lsm.manifest import FileMeta
from tidemill.objects.store import Buffer, ObjectStore, RangeError

CACHED_KEYS = 1024

_NAME = re.compile(r"(\d{20})-(\d{12})-([0-9a-zA-Z]+)\.sst")


class FileName(msgspec.Struct, frozen=True):
    """Name of a file. Size and time are known if it comes from a listing."""

    epoch: int
    number: int
    nonce: str
    size_bytes: int = 0
    modified_ms: int = 0


def lost_file_error(error: MissingError) -> CorruptError:
    """Return the error of a lost file for callers of the database: they take a MissingError for an absent row."""
    return CorruptError(error.message, fix=error.fix)


class SstFiles:
    """Files of one domain. Translates the store's errors for missing and truncated files."""

    def __init__(self, objects: ObjectStore, prefix: str) -> None:
        if not prefix.endswith("/"):
            raise InvalidError(f"the prefix of a domain's files must end with a slash: prefix={prefix!r}.")
        self.objects = objects
        self.prefix = prefix
        self._sst = f"{prefix}sst/"
        self.key: Callable[[FileMeta | FileName], str] = lru_cache(CACHED_KEYS)(self._key)
        """Return the object key of a file. Cached, since every read needs it."""

    def _key(self, file: FileMeta | FileName) -> str:
        return f"{self._sst}{file.epoch:020d}-{file.number:012d}-{file.nonce}.sst"

    async def put(self, name: FileMeta | FileName, data: Buffer | Sequence[Buffer]) -> None:
        """Store a file; it is durable on return.

        Raises ConflictError if the name exists, UnavailableError, UnknownOutcomeError.
        """
        await self.objects.put(self.key(name), data)

    async def read(self, file: FileMeta, start: int, end: int) -> bytes:
        """Read bytes [start, end). Raises MissingError if the file is gone, CorruptError if it is shorter than
        `end`."""
        try:
            data = await self.objects.get(self.key(file), start, end)
        except MissingError as error:
            raise self._missing_error(file) from error
        except RangeError as error:
            raise self._truncated_error(file, start, end) from error
        if len(data) != end - start:
            raise self._truncated_error(file, start, end)
        return data

    async def read_ranges(self, file: FileMeta, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Read several half-open ranges, returned in the given order; nearby ones share a request. Raises as `read`."""
        try:
            pieces = await self.objects.get_ranges(self.key(file), ranges)
        except MissingError as error:
            raise self._missing_error(file) from error
        except RangeError as error:
            raise self._truncated_error(file, min(ranges)[0], max(end for _, end in ranges)) from error
        for (start, end), piece in zip(ranges, pieces, strict=True):
            if len(piece) != end - start:
                raise self._truncated_error(file, start, end)
        return pieces

    async def list(self) -> AsyncIterator[FileName]:
        """Yield the domain's files in order of (epoch, number). Keys that are not file names are skipped."""
        async for found in self.objects.list(self._sst):
            parts = _NAME.fullmatch(found.key, len(self._sst))
            if parts is not None:
                epoch, number, nonce = parts.groups()
                yield FileName(int(epoch), int(number), nonce, found.size_bytes, found.modified_ms)

    async def delete(self, name: FileMeta | FileName) -> None:
        """Delete a file. An absent file is not an error."""
        await self.objects.delete(self.key(name))

    def _missing_error(self, file: FileMeta) -> MissingError:
        return MissingError(
            f"a file that the manifest names is not in the bucket: file={self.key(file)}.",
            fix="Restore the object from a copy of the bucket, or restore the domain from an older manifest.",
        )

    def _truncated_error(self, file: FileMeta, start: int, end: int) -> CorruptError:
        return CorruptError(
            "the file is shorter than its manifest says: "
            f"file={self.key(file)} start={start} end={end} size_bytes={file.size_bytes}.",
            fix="Restore the object from a copy of the bucket, or restore the domain from an older manifest.",
        )
