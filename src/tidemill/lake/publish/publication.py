"""One publication of a table: its contents at a time become the current snapshot.

    state ─► hold ─► views ─► evaluation ─► files, vectors ─► manifests ─► metadata ─► pointer

Everything that a snapshot names is stored before the pointer moves. If anything fails, nothing was published, and the
objects that were written are orphans.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from tidemill.base.errors import InvalidError, UnavailableError
from tidemill.base.limits import OBJECT_CONCURRENCY
from tidemill.lake.format.deletion_vectors import Vector, decode_vector, encode_puffin
from tidemill.lake.format.manifests import (
    ADDED,
    DATA,
    DELETES,
    EXISTING,
    FORMAT_OF_DELETES,
    NAMES,
    ContentFile,
    Entry,
    Manifest,
    encode_manifest,
    encode_manifest_list,
)
from tidemill.lake.format.metadata import (
    Snapshot,
    TableMetadata,
    add_snapshot,
    add_tag,
    encode_metadata,
    expire,
    tag_of,
    with_logged,
    with_schema,
)
from tidemill.lake.format.position_deletes import PATH_FIELD, encode_position_deletes
from tidemill.lake.format.schema import Schema, inexpressible, oldest_version
from tidemill.lake.pointer import Pointer, move_pointer
from tidemill.lake.publish.manifest_groups import Group, Regrouped, regroup_data, regroup_deletes
from tidemill.lake.publish.stored import LakeStores, Stored
from tidemill.lake.publish.table_files import SnapshotFiles, encode_loose_rows, files_of, loose_rows
from tidemill.lake.settings import metadata_key, object_key
from tidemill.lake.vectors.evaluation import View, evaluate, views_at
from tidemill.lake.vectors.part_columns import PartColumns
from tidemill.shards.api import Batch, ShardSchema

VIEWS = "tidemill.views"


class Contents(msgspec.Struct, frozen=True):
    """Contents to publish: the batches of a shard under its newest schema, at a time.

    `summary` is added to the snapshot's summary.
    """

    shard_id: str
    name: str
    schema: ShardSchema
    batches: Sequence[Batch]
    time_ms: int
    summary: Mapping[str, str]


async def publish(stores: LakeStores, columns: PartColumns, stored: Stored, contents: Contents) -> Stored:
    """Publish `contents` as a new snapshot, or as a tag of the current one if nothing changed; return the new state.

    The objects of the batches are held. Raises ConflictError (another process published first: load again),
    InvalidError (a later time is published), MissingError, CorruptError, UnavailableError, UnknownOutcomeError.
    """
    views = views_at(contents.batches, contents.schema, contents.time_ms)
    current = stored.metadata.current
    if current is not None and contents.time_ms < stored.pointer.time_ms:
        raise InvalidError(
            f"a later time is published already: table={contents.name} time={contents.time_ms}"
            f" published={stored.pointer.time_ms}."
        )
    before = stored.evaluation
    if is_published(stored, contents):
        if tag_of(contents.time_ms) in stored.metadata.refs:
            return stored
        return await _publish_tag(stores, stored, contents)
    _check_defaults(contents, stored.metadata.format_version)
    found = await evaluate(columns, contents.schema, views, before)
    contents = replace(contents, summary={**contents.summary, VIEWS: _digest(views)})
    return await _Publication(stores, columns, stored, contents).run(replace(stored, evaluation=found), found.rows)


def _check_defaults(contents: Contents, version: int) -> None:
    """Raise UnavailableError if a file lacks a column whose default cannot be published."""
    oldest = oldest_version(contents.schema, version)
    waiting = [
        batch
        for batch in contents.batches
        if batch.schema_version < oldest
        and batch.lower <= contents.time_ms
        and any(part.object_key for part in batch.parts)  # inline parts are written as loose rows, with all columns
    ]
    if waiting:
        column = inexpressible(contents.schema, version)[-1]
        raise UnavailableError(
            "files of the table have to be rewritten, because Iceberg cannot express the default of a column:"
            f" table={contents.name} column={column.name} default={column.default!r} batches={len(waiting)}"
            f" bytes={sum(part.size_bytes for batch in waiting for part in batch.parts)}.",
            fix=f"Wait for maintenance, or run `tidemill table compact {contents.name}`.",
        )


def is_published(stored: Stored, contents: Contents) -> bool:
    """Return whether the current snapshot has these contents under this schema. Raises SchemaEvolvedError."""
    current = stored.metadata.current
    if current is None or current.schema_id != contents.schema.version:
        return False
    views = views_at(contents.batches, contents.schema, contents.time_ms)
    return current.summary.get(VIEWS) == _digest(views)


def _digest(views: Sequence[View]) -> str:
    """Return a digest of the views that a snapshot contains: equal views have equal contents."""
    found = hashlib.sha256()
    for id_ in sorted(repr(view.id) for view in views):
        found.update(id_.encode())
    return found.hexdigest()[:32]


async def publish_expiry(stores: LakeStores, stored: Stored, shard_id: str, overdue_ms: int) -> Stored:
    """Drop snapshots that are overdue by `overdue_ms`, without a new one. Without any, return `stored` itself.

    Raises as `publish`.
    """
    now_ms, keep_ms = stores.clock.now_ms(), stores.settings.keep_ms
    if expire(stored.metadata, now_ms - overdue_ms, keep_ms) is stored.metadata:
        return stored
    return await _move(stores, stored, shard_id, stored.metadata, stored.pointer)


async def _publish_tag(stores: LakeStores, stored: Stored, contents: Contents) -> Stored:
    metadata = add_tag(stored.metadata, contents.time_ms, stores.clock.now_ms())
    pointer = replace(stored.pointer, time_ms=contents.time_ms, published_ms=metadata.last_updated_ms)
    return await _move(stores, stored, contents.shard_id, metadata, pointer)


async def _move(stores: LakeStores, stored: Stored, shard_id: str, metadata: TableMetadata, pointer: Pointer) -> Stored:
    """Store the metadata without what has expired, and move the pointer to it."""
    old = stored.pointer.metadata
    if old and stored.metadata.last_updated_ms:
        metadata = with_logged(metadata, stores.settings.uri(old), stored.metadata.last_updated_ms)
    now_ms = stores.clock.now_ms()
    metadata = replace(metadata, last_updated_ms=max(now_ms, metadata.last_updated_ms))
    metadata = expire(metadata, metadata.last_updated_ms, stores.settings.keep_ms)
    key = metadata_key(shard_id, stored.seq + 1, now_ms, stores.rand)
    await stores.objects.put(key, encode_metadata(metadata))
    pointer = replace(pointer, metadata=key)
    seq = await move_pointer(stores.consensus, stores.rand, shard_id, stored.seq, pointer)
    return replace(stored, seq=seq, pointer=pointer, metadata=metadata)


class _Publication:
    """Files of one new snapshot."""

    def __init__(self, stores: LakeStores, columns: PartColumns, stored: Stored, contents: Contents) -> None:
        self._stores = stores
        self._columns = columns
        self._stored = stored
        self._contents = contents
        self._version = stores.settings.format
        self._metadata = with_schema(stored.metadata, contents.schema)
        self._schema: Schema = next(
            s for s in self._metadata.schemas if s.schema_id == self._metadata.current_schema_id
        )
        self._sequence = stored.metadata.last_sequence_number + 1
        self._snapshot_id = stores.rand.below((1 << 63) - 1) + 1
        self._now_ms = max(stores.clock.now_ms(), stored.metadata.last_updated_ms + 1)

    async def run(self, stored: Stored, rows: int) -> Stored:
        evaluation = stored.evaluation
        assert evaluation is not None
        files = files_of(self._stores.settings, evaluation)
        stored, files = await self._with_loose_rows(stored, files)
        data, deletes = await asyncio.gather(
            self._write_data(stored.data, files), self._write_deletes(stored.deletes, files)
        )
        listed = [group.manifest for group in (*data, *deletes)]
        first_row, added = self._metadata.next_row_id, 0
        if first_row is not UNSET:
            fresh = [m for m in listed if m.content == DATA and m.snapshot_id == self._snapshot_id]
            added = sum(m.added_rows + m.existing_rows for m in fresh)
        current = stored.metadata.current
        parent = None if current is None else current.snapshot_id
        encoded = encode_manifest_list(
            self._version, self._snapshot_id, parent, self._sequence, listed, 0 if first_row is UNSET else first_row
        )
        snapshot = Snapshot(
            self._snapshot_id,
            self._sequence,
            self._now_ms,
            await self._put("metadata", encoded, ".list.avro"),
            self._summary(files, rows),
            self._schema.schema_id,
            UNSET if parent is None else parent,
            first_row,
            UNSET if first_row is UNSET else added,
        )
        time_ms = self._contents.time_ms
        metadata = add_snapshot(self._metadata, snapshot, time_ms)
        pointer = Pointer(
            self._contents.name, "", self._snapshot_id, time_ms, self._now_ms, rows, stored.pointer.swept_ms
        )
        moved = await _move(self._stores, stored, self._contents.shard_id, metadata, pointer)
        return replace(moved, data=data, deletes=deletes)

    def _summary(self, files: SnapshotFiles, rows: int) -> dict[str, str]:
        return {
            "operation": "overwrite",
            "total-data-files": str(len(files.data)),
            "total-records": str(sum(file.rows for file in files.data.values())),
            "total-position-deletes": str(sum(files.dead.values())),
            "tidemill.time": str(self._contents.time_ms),
            "tidemill.rows": str(rows),
            **self._contents.summary,
        }

    # files ------------------------------------------------------------------------------------------
    async def _with_loose_rows(self, stored: Stored, files: SnapshotFiles) -> tuple[Stored, SnapshotFiles]:
        """Return the files with that of the loose rows, which is written if they changed."""
        assert stored.evaluation is not None
        rows = loose_rows(self._contents.schema, stored.evaluation)
        uri = stored.loose_uri if stored.loose is not None and rows.equals(stored.loose) else ""
        stored = replace(stored, loose=rows, loose_uri=uri)
        if not rows.num_rows:
            return replace(stored, loose_uri=""), files
        if uri:
            known = next(group.entries[uri].file for group in stored.data if uri in group.entries)
        else:
            data = await self._stores.cpu(lambda: encode_loose_rows(self._contents.schema, rows))
            uri = await self._put("data", data, ".parquet")
            known = ContentFile(uri, rows.num_rows, len(data))
        return replace(stored, loose_uri=uri), replace(files, data={**files.data, uri: known})

    async def _write_data(self, groups: Sequence[Group], files: SnapshotFiles) -> tuple[Group, ...]:
        regrouped = regroup_data(groups, files.data)
        entries = {path: Entry(await self._with_bounds(files, path)) for path in regrouped.new}
        return (*regrouped.kept, *await self._write_group(DATA, regrouped, entries, self._metadata.next_row_id))

    async def _with_bounds(self, files: SnapshotFiles, path: str) -> ContentFile:
        """Return the data file with the bounds of its columns. Its footer was read to evaluate it, so this is cheap."""
        file, part = files.data[path], files.parts.get(path)
        if part is None:
            return file
        found = await self._columns.bounds(part, self._contents.schema)
        return replace(file, lower=found.lower, upper=found.upper, values=found.values, nulls=found.nulls)

    async def _write_deletes(self, groups: Sequence[Group], files: SnapshotFiles) -> tuple[Group, ...]:
        regrouped = regroup_deletes(groups, files.vectors)
        if not regrouped.new and not regrouped.moved:
            return regrouped.kept
        write = self._write_vector if self._version >= 3 else self._write_position_deletes
        slots = asyncio.Semaphore(OBJECT_CONCURRENCY)

        async def write_entry(path: str) -> tuple[str, Entry]:
            async with slots:
                return path, Entry(await write(path, files))

        entries = dict(await asyncio.gather(*(write_entry(path) for path in regrouped.new)))
        written = await self._write_group(DELETES, regrouped, entries, UNSET)
        blobs = {path: files.vectors[path] for group in written for path in group.entries}
        return (*regrouped.kept, *(replace(group, blobs=blobs) for group in written))

    async def _write_vector(self, path: str, files: SnapshotFiles) -> ContentFile:
        """Write the vector of a data file, in a separate Puffin file.

        pyiceberg 0.12 applies every vector of a file, listed or not; DuckDB 1.5.5 may apply its first one for another.
        By the bounds of its path pyiceberg finds the vector of a data file; without them it reads all for each file.
        """
        data, (place,) = encode_puffin([Vector(path, files.vectors[path], files.dead[path])])
        uri = await self._put("data", data, ".puffin")
        kind, bound = FORMAT_OF_DELETES[self._version], {PATH_FIELD: path.encode()}
        return ContentFile(
            uri, place.count, len(data), 1, kind, lower=bound, upper=bound, referenced=path, offset=place.offset,
            length=place.length,
        )  # fmt: skip

    async def _write_position_deletes(self, path: str, files: SnapshotFiles) -> ContentFile:
        rows, blob = files.data[path].rows, files.vectors[path]
        data = await self._stores.cpu(lambda: encode_position_deletes(path, decode_vector(blob, rows)))
        uri, bound = await self._put("data", data, ".deletes.parquet"), {PATH_FIELD: path.encode()}
        return ContentFile(uri, files.dead[path], len(data), 1, referenced=path, lower=bound, upper=bound)

    async def _write_group(
        self, content: int, regrouped: Regrouped, new: Mapping[str, Entry], first_row: int | msgspec.UnsetType
    ) -> list[Group]:
        """Write the manifest of entries that moved and of new ones, if there are any."""
        moved = {path: replace(entry, status=EXISTING) for path, entry in regrouped.moved.items()}
        entries = {**moved, **new}
        if not entries:
            return []
        data = await self._stores.cpu(
            lambda: encode_manifest(self._version, self._schema, content, list(entries.values()))
        )
        known = [entry.sequence for entry in moved.values() if entry.sequence is not None]
        manifest = Manifest(
            await self._put("metadata", data, f".{NAMES[content]}.avro"),
            len(data),
            content,
            self._sequence,
            min([self._sequence, *known]),
            self._snapshot_id,
            len(new),
            len(moved),
            sum(entry.file.rows for entry in new.values()),
            sum(entry.file.rows for entry in moved.values()),
            None if first_row is UNSET else first_row,
        )
        return [Group(manifest, moved | self._numbered(new, manifest))]

    def _numbered(self, new: Mapping[str, Entry], manifest: Manifest) -> dict[str, Entry]:
        """Return new entries with the numbers that readers let them inherit."""
        row, out = manifest.first_row_id, {}
        for path, entry in new.items():
            file = replace(entry.file, first_row_id=row)
            out[path] = Entry(file, ADDED, manifest.snapshot_id, manifest.sequence)
            row = None if row is None else row + file.rows
        return out

    async def _put(self, folder: str, data: bytes, suffix: str) -> str:
        stores = self._stores
        key = object_key(self._contents.shard_id, folder, stores.clock.now_ms(), stores.rand, suffix)
        await stores.objects.put(key, data)
        return stores.settings.uri(key)
