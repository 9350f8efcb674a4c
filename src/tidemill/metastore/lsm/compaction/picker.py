"""Choice of the files to compact next. Pure: levels and options in, a job out.

Level 0 holds whole flushes, newest first, and they may overlap. Every deeper level holds files with disjoint key
ranges. For any key, a file of level n is newer than any file of level n + 1 that holds it. Every job preserves that
order:

- Invariant (level 0 overlap): a level 0 job that takes a file takes all level 0 files that overlap it, transitively. So
  no older version stays above a newer one that moved down.
- Invariant (target overlap): a job takes all files of its target level that overlap its sources. So the target level
  stays disjoint.
- Invariant (tombstones): a tombstone is dropped only if no file outside the job may hold an older version of its key.
  By the first two invariants such files are below the target level only; `Job.older` are their key ranges.

Scores follow LevelDB: level 0 by number of files against `l0_compact`, because each costs a look-up; the others by
bytes against their target, `level_base_bytes × level_factor^(n-1)`. The deepest level has no target.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence

import msgspec

from tidemill.metastore.lsm.file_store import FileName
from tidemill.metastore.lsm.manifest import FileMeta
from tidemill.metastore.lsm.options import Options

Levels = Sequence[Sequence[FileMeta]]
Files = tuple[FileMeta, ...]
Progress = Callable[[int], None]
"""Callback that occasionally gets the number of the job's rows that are done."""

SMALL_SHARE = 4
"""A file below `file_bytes / SMALL_SHARE` is small: it is merged with a new neighbour instead of staying next to it."""


class Job(msgspec.Struct, frozen=True):
    """One compaction. The compactor adds `names` and `prefix` before it passes the job to a merger.

    level     level of the sources; the lowest number if the job takes several levels
    target    level of the outputs
    runs      inputs, oldest run first; the files of one run are disjoint and in key order
    older     inclusive key ranges, disjoint and in key order, in which a file below the target may hold a key
    move      nothing overlaps: the inputs move to the target level unchanged, without any I/O
    names     names reserved for the outputs; the last one takes all remaining rows
    prefix    prefix of the files in the object store
    """

    level: int
    target: int
    runs: tuple[Files, ...]
    older: tuple[tuple[bytes, bytes], ...]
    move: bool = False
    names: tuple[FileName, ...] = ()
    prefix: str = ""

    @property
    def inputs(self) -> Files:
        return tuple(file for run in self.runs for file in run)

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.inputs)

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.inputs)


def target_bytes(level: int, options: Options) -> int:
    """Return the maximum size of a level ≥ 1, in bytes."""
    return options.level_base_bytes * int(options.level_factor ** (level - 1))


def scores(levels: Levels, options: Options) -> list[tuple[float, int]]:
    """Return (score, level) of every level that may be a source, the most urgent first. From score 1 on a level is
    due."""
    found = [(len(levels[0]) / options.l0_compact, 0)] if levels else []
    for level in range(1, min(len(levels), options.levels - 1)):
        found.append((sum(file.size_bytes for file in levels[level]) / target_bytes(level, options), level))
    return sorted(found, key=lambda scored: (-scored[0], scored[1]))


def pick_job(levels: Levels, options: Options, pointers: Mapping[int, bytes]) -> Job | None:
    """Return the most urgent job, or None if no level exceeds its limit.

    `pointers` gives, per level, the largest key that the last job of that level took. The next file after it is taken,
    round-robin, so that every part of the key space moves down in turn.
    """
    ranked = scores(levels, options)
    if not ranked or ranked[0][0] < 1.0:
        return None
    level = ranked[0][1]
    if level == 0:
        return _pick_level_0(levels, options)
    files = levels[level]
    after = bisect_right([file.smallest for file in files], pointers[level]) if level in pointers else 0
    source = files[after % len(files)]
    return _build_job(levels, options, level, ((source,),))


def pick_full_compaction(levels: Levels, options: Options) -> Job | None:
    """Return the job that brings everything into one level, without tombstones; None if that is already the case.

    That level is the deepest in use, or a deeper one if its target size is below the size of the database. The job
    takes every file, so no older version is outside it and every tombstone can be dropped.
    """
    used = [level for level, files in enumerate(levels) if files]
    if not used:
        return None
    total = sum(file.size_bytes for files in levels for file in files)
    target = max(1, used[-1])
    while target < options.levels - 1 and target_bytes(target, options) < total:
        target += 1
    only = levels[used[0]]
    if len(used) == 1 and used[0] >= 1 and not any(file.tombstones for file in only):
        return None
    deeper = tuple(tuple(files) for files in reversed(levels[1:]) if files)
    return Job(used[0], target, deeper + tuple((file,) for file in reversed(levels[0])), older=())


def overlapping(files: Sequence[FileMeta], smallest: bytes, largest: bytes) -> Sequence[FileMeta]:
    """Return the files of a level of disjoint files that may hold a key in [smallest, largest]."""
    first, end = _span(files, smallest, largest)
    return files[first:end]


def _span(files: Sequence[FileMeta], smallest: bytes, largest: bytes) -> tuple[int, int]:
    first = bisect_left(files, smallest, key=lambda file: file.largest)
    return first, max(first, bisect_right(files, largest, key=lambda file: file.smallest))


def _pick_level_0(levels: Levels, options: Options) -> Job:
    oldest = levels[0][-1]
    groups = _overlap_groups(levels[0])
    jobs = [_build_job(levels, options, 0, tuple((file,) for file in reversed(group))) for group in groups]
    due = next(job for job, group in zip(jobs, groups, strict=True) if oldest in group)
    if not due.move:
        return due
    # Files that overlap nothing move down together: one edit, one manifest write.
    moved = sorted((job.inputs[0] for job in jobs if job.move), key=lambda file: file.smallest)
    return Job(0, 1, (tuple(moved),), older=(), move=True)


def _overlap_groups(files: Sequence[FileMeta]) -> list[list[FileMeta]]:
    """Group level 0 files by transitive overlap; each group keeps the given order."""
    groups: list[list[FileMeta]] = []
    reach = b""
    by_key = sorted(range(len(files)), key=lambda at: files[at].smallest)
    members: list[list[int]] = []
    for at in by_key:
        if members and files[at].smallest <= reach:
            members[-1].append(at)
            reach = max(reach, files[at].largest)
        else:
            members.append([at])
            reach = files[at].largest
    for group in members:
        groups.append([files[at] for at in sorted(group)])
    return groups


def _build_job(levels: Levels, options: Options, level: int, sources: tuple[Files, ...]) -> Job:
    """Return the job of `sources` (runs, oldest first) of `level`, with the overlapping files of the next level."""
    target = level + 1
    below = levels[target] if target < len(levels) else ()
    smallest = min(file.smallest for run in sources for file in run)
    largest = max(file.largest for run in sources for file in run)
    first, end = _span(below, smallest, largest)
    first, end = _extend_by_small_files(below, first, end, sources, options)
    taken = tuple(below[first:end])
    if taken:
        smallest, largest = min(smallest, taken[0].smallest), max(largest, taken[-1].largest)
    older = _older_ranges(levels, target, smallest, largest)
    # A file with tombstones that nothing below needs must not move to the bottom with them: it is rewritten.
    if not taken and len(sources) == 1 and (older or not any(file.tombstones for file in sources[0])):
        return Job(level, target, sources, older=(), move=True)
    return Job(level, target, ((taken,) if taken else ()) + sources, older)


def _extend_by_small_files(
    below: Sequence[FileMeta], first: int, end: int, sources: tuple[Files, ...], options: Options
) -> tuple[int, int]:
    """Extend the job by adjacent small files, so that frequent small flushes do not accumulate small files.

    Only if the neighbour is not much larger than the job's files so far. So each row is rewritten a bounded number of
    times before its file is no longer small, as in size-tiered compaction.
    """
    bytes_so_far = sum(file.size_bytes for run in sources for file in run)
    bytes_so_far += sum(file.size_bytes for file in below[first:end])

    def joins(file: FileMeta) -> bool:
        small = file.size_bytes < options.file_bytes // SMALL_SHARE
        return small and file.size_bytes <= options.level_factor * bytes_so_far

    if bytes_so_far >= options.file_bytes:
        return first, end
    while first > 0 and joins(below[first - 1]):
        first -= 1
        bytes_so_far += below[first].size_bytes
    while end < len(below) and joins(below[end]):
        bytes_so_far += below[end].size_bytes
        end += 1
    return first, end


def _older_ranges(levels: Levels, target: int, smallest: bytes, largest: bytes) -> tuple[tuple[bytes, bytes], ...]:
    """Return the key ranges of the job in which files below the target may hold a key, disjoint and in key order."""
    ranges = sorted(
        (file.smallest, file.largest)
        for files in levels[target + 1 :]
        for file in overlapping(files, smallest, largest)
    )
    merged: list[tuple[bytes, bytes]] = []
    for low, high in ranges:
        if merged and low <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return tuple(merged)
