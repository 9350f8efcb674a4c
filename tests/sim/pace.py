"""Other limits and intervals than those of production, from the seed PACED_FROM on.

Limits of production are too large for the small data of a world, and its intervals order events that may happen in any
order. So each of the constants below has another value in many of these worlds. A value that only costs more or less
must never change what is stored or read: every world stays clean with every value. Worlds of smaller seeds have the
values of production, so that the seeds of former faults replay their histories.
"""

from __future__ import annotations

import contextlib
import importlib
import random
from collections.abc import Iterator

from sim.world import swapped

PACED_FROM = 10_000
MANY = 1 << 20

CHOICES: dict[str, dict[str, tuple[float, ...]]] = {
    "capture.session.stream_reader": {
        "GATHER_S": (0.0, 0.008, 0.05), "DENSE_FRAMES": (2, 24), "MESSAGES_PER_CHECK": (1, 16),
    },
    "capture.session.table_adder": {"APPEND_POLL_S": (0.001, 0.1), "MAX_REMAINING_RECORDS": (0, 1, 2_000)},
    "capture.snapshot.copier": {
        "RECORD_S": (0.01, 1.0), "MAX_ROWS_PER_TURN": (1, 2_048), "BACKLOG_BYTES": (1, MANY),
    },
    "capture.snapshot.side_topic": {"MAX_RECORDS_BETWEEN_SESSIONS": (0, 2, 100_000)},
    "capture.snapshot.side_topic_append": {"READ_BYTES": (1, 500, MANY), "IN_FLIGHT": (1, 3)},
    "capture.snapshot.wal_hold": {"HOLD_POLL_S": (0.01, 0.1, 0.5), "RECORD_S": (0.05, 1.0, 5.0)},
    "capture.tables.copy_progress": {"MAX_FRUITLESS_ATTEMPTS": (2, 10)},
    "capture.topics.batch_sender": {
        "ROUNDS_IN_FLIGHT": (1, 2, 3), "SMALL_ROUND_BYTES": (1, 300, MANY), "REPAIR_PAUSE_S": (0.001, 0.05),
    },
    "capture.topics.binder": {"MAX_UNMERGED_BOUNDARIES": (1, 2, 256), "FIRST_IDLE_MS": (1, 50, 500)},
    "capture.topics.partition_writer": {"BATCH_BYTES": (200, MANY)},
    "capture.topics.topic_writer": {"RETIRE_POLL_S": (0.001, 0.02, 0.3)},
    "consensus.state_log.replica": {"PART_BYTES": (100, MANY)},
    "consensus.state_log.state_log": {"BATCH_COMMANDS": (1, 2, 512), "BATCH_BYTES": (1, MANY)},
    "kafka.groups.group_store": {"READ_ROWS_MAX": (1, 3, 1_000)},
    "kafka.groups.group_writer": {"PART_ROWS": (1, 3, 5_000), "PART_BYTES": (1, MANY), "WRITE_BYTES": (1, MANY)},
    "kafka.transactions.completion": {"CONCURRENT_MARKERS_MAX": (1, 64)},
    "metastore.backup.checkpoint": {"COMMIT_BYTES": (1, MANY), "UNIT_BYTES": (1, MANY)},
    "metastore.domain.codec": {"SLICE_ROWS": (1, 3, 2_000)},
    "metastore.domain.commit.write_path": {"GROUP_BYTES": (1, MANY)},
    "metastore.domain.forwarding.client": {"APPEND_REQUESTS": (1, 256)},
    "metastore.domain.forwarding.server": {"READ_REQUESTS": (1, 256), "TRUNCATE_AFTER": (1, 64)},
    "metastore.lsm.compaction.compaction_job": {
        "WINDOW_BYTES_MIN": (1, MANY), "CHUNK_BYTES": (1, MANY), "CHUNK_ROWS_MIN": (1, 64),
    },
    "metastore.lsm.memtable": {"SORT_ROWS": (1, 3, 4_096), "INSERT_SHARE": (1, 256), "FOLD_ROWS": (2, 20_000)},
    "metastore.lsm.merge_iterator": {
        "LAYER_ROWS": (1, 3, 1_024), "WINDOW_BLOCKS": (1, 16), "READ_BLOCKS": (1, 64), "READ_BYTES": (1, MANY),
        "FEW_BLOCKS": (0, 4),
    },
    "metastore.lsm.table_cache": {"DECODE_SLICE": (1, 64)},
    "metastore.rows.groups": {
        "MEMBER_ROW_BYTES": (1, 100 << 10), "PARTITIONS_ROW_BYTES": (1, MANY), "ENTRY_PARTITIONS_MAX": (1, 2, 10_000),
    },
    "shards.bindings.remap": {"WHOLE_RECORD_INTERVAL": (1, 2, 64), "WINDOW_BINDINGS": (2, 10, 2_000)},
    "shards.compaction.compaction": {"RUN_BATCHES": (2, 512), "RUN_BYTES": (1, MANY)},
    "shards.handle": {"INLINE_BUDGET_BYTES": (0, 300, MANY)},
    "shards.parts.parts": {"ROW_GROUP_ROWS": (1, 3, 1 << 17)},
    "shards.read.hash_ranges": {"RANGE_ROWS": (1, 3, 500_000)},
    "shards.read.holds": {"HOLD_ABOVE_BYTES": (0, 300, 16 << 20)},
    "shards.read.part_reader": {"WHOLE_FETCH_BYTES": (1, MANY)},
    "shards.read.read_plan": {"DIFFERENCE_BYTES": (1, MANY), "SMALL_BYTES": (1, MANY), "KNOWN_MAX": (1, 8_192)},
    "shards.state.restore": {"BINDINGS_PER_APPEND": (1, 3, 1_000)},
    "topics.batch_reads": {"INLINE_BATCHES": (1, 2_000)},
    "topics.fetch.fetch_planner": {"BATCHES_MAX": (1, 3, 4_096), "COLD_OBJECTS_MAX": (1, 64)},
    "topics.l0.group_commit": {
        "GATHER_MIN_S": (0.0, 0.002), "GATHER_MAX_S": (0.002, 0.01, 0.1), "GATHER_LINES": (1, 64),
    },
    "topics.l1.extent_cache": {"LOOKUP_EXTENTS_MIN": (1, 8), "EXTENTS_MAX": (2, 8_192)},
    "topics.l1.extent_merge": {"FANOUT": (2, 8), "MERGE_BYTES_MIN": (1, 4_096)},
    "topics.l1.extent_store": {"TRIM_EXTENTS_MAX": (1, 1_000)},
    "topics.l1.object_planner": {
        "OBJECT_PARTITIONS_MAX": (1, 3_000), "PIECE_BATCHES_MAX": (1, 3, 65_536), "ROUND_BATCHES_TARGET": (1, 1_024),
    },
    "topics.lifecycle.checkpoint": {"SLICE_ROWS": (1, 200)},
    "topics.partition.rollup": {
        "INLINE_BATCHES": (1, 20_000), "RETENTION_ROLLUP_RECORDS": (4, 1_024),
    },
    "topics.partition.state_machine.row_codec": {"EXTENT_BATCHES": (1, 3, 256)},
    "topics.partition_reader": {"RECENT_S": (0.0, 20.0)},
    "topics.produce.producer_ids": {"BLOCK_IDS": (1, 2, 1_000)},
}  # fmt: skip


@contextlib.contextmanager
def varied_pace(seed: int) -> Iterator[None]:
    """Give each constant a value for the world of this seed, if it is one of the varied worlds."""
    if seed < PACED_FROM:
        yield
        return
    with contextlib.ExitStack() as stack:
        for module, constants in CHOICES.items():
            for name, values in constants.items():
                place = importlib.import_module(f"tidemill.{module}")
                # One source for each: a constant that is added or removed leaves the other values of a seed unchanged.
                value = random.Random(f"pace {seed} {module} {name}").choice(values)
                stack.enter_context(swapped(place, name, value))
        yield
