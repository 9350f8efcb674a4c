"""Larger steps on executors: record batches are decoded once, exchanged by hash range, and resolved range by range.

    Piece ─► read ─► one message per range (Arrow IPC) ─► Spark's shuffle ─► resolve ─► a part, a run next to the mirror

Tasks run the same functions as inline steps. They need the bucket; they need consensus only if no mirror as of the
right upper is found (range_mirror.py). Parts are named per attempt; only those that are returned are ever referenced.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import pyarrow as pa

from tidemill.base.clock import Rand, SystemClock
from tidemill.shards.api import Part, ShardSchema
from tidemill.shards.parts.arrow_rows import combine_columns
from tidemill.shards.parts.parts import PartTarget, store_part
from tidemill.spark.decode.captured import Stop
from tidemill.spark.decode.records import SliceDescriptor
from tidemill.spark.formats.schemas.writer_schema import WriterSchema
from tidemill.spark.ingest.dead_letters import letters_of_resolved, stop_of_rejected, violations_of_rejected
from tidemill.spark.ingest.fetch_decode import fetch_and_decode, from_ipc, to_ipc
from tidemill.spark.ingest.sources import TopicFeed
from tidemill.spark.merge.commands import Commands, Truncate, command_schema, concat_commands
from tidemill.spark.merge.mirror import Mirror
from tidemill.spark.merge.range_mirror import HashRange, cut_by_hash, open_range_mirror
from tidemill.spark.merge.resolve import Resolved, resolve
from tidemill.spark.merge.sorted_runs import SortedRun, write_run
from tidemill.spark.predicates.expectations import Violations, expectation_check
from tidemill.spark.settings import StoreUrls
from tidemill.spark.stores import shared_objects

PENDING_RUN_NAME = "pending-{}-{}.arrow"
"""Name of a task's run next to the mirror, by range and attempt: the driver adopts or deletes it."""

Message = tuple[int, tuple[bytes, bytes]]
"""(partition of the job, (rows of a range, SideOutput)), of which one is empty."""


class StepPlan(msgspec.Struct, frozen=True):
    """Step [lower, upper) of one table. Its ranges are partitions `first` to `first + ranges` of the job."""

    table: str
    shard_id: str
    writer: str
    feed: TopicFeed
    schema: ShardSchema
    lower: int
    upper: int
    first: int
    ranges: int
    urls: StoreUrls
    mirror: str
    """Directory of the driver's saved mirror, used if it is on this machine too."""
    boot: str
    written_ms: int = 0
    """Earliest time in the keys of its parts: parts before the shard's last sweep are rejected."""
    schemas: tuple[WriterSchema, ...] = ()
    """Schemas of the topic's writers that the driver has met."""


class StepPiece(msgspec.Struct, frozen=True):
    """Some record batches of plan number `plan`."""

    plan: int
    descriptors: tuple[SliceDescriptor, ...]


class SideOutput(msgspec.Struct, frozen=True):
    """Output of a piece other than rows: dead letters, and the stop and truncations, which concern the whole step."""

    dead: bytes = b""
    stop: Stop | None = None
    truncates: tuple[Truncate, ...] = ()
    violations: tuple[Violations, ...] = ()
    incomplete: bool = False
    """True if the piece has a record whose schema only the driver can look up."""


class RangeResult(msgspec.Struct, frozen=True):
    """Result of one range. `run`: file of the pending run next to the mirror, or "". The first range of a table carries
    the side outputs."""

    table: str
    number: int
    part: Part | None
    rows: int
    run: str
    asides: tuple[SideOutput, ...]
    dead: bytes = b""
    """Dead letters of commands that were lost or rejected in this range."""
    violations: tuple[Violations, ...] = ()
    stops: bool = False
    """True if a rejected command stops the table."""


_PLANS = msgspec.msgpack.Decoder(list[StepPlan])
_PIECE = msgspec.msgpack.Decoder(StepPiece)
_ASIDE = msgspec.msgpack.Decoder(SideOutput)


def decode_piece(plans: bytes, payload: bytes) -> Iterator[Message]:
    """Task: yield the commands of a piece by range, and its side output."""
    piece = _PIECE.decode(payload)
    plan = _PLANS.decode(plans)[piece.plan]
    decoded = fetch_and_decode(plan.urls.objects, plan.feed, piece.descriptors, plan.schemas)
    for number, rows in enumerate(cut_by_hash(decoded.commands.rows, plan.schema.key, plan.ranges)):
        if rows.num_rows:
            yield plan.first + number, (to_ipc(rows), b"")
    aside = SideOutput(
        to_ipc(decoded.dead), decoded.stop, decoded.commands.truncates, decoded.violations, decoded.incomplete
    )
    if aside != SideOutput():
        yield plan.first, (b"", msgspec.msgpack.encode(aside))


def resolve_range(plans: bytes, index: int, messages: Iterable[Message]) -> Iterator[bytes]:
    """Task: resolve the commands of one range against its mirror and store their part. The driver handles truncations
    and stops."""
    plan = next(p for p in _PLANS.decode(plans) if p.first <= index < p.first + p.ranges)
    part = HashRange(index - plan.first, plan.ranges)
    empty = command_schema(plan.schema).empty_table()
    tables: list[pa.Table] = [empty]
    asides: list[SideOutput] = []
    for _, (rows, aside) in messages:
        if aside:
            asides.append(_ASIDE.decode(aside))
        else:
            tables.append(from_ipc(rows, empty))
    commands = Commands(combine_columns(concat_commands(tables)))
    del tables
    if not len(commands):
        yield msgspec.msgpack.encode(RangeResult(plan.table, part.number, None, 0, "", tuple(asides)))
        return
    saved = Mirror.load(Path(plan.mirror), plan.schema, plan.shard_id, plan.boot)
    mirror = open_range_mirror(plan.urls, plan.table, plan.shard_id, plan.schema, part, plan.lower, saved)
    check = expectation_check(plan.schema, plan.feed.expectations)
    resolved = resolve(plan.schema, commands, mirror, plan.lower, plan.upper, check=check)
    rand = Rand()
    stored, run = _store_range(plan, part, resolved, rand) if resolved.updates.num_rows else (None, "")
    dead = to_ipc(letters_of_resolved(plan.feed, resolved))
    rejected, stop = violations_of_rejected(resolved), stop_of_rejected(plan.feed, resolved)
    result = RangeResult(
        plan.table,
        part.number,
        stored,
        resolved.updates.num_rows,
        run,
        tuple(asides),
        dead,
        rejected,
        stop is not None,
    )
    yield msgspec.msgpack.encode(result)


def _store_range(plan: StepPlan, part: HashRange, resolved: Resolved, rand: Rand) -> tuple[Part, str]:
    """Store the part, and its run as a file next to the mirror if that directory is on this machine; otherwise the
    driver reads the part back."""
    portal, objects = shared_objects(plan.urls.objects)
    stored = portal.call(
        store_part(
            objects,
            plan.schema,
            resolved.updates,
            PartTarget(plan.shard_id, plan.writer, max(plan.written_ms, SystemClock().now_ms())),
            rand,
        )
    )
    directory = Path(plan.mirror)
    if not directory.is_dir() or not os.access(directory, os.W_OK):
        return stored, ""
    path = directory / PENDING_RUN_NAME.format(part.number, rand.nonce())
    changes = resolved.changes
    write_run(plan.schema, SortedRun(changes.rows, changes.hashes, changes.live), path)
    return stored, str(path)
