"""Publications of a table so far, as read from its pointer, metadata and manifests."""

from __future__ import annotations

import asyncio

import msgspec
import pyarrow as pa

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import MissingError
from tidemill.consensus.api import Consensus
from tidemill.lake.format.manifests import DATA, Manifest, decode_manifest, decode_manifest_list
from tidemill.lake.format.metadata import Snapshot, TableMetadata, decode_metadata, new_metadata
from tidemill.lake.pointer import Pointer, read_pointer
from tidemill.lake.publish.manifest_groups import Group
from tidemill.lake.settings import PREFIX, LakeSettings
from tidemill.lake.vectors.evaluation import Evaluation
from tidemill.objects.store import ObjectStore
from tidemill.shards.api import RunCpuWork, ShardSchema, run_inline


class LakeStores(msgspec.Struct, frozen=True):
    """Dependencies of a publication."""

    consensus: Consensus
    objects: ObjectStore
    clock: Clock
    rand: Rand
    settings: LakeSettings
    cpu: RunCpuWork = run_inline

    def key_of(self, uri: str) -> str:
        """Return the key of an object of this bucket."""
        return uri.removeprefix(f"{self.settings.base}/")


class Stored(msgspec.Struct, frozen=True):
    """State of a table's publications. `seq` is the version of the pointer's register.

    `evaluation` and `loose` are what the newest snapshot contains; None after a start, until they are computed again.
    """

    seq: int
    pointer: Pointer
    metadata: TableMetadata
    data: tuple[Group, ...] = ()
    deletes: tuple[Group, ...] = ()
    evaluation: Evaluation | None = None
    loose: pa.Table | None = None
    loose_uri: str = ""


async def load_stored(stores: LakeStores, shard_id: str, name: str, schema: ShardSchema) -> Stored:
    """Read the newest publication. Without one under this format and base, the table has no snapshots yet.

    Raises MissingError (the table was dropped, or an object is missing), CorruptError, UnavailableError, InvalidError.
    """
    settings = stores.settings
    pointer, seq = await read_pointer(stores.consensus, shard_id)
    if pointer is not None and pointer.dropped:
        raise MissingError(f"the table was dropped: table={name} id={shard_id}.")
    location = settings.location(shard_id)
    if pointer is not None and pointer.metadata:
        metadata = decode_metadata(await stores.objects.get(pointer.metadata), pointer.metadata)
        if (metadata.format_version, metadata.location) == (settings.format, location):
            groups = await _read_groups(stores, metadata.current)
            data = tuple(group for group in groups if group.manifest.content == DATA)
            deletes = tuple(group for group in groups if group.manifest.content != DATA)
            return Stored(seq, pointer, metadata, data, deletes)
    metadata = new_metadata(settings.format, stores.rand.uuid(), location, schema)
    return Stored(seq, pointer or Pointer(name), metadata)


async def read_manifests(stores: LakeStores, snapshot: Snapshot) -> list[Manifest]:
    """Return the manifests of a snapshot. Raises MissingError, CorruptError, UnavailableError."""
    key = stores.key_of(snapshot.manifest_list)
    return decode_manifest_list(await stores.objects.get(key), key)


async def _read_groups(stores: LakeStores, snapshot: Snapshot | None) -> list[Group]:
    async def read(manifest: Manifest) -> Group:
        entries = decode_manifest(await stores.objects.get(stores.key_of(manifest.path)), manifest)
        return Group(manifest, {entry.file.referenced or entry.file.path: entry for entry in entries})

    if snapshot is None:
        return []
    return list(await asyncio.gather(*(read(manifest) for manifest in await read_manifests(stores, snapshot))))


def own_objects(stores: LakeStores, groups: tuple[Group, ...]) -> set[str]:
    """Return the keys below `lake/` that manifests and their entries name."""
    named = {group.manifest.path for group in groups}
    named |= {entry.file.path for group in groups for entry in group.entries.values()}
    return {key for uri in named if (key := stores.key_of(uri)).startswith(PREFIX)}
