"""Bigger steps by Spark tasks: by table and hash range they write parts and leave their runs; the driver appends."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa

from tidemill.shards.front import Part
from tidemill.spark.decode.letters import no_dead_letters
from tidemill.spark.steps import Step
from tidemill.spark.stores import Stores
from tidemill.spark.table import TableWriter
from tidemill.spark.tasks import PENDING, Task, TaskResult, boot_id, concat_changes, from_ipc, run_task
from tidemill.spark.upsert.resolve import KeyChanges, no_changes
from tidemill.spark.upsert.runs import Run, open_run

if TYPE_CHECKING:
    from pyspark import SparkContext

TASKS_MAX = 8
"""Hash ranges of one table's step."""
ROWS_PER_TASK = 50_000


class Results(msgspec.Struct):
    """Of one table. `inline`: the tasks could not decide it, do it on the driver."""

    parts: list[Part]
    runs: list[Path]
    rows: int
    dead: pa.Table
    inline: bool


class ByTasks:
    def __init__(self, context: SparkContext, stores: Stores) -> None:
        self._context = context
        self._stores = stores

    def run(self, work: Sequence[tuple[TableWriter, Step]]) -> dict[str, Results]:
        """By table. A table whose task fails for good is to be done inline, which names what is wrong with it alone."""
        out: dict[str, Results] = {}
        payloads: list[bytes] = []
        for table, step in work:
            sweep_pending(table.mirror_dir)
            table.save()
            payloads += self._tasks(table, step)
        try:
            found = self._context.parallelize(payloads, len(payloads)).map(run_task).collect()
        except Exception:  # py4j raises what it likes, of one table or of Spark: inline tells which
            return {table.name: Results([], [], 0, no_dead_letters(), True) for table, _ in work}
        results = [msgspec.msgpack.decode(f, type=TaskResult) for f in found]
        for table, _ in work:
            mine = sorted((r for r in results if r.table == table.name), key=lambda r: r.bucket)
            out[table.name] = Results(
                [r.part for r in mine if r.part is not None],
                [Path(r.run) for r in mine if r.run],
                sum(r.rows for r in mine),
                pa.concat_tables([from_ipc(r.dead, no_dead_letters()) for r in mine]),
                any(r.inline for r in mine),
            )
        return out

    def _tasks(self, table: TableWriter, step: Step) -> list[bytes]:
        assert table.feed is not None
        buckets = min(TASKS_MAX, max(1, self._context.defaultParallelism), 1 + step.records // ROWS_PER_TASK)
        return [
            msgspec.msgpack.encode(
                Task(
                    table.name,
                    table.shard.shard_id,
                    table.shard.writer,
                    table.feed,
                    table.schema,
                    step.descriptors,
                    step.lower,
                    step.upper,
                    bucket,
                    buckets,
                    self._stores.urls,
                    str(table.mirror_dir),
                    boot_id(),
                )
            )
            for bucket in range(buckets)
        ]

    def append(self, table: TableWriter, step: Step, found: Results) -> None:
        won = table.portal.call(table.append(step.lower, step.upper, found.parts))
        try:
            if won and len(found.runs) == len(found.parts):
                opened = [open_run(table.schema, path) for path in found.runs]
                table.took(_joined(table, opened), step.lower, step.upper, found.rows)
            else:  # lost, or the runs are on another machine: what the shard holds says it all
                table.follow()
        finally:
            for path in found.runs:
                path.unlink(missing_ok=True)


def sweep_pending(mirror_dir: Path) -> None:
    """Runs that tasks left whose results never came: a task that was killed, or an attempt that another one beat."""
    for path in mirror_dir.glob(PENDING.format("*", "*")):
        path.unlink(missing_ok=True)


def _joined(table: TableWriter, runs: Sequence[Run]) -> KeyChanges:
    if not runs:
        return no_changes(table.schema)
    run = concat_changes(runs)
    return KeyChanges(run.rows, run.hashes, run.live)
