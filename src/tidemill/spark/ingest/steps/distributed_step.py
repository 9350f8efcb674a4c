"""Larger steps as Spark tasks: tasks decode pieces and resolve ranges (shuffle.py); the driver appends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pyarrow as pa
import structlog

from tidemill.base.runtime.tasks import error_sentence
from tidemill.shards.api import Part
from tidemill.spark.decode.dead_letter_rows import no_dead_letters
from tidemill.spark.decode.records import SliceDescriptor
from tidemill.spark.ingest.fetch_decode import from_ipc, mirror_identity
from tidemill.spark.ingest.step_planner import Step, split_descriptors
from tidemill.spark.ingest.steps.shuffle import (
    PENDING_RUN_NAME,
    RangeResult,
    StepPiece,
    StepPlan,
    decode_piece,
    resolve_range,
)
from tidemill.spark.ingest.table_writer import TableWriter
from tidemill.spark.merge.commands import BEFORE_ALL
from tidemill.spark.merge.resolve import KeyChanges, no_changes
from tidemill.spark.merge.sorted_runs import SortedRun, open_run
from tidemill.spark.predicates.expectations import Violations
from tidemill.spark.stores import Stores

if TYPE_CHECKING:
    from pyspark import SparkContext

log = structlog.get_logger()

RANGES_MAX = 8
"""Hash ranges of one table's step. The number is constant because an executor's process caches mirrors of its
ranges."""
PIECE_BYTES = 1 << 20
"""Minimum size of the stored record batches that a task reads."""


class DistributedResult(msgspec.Struct):
    """Results of one table's tasks. `inline`: the tasks could not compute the step, the driver must."""

    parts: list[Part]
    runs: list[Path]
    rows: int
    dead: pa.Table
    inline: bool
    violations: tuple[Violations, ...] = ()


class DistributedStep:
    def __init__(self, context: SparkContext, stores: Stores) -> None:
        self._context = context
        self._stores = stores

    def run(self, work: Sequence[tuple[TableWriter, Step]]) -> dict[str, DistributedResult]:
        """Run the steps and return the results by table.

        If the job fails, all its tables are computed inline, which attributes the error to the table that has it.
        """
        slots = max(1, self._context.defaultParallelism)
        plans: list[StepPlan] = []
        payloads: list[bytes] = []
        try:
            for table, step in work:
                sweep_pending(table.mirror_dir)
                table.save()
                for descriptors in _pack_pieces(step, max(PIECE_BYTES, -(-step.bytes // slots))):
                    payloads.append(msgspec.msgpack.encode(StepPiece(len(plans), descriptors)))
                plans.append(self._plan(table, step, plans[-1].first + plans[-1].ranges if plans else 0, slots))
            encoded_plans = msgspec.msgpack.encode(plans)
            ranges = plans[-1].first + plans[-1].ranges
            read_once = self._context.parallelize(payloads, len(payloads)).flatMap(partial(decode_piece, encoded_plans))
            exchanged = read_once.partitionBy(ranges, int)  # the key is the partition number
            answers = exchanged.mapPartitionsWithIndex(partial(resolve_range, encoded_plans)).collect()
            found = [msgspec.msgpack.decode(answer, type=RangeResult) for answer in answers]
        except Exception as error:  # the cause may be one table, its mirror's disk or Spark: inline finds out
            tables = sorted(table.name for table, _ in work)
            log.warning(
                "Spark tasks failed; the driver computes the step", tables=tables, error=error_sentence(error)[:500]
            )
            return {table.name: DistributedResult([], [], 0, no_dead_letters(), True) for table, _ in work}
        return {table.name: _join_results(table, [r for r in found if r.table == table.name]) for table, _ in work}

    def _plan(self, table: TableWriter, step: Step, first: int, slots: int) -> StepPlan:
        assert table.feed is not None
        return StepPlan(
            table.name,
            table.shard.shard_id,
            table.shard.writer,
            table.feed,
            table.schema,
            step.lower,
            step.upper,
            first,
            min(RANGES_MAX, slots),
            self._stores.urls,
            str(table.mirror_dir),
            mirror_identity(self._stores.consensus_life),
            table.shard.part_time_ms(),
            table.schemas.known_schemas,
        )

    def append(self, table: TableWriter, step: Step, found: DistributedResult) -> None:
        won = table.portal.call(table.append(step.lower, step.upper, found.parts))
        if won:
            table.count_violations(found.violations, step.upper)
        try:
            if won and len(found.runs) == len(found.parts):
                opened = [open_run(table.schema, path) for path in found.runs]
                table.apply_external(_join_runs(table, opened), step.lower, step.upper, found.rows)
            else:  # lost, or the runs are on another machine: read the changes from the shard
                table.follow()
        finally:
            for path in found.runs:
                path.unlink(missing_ok=True)


def _pack_pieces(step: Step, most_bytes: int) -> Iterator[tuple[SliceDescriptor, ...]]:
    """Yield the step's batches in shares of at most `most_bytes`: a task costs more than a few batches."""
    share: list[SliceDescriptor] = []
    size = 0
    for descriptor in split_descriptors(step.descriptors, most_bytes):
        more = sum(ref.size_bytes for ref in descriptor.refs)
        if share and size + more > most_bytes:
            yield tuple(share)
            share, size = [], 0
        share.append(descriptor)
        size += more
    if share:
        yield tuple(share)


def sweep_pending(mirror_dir: Path) -> None:
    """Delete runs of tasks whose results never arrived: of a killed task, or of an attempt that another attempt
    beat."""
    for path in mirror_dir.glob(PENDING_RUN_NAME.format("*", "*")):
        path.unlink(missing_ok=True)


def _join_results(table: TableWriter, found: Sequence[RangeResult]) -> DistributedResult:
    ordered = sorted(found, key=lambda r: r.number)
    asides = [aside for r in ordered for aside in r.asides]
    dead = [aside.dead for aside in asides] + [r.dead for r in ordered]
    # A truncation needs every live key at the same time, a stop shortens the interval, and only the driver asks a
    # registry.
    empty = table.operator.mirror.empty
    inline = any(
        aside.incomplete or aside.stop is not None or any(t.order != BEFORE_ALL or not empty for t in aside.truncates)
        for aside in asides
    )
    inline |= any(r.stops for r in ordered)
    return DistributedResult(
        [r.part for r in ordered if r.part is not None],
        [Path(r.run) for r in ordered if r.run],
        sum(r.rows for r in ordered),
        pa.concat_tables([no_dead_letters(), *(from_ipc(each, no_dead_letters()) for each in dead)]),
        inline,
        (*(v for aside in asides for v in aside.violations), *(v for r in ordered for v in r.violations)),
    )


def _join_runs(table: TableWriter, runs: Sequence[SortedRun]) -> KeyChanges:
    """Return runs of ascending hash ranges as the changes of one run."""
    if not runs:
        return no_changes(table.schema)
    rows = pa.concat_tables([run.rows for run in runs])
    return KeyChanges(rows, np.concatenate([r.hashes for r in runs]), np.concatenate([r.live for r in runs]))
