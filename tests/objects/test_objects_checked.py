"""A second read distinguishes a damaged answer from a damaged object."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tidemill.base.clock import ManualClock, Rand
from tidemill.base.errors import CorruptError, UnavailableError
from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.metastore.cluster_manifest import SignOfLife, signs_of_life, write_sign_of_life
from tidemill.metastore.lsm.file_store import SstFiles
from tidemill.metastore.lsm.options import Options
from tidemill.metastore.lsm.sst import SstWriter
from tidemill.metastore.lsm.table_cache import BlockCache, TableCache
from tidemill.objects.memory import MemoryObjects
from tidemill.objects.reads import ObjectFile, read_verified, read_verified_sync
from tidemill.objects.retrying import RetryingObjects
from tidemill.objects.store import ObjectMeta
from tidemill.shards.api import DIFF, TIME, Column, ShardSchema
from tidemill.shards.parts.checksums import open_part
from tidemill.shards.parts.parts import encode_part
from tidemill.shards.read.part_reader import PartReader, fetch_through
from tidemill.shards.read.verified_file import VerifiedFile


@pytest.mark.parametrize("synchronous", [False, True])
async def test_f620_a_flipped_answer_is_a_notice_and_a_damaged_object_an_error_and_a_notice(synchronous: bool) -> None:
    clock = ManualClock()
    objects = RetryingObjects(MemoryObjects(clock), clock, Rand(1), store="s3")
    answers = ["flipped", "right", "flipped", "flipped", "right"]

    def read() -> str:
        found = answers.pop(0)
        if found == "away":
            raise UnavailableError("away.")
        if found != "right":
            raise CorruptError(f"checksum: {found}.")
        return found

    async def ask() -> str:
        async def asked() -> str:
            return read()

        return read_verified_sync(objects, "l1/x", read) if synchronous else await read_verified(objects, "l1/x", asked)

    assert await ask() == "right"
    said = objects.recent_fault()
    assert "answered a read with damaged bytes, and then with valid ones" in said
    assert "key=l1/x" in said and "checksum: flipped" in said and "store=s3" in said
    assert objects.trouble() == ""
    with pytest.raises(CorruptError, match="flipped"):
        await ask()
    assert "an object is damaged, or the object store damages its answers: reads=2 key=l1/x" in objects.recent_fault()
    clock.advance(60_000)
    assert await ask() == "right"
    assert objects.recent_fault() == ""
    answers.extend(["flipped", "away"])
    with pytest.raises(UnavailableError):
        await ask()
    assert objects.recent_fault() == "", "nobody knows what was damaged"


class Flipping(MemoryObjects):
    """A store that flips a bit in the last byte of its next `flips` answers, and records notices."""

    def __init__(self) -> None:
        super().__init__(ManualClock())
        self.flips = 0
        self.notices: list[str] = []

    def record_notice(self, what: str) -> None:
        self.notices.append(what)

    def _flipped(self, data: bytes) -> bytes:
        if not self.flips:
            return data
        self.flips -= 1
        return data[:-1] + bytes((data[-1] ^ 1,))

    async def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        return self._flipped(await super().get(key, start, end))


async def test_f620_every_reader_of_the_metastores_files_reads_a_flipped_answer_again() -> None:
    objects, rand = Flipping(), Rand(1)
    files = SstFiles(objects, "metastore/test/")
    writer = SstWriter(Options(block_bytes=64))
    writer.add([b"%03d" % n for n in range(100)], [b"v" * 20] * 100, list(range(1, 101)))
    buffers, summary = writer.finish()
    file = summary.named(1, 1, "n")
    await files.put(file, buffers)
    for flips, broken in ((0, False), (1, False), (2, True)):
        for ask in ("meta", "block", "blocks"):
            tables = TableCache(files, BlockCache(1 << 20))
            objects.notices.clear()
            if ask != "meta":
                await tables.meta(file)
            objects.flips = flips
            asked = {
                "meta": lambda tables=tables: tables.meta(file),
                "block": lambda tables=tables: tables.block(file, 0),
                "blocks": lambda tables=tables: tables.blocks(file, 0, 3),
            }[ask]
            if broken:
                with pytest.raises(CorruptError):
                    await asked()
            else:
                await asked()
            assert len(objects.notices) == bool(flips), ask
            assert all(files.key(file) in said for said in objects.notices)
            objects.flips = 0

    objects.notices.clear()
    await write_sign_of_life(objects, rand, SignOfLife("c", 1, "n", 5))
    objects.flips = 1
    assert [alive.at_ms async for alive, _ in signs_of_life(objects)] == [5]
    objects.flips = 2
    with pytest.raises(CorruptError):
        _ = [alive async for alive, _ in signs_of_life(objects)]
    assert len(objects.notices) == 2


def test_f620_every_reader_of_a_part_reads_a_flipped_answer_again() -> None:
    schema = ShardSchema((Column("k", "int64"),), ("k",))
    rows = pa.table({"k": range(50), TIME: pa.array([1] * 50, pa.int64()), DIFF: pa.array([1] * 50, pa.int64())})
    encoded = encode_part(schema, rows)
    data, part = encoded.data.to_pybytes(), encoded.to_part(0, "shards/x/y.parquet")
    objects = Flipping()
    with BlockingPortal() as portal:
        portal.call(objects.put(part.object_key, data))

        def by_file() -> object:
            return open_part(part, ObjectFile(portal, objects, part.object_key, len(data))).metadata.num_rows

        def by_an_engine() -> object:
            file = VerifiedFile(part, ObjectFile(portal, objects, part.object_key, len(data)))
            objects.flips, left = left_flips[0], objects.flips
            assert not left
            return pq.ParquetFile(file, page_checksum_verification=False).read().num_rows

        left_flips = [0]
        readers: list[Callable[[], object]] = [
            lambda: portal.call(PartReader(objects, schema, cache_bytes=0).read_part(part)).num_rows,
            lambda: len(fetch_through(portal, objects, whole=True)(part)) and 50,
            by_file,
            by_an_engine,
        ]
        for read in readers:
            for flips in (0, 1, 2):
                objects.notices.clear()
                objects.flips, left_flips[0] = (flips, 0) if read is not by_an_engine else (0, flips)
                if flips == 2:
                    with pytest.raises((CorruptError, pa.ArrowException, OSError)):
                        read()
                else:
                    assert read() == 50
                assert len(objects.notices) == bool(flips)
                assert all(part.object_key in said for said in objects.notices)
                objects.flips = 0


async def test_a_listing_that_is_cancelled_or_left_is_no_request_without_an_answer() -> None:
    class Hanging(MemoryObjects):
        async def list(self, prefix: str, start_after: str = "") -> AsyncIterator[ObjectMeta]:
            yield ObjectMeta("a", 1, 1)
            await asyncio.Event().wait()

    clock = ManualClock()
    objects = RetryingObjects(Hanging(clock), clock, Rand(1), store="s3")

    async def read() -> None:
        async for _ in objects.list(""):
            pass

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await read()
    listing = objects.list("")
    await anext(listing)
    await listing.aclose()  # type: ignore[attr-defined]
    clock.advance(600_000)
    assert objects.recent_fault() == ""
