"""Merge many small extents into few large ones: selection and assembly (RFC 0005 §7).

A run is FANOUT or more adjacent extents whose largest is at most 1/GROWTH of their sum; they become one extent. So each
time that a record is copied, its extent has grown by a factor of GROWTH, and a partition has few extents of each size.
With 4 KiB every ten minutes, a month is about ten extents, and each record was copied four times. Batches are not
changed, and neither are the offsets that extents cover.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from tidemill.metastore.rows.l1 import L1ExtentRow
from tidemill.objects.store import Buffer
from tidemill.topics.l1.builder import ObjectBuilder
from tidemill.topics.l1.format import REGION_BATCHES, RegionIndex

FANOUT = 8
GROWTH = 4
MERGE_BYTES_MIN = 4096
"""Size up to which all extents count as equally small."""

ExtentRun = Sequence[L1ExtentRow]


def find_mergeable_run(extents: Sequence[L1ExtentRow], target_bytes: int, fanout: int = FANOUT) -> ExtentRun:
    """Return the adjacent extents to merge next, the smallest first, or () if no run is long enough.

    A run is never larger than `target_bytes`, nor than a region allows.
    """
    bound = MERGE_BYTES_MIN
    while bound < 2 * target_bytes:
        run: list[L1ExtentRow] = []
        size = batches = 0
        for extent in extents:
            joins = extent.size_bytes <= min(bound, target_bytes)
            follows = not run or run[-1].last_offset + 1 == extent.base_offset
            fits = size + extent.size_bytes <= target_bytes and batches + extent.batch_count <= REGION_BATCHES
            if not (joins and follows and fits):
                if _is_mergeable(run, fanout):
                    return run
                run, size, batches = [], 0, 0
            if joins:
                run.append(extent)
                size, batches = size + extent.size_bytes, batches + extent.batch_count
        if _is_mergeable(run, fanout):
            return run
        bound *= 2
    return ()


def _is_mergeable(run: ExtentRun, fanout: int) -> bool:
    sizes = [extent.size_bytes for extent in run]
    return len(run) >= fanout and sum(sizes) >= min(GROWTH, fanout) * max(sizes)


def merge_run(build: ObjectBuilder, run: ExtentRun, held: Sequence[tuple[RegionIndex, Buffer]]) -> None:
    """Add the extents of `run` as one range of `build`. `held`: index and batch bytes of each extent."""
    if any(one.last_offset + 1 != other.base_offset for one, other in pairwise(run)):
        raise ValueError("the extents of a run must be contiguous")
    build.begin_range(run[0].partition, run[0].base_offset)
    for index, data in held:
        view = memoryview(data)
        for base, end, start, size, timestamp in zip(
            index.bases.tolist(),
            index.ends.tolist(),
            index.starts.tolist(),
            index.sizes.tolist(),
            index.timestamps.tolist(),
            strict=True,
        ):
            build.add(view[start : start + size], base, end, timestamp)
    build.end(run[-1].last_offset + 1)
