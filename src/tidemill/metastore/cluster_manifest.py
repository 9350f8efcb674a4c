"""Objects in which a cluster describes itself in its bucket: the cluster manifest that a restore begins with, and signs
of life.

    metastore/cluster/<number, 20 digits>-<nonce>           cluster manifest; the greatest number counts
    metastore/alive/<milliseconds, 20 digits>-<nonce>       written at intervals while the cluster is led

    both    'TMCL' 4 bytes | format uint16 = 1 | msgpack map | crc32c uint32 of everything before it, little end first

- Invariant (newest incarnation owns the bucket): the leader of an older incarnation stops; its bucket has been restored
  into another consensus.
- Invariant (no accidental takeover): no cluster is created in empty consensus on a bucket that already has one; that
  requires a restore.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import NamedTuple, TypeVar

import crc32c
import msgspec

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import ClusterReplacedError, CorruptError, InvalidError, MissingError
from tidemill.base.limits import CLUSTER_ALIVE_INTERVAL_S
from tidemill.objects.reads import read_verified
from tidemill.objects.store import ObjectStore

CLUSTER_PREFIX = "metastore/cluster/"
ALIVE_PREFIX = "metastore/alive/"
MAGIC = b"TMCL"
FORMAT = 1

MANIFESTS_KEPT = 3
REPLACED_FIX = "Stop this cluster, or give it its own bucket."

StructT = TypeVar("StructT", bound=msgspec.Struct)


class ClusterManifest(msgspec.Struct, frozen=True):
    """
    cluster_uuid   of the cluster that wrote it
    label          the cluster it was restored from, "" for none
    incarnation    1, and one more with every restore of this bucket
    domains        uuid of each domain, by index; it is part of the paths of its manifests and files
    """

    cluster_uuid: str
    label: str
    incarnation: int
    domains: tuple[str, ...]
    created_ms: int


class SignOfLife(msgspec.Struct, frozen=True):
    """Sign of life. The cluster may be alive until the sign is `young_s` old; the next one is due after a third of
    that."""

    cluster_uuid: str
    incarnation: int
    node: str
    at_ms: int
    young_s: float = 3 * CLUSTER_ALIVE_INTERVAL_S


class FoundManifest(NamedTuple):
    """The newest cluster manifest, its key and its number."""

    manifest: ClusterManifest
    key: str
    number: int


async def newest_manifest(objects: ObjectStore) -> FoundManifest | None:
    """Return the newest manifest, if any. Raises CorruptError (naming the object), InvalidError (a newer format),
    UnavailableError."""
    newest = ""
    async for found in objects.list(CLUSTER_PREFIX):
        newest = max(newest, found.key)
    if not newest:
        return None
    return await load_manifest(objects, newest)


async def load_manifest(objects: ObjectStore, key: str) -> FoundManifest:
    """Load one manifest. Raises MissingError, and what `newest_manifest` raises."""
    number = key.removeprefix(CLUSTER_PREFIX).partition("-")[0]
    if not key.startswith(CLUSTER_PREFIX) or not number.isdigit():
        raise CorruptError(f"not a cluster manifest's name: object={key}.", fix="Remove it from the bucket.")
    return FoundManifest(await read_struct(objects, key, ClusterManifest), key, int(number))


async def upload_manifest(objects: ObjectStore, rand: Rand, manifest: ClusterManifest, number: int) -> str:
    """Upload a manifest; return its key.

    Deletes all but the MANIFESTS_KEPT newest. Raises UnavailableError, UnknownOutcomeError.
    """
    key = f"{CLUSTER_PREFIX}{number:020d}-{rand.nonce()}"
    await objects.put(key, encode(manifest))
    names = {found.key async for found in objects.list(CLUSTER_PREFIX)}
    for old in sorted(names)[:-MANIFESTS_KEPT]:
        await objects.delete(old)
    return key


async def write_sign_of_life(objects: ObjectStore, rand: Rand, alive: SignOfLife) -> None:
    """Write a sign of life. Deletes earlier signs of this incarnation, those of older ones, and unreadable ones."""
    key = f"{ALIVE_PREFIX}{alive.at_ms:020d}-{rand.nonce()}"
    await objects.put(key, encode(alive))
    for name in [found.key async for found in objects.list(ALIVE_PREFIX)]:
        if name == key:
            continue
        incarnation = await _incarnation_of_sign(objects, name)
        if incarnation is None or incarnation <= alive.incarnation:
            await objects.delete(name)


async def _incarnation_of_sign(objects: ObjectStore, name: str) -> int | None:
    """Return the incarnation of a sign of life; None if the sign is gone or damaged."""
    try:
        return (await read_struct(objects, name, SignOfLife)).incarnation
    except (MissingError, CorruptError):
        return None


async def signs_of_life(objects: ObjectStore) -> AsyncIterator[tuple[SignOfLife, str]]:
    """Yield (sign, key), oldest first.

    Skips signs deleted during the iteration. Raises CorruptError, UnavailableError.
    """
    names = [found.key async for found in objects.list(ALIVE_PREFIX)]
    for name in names:
        try:
            yield await read_struct(objects, name, SignOfLife), name
        except MissingError:
            continue


class Presence:
    """Upkeep of the manifest and of signs of life by the leader of domain 0: `publish` at intervals, and once before it
    serves."""

    def __init__(
        self, objects: ObjectStore, clock: Clock, rand: Rand, node: str, *, interval_s: float = CLUSTER_ALIVE_INTERVAL_S
    ) -> None:
        self._objects = objects
        self._clock = clock
        self._rand = rand
        self._node = node
        self._interval_s = interval_s
        self._last: SignOfLife | None = None

    async def publish(self, manifest: ClusterManifest) -> None:
        """Write the manifest if the bucket has a different one, then a sign of life.

        Raises ClusterReplacedError if the bucket has been restored into another consensus, CorruptError,
        UnavailableError, UnknownOutcomeError.
        """
        try:
            found = await newest_manifest(self._objects)
        except CorruptError:
            # The damaged manifest may belong to a newer incarnation, so it is not replaced. The sign of life is still
            # written: otherwise a restore would take this cluster for dead.
            await self._write_sign_of_life(manifest)
            raise
        check_not_replaced(found, manifest.cluster_uuid, manifest.incarnation)
        if found is None or msgspec.structs.replace(found.manifest, created_ms=manifest.created_ms) != manifest:
            number = found.number + 1 if found is not None else 1
            await upload_manifest(self._objects, self._rand, manifest, number)
            # Two incarnations may have uploaded concurrently. The newer one must win, regardless of the nonces.
            check_not_replaced(await newest_manifest(self._objects), manifest.cluster_uuid, manifest.incarnation)
        await self._write_sign_of_life(manifest)

    async def _write_sign_of_life(self, manifest: ClusterManifest) -> None:
        sign = SignOfLife(
            manifest.cluster_uuid, manifest.incarnation, self._node, self._clock.now_ms(), 3 * self._interval_s
        )
        await write_sign_of_life(self._objects, self._rand, sign)
        self._last = sign

    async def withdraw(self) -> None:
        """Delete the last sign at a clean shutdown, so that a restore need not wait.

        Raises UnavailableError, UnknownOutcomeError.
        """
        sign, self._last = self._last, None
        if sign is not None:
            async for other, key in signs_of_life(self._objects):
                if other == sign:
                    await self._objects.delete(key)


def check_not_replaced(found: FoundManifest | None, cluster_uuid: str, incarnation: int) -> None:
    """Raise ClusterReplacedError if the manifest is of a newer incarnation, or of another cluster of the same one."""
    if found is None:
        return
    other = found.manifest
    if (other.incarnation, other.cluster_uuid) == (incarnation, cluster_uuid) or other.incarnation < incarnation:
        return
    raise ClusterReplacedError(
        "this cluster has been replaced: the bucket was restored into another consensus:"
        f" cluster={cluster_uuid}"
        f" incarnation={incarnation} bucket_cluster={other.cluster_uuid} bucket_incarnation={other.incarnation}.",
        fix=REPLACED_FIX,
    )


async def check_unclaimed(objects: ObjectStore) -> None:
    """Check the bucket before a cluster is created in empty consensus. Raises InvalidError if it has a cluster."""
    found = await newest_manifest(objects)
    if found is not None:
        raise InvalidError(
            "consensus has no cluster, but the bucket has one:"
            f" cluster={found.manifest.cluster_uuid} incarnation={found.manifest.incarnation} object={found.key}.",
            fix="Run `tidemill restore` to restore it, or choose another objects.url.",
        )


def encode(struct: msgspec.Struct) -> bytes:
    data = MAGIC + FORMAT.to_bytes(2, "little") + msgspec.msgpack.encode(struct)
    return data + int(crc32c.crc32c(data)).to_bytes(4, "little")


async def read_struct(objects: ObjectStore, key: str, kind: type[StructT]) -> StructT:
    """Read a struct that `encode` wrote. Raises MissingError, CorruptError (naming the object), InvalidError (a newer
    format)."""

    async def read() -> StructT:
        return decode(await objects.get(key), key, kind)

    return await read_verified(objects, key, read)


def decode(data: bytes, key: str, kind: type[StructT]) -> StructT:
    head = len(MAGIC) + 2
    if not data.startswith(MAGIC) or int(crc32c.crc32c(data[:-4])).to_bytes(4, "little") != data[-4:]:
        raise CorruptError(f"the object is damaged: object={key} size_bytes={len(data)}.", fix=_FIX)
    found = int.from_bytes(data[len(MAGIC) : head], "little")
    if found > FORMAT:
        raise InvalidError(
            f"the object was written by a newer version of tidemill: object={key} format={found} known={FORMAT}.",
            fix="Use that version or a newer one.",
        )
    try:
        return msgspec.msgpack.decode(data[head:-4], type=kind)
    except msgspec.MsgspecError as error:
        raise CorruptError(
            f"the object is undecodable though its checksum is valid: object={key} cause={error}."
        ) from error


_FIX = "Remove it if there are older ones of its kind, or restore it from a copy of the bucket."
