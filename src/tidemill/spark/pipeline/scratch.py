"""The scratch directory of a driver: all of it is a cache, and what nobody reads any more is removed at its start.

mirrors/TABLE    of the pipeline's tables; those of tables it no longer has go
  pending-…      runs of tasks whose results never came
derived/         inputs of derived tables, by group; made anew by every process
large/           a step that was cut off
checkpoints/     made anew by every process
archive/         what is sent to executors that lack it (code_shipping.py)
spark-local/     Spark's shuffle files; a killed JVM leaves its own behind
"""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path

from tidemill.spark.ingest.distributed_step import sweep_pending

ANEW = ("derived", "large", "checkpoints", "spark-local", "archive")


def sweep(scratch: Path, tables: Collection[str]) -> None:
    """Called by the one process that holds the directory. What cannot be removed now is left for the next start."""
    for name in ANEW:
        shutil.rmtree(scratch / name, ignore_errors=True)
    mirrors = scratch / "mirrors"
    for directory in mirrors.iterdir() if mirrors.is_dir() else ():
        if directory.name not in tables:
            shutil.rmtree(directory, ignore_errors=True)
        else:
            sweep_pending(directory)
