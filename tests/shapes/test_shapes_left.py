"""Files of shape logs that another node has continued: they are deleted, and no other file is."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

import pytest

from tidemill.base.errors import UnavailableError
from tidemill.shapes.log.sqlite_file import Flush, ShapeFile
from tidemill.shapes.log.stale_files import remove_stale_files


def made(path: Path, owner: str) -> ShapeFile:
    file = ShapeFile(path)
    file.open()
    file.flush(Flush(owner, False, (), ()))
    return file


async def test_a_file_goes_when_the_row_names_another_owner_or_is_gone_and_only_then(tmp_path: Path) -> None:
    rows: dict[str, tuple[str, ...]] = {
        "stays": ("b", "a"),
        "moved": ("b",),
        "a name/of two": ("c",),
        "open": ("b",),
    }
    for name in ("stays", "moved", "a name%2Fof two", "dropped"):
        made(tmp_path / f"{name}.db", "a").release()
    served = made(tmp_path / "open.db", "a")
    (tmp_path / "corrupt.db").write_bytes(b"no database at all, but of some length" * 100)
    (tmp_path / "crashed.over").write_bytes(b"set aside when a process died")
    asked: list[str] = []

    async def names(capture: str) -> Collection[str]:
        asked.append(capture)
        return rows.get(capture, ())

    await remove_stale_files(tmp_path, names)
    left = {path.name for path in tmp_path.iterdir() if not path.name.endswith((".lock", "-wal", "-shm"))}
    assert left == {"open.db", "stays.db"}
    served.release()
    assert "a name/of two" in asked
    file = ShapeFile(tmp_path / "stays.db")
    assert file.open() == "a"
    file.release()
    new = ShapeFile(tmp_path / "moved.db")
    assert new.open() == "" and new.read_shapes() == []
    new.release()


def killed(path: Path, owner: str) -> None:
    """Simulate a killed process: its last writes are only in the write-ahead log."""
    pid = os.fork()
    if pid == 0:
        file = made(path, owner)
        os._exit(0 if file else 1)
    os.waitpid(pid, 0)


async def test_a_file_whose_log_was_not_folded_in_when_its_process_died_is_known_by_its_newest_name(
    tmp_path: Path,
) -> None:
    path = tmp_path / "db.db"
    made(path, "old").release()
    killed(path, "new")
    assert (tmp_path / "db.db-wal").stat().st_size > 0

    async def newest(_: str) -> Collection[str]:
        return ("new",)

    async def oldest(_: str) -> Collection[str]:
        return ("old",)

    await remove_stale_files(tmp_path, newest)
    assert path.exists()
    await remove_stale_files(tmp_path, oldest)
    assert [each.name for each in tmp_path.iterdir()] == ["db.lock"]


async def test_nothing_goes_while_the_row_cannot_be_read(tmp_path: Path) -> None:
    made(tmp_path / "db.db", "a").release()

    async def names(_: str) -> Collection[str]:
        raise UnavailableError("no store answers.")

    with pytest.raises(UnavailableError):
        await remove_stale_files(tmp_path, names)
    assert (tmp_path / "db.db").exists()
