"""The scratch directory: unused files are deleted at the next start, a table's own files stay."""

from __future__ import annotations

from pathlib import Path

from tidemill.spark.ingest.pipeline_context import sweep_scratch


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
    )
    sweep_scratch(tmp_path, {"orders"})
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert left == ["lock", "mirrors/orders/MANIFEST.json", "mirrors/orders/run-1-2-3.arrow"]


def test_a_scratch_directory_that_is_not_there_yet_is_fine(tmp_path: Path) -> None:
    sweep_scratch(tmp_path / "new", {"orders"})
