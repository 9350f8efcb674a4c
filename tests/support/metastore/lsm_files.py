"""Files and levels without a database: for tests of picking, merging and collecting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count

import msgspec

from tidemill.base.clock import ManualClock
from tidemill.metastore.lsm.block import decode_block
from tidemill.metastore.lsm.compaction.compaction_job import names_needed
from tidemill.metastore.lsm.compaction.inline_executor import InlineExecutor
from tidemill.metastore.lsm.compaction.picker import Job
from tidemill.metastore.lsm.file_store import FileName, SstFiles
from tidemill.metastore.lsm.manifest import FileMeta
from tidemill.metastore.lsm.options import Options
from tidemill.metastore.lsm.sst import SstWriter, decode_meta
from tidemill.metastore.lsm.version import EMPTY_VERSION, Edit, Version
from tidemill.objects.memory import MemoryObjects
from tidemill.objects.store import ObjectStore

PREFIX = "metastore/test/"

Row = tuple[bytes, bytes, int]


def meta(
    number: int, smallest: bytes, largest: bytes, *, size_bytes: int = 100, rows: int = 10, tombstones: int = 0
) -> FileMeta:
    """A file that exists on paper only."""
    return FileMeta(1, number, "n", size_bytes, rows, smallest, largest, number, number, 0, tombstones)


class Shelf:
    """A version whose files exist, by default in memory objects."""

    def __init__(self, options: Options, objects: ObjectStore | None = None, epoch: int = 1) -> None:
        self.options = options
        self.clock = ManualClock()
        self.objects = objects or MemoryObjects(self.clock)
        self.files = SstFiles(self.objects, PREFIX)
        self.version: Version = EMPTY_VERSION
        self.merger = InlineExecutor(self.objects, options, self.clock)
        self.epoch = epoch
        self._numbers = count(1)

    def name(self) -> FileName:
        number = next(self._numbers)
        return FileName(self.epoch, number, f"n{number}")

    async def put(self, rows: Sequence[Row]) -> FileMeta:
        writer = SstWriter(self.options)
        keys, values, seqnos = (list(column) for column in zip(*rows, strict=True))
        writer.add(keys, values, seqnos)
        buffers, summary = writer.finish()
        name = self.name()
        await self.files.put(name, buffers)
        return summary.named(name.epoch, name.number, name.nonce)

    async def flush(self, rows: Mapping[bytes, bytes], seqno: int) -> FileMeta:
        """A new file of level 0."""
        file = await self.put([(key, rows[key], seqno) for key in sorted(rows)])
        self.version = self.version.apply_edit(Edit(added=((0, file),), last_seqno=seqno))
        return file

    def prepared(self, job: Job) -> Job:
        names = tuple(self.name() for _ in range(names_needed(job, self.options)))
        return msgspec.structs.replace(job, names=names, prefix=PREFIX)

    async def do(self, job: Job) -> list[FileMeta]:
        """Merge or move, and make the result the version."""
        made = list(job.inputs) if job.move else await self.merger.merge(self.prepared(job))
        self.version = self.version.apply_edit(Edit(tuple((job.target, file) for file in made), job.inputs))
        return made

    async def rows_of(self, file: FileMeta) -> list[Row]:
        data = await self.files.read(file, 0, file.size_bytes)
        index = decode_meta(data[file.meta_start :], file, "f")
        rows: list[Row] = []
        for at, count_of in enumerate(index.rows):
            block = decode_block(data[index.starts[at] : index.starts[at + 1]], "f", index.starts[at], count_of)
            rows += zip(block.keys, block.values, block.seqnos(), strict=True)
        return rows

    async def seen(self) -> dict[bytes, tuple[bytes, int]]:
        """Return the view of a reader: of each key its newest row, as (value, seqno), without tombstones."""
        rows: dict[bytes, tuple[bytes, int]] = {}
        for level in reversed(self.version.levels[1:]):
            for file in level:
                rows.update({key: (value, seqno) for key, value, seqno in await self.rows_of(file)})
        for file in reversed(self.version.levels[0]):
            rows.update({key: (value, seqno) for key, value, seqno in await self.rows_of(file)})
        return {key: row for key, row in sorted(rows.items()) if row[0]}

    async def tombstones(self) -> int:
        found = [await self.rows_of(file) for file in self.version.files]
        return sum(not value for rows in found for _, value, _ in rows)
