"""Verification of tables by their source in the catalogue: a captured table, a topic, or a function of other tables.

A captured table may have dead letters. A poisoned row is neither present nor equal: it is counted separately and named.
After a later repair the key is in the shard again, so an old dead letter explains only a missing row.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.compute as pc
from msgspec.structs import replace

from tidemill.base.errors import InvalidError, MissingError, unknown_name_fix
from tidemill.cli.context import OpenStores
from tidemill.cli.verify.canonical_values import canonical_column, float_canonicalizer, ordered_columns
from tidemill.cli.verify.compare import Row
from tidemill.cli.verify.derived import RecomputedTable
from tidemill.cli.verify.table import Progress, Verified, verify_captured, verify_expected
from tidemill.cli.verify.topic_fold import TopicFold
from tidemill.console.captured_names import maintain_line, tables_of_any_name
from tidemill.console.dead_letter_read import NewestFirst, read_pieces
from tidemill.console.views.captures import shown_state
from tidemill.metastore.catalogue import PipelineRow, TopicRow
from tidemill.shards.api import Remap, Shard, ShardSchema
from tidemill.shards.handle import LogShard
from tidemill.shards.read.read_handle import ShardReadHandle
from tidemill.shards.registry import open_remap, open_shard
from tidemill.spark.decode.captured import CapturedDecoder
from tidemill.spark.decode.records import Records
from tidemill.spark.definition import Pipeline, load_pipeline
from tidemill.spark.formats.record_format import PLAIN, RecordFormat, decode_format
from tidemill.spark.formats.schemas.lookup import SchemaCache, schema_source
from tidemill.spark.ingest.sources import TopicFeed, column_forms
from tidemill.spark.merge.commands import ORDER
from tidemill.spark.predicates.expectations import DROP, Expectations
from tidemill.topics.batch.records import columns_from_fields
from tidemill.topics.l1.reader import open_l1_reader
from tidemill.topics.partition_reader import LogPartitionReader


class VerificationPlan(msgspec.Struct):
    """Table names by kind of source."""

    captured: dict[str, list[tuple[str, str]]] = {}
    """Captured tables: capture → [(schema.table, shard)]."""
    topics: dict[str, str] = {}
    """Tables of topics: shard → topic."""
    formats: dict[str, RecordFormat] = {}
    """Formats of topics, except plain JSON: shard → format."""
    derived: list[str] = []
    pipelines: dict[str, str] = {}
    """Maintaining pipelines: shard → pipeline."""


class Verifier:
    """Verification of tables against their sources, with the stores of one configuration."""

    def __init__(self, stores: OpenStores, progress: Progress) -> None:
        self._stores = stores
        self._config = stores.config
        self._catalogue = stores.catalogue
        self._progress = progress

    async def tables(self, names: Iterable[str] = ()) -> list[Verified]:
        """Verify the named tables, or without names all that pipelines maintain.

        Without names, a table that cannot be compared is reported as `unverified`. Raises InvalidError (a named table
        cannot be compared), MissingError (an unknown table).
        """
        plan = await self._plan_verification(tuple(names))
        found: list[Verified] = []
        for capture, pairs in plan.captured.items():
            found += await self._verify_capture(capture, pairs, named=bool(names))
        for shard in (*plan.topics, *plan.derived):
            try:
                found += await self._verify_uncaptured(shard, plan, named=bool(names))
            except InvalidError as error:
                if names:
                    raise
                found.append(_unverified(shard, error))
        return found

    async def _verify_uncaptured(self, name: str, plan: VerificationPlan, *, named: bool) -> list[Verified]:
        """Verify the table of a topic, or a derived table. Return no result for a history that is not named."""
        pipeline_name = plan.pipelines[name]
        if name in plan.topics:
            expectations = self._expectations_of(name, pipeline_name)
            return [await self._verify_stream(name, plan.topics[name], expectations, plan.formats.get(name, PLAIN))]
        pipeline = self._load_pipeline(pipeline_name)
        if name not in pipeline.histories:
            return [await self._verify_derived(name, pipeline)]
        if named:
            raise InvalidError(
                f"the former versions of a history are in no other table: table={name}.",
                fix=f"Verify its input: tidemill verify {pipeline.histories[name].of}",
            )
        return []

    async def _plan_verification(self, names: tuple[str, ...]) -> VerificationPlan:
        fed_by: dict[str, str] = {}
        plan = VerificationPlan()
        for row in await self._catalogue.list(PipelineRow):
            fed_by |= row.tables
            plan.formats |= {table: decode_format(text) for table, text in row.formats.items()}
            plan.pipelines |= dict.fromkeys(row.tables, row.name)
        for name in names or tuple(fed_by):
            if name not in fed_by:
                raise await self._not_maintained(name, fed_by)
            kind, _, rest = fed_by[name].partition(":")
            if kind == "capture":
                capture, _, source = rest.partition(":")
                plan.captured.setdefault(capture, []).append((source, name))
            elif kind == "topic":
                plan.topics[name] = rest
            else:
                plan.derived.append(name)
        return plan

    async def _not_maintained(self, name: str, maintained: Collection[str]) -> MissingError:
        for row in tables_of_any_name(await self._catalogue.all_tables(), name):
            return MissingError(
                f"no pipeline maintains this table: table={name}; it is {shown_state(row)} by {row.capture}.",
                fix=f"To maintain it, add to a pipeline: {maintain_line(row)}",
            )
        return MissingError(
            f"no pipeline maintains this table: table={name}.", fix=unknown_name_fix(name, sorted(maintained))
        )

    async def _verify_capture(self, capture: str, pairs: list[tuple[str, str]], *, named: bool) -> list[Verified]:
        """Verify tables of a capture together; if one of them cannot be compared and none is named, each alone."""
        try:
            return await self._verify_captured(capture, pairs, named=named)
        except InvalidError as error:
            if named:
                raise
            if len(pairs) == 1:
                return [_unverified(pairs[0][1], error)]
        return [verified for pair in pairs for verified in await self._verify_capture(capture, [pair], named=named)]

    async def _verify_captured(self, capture: str, pairs: list[tuple[str, str]], *, named: bool) -> list[Verified]:
        section = self._config.capture.get(capture)
        if section is None:
            raise InvalidError(
                f"the configuration has no such capture: key=capture.{capture}.", fix="Add the capture with its DSN."
            )
        remap = await self._open_remap(f"capture/{capture}")
        found: dict[str, Verified] = {}
        tables = []
        for source, name in pairs:
            row = await self._catalogue.table(capture, source)
            if row is None or not row.is_streaming:
                why = row.reason if row is not None and row.reason else "the table is not captured yet"
                found[name] = replace(_uncompared(name), parked=why)
                continue
            try:
                tables.append((source, await self._open_shard(name)))
            except MissingError as error:  # its pipeline has not computed it yet
                if named:
                    raise
                found[name] = _unverified(name, error)
        if tables:
            done = await verify_captured(
                section.dsn,
                remap,
                tables,
                self._stores.rand,
                progress=self._progress,
                poisoned=self._read_poisoned_keys,
            )
            found |= {verified.table: verified for verified in done}
        return [found[name] for _, name in pairs]

    async def _read_poisoned_keys(self, table: str, shard: Shard) -> dict[Row, str]:
        found: dict[Row, str] = {}
        for row in await self._catalogue.list(PipelineRow):
            if shard.name in row.tables and row.dead_letters:
                captured = await self._catalogue.table(row.tables[shard.name].split(":")[1], table)
                forms = column_forms(captured) if captured is not None else None
                with contextlib.suppress(MissingError):
                    letters = await self._open_shard(row.dead_letters)
                    found |= await poisoned_keys(letters, table, shard.schema, dict(forms) if forms else None)
        return found

    def _expectations_of(self, table: str, pipeline: str) -> Expectations | None:
        """Return the expectations in the pipeline's file. A pipeline that is not configured here has none."""
        if pipeline not in self._config.pipeline:
            return None
        found = self._load_pipeline(pipeline).expectations.get(table)
        # Violations do not stop this reader: the table has stopped before them, or has skipped them.
        return replace(found, on_violation=DROP) if found is not None else None

    async def _verify_stream(
        self, name: str, topic: str, expectations: Expectations | None, record_format: RecordFormat
    ) -> Verified:
        row = await self._catalogue.get(TopicRow, topic)
        if row is None:
            raise MissingError(f"the topic of this table does not exist: table={name} topic={topic}.")
        remap = await self._open_remap(f"topic/{topic}")
        latest = await remap.latest()
        if latest is None:
            raise MissingError(f"the topic has no binding yet: topic={topic}.", fix="Start a node with: tidemill up")
        shard = await self._open_shard(name)
        feed = TopicFeed(
            row.name, row.topic_id, row.partitions, False, shard.schema, record_format=record_format,
            expectations=expectations,
        )  # fmt: skip
        stores = self._stores
        schemas = SchemaCache(schema_source(stores.metastore, record_format))
        l1 = open_l1_reader(stores.metastore, stores.objects, stores.clock, stores.rand)
        fold = TopicFold(remap, LogPartitionReader(stores.consensus, stores.objects, l1), feed, latest.time_ms, schemas)
        return await verify_expected(shard, latest.time_ms, fold.rows, progress=self._progress)

    async def _verify_derived(self, name: str, pipeline: Pipeline) -> Verified:
        from tidemill.spark.session.session import build_session

        table = pipeline.derived_tables[name]
        output = await self._open_shard(name)
        spark = build_session("tidemill-verify", "local[2]")
        recomputed = RecomputedTable(spark, table, output, [await self._open_shard(i) for i in table.inputs])
        time_ms = await recomputed.choose_comparison_time()
        return await verify_expected(output, time_ms, recomputed.rows, progress=self._progress)

    async def _open_shard(self, name: str) -> LogShard:
        stores = self._stores
        return await open_shard(stores.consensus, stores.objects, stores.clock, stores.rand, name)

    async def _open_remap(self, name: str) -> Remap:
        return await open_remap(self._stores.consensus, self._stores.clock, self._stores.rand, name)

    def _load_pipeline(self, name: str) -> Pipeline:
        section = self._config.pipeline.get(name)
        if section is None:
            raise InvalidError(
                f"the configuration has no such pipeline: key=pipeline.{name}.", fix="Add the pipeline with its file."
            )
        return load_pipeline(Path(section.file), name)


def _uncompared(name: str) -> Verified:
    return Verified(name, 0, 0, 0, 0, "", "", 0, 0)


def _unverified(name: str, error: InvalidError) -> Verified:
    return replace(_uncompared(name), unverified=f"{error.message} {error.fix}".strip())


async def poisoned_keys(
    letters: ShardReadHandle, table: str, schema: ShardSchema, forms: Mapping[str, str] | None = None
) -> dict[Row, str]:
    """Return key → reason of its newest dead letter, for the captured `table` (schema.table). Older shards of dead
    letters contain no keys; the result is then empty."""
    if "key" not in {c.name for c in letters.schema.columns}:
        return {}
    try:
        _, upper = await letters.frontiers()
    except MissingError:
        return {}
    found: dict[str, tuple[Any, int, str]] = {}
    newest = NewestFirst()
    for batch in reversed(await letters.batches_until(upper - 1) if upper else []):
        async for piece in read_pieces(letters, batch, upper, ("at", "table", "key", "reason")):
            rows = newest.live(piece)
            of_table = rows.filter(pc.and_(pc.equal(rows.column("table"), table), pc.not_equal(rows.column("key"), "")))
            fields = (of_table.column(name).to_pylist() for name in ("key", "at", "offset", "reason"))
            for key, *letter in zip(*fields, strict=True):
                found[key] = max(found.get(key, (letter[0], -1, "")), tuple(letter))
    by_age = sorted(found.items(), key=lambda each: each[1])
    keys = canonical_keys([key.encode() for key, _ in by_age], schema, forms)
    said = [reason for _, (_, _, reason) in by_age]
    return {row: said[place] for row, place in keys.items()}


def canonical_keys(
    keys: Sequence[bytes | None], schema: ShardSchema, forms: Mapping[str, str] | None = None
) -> dict[Row, int]:
    """Return the canonical keys with their places in `keys`, which are as in topics: JSON of the key columns, in the
    representations of `forms` in event topics. A key that no key column can hold is left out: it can be in no shard."""
    columns_of_keys = columns_from_fields(keys, [None] * len(keys))
    records = Records("", 0, columns_of_keys.timestamps_ms, columns_of_keys)
    rows = CapturedDecoder(schema, forms=forms).decode(records).commands.rows
    columns = ordered_columns(schema)[: len(schema.key)]
    values: list[list[Any]] = [canonical_column(rows.column(c.name), c).to_pylist() for c in columns]
    fix = float_canonicalizer(columns)
    out = zip(*values, strict=True)
    return dict(zip(map(fix, out) if fix is not None else out, rows.column(ORDER).to_pylist(), strict=True))
