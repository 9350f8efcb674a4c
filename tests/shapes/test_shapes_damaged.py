"""A flipped bit in a shape's file ends that shape, whose clients refetch, and never yields a wrong row."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import apsw
import pytest
from msgspec.structs import replace

from support.shapes.consumer import TABLE
from support.shapes.storage import INFO, written
from support.waiting import until
from tidemill.base.clock import Rand, SystemClock
from tidemill.base.errors import CorruptError
from tidemill.base.status.status import StatusTracker
from tidemill.shapes.log.log_offset import BASE_END, BEFORE_ALL
from tidemill.shapes.log.sqlite_file import Flush, ShapeFile, StoredItem
from tidemill.shapes.service import ShapeService
from tidemill.shapes.settings import ShapeSettings

BASE, ITEM, RECORD, WHOLE = 1, 2, 3, 4


def filled(path: Path) -> None:
    file = ShapeFile(path)
    file.open()
    shapes = []
    for key in (BASE, ITEM, RECORD, WHOLE):
        one = written(key)
        assert one.saved is not None
        rows = [(0, b'{"value":{"n":"%d"}}' % key)]
        items = [StoredItem(700, 2, b'{"later":{"n":"%d"}}' % key)]
        shapes.append(replace(one, base=rows, items=items, saved=replace(one.saved, end=(700, 2), log_bytes=30)))
    file.flush(Flush("owner", False, shapes, ()))
    file.release()


def flip(path: Path, table: str, column: str, key: int, at: int) -> None:
    connection = apsw.Connection(str(path))
    ((stored,),) = connection.execute(f"SELECT {column} FROM {table} WHERE id = ?", (key,)).fetchall()
    damaged = bytearray(stored)
    damaged[at] ^= 1
    connection.execute(f"UPDATE {table} SET {column} = ? WHERE id = ?", (bytes(damaged), key))
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    connection.close()


async def test_f131_what_is_damaged_in_a_shapes_file_ends_that_shape_alone(tmp_path: Path) -> None:
    path = tmp_path / "main.db"
    filled(path)
    flip(path, "base", "json", BASE, -3)
    flip(path, "items", "json", ITEM, -3)
    flip(path, "shapes", "record", RECORD, -1)
    service = ShapeService(SystemClock(), Rand(7), StatusTracker(), ShapeSettings(directory=tmp_path))
    sink = service.add_database("main", "host=/nowhere", lambda: [TABLE])
    service._tables._databases["main"].infos[TABLE] = INFO
    sink.begin_session(["owner"])
    sink.set_carried_relations([TABLE.oid])
    sink.begin_stream(SimpleNamespace(report_flushed=lambda *_: None), 0)  # type: ignore[arg-type]
    await until(lambda: not sink.restoring)
    assert service.find_by_handle(f"h{RECORD}") is None, "its definition may be another: it is not restored"
    base, item, whole = (service.find_by_handle(f"h{key}") for key in (BASE, ITEM, WHOLE))
    assert base is not None and item is not None and whole is not None
    assert (await base.fetch(BEFORE_ALL)).items == () and base.has_ended and "damaged" in base.end_reason
    assert list((await item.fetch(BEFORE_ALL)).items) == [b'{"value":{"n":"2"}}'] and not item.has_ended
    assert (await item.fetch(BASE_END)).items == () and item.has_ended and "tx=700 op=2" in item.end_reason
    assert list((await whole.fetch(BEFORE_ALL)).items) == [b'{"value":{"n":"4"}}']
    (later,) = (await whole.fetch(BASE_END)).items
    assert b'"n":"4"' in later and not whole.has_ended
    await service.aclose()


def test_every_flipped_bit_of_a_row_is_corrupt_when_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "main.db"
    filled(path)
    for at in range(0, len(b'{"later":{"n":"1"}}')):
        flip(path, "items", "json", WHOLE, at)
        file = ShapeFile(path)
        file.open()
        with pytest.raises(CorruptError, match="id=4 tx=700 op=2"):
            file.items(WHOLE, (0, 0), (900, 0), 1000)
        assert len(file.items(BASE, (0, 0), (900, 0), 1000)) == 1
        file.release()
        flip(path, "items", "json", WHOLE, at)


@pytest.mark.parametrize("other", [(WHOLE, 701, 1), (WHOLE, 699, 3), (ITEM, 700, 4), (ITEM, 702, 2)])
def test_rows_that_change_places_are_corrupt_even_if_their_keys_have_the_same_sum(
    tmp_path: Path, other: tuple[int, int, int]
) -> None:
    path = tmp_path / "main.db"
    filled(path)
    file = ShapeFile(path)
    file.open()
    moved = replace(written(other[0]), saved=None, items=[StoredItem(*other[1:], b'{"moved":true}')])
    file.flush(Flush("owner", False, [moved], ()))
    file.release()
    exchange(path, "items", "id, tx, op", (WHOLE, 700, 2), other)
    file = ShapeFile(path)
    file.open()
    for key, tx, op in ((WHOLE, 700, 2), other):
        with pytest.raises(CorruptError, match=f"id={key} tx={tx} op={op}"):
            file.items(key, (tx, op - 1), (tx, op), 1000)
    file.release()


def test_base_chunks_that_change_places_are_corrupt_even_if_their_keys_have_the_same_sum(tmp_path: Path) -> None:
    path = tmp_path / "main.db"
    filled(path)
    file = ShapeFile(path)
    file.open()
    file.flush(Flush("owner", False, [replace(written(BASE), saved=None, base=[(1, b"{}")])], ()))
    file.release()
    exchange(path, "base", "id, chunk", (BASE, 1), (ITEM, 0))
    file = ShapeFile(path)
    file.open()
    for key, chunk in ((BASE, 1), (ITEM, 0)):
        with pytest.raises(CorruptError, match=f"id={key} chunk={chunk}"):
            file.read_base(key, chunk)
    file.release()


def exchange(path: Path, table: str, names: str, one: tuple[int, ...], other: tuple[int, ...]) -> None:
    """Give each of two rows the JSON and the checksum of the other."""
    connection = apsw.Connection(str(path))
    places = ", ".join("?" * len(one))
    stored = [
        connection.execute(f"SELECT json, crc FROM {table} WHERE ({names}) = ({places})", place).fetchall()[0]
        for place in (one, other)
    ]
    for place, row in zip((one, other), reversed(stored), strict=True):
        connection.execute(f"UPDATE {table} SET json = ?, crc = ? WHERE ({names}) = ({places})", (*row, *place))
    connection.close()
