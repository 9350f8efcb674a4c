"""Materialising batches: views into cached objects where they are there, coalesced reads of objects where not."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from tidemill.base.errors import CorruptError, InvalidError, MissingError, TidemillError
from tidemill.base.limits import OBJECT_CONCURRENCY
from tidemill.metastore.rows.l1 import PREFIX as L1_PREFIX
from tidemill.objects.store import Buffer
from tidemill.objects.verified_read import tell_damaged, tell_flipped
from tidemill.topics.api import BatchRef
from tidemill.topics.batch.header import base_offset_at, is_intact, is_patched, patch
from tidemill.topics.l0.object_cache import ObjectCache


class Ranges(Protocol):
    """Where ranges of an object come from."""

    async def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> Sequence[Buffer]: ...


@runtime_checkable
class SharedRanges(Protocol):
    """`Ranges` that share their reads with other readers."""

    def forget(self, key: str) -> None:
        """Read this object from the store from here on."""
        ...


INLINE_BATCHES = 2_000
"""More of one object are verified, and put together, in a thread: the checksums of so many take 1 to 2 ms."""


def choose(sizes: Sequence[int], first: int, max_bytes: int, max_count: int, *, at_least_one: bool) -> tuple[int, int]:
    """(end index, bytes): at most max_count whole batches from `first` on that fit max_bytes; the first one regardless
    if asked."""
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
    objects: Ranges,
    groups: Sequence[Sequence[BatchRef]],
    cache: ObjectCache | None = None,
    ahead: Ranges | None = None,
) -> list[list[Buffer] | TidemillError]:
    """The batches of each group, base offsets patched; those of L1 through `ahead`. One coalesced read per object over
    all groups, as many objects side by side as a store takes requests at once: it answers each in its own time.

    A group whose object cannot be read is the error instead; the others are not harmed.

    Batches that a store returned are verified. One that does not match its checksum is read once more. One that is
    damaged in its object is returned unchanged: consumers detect it by the same checksum (F207).
    """
    missing: dict[str, list[BatchRef]] = {}
    buffers: dict[tuple[str, int], Buffer] = {}
    failed: dict[str, TidemillError] = {}
    for refs in groups:
        for ref in refs:
            cached = cache.get(ref.object_key) if cache is not None else None
            if cached is not None:
                # An append whose outcome its leader never learned leaves the batch as it was sent.
                if base_offset_at(cached, ref.first_byte) != ref.base_offset:
                    patch(cached, ref.first_byte, ref.base_offset)
                buffers[ref.object_key, ref.first_byte] = memoryview(cached)[
                    ref.first_byte : ref.first_byte + ref.size_bytes
                ]
            else:
                missing.setdefault(ref.object_key, []).append(ref)

    async def read(key: str, refs: list[BatchRef]) -> None:
        try:
            ranges_of = ahead if ahead is not None and key.startswith(L1_PREFIX) else objects
            await _read_object(ranges_of, key, refs, buffers)
            damaged = await _damaged(key, refs, buffers)
            if damaged:
                await _read_damaged(ranges_of, key, damaged, buffers)
        except (MissingError, InvalidError):
            # The log names it, so it was acknowledged: not the asker's mistake, and no topic is missing.
            failed[key] = CorruptError(
                f"an object that a partition log names is gone: key={key}.",
                fix="Put it back from a copy of the bucket; or see: tidemill topic lost",
            )
        except TidemillError as error:
            failed[key] = error

    left = iter(missing.items())

    async def work() -> None:
        for key, refs in left:
            await read(key, refs)

    if len(missing) == 1:
        await work()
    elif missing:
        await asyncio.gather(*(work() for _ in range(min(len(missing), OBJECT_CONCURRENCY))))
    results: list[list[Buffer] | TidemillError] = []
    for refs in groups:
        if not refs:
            results.append([])
            continue
        reason = next((failed[ref.object_key] for ref in refs if ref.object_key in failed), None)
        results.append(reason if reason is not None else [buffers[ref.object_key, ref.first_byte] for ref in refs])
    return results


async def _damaged(key: str, refs: list[BatchRef], buffers: dict[tuple[str, int], Buffer]) -> list[BatchRef]:
    def find() -> list[BatchRef]:
        return [ref for ref in refs if not is_intact(buffers[key, ref.first_byte])]

    return await asyncio.to_thread(find) if len(refs) > INLINE_BATCHES else find()


async def _read_damaged(
    ranges_of: Ranges, key: str, refs: list[BatchRef], buffers: dict[tuple[str, int], Buffer]
) -> None:
    """Read from the store itself: the shared copy is the damaged answer."""
    if isinstance(ranges_of, SharedRanges):
        ranges_of.forget(key)
    await _read_object(ranges_of, key, refs, buffers)
    left = await _damaged(key, refs, buffers)
    tell, ref = (tell_damaged, left[0]) if left else (tell_flipped, refs[0])
    tell(ranges_of, key, f"batches do not match their checksum: count={len(left or refs)} offset={ref.base_offset}")


async def _read_object(
    ranges_of: Ranges, key: str, refs: list[BatchRef], buffers: dict[tuple[str, int], Buffer]
) -> None:
    """Adjacent batches travel as one range. Where one of them has another base offset, as those of L0 have, the range
    is copied once, to be patched: a copy costs twice what the read does, for most of both is memory touched anew."""
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
                patch(view, ref.first_byte - start, ref.base_offset)
        for ref in run:
            at = ref.first_byte - start
            buffers[key, ref.first_byte] = view[at : at + ref.size_bytes]
