"""Where manifests are kept: the protocol the database writes through, and a bucket on its own.

<prefix>manifest/<epoch, 20 digits>-<number, 20 digits>-<nonce>      prefix = metastore/<domain uuid>/

In a cluster the replicated state decides which manifest counts, and the bucket holds the copies that
a restore starts from: `upload` first, then replicate. Alone (tools, tests, benchmarks) the greatest
(epoch, number) in the bucket counts, and there is one writer: a bucket cannot fence a second one.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Protocol

import msgspec

from tidemill.base.clock import Rand
from tidemill.base.errors import ConflictError, CorruptError, FencedError, InvalidError, MissingError
from tidemill.metastore.lsm.manifest import Manifest, decode_manifest, encode_manifest
from tidemill.objects.store import ObjectStore
from tidemill.objects.verified_read import checked

_NAME = re.compile(r"(\d{20})-(\d{20})-([0-9a-zA-Z]+)")

_ALONE = "alone"
"""The nonce of what `write` makes: one name per (epoch, number), so that of two writers one meets Conflict."""


class Manifests(Protocol):
    """Metadata persistence of one domain."""

    async def read(self, max_epoch: int) -> Manifest | None:
        """The newest manifest whose epoch is at most `max_epoch`, or None. Raises CorruptError, Unavailable."""
        ...

    async def write(self, manifest: Manifest) -> None:
        """Make it the newest, atomically.

        Raises FencedError when a newer epoch has written, ConflictError when it was refused for another reason,
        Unavailable, Unknown (rule L6: the database is broken then).
        """
        ...


class ManifestName(msgspec.Struct, frozen=True):
    """A manifest in the bucket by its name alone."""

    epoch: int
    number: int
    nonce: str
    key: str
    size_bytes: int
    modified_ms: int


class BucketManifests:
    """Manifests of one domain in its bucket. Implements `Manifests` for a bucket alone."""

    def __init__(self, objects: ObjectStore, prefix: str, rand: Rand) -> None:
        if not prefix.endswith("/"):
            raise InvalidError(f"The prefix of a domain's manifests must end with a slash: prefix={prefix!r}.")
        self._objects = objects
        self._rand = rand
        self._folder = f"{prefix}manifest/"

    async def upload(self, manifest: Manifest) -> str:
        """Its key, durable when this returns. Every upload has a name of its own. Raises Unavailable, Unknown."""
        return await self._put(manifest, self._rand.nonce())

    async def list(self) -> AsyncIterator[ManifestName]:
        """In order of (epoch, number, nonce), oldest first. Keys that are not manifest names are left out."""
        async for found in self._objects.list(self._folder):
            parts = _NAME.fullmatch(found.key, len(self._folder))
            if parts is not None:
                epoch, number, nonce = parts.groups()
                yield ManifestName(int(epoch), int(number), nonce, found.key, found.size_bytes, found.modified_ms)

    async def newest(self, max_epoch: int) -> ManifestName | None:
        """The greatest (epoch, number) among the names whose epoch is at most `max_epoch`; looks at no content."""
        newest = None
        async for name in self.list():
            if name.epoch > max_epoch:
                break
            newest = name
        return newest

    async def load(self, key: str) -> Manifest:
        """Raise MissingError, CorruptError (also when its content is not what its name says), InvalidError for a newer
        format."""

        async def read() -> Manifest:
            return decode_manifest(await self._objects.get(key), key)

        try:
            manifest = await checked(self._objects, key, read)
        except MissingError as error:
            raise MissingError(f"The manifest is not in the bucket: manifest={key}.") from error
        if not key.startswith(f"{self._folder}{manifest.epoch:020d}-{manifest.number:020d}-"):
            raise CorruptError(
                "The manifest is stored under another one's name: "
                f"manifest={key} epoch={manifest.epoch} number={manifest.number}."
            )
        return manifest

    async def delete(self, key: str) -> None:
        """An absent manifest is success."""
        await self._objects.delete(key)

    async def read(self, max_epoch: int) -> Manifest | None:
        """As the protocol says. A damaged newest manifest is Corrupt, never passed over for an older one."""
        name = await self.newest(max_epoch)
        return None if name is None else await self.load(name.key)

    async def write(self, manifest: Manifest) -> None:
        """As the protocol says, for one writer. Fenced and Conflict carry the manifest that is there."""
        newest = await self.newest(_ANY_EPOCH)
        current = None if newest is None else await self.load(newest.key)
        if current is not None:
            self._check_follows(manifest, current)
        try:
            await self._put(manifest, _ALONE)
        except ConflictError as error:
            raise ConflictError(
                f"Another writer has written this manifest: epoch={manifest.epoch} number={manifest.number}.",
                current=await self.read(_ANY_EPOCH),
            ) from error

    def _check_follows(self, manifest: Manifest, current: Manifest) -> None:
        if manifest.epoch < current.epoch:
            raise FencedError(
                "A manifest of a newer epoch exists: "
                f"folder={self._folder} epoch={manifest.epoch} current_epoch={current.epoch}.",
                current=current,
            )
        if manifest.number <= current.number or manifest.last_seqno < current.last_seqno:
            raise ConflictError(
                "The manifest does not follow the one that is there: "
                f"folder={self._folder} number={manifest.number} current_number={current.number} "
                f"last_seqno={manifest.last_seqno} current_last_seqno={current.last_seqno}.",
                current=current,
            )

    async def _put(self, manifest: Manifest, nonce: str) -> str:
        key = f"{self._folder}{manifest.epoch:020d}-{manifest.number:020d}-{nonce}"
        await self._objects.put(key, encode_manifest(manifest))
        return key


_ANY_EPOCH = 10**20 - 1
