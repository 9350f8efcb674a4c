"""Version: the live files, by level. Immutable; every change makes a new one.

    level 0     files as flushed, newest first; their keys may overlap
    level 1…    files in key order, disjoint: one sorted run each

If a key is in several places the first of them wins: level 0 from newest to oldest, then the levels downwards. A
look-up never skips a file because of its seqnos, and a tombstone ends it like a value does.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import pairwise

import msgspec

from tidemill.base.errors import ConflictError, InvalidError
from tidemill.metastore.lsm.manifest import FileMeta

Level = tuple[FileMeta, ...]


class Edit(msgspec.Struct, frozen=True):
    """Change by one flush or one compaction: files removed first, then files added, each to its level.

    A file in both moves. `last_seqno` is that of the frozen memtable for a flush, 0 for a compaction.
    """

    added: tuple[tuple[int, FileMeta], ...] = ()
    removed: tuple[FileMeta, ...] = ()
    last_seqno: int = 0


class Version:
    """Live files. `levels[0]` is newest first, the others are in key order. Compared and hashed by identity, as pins
    need."""

    __slots__ = ("_files", "deep", "last_seqno", "levels")

    def __init__(self, levels: tuple[Level, ...], last_seqno: int = 0) -> None:
        self.levels = levels
        self.last_seqno = last_seqno
        self.deep = tuple((level, [file.largest for file in level]) for level in levels[1:] if level)
        """Non-empty levels from 1 on, each with the largest keys of its files, for bisect."""
        self._files: frozenset[FileMeta] | None = None

    @property
    def files(self) -> frozenset[FileMeta]:
        if self._files is None:
            self._files = frozenset(file for level in self.levels for file in level)
        return self._files

    @property
    def rows(self) -> int:
        return sum(file.rows for level in self.levels for file in level)

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for level in self.levels for file in level)

    def candidates(self, key: bytes) -> Iterator[FileMeta]:
        """Yield the files that may hold `key`, in an order in which the first row found is the newest."""
        for file in self.levels[0] if self.levels else ():
            if file.smallest <= key <= file.largest:
                yield file
        for files, largest in self.deep:
            at = bisect_left(largest, key)
            if at < len(files) and files[at].smallest <= key:
                yield files[at]

    def overlapping(self, level: int, smallest: bytes, largest: bytes) -> Level:
        """Return the files of `level` with keys in [smallest, largest], both inclusive, in the level's order."""
        if level >= len(self.levels):
            return ()
        files = self.levels[level]
        if level == 0:
            return tuple(file for file in files if file.smallest <= largest and smallest <= file.largest)
        start = bisect_left(files, smallest, key=_largest)
        return files[start : max(start, bisect_right(files, largest, key=_smallest))]

    def runs(self, lower: bytes, upper: bytes | None) -> Iterator[Level]:
        """Yield the sorted runs that overlap [lower, upper), newest first: each file of level 0, then each level."""
        for file in self.levels[0] if self.levels else ():
            if lower <= file.largest and (upper is None or file.smallest < upper):
                yield (file,)
        for files, largest in self.deep:
            start = bisect_left(largest, lower)
            if upper is None:
                end = len(files)
            else:
                end = bisect_left(largest, upper, start)
                end += end < len(files) and files[end].smallest < upper
            if start < end:
                yield files[start:end]

    def apply_edit(self, edit: Edit) -> Version:
        """Return the next version. Raises ConflictError if a removed file is not in this version, InvalidError if files
        of a level would overlap."""
        removed = set(edit.removed)
        if not removed <= self.files:
            gone = sorted(f"{file.epoch}-{file.number}" for file in removed - self.files)
            raise ConflictError(f"an edit removes files that are not live: files={','.join(gone)}.", current=self)
        levels = [[file for file in level if file not in removed] for level in self.levels]
        for level, file in edit.added:
            while len(levels) <= level:
                levels.append([])
            if level == 0:
                levels[0].insert(0, file)
            else:
                levels[level].append(file)
        for number, files in enumerate(levels[1:], start=1):
            files.sort(key=_smallest)
            for left, right in pairwise(files):
                if left.largest >= right.smallest:
                    raise InvalidError(
                        f"two files of one level overlap: level={number} "
                        f"left={left.epoch}-{left.number} right={right.epoch}-{right.number}."
                    )
        while len(levels) > 1 and not levels[-1]:
            levels.pop()
        return Version(tuple(map(tuple, levels)), max(self.last_seqno, edit.last_seqno))


EMPTY_VERSION = Version(((),))


def _smallest(file: FileMeta) -> bytes:
    return file.smallest


def _largest(file: FileMeta) -> bytes:
    return file.largest


def prefix_end(prefix: bytes) -> bytes | None:
    """Return the smallest key above every key that starts with `prefix`; None if there can be no such key."""
    head = prefix.rstrip(b"\xff")
    return head[:-1] + bytes((head[-1] + 1,)) if head else None
