"""Expected contents of a table that follows a topic: the last record of each key up to a time, or the one with the
greatest sequence, folded on disk."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

from tidemill.base.errors import InvalidError
from tidemill.cli.verify.compare import Row
from tidemill.cli.verify.spool import Spool
from tidemill.shards.api import TIME, Binding, Remap
from tidemill.spark.decode.records import Records, cut_blocks, cut_slices
from tidemill.spark.formats.schemas.lookup import SchemaCache
from tidemill.spark.formats.schemas.writer_schema import KnownSchemas, MissingSchemasError, WriterSchema
from tidemill.spark.ingest.fetch_decode import Decoded, decode_block
from tidemill.spark.ingest.sources import TopicFeed
from tidemill.spark.merge.commands import LIVE, ORDER, PARTITION, UNCHANGED
from tidemill.topics.api import PartitionReader

BINDINGS_AT_ONCE = 2_000
REFS_AT_ONCE = 32


class TopicFold:
    """Fold of a topic. `malformed` counts the records that no table can hold; it is known once `rows` has yielded."""

    def __init__(
        self, remap: Remap, reader: PartitionReader, feed: TopicFeed, time_ms: int, schemas: SchemaCache | None = None
    ) -> None:
        """Create the fold. `schemas`: of the topic's writers, if its format needs them."""
        self._remap = remap
        self._reader = reader
        self._feed = feed
        self._time_ms = time_ms
        self._schemas = schemas
        self.malformed = 0
        self.records = 0

    async def rows(self, scratch: Path) -> AsyncIterator[list[Row]]:
        """Yield the live rows in key order, as `verify_expected` needs them. Raises the errors of reading the topic."""
        spool = Spool(scratch, "topic", self._feed.schema)
        try:
            async for base, page in self._binding_pages():
                await self._add_page(spool, base, page)
            sequence = self._feed.record_format.sequence_rule
            if sequence is not None and await spool.count_revived(sequence.columns, sequence.keep_ms):
                raise InvalidError(
                    "a topic with records that are later than sequence_keep_s after a deletion of their key cannot be"
                    f" verified: topic={self._feed.topic}.",
                    fix="Compare the table with a batch job over the topic.",
                )
            async for chunk in spool.last_per_key(self._feed.record_format.sequence_by):
                yield chunk
        finally:
            await spool.aclose()

    async def _binding_pages(self) -> AsyncIterator[tuple[Binding | None, list[Binding]]]:
        base: Binding | None = None
        after_ms = -1
        while True:
            found = await self._remap.after(after_ms, BINDINGS_AT_ONCE)
            page = [b for b in found if b.time_ms <= self._time_ms]
            if page:
                yield base, page
                base, after_ms = page[-1], page[-1].time_ms
            if len(page) < BINDINGS_AT_ONCE:
                return

    async def _add_page(self, spool: Spool, base: Binding | None, page: list[Binding]) -> None:
        for piece in cut_slices(base, page, self._feed.topic, self._feed.topic_id):
            refs = await self._reader.plan(piece.topic_id, piece.partition, piece.start, piece.end)
            for at in range(0, len(refs), REFS_AT_ONCE):
                some = refs[at : at + REFS_AT_ONCE]
                for records in cut_blocks([(piece, await self._reader.read(some), some)]):
                    found = await self._decode(records)
                    self._check_foldable(found)
                    self.records += len(records)
                    self.malformed += found.dead.num_rows
                    rows = found.commands.rows
                    await spool.add_commands(
                        rows, rows.column(LIVE), rows.column(TIME), rows.column(PARTITION), rows.column(ORDER)
                    )

    async def _decode(self, records: Records) -> Decoded:
        schemas: dict[int, WriterSchema] = {}
        while True:
            try:
                return decode_block(self._feed, records, KnownSchemas(schemas.values()))
            except MissingSchemasError as missing:
                if self._schemas is None:
                    raise
                schemas |= await self._schemas.load({*schemas, *missing.ids})

    def _check_foldable(self, found: Decoded) -> None:
        """Raise InvalidError for commands that depend on more than their own key's records."""
        if found.commands.truncates or found.stop is not None or UNCHANGED in found.commands.rows.column_names:
            raise InvalidError(
                "a topic with truncations, or with values that were not sent, cannot be verified:"
                f" topic={self._feed.topic}.",
                fix="Compare the table with the source database.",
            )
