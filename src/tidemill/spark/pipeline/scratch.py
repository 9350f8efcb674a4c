"""Scratch directory of a driver. All of it is a cache; a driver removes what is no longer used when it starts.

mirrors/TABLE    mirrors of the pipeline's tables; those of former tables are removed
  pending-…      runs of tasks whose results never arrived
derived/         inputs of derived tables, by group; every process creates them again
large/           an oversized step that was interrupted
checkpoints/     every process creates them again
archive/         code that is sent to executors that lack it (code_shipping.py)
spark-local/     Spark's shuffle files; a killed JVM leaves its files behind
"""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path

from tidemill.spark.ingest.distributed_step import sweep_pending

RECREATED = ("derived", "large", "checkpoints", "spark-local", "archive")


def sweep_scratch(scratch: Path, tables: Collection[str]) -> None:
    """Remove unused files. The caller holds the directory's lock. Files that cannot be removed are left for the next
    start."""
    for name in RECREATED:
        shutil.rmtree(scratch / name, ignore_errors=True)
    mirrors = scratch / "mirrors"
    for directory in mirrors.iterdir() if mirrors.is_dir() else ():
        if directory.name not in tables:
            shutil.rmtree(directory, ignore_errors=True)
        else:
            sweep_pending(directory)
