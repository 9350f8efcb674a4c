"""The files of one domain in its bucket: their names, and put, read, list, delete. What is in them is sst.py's.

<prefix>sst/<epoch, 20 digits>-<number, 12 digits>-<nonce>.sst      prefix = metastore/<domain uuid>/

A name is never used again (L1): the epoch keeps two leaders apart, the nonce two attempts.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Sequence
from functools import lru_cache

import msgspec

from tidemill.base.errors import CorruptError, InvalidError, MissingError
from tidemill.metastore.lsm.manifest import FileMeta
from tidemill.objects.store import Buffer, ObjectStore

KEPT_KEYS = 1024

_NAME = re.compile(r"(\d{20})-(\d{12})-([0-9a-zA-Z]+)\.sst")


class FileName(msgspec.Struct, frozen=True):
    """A file by its name alone. Size and time are known when it comes from a listing."""

    epoch: int
    number: int
    nonce: str
    size_bytes: int = 0
    modified_ms: int = 0


class Files:
    """Data persistence of one domain. Adds to the store's errors only what a damaged or missing file means here."""

    def __init__(self, objects: ObjectStore, prefix: str) -> None:
        if not prefix.endswith("/"):
            raise InvalidError(f"The prefix of a domain's files must end with a slash: prefix={prefix!r}.")
        self.objects = objects
        self.prefix = prefix
        self._sst = f"{prefix}sst/"
        self.key: Callable[[FileMeta | FileName], str] = lru_cache(KEPT_KEYS)(self._key)
        """The object's key of a file. Kept, for each read asks for it."""

    def _key(self, file: FileMeta | FileName) -> str:
        return f"{self._sst}{file.epoch:020d}-{file.number:012d}-{file.nonce}.sst"

    async def put(self, name: FileMeta | FileName, data: Buffer | Sequence[Buffer]) -> None:
        """Durable when it returns. Raises Conflict when the name is taken, Unavailable, Unknown."""
        await self.objects.put(self.key(name), data)

    async def read(self, file: FileMeta, start: int, end: int) -> bytes:
        """Bytes [start, end). Raises MissingError when the file is gone, CorruptError when it is shorter than `end`."""
        try:
            data = await self.objects.get(self.key(file), start, end)
        except MissingError as error:
            raise self._missing(file) from error
        except InvalidError as error:
            raise self._truncated(file, start, end) from error
        if len(data) != end - start:
            raise self._truncated(file, start, end)
        return data

    async def read_ranges(self, file: FileMeta, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Several half-open ranges in the order asked; near ones travel together. Raises as `read`."""
        try:
            pieces = await self.objects.get_ranges(self.key(file), ranges)
        except MissingError as error:
            raise self._missing(file) from error
        except InvalidError as error:
            raise self._truncated(file, min(ranges)[0], max(end for _, end in ranges)) from error
        for (start, end), piece in zip(ranges, pieces, strict=True):
            if len(piece) != end - start:
                raise self._truncated(file, start, end)
        return pieces

    async def list(self) -> AsyncIterator[FileName]:
        """The domain's files in order of (epoch, number). Keys that are not file names are left out."""
        async for found in self.objects.list(self._sst):
            parts = _NAME.fullmatch(found.key, len(self._sst))
            if parts is not None:
                epoch, number, nonce = parts.groups()
                yield FileName(int(epoch), int(number), nonce, found.size_bytes, found.modified_ms)

    async def delete(self, name: FileMeta | FileName) -> None:
        """An absent file is success."""
        await self.objects.delete(self.key(name))

    def _missing(self, file: FileMeta) -> MissingError:
        return MissingError(
            f"A file that the manifest names is not in the bucket: file={self.key(file)}.",
            fix="Restore the object from a copy of the bucket, or restore the domain from an older manifest.",
        )

    def _truncated(self, file: FileMeta, start: int, end: int) -> CorruptError:
        return CorruptError(
            "The file is shorter than its manifest says: "
            f"file={self.key(file)} start={start} end={end} size_bytes={file.size_bytes}.",
            fix="Restore the object from a copy of the bucket, or restore the domain from an older manifest.",
        )
