"""Storage of manifests: the protocol that the database writes through, and its implementation on a bucket alone.

<prefix>manifest/<epoch, 20 digits>-<number, 20 digits>-<nonce>      prefix = metastore/<domain uuid>/

In a cluster the replicated state decides which manifest is current, and the bucket holds the copies that a restore
starts from: `upload` first, then replicate. On a bucket alone (tools, tests, benchmarks) the manifest with the greatest
(epoch, number) is current, and there must be one writer only: a bucket cannot fence a second one.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Protocol

import msgspec

from tidemill.base.clock import Rand
from tidemill.base.errors import ConflictError, CorruptError, FencedError, InvalidError, MissingError
from tidemill.metastore.lsm.manifest import Manifest, decode_manifest, encode_manifest
from tidemill.objects.reads import read_verified
from tidemill.objects.store import ObjectStore

_NAME = re.compile(r"(\d{20})-(\d{20})-([0-9a-zA-Z]+)")

_SINGLE_WRITER_NONCE = "alone"
"""Nonce of manifests that `write` stores: one name per (epoch, number), so that one of two writers gets ConflictError.
"""


class Manifests(Protocol):
    """Manifest persistence of one domain."""

    async def read(self, max_epoch: int) -> Manifest | None:
        """Return the newest manifest whose epoch is at most `max_epoch`, or None.

        Raises CorruptError, UnavailableError.
        """
        ...

    async def write(self, manifest: Manifest) -> None:
        """Make the manifest the newest one, atomically.

        Raises FencedError if a newer epoch has written, ConflictError if it was rejected for another reason,
        UnavailableError, UnknownOutcomeError (the database is broken then).
        """
        ...


class ManifestName(msgspec.Struct, frozen=True):
    """Name of a manifest in the bucket."""

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
            raise InvalidError(f"the prefix of a domain's manifests must end with a slash: prefix={prefix!r}.")
        self._objects = objects
        self._rand = rand
        self._folder = f"{prefix}manifest/"

    async def upload(self, manifest: Manifest) -> str:
        """Upload under a new name; return the key, which is durable then.

        Raises UnavailableError, UnknownOutcomeError.
        """
        return await self._put(manifest, self._rand.nonce())

    async def list(self) -> AsyncIterator[ManifestName]:
        """Yield manifests in order of (epoch, number, nonce), oldest first. Keys that are not manifest names are
        skipped."""
        async for found in self._objects.list(self._folder):
            parts = _NAME.fullmatch(found.key, len(self._folder))
            if parts is not None:
                epoch, number, nonce = parts.groups()
                yield ManifestName(int(epoch), int(number), nonce, found.key, found.size_bytes, found.modified_ms)

    async def newest(self, max_epoch: int) -> ManifestName | None:
        """Return the greatest (epoch, number) among the names whose epoch is at most `max_epoch`; reads no content."""
        newest = None
        async for name in self.list():
            if name.epoch > max_epoch:
                break
            newest = name
        return newest

    async def load(self, key: str) -> Manifest:
        """Load a manifest. Raises MissingError, CorruptError (also if its content does not match its name),
        InvalidError for a newer format."""

        async def read() -> Manifest:
            return decode_manifest(await self._objects.get(key), key)

        try:
            manifest = await read_verified(self._objects, key, read)
        except MissingError as error:
            raise MissingError(f"the manifest is not in the bucket: manifest={key}.") from error
        if not key.startswith(f"{self._folder}{manifest.epoch:020d}-{manifest.number:020d}-"):
            raise CorruptError(
                "the manifest's content does not match its name: "
                f"manifest={key} epoch={manifest.epoch} number={manifest.number}."
            )
        return manifest

    async def delete(self, key: str) -> None:
        """Delete a manifest. An absent manifest is not an error."""
        await self._objects.delete(key)

    async def read(self, max_epoch: int) -> Manifest | None:
        """Read as the protocol defines. If the newest manifest is damaged, raises CorruptError; never falls back to
        an older one."""
        name = await self.newest(max_epoch)
        return None if name is None else await self.load(name.key)

    async def write(self, manifest: Manifest) -> None:
        """Write as the protocol defines, for one writer. FencedError and ConflictError carry the stored manifest."""
        newest = await self.newest(_ANY_EPOCH)
        current = None if newest is None else await self.load(newest.key)
        if current is not None:
            self._check_follows(manifest, current)
        try:
            await self._put(manifest, _SINGLE_WRITER_NONCE)
        except ConflictError as error:
            raise ConflictError(
                f"another writer has written this manifest: epoch={manifest.epoch} number={manifest.number}.",
                current=await self.read(_ANY_EPOCH),
            ) from error

    def _check_follows(self, manifest: Manifest, current: Manifest) -> None:
        if manifest.epoch < current.epoch:
            raise FencedError(
                "a manifest of a newer epoch exists: "
                f"folder={self._folder} epoch={manifest.epoch} current_epoch={current.epoch}.",
                current=current,
            )
        if manifest.number <= current.number or manifest.last_seqno < current.last_seqno:
            raise ConflictError(
                "the manifest does not follow the stored one: "
                f"folder={self._folder} number={manifest.number} current_number={current.number} "
                f"last_seqno={manifest.last_seqno} current_last_seqno={current.last_seqno}.",
                current=current,
            )

    async def _put(self, manifest: Manifest, nonce: str) -> str:
        key = f"{self._folder}{manifest.epoch:020d}-{manifest.number:020d}-{nonce}"
        await self._objects.put(key, encode_manifest(manifest))
        return key


_ANY_EPOCH = 10**20 - 1
