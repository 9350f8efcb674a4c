"""Read batches: views into cached objects if they are cached, otherwise coalesced reads of objects."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from tidemill.base.errors import CorruptError, MissingError, TidemillError
from tidemill.base.limits import OBJECT_CONCURRENCY
from tidemill.metastore.rows.l1 import PREFIX as L1_PREFIX
from tidemill.objects.reads import report_damaged_object, report_flipped_read
from tidemill.objects.store import Buffer, RangeError
from tidemill.topics.api import BatchRef
from tidemill.topics.batch.columns_trailer import without_trailer
from tidemill.topics.batch.header import base_offset_at, is_intact, is_patched, patch_base_offset
from tidemill.topics.l0.object_cache import ObjectCache


class RangeReader(Protocol):
    """Source of byte ranges of objects."""

    async def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> Sequence[Buffer]: ...


@runtime_checkable
class SharedRangeReader(Protocol):
    """`RangeReader` whose reads are shared by several readers."""

    def discard(self, key: str) -> None:
        """Drop the shared copy, so that the object is read from the store again."""
        ...


INLINE_BATCHES = 2_000
"""Limit of batches of one object that are verified on the event loop; their checksums take 1 to 2 ms. More are verified
in a thread."""


def select_batches(
    sizes: Sequence[int], first: int, max_bytes: int, max_count: int, *, at_least_one: bool
) -> tuple[int, int]:
    """Return (end index, bytes) of at most max_count whole batches from `first` that fit in max_bytes.

    With `at_least_one`, the first batch is included even if it is larger.
    """
    total = 0
    index = first
    end = min(len(sizes), first + max_count)
    while index < end:
        size = sizes[index]
        if total + size > max_bytes and not (at_least_one and index == first):
            break
        total += size
        index += 1
    return index, total


async def read_batches(
    objects: RangeReader,
    groups: Sequence[Sequence[BatchRef]],
    cache: ObjectCache | None = None,
    ahead: RangeReader | None = None,
) -> list[list[Buffer] | TidemillError]:
    """Read the batches of each group, base offsets patched, with their trailers; those of L1 through `ahead`.

    Each object is read once, coalesced over all groups. Up to OBJECT_CONCURRENCY objects are read concurrently.

    A group whose object cannot be read gets the error as its result; the other groups are not affected.

    Batches from the store are verified. A batch that does not match its checksum is read again. A batch that is damaged
    in its object is returned unchanged: consumers detect it by the same checksum.
    """
    missing: dict[str, list[BatchRef]] = {}
    buffers: dict[tuple[str, int], Buffer] = {}
    failed: dict[str, TidemillError] = {}
    for refs in groups:
        for ref in refs:
            cached = cache.get(ref.object_key) if cache is not None else None
            if cached is not None:
                # An append whose outcome its leader never learned leaves the batch with the base offset that the
                # producer sent.
                if base_offset_at(cached, ref.first_byte) != ref.base_offset:
                    patch_base_offset(cached, ref.first_byte, ref.base_offset)
                buffers[ref.object_key, ref.first_byte] = memoryview(cached)[
                    ref.first_byte : ref.first_byte + ref.size_bytes
                ]
            else:
                missing.setdefault(ref.object_key, []).append(ref)

    async def read(key: str, refs: list[BatchRef]) -> None:
        try:
            ranges_of = ahead if ahead is not None and key.startswith(L1_PREFIX) else objects
            await _read_object(ranges_of, key, refs, buffers)
            damaged = await _find_damaged(key, refs, buffers)
            if damaged:
                await _reread_damaged(ranges_of, key, damaged, buffers)
        except (MissingError, RangeError) as error:
            # The log names the object, so its batches were acknowledged. This is neither the caller's mistake nor a
            # missing topic.
            state = "gone" if isinstance(error, MissingError) else "shorter than the log says"
            failed[key] = CorruptError(
                f"an object that a partition log names is {state}: key={key}.",
                fix="Restore it from a copy of the bucket, or see: tidemill topic lost",
            )
        except TidemillError as error:
            failed[key] = error

    left = iter(missing.items())

    async def read_next_objects() -> None:
        for key, refs in left:
            await read(key, refs)

    if len(missing) == 1:
        await read_next_objects()
    elif missing:
        await asyncio.gather(*(read_next_objects() for _ in range(min(len(missing), OBJECT_CONCURRENCY))))
    results: list[list[Buffer] | TidemillError] = []
    for refs in groups:
        if not refs:
            results.append([])
            continue
        reason = next((failed[ref.object_key] for ref in refs if ref.object_key in failed), None)
        results.append(reason if reason is not None else [buffers[ref.object_key, ref.first_byte] for ref in refs])
    return results


async def _find_damaged(key: str, refs: list[BatchRef], buffers: dict[tuple[str, int], Buffer]) -> list[BatchRef]:
    def find() -> list[BatchRef]:
        return [ref for ref in refs if not is_intact(without_trailer(buffers[key, ref.first_byte]))]

    return await asyncio.to_thread(find) if len(refs) > INLINE_BATCHES else find()


async def _reread_damaged(
    ranges_of: RangeReader, key: str, refs: list[BatchRef], buffers: dict[tuple[str, int], Buffer]
) -> None:
    """Read again from the store itself: the shared copy is the damaged one."""
    if isinstance(ranges_of, SharedRangeReader):
        ranges_of.discard(key)
    await _read_object(ranges_of, key, refs, buffers)
    left = await _find_damaged(key, refs, buffers)
    tell, ref = (report_damaged_object, left[0]) if left else (report_flipped_read, refs[0])
    tell(ranges_of, key, f"batches do not match their checksum: count={len(left or refs)} offset={ref.base_offset}")


async def _read_object(
    ranges_of: RangeReader, key: str, refs: list[BatchRef], buffers: dict[tuple[str, int], Buffer]
) -> None:
    """Read adjacent batches as one range.

    If a batch has another base offset, as in L0, the range is copied once, to be patched. A copy costs twice as much as
    the read: both are dominated by touching new memory.
    """
    runs: list[list[BatchRef]] = []
    for ref in sorted(refs, key=lambda r: r.first_byte):
        if runs and runs[-1][-1].first_byte + runs[-1][-1].size_bytes == ref.first_byte:
            runs[-1].append(ref)
        else:
            runs.append([ref])
    ranges = [(run[0].first_byte, run[-1].first_byte + run[-1].size_bytes) for run in runs]
    for run, data in zip(runs, await ranges_of.get_ranges(key, ranges), strict=True):
        view = memoryview(data)
        start = run[0].first_byte
        if not all(is_patched(view, ref.first_byte - start, ref.base_offset) for ref in run):
            view = memoryview(bytearray(data))
            for ref in run:
                patch_base_offset(view, ref.first_byte - start, ref.base_offset)
        for ref in run:
            at = ref.first_byte - start
            buffers[key, ref.first_byte] = view[at : at + ref.size_bytes]
