"""Each bad input of a database raises a distinct error with a clear text and a remedy, and affects nothing else.

Cases: corrupt block, truncated SST, missing object, manifest of a newer format, wrong uuid, batch too large, empty
rows, decreasing seqno. They run on memory and on a local directory. The files are damaged in the bucket, as by a bad
disk.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

import crc32c
import pytest

from support.metastore.lsm_world import PREFIX, UUID, World, collect, expected, numbered
from support.metastore.lsm_world import objects as objects  # the fixture
from tidemill.base.errors import CorruptError, InvalidError, MissingError, TidemillError
from tidemill.base.limits import METASTORE_BATCH_ROWS
from tidemill.metastore.lsm.database import Database, DatabaseContext
from tidemill.metastore.lsm.file_store import SstFiles
from tidemill.metastore.lsm.manifest import FORMAT, Manifest, encode_manifest
from tidemill.metastore.lsm.manifest_store import BucketManifests
from tidemill.objects.store import ObjectStore

FIRST, SECOND = range(0, 100), range(500, 600)
"""Rows of the two files of the database; bad input affects at most the second one."""

OTHER = "metastore/another/"
"""Another domain in the same bucket."""


class Hurt:
    """A database with two files and rows in memory, whose files in the bucket a test can replace."""

    def __init__(self, world: World, database: Database) -> None:
        self.world = world
        self.database = database
        self.file = next(file for file in database.version.files if file.smallest == b"row/000500")
        self.key = database.files.key(self.file)

    async def replace(self, data: bytes) -> None:
        await self.world.objects.inner.delete(self.key)
        await self.world.objects.inner.put(self.key, data)

    async def read_hurt_row(self) -> None:
        await self.database.get(b"row/000555")

    def apply(self, seqno: int, keys: list[bytes]) -> None:
        self.database.apply(seqno, keys, [b"1"] * len(keys))

    async def open_other(self, domain_uuid: str) -> None:
        world = self.world
        await Database.open(
            SstFiles(world.objects, OTHER),
            BucketManifests(world.objects, OTHER, world.rand),
            DatabaseContext(
                domain_uuid=domain_uuid,
                epoch=9,
                options=world.options,
                clock=world.clock,
                rand=world.rand,
                background=False,
            ),
        )


async def corrupt_block(hurt: Hurt) -> None:
    meta = await hurt.database.tables.meta(hurt.file)
    block = meta.find(b"row/000555")
    data = bytearray(await hurt.world.objects.get(hurt.key))
    data[meta.starts[block] + 5] ^= 0x10
    await hurt.replace(bytes(data))
    await hurt.read_hurt_row()


async def truncated_sst(hurt: Hurt) -> None:
    await hurt.replace((await hurt.world.objects.get(hurt.key))[:-20])
    await hurt.read_hurt_row()


async def missing_object(hurt: Hurt) -> None:
    await hurt.world.objects.delete(hurt.key)
    await hurt.read_hurt_row()


async def newer_manifest(hurt: Hurt) -> None:
    data = bytearray(encode_manifest(Manifest(UUID, 1, 1, 5, 9, 0, ((),))))
    data[4:6] = (FORMAT + 1).to_bytes(2, "little")
    data[-4:] = crc32c.crc32c(bytes(data[:-4])).to_bytes(4, "little")
    await hurt.world.objects.put(f"{OTHER}manifest/{1:020d}-{1:020d}-n", bytes(data))
    await hurt.open_other(UUID)


async def wrong_uuid(hurt: Hurt) -> None:
    await hurt.world.objects.put(
        f"{OTHER}manifest/{1:020d}-{1:020d}-n", encode_manifest(Manifest("another", 1, 1, 5, 9, 0, ((),)))
    )
    await hurt.open_other(UUID)


async def batch_too_large(hurt: Hurt) -> None:
    hurt.apply(hurt.world.seqno + 1, [b"%06d" % number for number in range(METASTORE_BATCH_ROWS + 1)])


async def empty_rows(hurt: Hurt) -> None:
    hurt.apply(hurt.world.seqno + 1, [])


async def decreasing_seqno(hurt: Hurt) -> None:
    hurt.apply(hurt.world.seqno - 1, [b"x"])


BAD: dict[str, tuple[Callable[[Hurt], Awaitable[None]], type[TidemillError], str]] = {
    "corrupt block": (corrupt_block, CorruptError, r"its checksum is .* file=metastore/.*\.sst section=block offset="),
    "truncated SST": (truncated_sst, CorruptError, r"shorter than its manifest says: file=metastore/.*\.sst"),
    "missing object": (missing_object, MissingError, r"is not in the bucket: file=metastore/.*\.sst"),
    "manifest of a newer format": (
        newer_manifest,
        InvalidError,
        f"newer version of .* format={FORMAT + 1} .*={FORMAT}",
    ),
    "wrong uuid": (wrong_uuid, InvalidError, f"another domain: domain_uuid={UUID} manifest_domain_uuid=another"),
    "batch too large": (batch_too_large, InvalidError, r"batch is too large: .*rows=\d+ limit_rows=\d+"),
    "empty rows": (empty_rows, InvalidError, r"at least one row: rows=0"),
    "decreasing seqno": (decreasing_seqno, InvalidError, r"must increase from batch to batch: seqno=2 last_seqno=3"),
}
SPOILS_A_FILE = {"corrupt block", "truncated SST", "missing object"}


async def hurt_database(objects: ObjectStore) -> Hurt:
    world = World(objects)
    database = await world.open()
    for numbers in (FIRST, SECOND):
        world.put(database, numbered(numbers))
        await database.flush()
    world.put(database, {b"memory": b"1"})
    return Hurt(world, database)


async def reported(hurt: Hurt, name: str) -> TidemillError:
    meet, kind, _ = BAD[name]
    with pytest.raises(kind) as caught:
        await meet(hurt)
    assert type(caught.value) is kind
    return caught.value


@pytest.mark.parametrize("name", BAD)
async def test_each_bad_input_has_its_error_and_nothing_else_is_affected(name: str, objects: ObjectStore) -> None:
    hurt = await hurt_database(objects)
    world, database = hurt.world, hurt.database
    error = await reported(hurt, name)
    assert re.search(BAD[name][2], error.message), error.message
    # One sentence with its data at the end, and what to do.
    assert re.search(r": ([a-z0-9_]+=.*)+\.$", error.message) and error.fix.endswith("."), str(error)

    assert database.max_applied_seqno == world.seqno == 3
    assert await database.get_many([b"row/000007", b"memory"]) == [b"v7", b"1"]
    assert await collect(database.scan(upper=b"row/000500")) == expected(world.rows, upper=b"row/000500")
    world.put(database, {b"row/000001": b"", b"row/000200": b"new"})
    assert await database.flush() == 4
    if name not in SPOILS_A_FILE:
        assert await collect(database.scan()) == expected(world.rows)
    await database.aclose()
    database = await world.open()
    assert await database.get_many([b"row/000001", b"row/000200", b"memory"]) == [None, b"new", b"1"]
    assert await collect(database.scan(upper=b"row/000500")) == expected(world.rows, upper=b"row/000500")
    assert PREFIX in database.files.prefix and database.versions.pins == 0


async def test_no_two_bad_inputs_are_told_alike(objects: ObjectStore) -> None:
    said = {}
    for name in BAD:
        hurt = await hurt_database(objects)
        said[name] = (await reported(hurt, name)).message.partition(":")[0]
        await hurt.database.aclose()
        async for found in objects.list(""):
            await objects.delete(found.key)
    assert len(set(said.values())) == len(BAD), said
