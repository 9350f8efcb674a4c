"""The class-data archive of Spark's JVM: used where it exists, and deleted once nothing uses it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tidemill.base.errors import InvalidError
from tidemill.spark.session.cds_archive import (
    DAY_S,
    UNUSED_DAYS_MAX,
    archive_options,
    archive_path,
    delete_unused_archives,
    ensure_archive,
)

NOW_S = 1_790_000_000.0


def test_an_archive_is_used_where_it_exists_and_its_use_is_recorded(tmp_path: Path) -> None:
    environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    assert archive_options(environ) == []
    path = archive_path(environ)
    assert path.parent == tmp_path / "tidemill"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"")
    os.utime(path, (0, 0))
    assert f"-XX:SharedArchiveFile={path}" in archive_options(environ)
    assert path.stat().st_mtime > 0


def test_an_archive_on_a_read_only_file_system_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    path = archive_path(environ)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"")
    monkeypatch.setattr(os, "utime", refuse)
    assert f"-XX:SharedArchiveFile={path}" in archive_options(environ)


def test_a_java_that_writes_no_archive_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The JDK of PyPI lacks the archive that a dynamic one extends."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("tidemill.spark.session.cds_archive.subprocess.run", lambda *_, **__: None)
    with pytest.raises(InvalidError, match="Java wrote no class-data archive"):
        ensure_archive()
    assert not list((tmp_path / "tidemill").glob("spark-4*-java*"))


def test_archives_and_rests_of_dumps_that_nothing_uses_are_deleted_and_nothing_else(tmp_path: Path) -> None:
    unused_s = NOW_S - UNUSED_DAYS_MAX * DAY_S - 1
    ages = {
        "spark-4.3.0-java17-0a.jsa": unused_s,
        "spark-4.3.0-java17-0b.4711": unused_s,
        "spark-4.3.0-java17-0c.jsa": unused_s + 2,
        "spark-home-4.3.0-0d": unused_s,
    }
    for name, used_s in ages.items():
        (tmp_path / name).write_bytes(b"")
        os.utime(tmp_path / name, (used_s, used_s))
    delete_unused_archives(tmp_path, NOW_S)
    assert {path.name for path in tmp_path.iterdir()} == {"spark-4.3.0-java17-0c.jsa", "spark-home-4.3.0-0d"}
