"""Many restored shapes: compiled together, ended separately, and reported in bounded size."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from support.shapes.consumer import TABLE, row
from support.shapes.storage import INFO, OTHERWISE, UNCOMPILABLE, UNREADABLE, WITHOUT_LSN, written
from support.waiting import until
from tidemill.base.clock import Rand, SystemClock
from tidemill.base.errors import InvalidError
from tidemill.base.lsn import ChangePosition
from tidemill.base.status.status import StatusTracker
from tidemill.capture.changes import Change, Fragment
from tidemill.shapes.definition.definition import ShapeDefinition, Source
from tidemill.shapes.log.log_offset import BASE_END
from tidemill.shapes.log.sqlite_file import Flush, ShapeFile
from tidemill.shapes.reporting import CHECKED_PER_REPORT, LARGEST_COUNT, LargestShapes
from tidemill.shapes.service import ShapeService
from tidemill.shapes.settings import ShapeSettings

COUNT = 250


async def test_of_many_shapes_that_come_back_each_ends_alone_and_the_others_follow_on(tmp_path: Path) -> None:
    file = ShapeFile(tmp_path / "main.db")
    file.open()
    file.flush(Flush("owner", False, [written(key) for key in range(1, COUNT + 1)], ()))
    file.release()
    service = ShapeService(SystemClock(), Rand(7), StatusTracker(), ShapeSettings(directory=tmp_path))
    sink = service.add_database("main", "host=/nowhere", lambda: [TABLE])
    service._tables._databases["main"].infos[TABLE] = INFO
    sink.begin_session(["owner"])
    sink.set_carried_relations([TABLE.oid])
    sink.begin_stream(SimpleNamespace(report_flushed=lambda *_: None), 0)  # type: ignore[arg-type]
    await until(lambda: not sink.restoring)
    over = {UNREADABLE, UNCOMPILABLE, OTHERWISE, *WITHOUT_LSN}
    lives = {f"h{key}" for key in range(1, COUNT + 1) if key not in over}
    assert {shape.handle for shape in service._live.by_handle.values()} == lives
    changes = tuple(
        Change(TABLE, "insert", ChangePosition(900, 2 * key), row(key), None) for key in range(1, COUNT + 1)
    )
    sink.process_fragment(Fragment(5, 900, 0, True, True, changes, changes[-1].position, (), 100))
    await until(lambda: sink.evaluated_position() == 900)
    for handle in lives:
        shape = service.find_by_handle(handle)
        assert shape is not None
        (item,) = (await shape.log.fetch(BASE_END)).items
        assert b'"id":"%s"' % handle[1:].encode() in item
    await service.aclose()
    again = ShapeFile(tmp_path / "main.db")
    again.open()
    assert {saved.handle for saved in again.read_shapes()} == lives, "who is over is not there after the next restart"
    again.release()


async def test_a_table_that_grows_while_its_shapes_are_compiled_is_not_followed_as_it_was(tmp_path: Path) -> None:
    """World 208 of the oracle: the check for changed descriptions had run before the shapes were restored. Without a
    row under the new description nothing ended them."""
    file = ShapeFile(tmp_path / "main.db")
    file.open()
    file.flush(Flush("owner", False, [written(key) for key in range(1, 4)], ()))
    file.release()
    captured = [TABLE]
    service = ShapeService(SystemClock(), Rand(7), StatusTracker(), ShapeSettings(directory=tmp_path))
    sink = service.add_database("main", "host=/nowhere", lambda: list(captured))
    tables = service._tables
    tables._databases["main"].infos[TABLE] = INFO
    compile_all = tables._compiler.compile_many

    async def grown(asked: Any) -> Any:
        captured[0] = replace(TABLE, columns=(*TABLE.columns, replace(TABLE.columns[1], name="late")))
        assert not tables.redefined_consumers(), "nobody is there yet"
        return await compile_all(asked)

    tables._compiler.compile_many = grown  # type: ignore[method-assign]
    sink.begin_session(["owner"])
    sink.set_carried_relations([TABLE.oid])
    sink.begin_stream(SimpleNamespace(report_flushed=lambda *_: None), 0)  # type: ignore[arg-type]
    await until(lambda: not sink.restoring)
    assert captured != [TABLE] and not service._live.by_handle and not sink.router
    await service.aclose()


def test_the_largest_shapes_are_found_a_part_at_a_time() -> None:
    def shape(handle: str, size: int) -> Any:
        return SimpleNamespace(handle=handle, has_ended=False, log=SimpleNamespace(base_bytes=size, log_bytes=0))

    shapes = {f"h{n}": shape(f"h{n}", n * 7919 % 4001) for n in range(4_000)}
    greatest = sorted(shapes.values(), key=lambda each: -each.log.base_bytes)[:LARGEST_COUNT]
    largest = LargestShapes()
    for _ in range(len(shapes) // CHECKED_PER_REPORT):
        found = largest.find(shapes)
    assert found == greatest
    greatest[0].has_ended = True
    shapes.pop(greatest[0].handle)
    for _ in range(len(shapes) // CHECKED_PER_REPORT + 1):
        found = largest.find(shapes)
    assert greatest[0] not in found and found[:4] == greatest[1:]


async def test_a_suspended_database_leaves_the_rejections_of_other_databases(tmp_path: Path) -> None:
    service = ShapeService(SystemClock(), Rand(7), StatusTracker(), ShapeSettings(directory=tmp_path))
    rejected = [ShapeDefinition(Source("table", name, "public", "t"), "1 / id = 1") for name in ("main", "other")]
    rejected.append(ShapeDefinition(Source("shard", "", "", "main"), "1 / id = 1"))
    for definition in rejected:
        service._live.rejections.add(definition, InvalidError("division by zero."), 0.0)
    service.suspend_database("main")
    service._live.rejections.raise_if_rejected(rejected[0], 1.0)
    for definition in rejected[1:]:
        with pytest.raises(InvalidError):
            service._live.rejections.raise_if_rejected(definition, 1.0)
    await service.aclose()
