"""The scratch directory: unused files are deleted at the next start, a table's own files stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidemill.spark.ingest.pipeline_context import sweep_scratch
from tidemill.spark.session.session import SOCKETS_SETTING, session_settings


def made(scratch: Path, *names: str) -> None:
    for name in names:
        path = scratch / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")


def test_what_is_nobodys_any_more_is_removed(tmp_path: Path) -> None:
    made(
        tmp_path,
        "lock",
        "mirrors/orders/MANIFEST.json",
        "mirrors/orders/run-1-2-3.arrow",
        "mirrors/orders/pending-0-abc.arrow",
        "mirrors/dropped/MANIFEST.json",
        "large/orders/range-0.arrow",
        "checkpoints/capture-shop/offsets/0",
        "spark-local/blockmgr-1/x",
        "sockets/.01234567-89ab-cdef-0123-456789abcdef.sock",
    )
    sweep_scratch(tmp_path, {"orders"})
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert left == ["lock", "mirrors/orders/MANIFEST.json", "mirrors/orders/run-1-2-3.arrow"]


def test_a_scratch_directory_that_is_not_there_yet_is_fine(tmp_path: Path) -> None:
    sweep_scratch(tmp_path / "new", {"orders"})


@pytest.mark.parametrize(
    ("scratch", "master", "directory"),
    [
        ("/data/scratch/shop", "local[2]", "/data/scratch/shop/sockets"),
        (f"/{'x' * 55}", "local[2]", f"/{'x' * 55}/sockets"),
        (f"/{'x' * 56}", "local[2]", None),
        (f"/{'é' * 28}", "local[2]", None),
        ("/data/scratch/shop", "spark://host:7077", None),
    ],
    ids=["usual", "longest", "too long", "too long in bytes", "cluster"],
)
def test_sockets_of_python_are_in_scratch_unless_their_paths_are_too_long(
    scratch: str, master: str, directory: str | None
) -> None:
    """A path of a socket has at most 107 bytes; Spark's names have 42."""
    assert session_settings(master, scratch=Path(scratch)).get(SOCKETS_SETTING) == directory
