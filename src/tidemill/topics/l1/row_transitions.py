"""Changes of L1's rows (RFC 0005 §3). Pure: from the rows as read to the rows to write, or an error.

The commit of a change must expect every partition row and object row that was read for it. Extents and terms change
only together with their partition's row, which guards them too.

Invariant (coverage): extents of a partition cover [start, next) without gaps or overlaps.

Invariant (one reference): only the commit that registers an object refers to it. Its removed bytes are those of its
deleted extents.

Invariant (monotonic): `start` and `next` never decrease.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise

import msgspec
from msgspec.structs import replace

from tidemill.base.errors import InvalidError
from tidemill.metastore.rows import L1_EXTENTS, L1_OBJECTS, L1_PARTITIONS, L1_TERMS
from tidemill.metastore.rows.l1 import L1ExtentRow, L1ObjectRow, L1PartitionRow, L1TermRow
from tidemill.topics.l1.format import L1Region

RowWrites = list[tuple[bytes, bytes]]
"""Rows to write, as keys and values; an empty value deletes."""


class AddRequest(msgspec.Struct, frozen=True):
    """Request to refer to an object, with offsets and sizes as in `format.L1Region`.

    `terms`: by partition, (term, its first offset) of all terms that placed the offsets of its extents, ascending.
    """

    topic_id: str
    object_id: str
    object_bytes: int
    regions: tuple[L1Region, ...]
    terms: Mapping[int, Sequence[tuple[int, int]]]


class ReadRows(msgspec.Struct, frozen=True):
    """Rows as they were read. `terms`: the newest of each partition; a partition without terms is absent."""

    partitions: Mapping[int, L1PartitionRow]
    terms: Mapping[int, L1TermRow]
    objects: Mapping[str, L1ObjectRow]


class AddResult(msgspec.Struct, frozen=True):
    """Result of `add_object`.

    `next` by partition: its next offset, which is not the end of its extents if they were left out.
    """

    rows: RowWrites
    next: dict[int, int]


class ReplaceRequest(msgspec.Struct, frozen=True):
    """Request to refer to an object in place of whole extents.

    `epochs`: by partition, the compaction epoch of its row when the extents were read from which the regions were
    built.
    """

    topic_id: str
    object_id: str
    object_bytes: int
    regions: tuple[L1Region, ...]
    epochs: Mapping[int, int]


class ReplaceResult(msgspec.Struct, frozen=True):
    """Result of `replace_extents`.

    `stale`: partitions whose extents changed since they were read; theirs are not replaced.
    """

    rows: RowWrites
    stale: tuple[int, ...]


class TrimResult(msgspec.Struct, frozen=True):
    """Result of `set_start`. `more`: extents below the start are left for another commit."""

    rows: RowWrites
    more: bool


def new_object_row(topic_id: str, object_id: str, at_ms: int) -> L1ObjectRow:
    return L1ObjectRow(topic_id, object_id, updated_ms=at_ms)


def was_added(row: L1ObjectRow | None) -> bool:
    """Return whether the one `add_object` of this object took place. An extent always has some bytes."""
    return row is not None and row.registered and row.total_bytes > 0


def is_garbage(row: L1ObjectRow) -> bool:
    """Return whether no row refers to the object, or ever will.

    An object with more removed than total bytes is retained.
    """
    return row.registered and row.removed_bytes == row.total_bytes


def expire_registration(row: L1ObjectRow, at_ms: int) -> L1ObjectRow | None:
    """Return the row that prevents any later `add_object` from registering it, or None if one has."""
    return None if row.registered else replace(row, registered=True, updated_ms=at_ms)


def add_object(held: ReadRows, request: AddRequest, at_ms: int) -> AddResult:
    """Refer to an uploaded object.

    Raises InvalidError if the request contradicts itself or the stored terms, or names an object that was not
    registered for it or has expired.
    """
    known = _check_unregistered(held, request.object_id)
    rows: RowWrites = []
    nexts: dict[int, int] = {}
    total = removed = 0
    for partition, group in groupby(request.regions, key=lambda region: region.partition):
        regions = list(group)
        if partition in nexts:
            raise InvalidError(f"the regions of a partition are not adjacent in the request: partition={partition}.")
        _check_regions(regions)
        weight = sum(region.size_bytes + region.index_bytes for region in regions)
        total += weight
        row = held.partitions.get(partition)
        base = regions[0].base_offset
        if row is None:
            row = L1PartitionRow(request.topic_id, partition, base, base)
        if base != row.next:
            removed += weight
            nexts[partition] = row.next
            continue
        rows += _new_terms(request, held.terms.get(partition), regions)
        row, extents = _append_extents(row, request.object_id, regions)
        rows += [L1_EXTENTS.encode(extent) for extent in extents]
        rows.append(L1_PARTITIONS.encode(row))
        nexts[partition] = row.next
    if not nexts:
        raise InvalidError(f"an L1 object has no region: object={request.object_id}.")
    rows.append(_registered_row(known, total, removed, request.object_bytes, at_ms))
    return AddResult(rows, nexts)


def replace_extents(
    held: ReadRows, standing: Mapping[int, Sequence[L1ExtentRow]], request: ReplaceRequest, at_ms: int
) -> ReplaceResult:
    """Replace extents by those of a new object.

    `standing`: by partition, the extents with an offset in the range of its regions, ascending, read with its row.
    `held.objects`: their objects, and the new one.
    Raises InvalidError like `add_object`, and if every partition is stale.
    """
    known = _check_unregistered(held, request.object_id)
    rows: RowWrites = []
    stale: list[int] = []
    gone: list[L1ExtentRow] = []
    total = removed = 0
    for partition, group in groupby(request.regions, key=lambda region: region.partition):
        regions = list(group)
        _check_regions(regions)
        weight = sum(region.size_bytes + region.index_bytes for region in regions)
        total += weight
        row, old = held.partitions.get(partition), standing.get(partition, ())
        if row is None or not _regions_match(row, old, regions, request.epochs[partition]):
            removed += weight
            stale.append(partition)
            continue
        # The old first extent's bound covers all extents before it, and is a valid start for the new ones and those
        # after.
        before = replace(row, highest_timestamp_ms=old[0].highest_timestamp_ms)
        changed, extents = _append_extents(before, request.object_id, regions)
        bases = {extent.base_offset for extent in extents}
        rows += [(L1_EXTENTS.key_of(extent), b"") for extent in old if extent.base_offset not in bases]
        rows += [L1_EXTENTS.encode(extent) for extent in extents]
        changed = replace(
            row,
            size_bytes=changed.size_bytes - sum(extent.size_bytes for extent in old),
            extent_count=changed.extent_count - len(old),
            compaction_epoch=row.compaction_epoch + 1,
        )
        rows.append(L1_PARTITIONS.encode(changed))
        gone += old
    if not gone:
        raise InvalidError(f"all extents that an L1 object replaces have changed: object={request.object_id}.")
    rows += _charge_removed(gone, held.objects, at_ms)
    rows.append(_registered_row(known, total, removed, request.object_bytes, at_ms))
    return ReplaceResult(rows, tuple(stale))


def _regions_match(row: L1PartitionRow, old: Sequence[L1ExtentRow], regions: Sequence[L1Region], epoch: int) -> bool:
    """Return whether the regions match exactly these extents, and the extents have not changed since they were read."""
    return (
        row.compaction_epoch == epoch
        and bool(old)
        and old[0].base_offset == regions[0].base_offset
        and old[-1].last_offset == regions[-1].last_offset
    )


def _check_unregistered(held: ReadRows, object_id: str) -> L1ObjectRow:
    known = held.objects.get(object_id)
    if known is None or known.registered:
        raise InvalidError(
            f"an L1 object is unregistered or expired: object={object_id} expired={known is not None}.",
            fix="Register a new object.",
        )
    return known


def _registered_row(known: L1ObjectRow, total: int, removed: int, object_bytes: int, at_ms: int) -> tuple[bytes, bytes]:
    return L1_OBJECTS.encode(
        replace(
            known,
            total_bytes=total,
            removed_bytes=removed,
            object_bytes=object_bytes,
            updated_ms=at_ms,
            registered=True,
        )
    )


def _check_regions(regions: Sequence[L1Region]) -> None:
    for region in regions:
        if region.last_offset < region.base_offset or region.index_bytes < 1 or region.size_bytes < 0:
            raise InvalidError(f"a region of an L1 object is inverted or empty: {region}.")
    for one, following in pairwise(regions):
        if following.base_offset != one.last_offset + 1:
            raise InvalidError(
                f"the regions of a partition are not contiguous: partition={one.partition} "
                f"expected={one.last_offset + 1} found={following.base_offset}."
            )


def _new_terms(request: AddRequest, newest: L1TermRow | None, regions: Sequence[L1Region]) -> RowWrites:
    """Return the rows of the terms that are not stored yet."""
    partition, base, last = regions[0].partition, regions[0].base_offset, regions[-1].last_offset
    terms = list(request.terms.get(partition, ()))
    rising = all(one[0] < other[0] and one[1] < other[1] for one, other in pairwise(terms))
    if not terms or not rising or terms[0][1] != base or terms[-1][1] > last:
        raise InvalidError(
            f"the terms do not match a partition's extents: partition={partition} base_offset={base} "
            f"last_offset={last} terms={terms}."
        )
    if newest is not None:
        if terms[0][0] < newest.term or terms[0][1] <= newest.first_offset:
            raise InvalidError(
                f"the terms of a partition's extents do not follow the stored one: partition={partition} "
                f"terms={terms} newest={newest.term} first_offset={newest.first_offset}."
            )
        terms = [term for term in terms if term[0] > newest.term]
    return [L1_TERMS.encode(L1TermRow(request.topic_id, partition, term, first)) for term, first in terms]


def _append_extents(
    row: L1PartitionRow, object_id: str, regions: Sequence[L1Region]
) -> tuple[L1PartitionRow, list[L1ExtentRow]]:
    highest = row.highest_timestamp_ms
    extents = []
    for region in regions:
        highest = max(highest, region.max_timestamp_ms)
        extents.append(
            L1ExtentRow(
                row.topic_id,
                row.partition,
                region.base_offset,
                region.last_offset,
                region.max_timestamp_ms,
                highest,
                object_id,
                region.first_byte,
                region.size_bytes,
                region.batch_count,
                region.index_byte,
                region.index_bytes,
            )
        )
    row = replace(
        row,
        next=regions[-1].last_offset + 1,
        size_bytes=row.size_bytes + sum(region.size_bytes for region in regions),
        extent_count=row.extent_count + len(regions),
        highest_timestamp_ms=highest,
    )
    return row, extents


def set_start(
    row: L1PartitionRow,
    start: int,
    oldest: Sequence[L1ExtentRow],
    objects: Mapping[str, L1ObjectRow],
    at_ms: int,
) -> TrimResult:
    """Start the partition at `start`, unless it already starts later.

    `oldest`: its first extents, ascending; `objects`: their objects. A start beyond `next` empties the partition and
    becomes its next offset.
    """
    start = max(start, row.start)
    gone = [extent for extent in oldest if extent.last_offset < start]
    more = bool(gone) and len(gone) == len(oldest) and len(gone) < row.extent_count
    changed = replace(
        row,
        start=start,
        next=max(row.next, start),
        size_bytes=row.size_bytes - sum(extent.size_bytes for extent in gone),
        extent_count=row.extent_count - len(gone),
    )
    if changed == row:
        return TrimResult([], False)
    rows: RowWrites = [L1_PARTITIONS.encode(changed), *((L1_EXTENTS.key_of(extent), b"") for extent in gone)]
    return TrimResult([*rows, *_charge_removed(gone, objects, at_ms)], more)


def _charge_removed(gone: Sequence[L1ExtentRow], objects: Mapping[str, L1ObjectRow], at_ms: int) -> RowWrites:
    removed: dict[str, int] = {}
    for extent in gone:
        removed[extent.object_id] = removed.get(extent.object_id, 0) + extent.weight_bytes
    return [
        L1_OBJECTS.encode(replace(objects[name], removed_bytes=objects[name].removed_bytes + weight, updated_ms=at_ms))
        for name, weight in removed.items()
        if name in objects
    ]
