"""Fetching and decoding of record batches: inline on the driver or in a Spark task (shuffle.py), by the same functions;
and one step ahead, while the current step is resolved, written and appended.

Bindings and the topic alone determine a step, so it can be read before the table has reached it. When its turn comes,
the caller checks whether it is the table's next step, and discards it otherwise. One step at a time: memory holds two.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

import msgspec
import pyarrow as pa
import structlog

from tidemill.base.errors import TidemillError
from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.base.runtime.tasks import error_sentence, is_fault
from tidemill.objects.store import Buffer, ObjectStore
from tidemill.shards.api import TIME, Remap
from tidemill.shards.parts.arrow_rows import int64s, to_mask
from tidemill.spark.decode.captured import CapturedDecoder, Stop
from tidemill.spark.decode.column_batches import (
    ColumnBatch,
    find_column_batches,
    group_column_batches,
    without_batches,
)
from tidemill.spark.decode.dead_letter_rows import no_dead_letters
from tidemill.spark.decode.records import Records, SliceBatches, SliceDescriptor, cut_blocks, record_count
from tidemill.spark.decode.stream import StreamDecoder
from tidemill.spark.formats.record_format import PLAIN
from tidemill.spark.formats.schemas.writer_schema import (
    NO_SCHEMAS,
    KnownSchemas,
    MissingSchemasError,
    SchemaLookup,
    WriterSchema,
)
from tidemill.spark.formats.topic_decoder import TopicDecoder
from tidemill.spark.ingest.sources import TopicFeed
from tidemill.spark.ingest.step_planner import Step, StepPlanner
from tidemill.spark.merge.commands import (
    BEFORE_ALL,
    LIVE,
    Commands,
    Truncate,
    filter_commands,
    join_commands,
    no_commands,
    times_of,
)
from tidemill.spark.predicates.expectations import Violations, expectation_check
from tidemill.spark.stores import Stores, shared_objects
from tidemill.spark.violations import check_commands
from tidemill.topics.batch_reads import read_batches

log = structlog.get_logger()

T = TypeVar("T")
U = TypeVar("U")


class Decoded(msgspec.Struct, frozen=True):
    """Commands of some descriptors, and updates of the dead-letter shard; if the table stops, only those before the
    stop."""

    commands: Commands
    dead: pa.Table
    stop: Stop | None = None
    violations: tuple[Violations, ...] = ()
    """Violations of the table's expectations; those of commands that leave columns unchanged are counted later."""
    incomplete: bool = False
    """True if a schema of a writer is not known here: then there is no result."""


@lru_cache(maxsize=256)
def _decoder_for(feed: TopicFeed) -> CapturedDecoder | StreamDecoder | TopicDecoder:
    if not feed.captured:
        plain = feed.record_format == PLAIN
        return StreamDecoder(feed.schema) if plain else TopicDecoder(feed.schema, feed.record_format, feed.partitions)
    forms = None if feed.forms is None else dict(feed.forms)
    return CapturedDecoder(feed.schema, feed.table, feed.known, forms, feed.avro)


DECODERS = 2
"""Threads that help a driver's `decode`. Half of a block's time is native code, during which another thread can run."""
BLOCKS_IN_FLIGHT = 2 * DECODERS
"""Blocks that are decoded concurrently."""
MIN_PARALLEL_RECORDS = 5_000
"""Below this many records the calling thread decodes: handing them to a helper would take as long."""


def decode(
    feed: TopicFeed,
    descriptors: Sequence[SliceDescriptor],
    batches: Batches,
    helpers: Executor | None = None,
    schemas: SchemaLookup = NO_SCHEMAS,
) -> Decoded:
    """Decode `batches[i]`, the record batches of `descriptors[i]`. Undecodable records are in the result, never
    raised. Raises MissingSchemasError, and as `schemas`."""
    parts = list(decode_blocks(feed, descriptors, batches, helpers, schemas))
    stop = min((part.stop for part in parts if part.stop is not None), default=None)
    violations = tuple(each for part in parts for each in part.violations)
    commands = join_commands(feed.schema, [part.commands for part in parts])
    dead = pa.concat_tables([part.dead for part in parts]) if parts else no_dead_letters()
    if stop is not None:
        commands = filter_commands(commands, times_of(commands) < stop.time_ms)
        dead = dead.filter(pa.array(int64s(dead, TIME) < stop.time_ms))
        violations = tuple(each for each in violations if each.time_ms < stop.time_ms)
    return Decoded(commands, dead, stop, violations)


def decode_blocks(
    feed: TopicFeed,
    descriptors: Sequence[SliceDescriptor],
    batches: Batches,
    helpers: Executor | None = None,
    schemas: SchemaLookup = NO_SCHEMAS,
) -> Iterator[Decoded]:
    """Decode block by block, as `decode`: batches with columns first, then the others in order. The input of a block is
    released when the next block is taken, or with helpers `BLOCKS_IN_FLIGHT` blocks later.

    This thread cuts records out of their batches; `helpers` read them.
    """
    few = record_count([d.slice for d in descriptors]) < MIN_PARALLEL_RECORDS
    spread = partial(_map_concurrently, helpers) if helpers is not None and not few else map
    pieces: list[SliceBatches] = [(d.slice, data, d.refs) for d, data in zip(descriptors, batches, strict=True)]
    decoder = _decoder_for(feed)
    if isinstance(decoder, CapturedDecoder) and decoder.reads_columns:
        groups = list(group_column_batches(find_column_batches(pieces)))
        done: set[tuple[int, int]] = set()
        for group, found in zip(groups, spread(partial(_decode_columns, feed, decoder), iter(groups)), strict=True):
            if found is not None:
                yield found
                done.update(each.place for each in group)
        pieces = without_batches(pieces, done)
    yield from spread(partial(decode_block, feed, schemas=schemas), cut_blocks(pieces))
    # The table restarts on this topic: a re-snapshot of a captured table, or a stream that was deleted and created
    # again. Rows that are not in the new topic are deleted. All partitions are truncated at one time, even those
    # without records in this interval, so the result does not depend on how intervals are cut.
    begins = {d.slice.begins_ms for d in descriptors if d.slice.begins_ms >= 0}
    if begins:
        count = max(feed.partitions, *(d.slice.partition + 1 for d in descriptors))  # partitions may have been added
        gone = tuple(Truncate(time_ms, p, BEFORE_ALL) for time_ms in begins for p in range(count))
        yield Decoded(Commands(no_commands(feed.schema).rows, gone), no_dead_letters())


def _decode_columns(feed: TopicFeed, decoder: CapturedDecoder, group: Sequence[ColumnBatch]) -> Decoded | None:
    """Decode a group of batches from their columns. None: their records decide, also if a row violates an
    expectation, or for an exception that nothing foresees."""
    try:
        commands = decoder.decode_columns(group)
    except BaseException as error:
        if not is_fault(error):
            raise
        log.warning("columns are not read", table=feed.table, cause=error_sentence(error), exc_info=error)
        return None
    check = expectation_check(feed.schema, feed.expectations)
    if commands is None or (
        check is not None and check.violated(commands.rows)[:, to_mask(commands.rows.column(LIVE))].any()
    ):
        return None
    return Decoded(commands, no_dead_letters())


def _map_concurrently(helpers: Executor, call: Callable[[T], U], items: Iterator[T]) -> Iterator[U]:
    """Map `call` over items in order, with several calls running concurrently."""
    under_way: deque[Future[U]] = deque()
    for item in items:
        under_way.append(helpers.submit(call, item))
        if len(under_way) == BLOCKS_IN_FLIGHT:
            yield under_way.popleft().result()
    while under_way:
        yield under_way.popleft().result()


def decode_block(feed: TopicFeed, records: Records, schemas: SchemaLookup = NO_SCHEMAS) -> Decoded:
    """Decode a block. Raises MissingSchemasError, and as `schemas`."""
    decoder, stop = _decoder_for(feed), None
    key_of: Callable[[int], tuple[str, str]] | None = None
    if isinstance(decoder, CapturedDecoder):
        found = decoder.decode(records)
        commands, dead, stop = found.commands, found.dead, found.stop
        key_of = partial(_table_and_key, decoder, records)
    elif isinstance(decoder, TopicDecoder):
        commands, dead, stop = decoder.decode(records, schemas)
    else:
        commands, dead = decoder.decode(records)
    check = expectation_check(feed.schema, feed.expectations)
    if check is None or not commands.rows.num_rows:
        return Decoded(commands, dead, stop)
    absent = feed.captured or feed.record_format.envelope == "debezium"
    checked = check_commands(check, records, commands, key_of, absent=absent)
    stop = min((each for each in (stop, checked.stop) if each is not None), default=None)
    return Decoded(checked.commands, pa.concat_tables([dead, checked.dead]), stop, checked.violations)


def _table_and_key(decoder: CapturedDecoder, records: Records, at: int) -> tuple[str, str]:
    return decoder.table, decoder.key_as_json(records.columns, at)


Batches = Sequence[Sequence[Buffer]]
"""Record batches by descriptor: for each, those of its slice."""


async def fetch_batches(
    objects: ObjectStore, tables: Sequence[Sequence[SliceDescriptor]]
) -> list[list[list[Buffer]] | TidemillError]:
    """Fetch the record batches of each table's descriptors from the bucket alone; an unreadable table yields the error.

    An object holds batches of many tables that were received together, so it is read once for all of them.
    """
    found = iter(await read_batches(objects, [d.refs for descriptors in tables for d in descriptors]))
    out: list[list[list[Buffer]] | TidemillError] = []
    for descriptors in tables:
        mine = list(islice(found, len(descriptors)))
        error = next((one for one in mine if isinstance(one, TidemillError)), None)
        out.append(error if error is not None else [one for one in mine if not isinstance(one, TidemillError)])
    return out


def fetch_table(portal: BlockingPortal, objects: ObjectStore, descriptors: Sequence[SliceDescriptor]) -> Batches:
    """Fetch the record batches of one table. Raises as reading them."""
    (found,) = portal.call(fetch_batches(objects, [descriptors]))
    if isinstance(found, TidemillError):
        raise found
    return found


def fetch_and_decode(
    objects_url: str, feed: TopicFeed, descriptors: Sequence[SliceDescriptor], schemas: Sequence[WriterSchema] = ()
) -> Decoded:
    """Fetch and decode in a worker process, with the schemas of writers that are given."""
    portal, objects = shared_objects(objects_url)
    batches = fetch_table(portal, objects, descriptors)
    try:
        return decode(feed, descriptors, batches, schemas=KnownSchemas(schemas))
    except MissingSchemasError:
        return Decoded(no_commands(feed.schema), no_dead_letters(), incomplete=True)


def to_ipc(table: pa.Table) -> bytes:
    if table.num_rows == 0:
        return b""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue().to_pybytes())


def from_ipc(data: bytes, empty: pa.Table) -> pa.Table:
    return pa.ipc.open_stream(data).read_all() if data else empty


def boot_id() -> str:
    """Return the id of this boot of this machine: files that were not synced are trusted only within one boot."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def mirror_identity(life: str) -> str:
    """Return the identity under which a mirror on disk is saved and trusted: this boot, and this life of consensus.
    After a restore, consensus may accept appends that do not continue the mirror's contents."""
    return f"{boot_id()} {life}".strip()


class PrefetchedStep(msgspec.Struct, frozen=True):
    step: Step
    decoded: Decoded


class Prefetcher:
    """Prefetcher of one feed. Called by one thread at a time."""

    def __init__(self, portal: BlockingPortal, stores: Stores, remap: Remap, helpers: Executor | None = None) -> None:
        self._portal = portal
        self._helpers = helpers
        self._stores = stores
        # A separate planner, because a planner's round belongs to one caller.
        self._planner = StepPlanner(stores, remap)
        self._of: tuple[str, TopicFeed, int] | None = None
        self._under_way: Future[PrefetchedStep | None] | None = None
        self.bytes = 0
        """Stored bytes of the prefetched step."""

    def start(
        self, table: str, feed: TopicFeed, schemas: SchemaLookup, lower: int, end: int, most_records: int
    ) -> None:
        """Start to read the table's step from `lower`, at most to `end`; a step of more than `most_records` is not
        read."""
        self.discard()
        if self._under_way is not None:
            return  # the discarded prefetch has not ended yet
        self._of = (table, feed, lower)
        self._under_way = under_way = Future[PrefetchedStep | None]()

        def run() -> None:
            try:
                under_way.set_result(self._read(table, feed, schemas, lower, end, most_records))
            except BaseException as error:  # of any type: `wait_result` handles it
                under_way.set_exception(error)

        # A daemon thread, because it may wait for storage when the process ends.
        threading.Thread(target=run, name="ahead", daemon=True).start()

    def is_for(self, table: str, feed: TopicFeed, lower: int) -> bool:
        return self._of == (table, feed, lower)

    def wait_result(self) -> PrefetchedStep | None:
        """Wait for the step and return it; None if it is too large or could not be read: then the caller reads it
        itself, and reports the error."""
        under_way, self._of = self._under_way, None
        error = under_way.exception() if under_way is not None else None
        self._under_way, self.bytes = None, 0
        return under_way.result() if under_way is not None and error is None else None

    def discard(self) -> None:
        """Discard the step."""
        self._of = None
        if self._under_way is not None and self._under_way.done():
            self._under_way = None
            self.bytes = 0

    def _read(
        self, table: str, feed: TopicFeed, schemas: SchemaLookup, lower: int, end: int, most_records: int
    ) -> PrefetchedStep | None:
        self._planner.start_round()
        step = self._portal.call(self._planner.next(table, feed, lower, end))
        if step.large or step.records > most_records or not step.slices:
            return None
        self.bytes = step.bytes
        batches = fetch_table(self._portal, self._stores.objects, step.descriptors)
        return PrefetchedStep(step, decode(feed, step.descriptors, batches, self._helpers, schemas))
