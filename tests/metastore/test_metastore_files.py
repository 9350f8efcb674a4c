"""Names in the bucket: the format of the RFC, written once, and listed without foreign names."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.metastore.sst_world import PREFIX, numbered_rows, on_memory_and_local, opener, write_sst
from tidemill.base.errors import ConflictError, CorruptError, InvalidError, MissingError
from tidemill.metastore.lsm.file_store import FileName, SstFiles
from tidemill.metastore.lsm.manifest import FileMeta

DATA, SUMMARY = write_sst(numbered_rows(300))


def file(number: int = 1, epoch: int = 1, nonce: str = "a1") -> FileMeta:
    return SUMMARY.named(epoch, number, nonce)


def test_a_file_is_named_by_epoch_number_and_nonce() -> None:
    files = SstFiles(None, PREFIX)  # type: ignore[arg-type]
    expected = f"{PREFIX}sst/00000000000000000012-000000000345-abcdef.sst"
    assert files.key(FileName(12, 345, "abcdef")) == files.key(file(345, 12, "abcdef")) == expected


def test_a_prefix_without_its_slash_is_refused() -> None:
    with pytest.raises(InvalidError, match="must end with a slash"):
        SstFiles(None, PREFIX.rstrip("/"))  # type: ignore[arg-type]


@on_memory_and_local
async def test_what_was_put_is_read_and_listed(kind: str, tmp_path: Path) -> None:
    async with opener(kind, tmp_path)() as objects:
        files = SstFiles(objects, PREFIX)
        await files.put(file(), [DATA[:100], DATA[100:]])
        assert await files.read(file(), 10, 200) == DATA[10:200]
        assert await files.read_ranges(file(), [(50, 60), (0, 10), (len(DATA) - 5, len(DATA))]) == [
            DATA[50:60],
            DATA[:10],
            DATA[-5:],
        ]
        (name,) = [name async for name in files.list()]
        assert (name.epoch, name.number, name.nonce, name.size_bytes) == (1, 1, "a1", len(DATA))
        assert name.modified_ms > 0


@on_memory_and_local
async def test_a_file_is_written_once(kind: str, tmp_path: Path) -> None:
    async with opener(kind, tmp_path)() as objects:
        files = SstFiles(objects, PREFIX)
        await files.put(file(), DATA)
        with pytest.raises(ConflictError):
            await files.put(file(), b"other")
        assert await files.read(file(), 0, len(DATA)) == DATA
        for other in (file(2), file(epoch=2), file(nonce="a2")):
            await files.put(other, DATA)
        assert len([name async for name in files.list()]) == 4


@on_memory_and_local
async def test_a_missing_and_a_truncated_file_are_told_apart(kind: str, tmp_path: Path) -> None:
    async with opener(kind, tmp_path)() as objects:
        files = SstFiles(objects, PREFIX)
        await files.put(file(2), DATA[:-1])
        for gone in (files.read(file(1), 0, 5), files.read_ranges(file(1), [(0, 5), (6, 9)])):
            with pytest.raises(MissingError, match=files.key(file(1))):
                await gone
        end = len(DATA)
        for cut in (files.read(file(2), 5, end), files.read_ranges(file(2), [(0, 5), (end - 3, end)])):
            with pytest.raises(CorruptError, match="shorter than its manifest says") as found:
                await cut
            assert files.key(file(2)) in str(found.value)
        assert await files.read(file(2), 0, end - 1) == DATA[:-1]


async def test_a_store_that_answers_with_less_than_asked_is_not_believed() -> None:
    class Short:
        async def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
            return DATA[start:end][:-1]

        async def get_ranges(self, key: str, ranges: list[tuple[int, int]]) -> list[bytes]:
            return [DATA[start:end][:-1] for start, end in ranges]

    files = SstFiles(Short(), PREFIX)  # type: ignore[arg-type]
    for read in (files.read(file(), 0, 9), files.read_ranges(file(), [(0, 9)])):
        with pytest.raises(CorruptError, match="start=0 end=9"):
            await read


@on_memory_and_local
async def test_foreign_keys_are_left_out_of_the_list(kind: str, tmp_path: Path) -> None:
    async with opener(kind, tmp_path)() as objects:
        files = SstFiles(objects, PREFIX)
        good = files.key(file())
        await files.put(file(), DATA)
        foreign = [
            good + ".bak",
            good.replace("-a1", ""),
            good.replace(".sst", ".tmp"),
            good.replace("1-0", "1-x"),
            good.replace("sst/", "sst/deeper/"),
            f"{PREFIX}sst/readme",
            f"{PREFIX}manifest/00000000000000000001-000000000001-a1.sst",
            good.replace("11111111", "22222222"),
        ]
        for key in foreign:
            await objects.put(key, b"?")
        assert [files.key(name) async for name in files.list()] == [good]


@on_memory_and_local
async def test_files_are_listed_in_order_of_epoch_and_number(kind: str, tmp_path: Path) -> None:
    async with opener(kind, tmp_path)() as objects:
        files = SstFiles(objects, PREFIX)
        pairs = [(10, 1), (2, 100), (2, 9), (1, 10**11), (10**15, 1)]
        for epoch, number in pairs:
            await files.put(file(number, epoch), DATA)
        assert [(name.epoch, name.number) async for name in files.list()] == sorted(pairs)


@on_memory_and_local
async def test_a_file_can_be_deleted_twice(kind: str, tmp_path: Path) -> None:
    async with opener(kind, tmp_path)() as objects:
        files = SstFiles(objects, PREFIX)
        await files.put(file(), DATA)
        await files.put(file(2), DATA)
        (name, other) = [name async for name in files.list()]
        await files.delete(name)
        await files.delete(name)
        assert [left async for left in files.list()] == [other]
