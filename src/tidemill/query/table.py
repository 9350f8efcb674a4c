"""`Table`: one shard of a cluster, read at one time, or followed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from tidemill.base.errors import InvalidError, MissingError, unknown_name
from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.base.runtime.sync_context import SyncContext
from tidemill.query.changelog import following, following_one
from tidemill.query.filters import Filter, Where, filter_of
from tidemill.query.table_read import Chosen, chosen, rows_of
from tidemill.shards.api import Delta
from tidemill.shards.parts.schema import contents_schema
from tidemill.shards.read.part_bytes import fetching
from tidemill.shards.read.row_count import count_rows
from tidemill.shards.read.time_parsing import as_of_ms
from tidemill.spark.stores import Stores

if TYPE_CHECKING:
    import duckdb
    import polars as pl

    from tidemill.query.cluster import Cluster
    from tidemill.shards.handle import LogShard

Moment = int | str | datetime | None
"""ms since 1970, ISO 8601 text or a datetime (UTC when they name no zone); None or "latest" = the newest there is."""

WAIT_S = 60.0


class Frontiers(NamedTuple):
    """Readable are the times since ≤ t < upper, in ms since 1970. Nothing was ever written while upper is 0."""

    since: int
    upper: int


class Table:
    """A table of a cluster. Every read is the exact contents at one time, whoever writes meanwhile.

    What reads have in common:

    columns   names, in the order that is wanted; None = all. Only these (and the key) are fetched and decoded
    where     a filter (`query.where.Where`); equality with the whole key reads only where that key may be
    as_of     the time, see `Moment`
    wait_s    how long to wait until `as_of` is final

    They raise InvalidError (a column, a filter, a time that makes no sense), HistoryLost (the time is below since),
    Unavailable (it is not final in time, or a store is away), MissingError (the table was dropped), Corrupt, Closed.
    """

    def __init__(self, cluster: Cluster, portal: BlockingPortal, stores: Stores, name: str) -> None:
        self.name = name
        self._cluster = cluster  # for as long as a table of it is used, it stays open
        self._portal = portal
        self._stores = stores
        self._shard: LogShard = portal.call(stores.shard(name))

    @property
    def schema(self) -> pa.Schema:
        """The columns, as of the last read: a table may gain columns and wider types."""
        return contents_schema(self._shard.schema)

    @property
    def key(self) -> tuple[str, ...]:
        """The columns of which there is one row for each value; empty = a row is its own key, and may repeat."""
        return self._shard.schema.key

    def frontiers(self) -> Frontiers:
        """Which times can be read, now."""
        return Frontiers(*self._portal.call(self._shard.frontiers()))

    def count(self, where: Where | None = None, *, as_of: Moment = None, wait_s: float = WAIT_S) -> int:
        """How many rows there are. Without a filter no row is read: the diffs of all updates are summed."""
        if where is not None:
            only = self._filter(where)
            with self.to_batches(only.names[:1] or None, where, as_of=as_of, wait_s=wait_s) as reader:
                return sum(batch.num_rows for batch in reader)
        with self._choose(as_of, wait_s, long=False) as found:
            fetch = fetching(self._portal, self._stores.objects, whole=False)
            try:
                return count_rows(found.batches, found.at, fetch)
            except MissingError as error:
                raise self._portal.call(self._shard.why_missing(error, found.batches)) from error

    def to_arrow(
        self,
        columns: Sequence[str] | None = None,
        where: Where | None = None,
        *,
        as_of: Moment = None,
        wait_s: float = WAIT_S,
    ) -> pa.Table:
        """All of it in memory. Rows in no order."""
        with self._reader(columns, where, as_of, wait_s, long=False) as reader:
            return reader.read_all()

    def to_batches(
        self,
        columns: Sequence[str] | None = None,
        where: Where | None = None,
        *,
        as_of: Moment = None,
        wait_s: float = WAIT_S,
    ) -> pa.RecordBatchReader:
        """A stream of it: memory holds one row group and what is not merged of one range of keys, whatever the size.

        The time is fixed and held by this call, until the reader is at its end, closed or forgotten: what others write
        meanwhile changes nothing. A reader of Arrow's: DuckDB, Polars and `pyarrow.dataset.write_dataset` take it too.
        """
        return self._reader(columns, where, as_of, wait_s, long=True)

    def changes(self, since: Moment, *, follow: bool = False) -> Iterator[pa.Table]:
        """Every update after the time `since`, once, in tables of one or several whole appends: the columns, `_time`
        (ms) and `_diff`.

        An update of a row is its retraction (`_diff` −1) and the new row (+1), at one time. Ends with what is final
        now; with `follow` it waits for more, for ever. What was yielded is complete up to its greatest `_time`: begin
        there again. History is held while the iterator is in use, and for five minutes more.

        Raises HistoryLost when updates after `since` can no longer be told apart: begin with `to_arrow`, at a newer
        time. Evolved when the table's schema changed meanwhile: begin another, after what was yielded.
        """
        at = as_of_ms(since)
        if at is None:
            at = self.frontiers().upper - 1
        deltas = following(self._fresh(), self._stores.clock, at, follow=follow)
        return self._changed(self._cluster._enter(deltas))

    def to_polars(
        self,
        columns: Sequence[str] | None = None,
        where: Where | None = None,
        *,
        as_of: Moment = None,
        wait_s: float = WAIT_S,
    ) -> pl.DataFrame:
        """All of it as a DataFrame. Raises InvalidError as well where polars is not installed."""
        from tidemill.query.polars_frames import polars

        frame: pl.DataFrame = polars().from_arrow(self.to_arrow(columns, where, as_of=as_of, wait_s=wait_s))
        return frame

    def scan_polars(self, *, as_of: Moment = None, wait_s: float = WAIT_S) -> pl.LazyFrame:
        """A LazyFrame at one time, which is held until the last frame made from it is gone; columns that a query does
        not use are not read. Raises InvalidError as well where polars is not installed."""
        from tidemill.query.polars_frames import scan

        return scan(self, self._choose(as_of, wait_s, long=True))

    def to_duckdb(
        self,
        connection: duckdb.DuckDBPyConnection,
        name: str | None = None,
        *,
        as_of: Moment = None,
        wait_s: float = WAIT_S,
    ) -> duckdb.DuckDBPyRelation:
        """A temporary view `name` (the table's own name) of `connection`, at one time, and the relation of it.

        DuckDB reads of it what a query uses. The time is held while the connection has the view: until it is closed, or
        the table is given to it again under this name, at a newer time. For several tables at one time:
        `Cluster.to_duckdb`. Raises InvalidError as well for a name that DuckDB has something else under.
        """
        from tidemill.query.duckdb_views import make_view, quoted

        chosen = self._choose(as_of, wait_s, long=True)
        try:
            make_view(connection, self, chosen, name or self.name)
        except BaseException:
            chosen.leave()
            raise
        return connection.sql(f"SELECT * FROM {quoted(name or self.name)}")

    def __repr__(self) -> str:
        return f"<tidemill.Table {self.name}: {', '.join(self.schema.names)}>"

    # ------------------------------------------------------------------------------------------------

    def _changed(self, entered: SyncContext[AsyncIterator[Delta]]) -> Iterator[pa.Table]:
        with entered as deltas:
            while (delta := self._portal.call(following_one(deltas))) is not None:
                if delta.rows.num_rows:
                    yield delta.rows

    def _reader(
        self, columns: Sequence[str] | None, where: Where | None, as_of: Moment, wait_s: float, *, long: bool
    ) -> pa.RecordBatchReader:
        found = self._choose(as_of, wait_s, long=long)
        try:
            return self._over(found, columns, where, end=found.leave)
        except BaseException:
            found.leave()
            raise

    def _over(
        self, found: SyncContext[Chosen], columns: Sequence[str] | None, where: Where | None, end: Callable[[], None]
    ) -> pa.RecordBatchReader:
        """What was chosen, as a stream; `end` is called at its end, or when it is given up."""
        names = self._columns(columns)
        only = None if where is None else self._filter(where)
        read = names if only is None else [*names, *(n for n in only.names if n not in names)]
        wanted = None if only is None else only.hashes
        tables = rows_of(self._portal, self._stores.objects, self._shard, found.value, read, wanted)

        def batches() -> Iterator[pa.RecordBatch]:
            try:
                for table in tables:
                    rows = table if only is None else only.passing(table).select(names)
                    yield from rows.to_batches()
            finally:
                end()

        schema = pa.schema([self.schema.field(name) for name in names])
        return pa.RecordBatchReader.from_batches(schema, batches())

    def _choose(self, as_of: Moment, wait_s: float, *, long: bool) -> SyncContext[Chosen]:
        at = as_of_ms(as_of)
        found = self._cluster._enter(chosen(self._fresh(), at, wait_s, long=long))
        if all(batch.schema_version <= self._shard.schema.version for batch in found.value.batches):
            return found
        found.leave()  # the schema changed between the two looks
        return self._cluster._enter(chosen(self._fresh(), at, wait_s, long=long))

    def _fresh(self) -> LogShard:
        """The handle, of the newest schema. Raises MissingError, Unavailable."""
        self._portal.call(self._shard.frontiers())
        if self._shard.state.schema.version != self._shard.schema.version:
            self._shard = self._portal.call(self._stores.shard(self.name))
        return self._shard

    def _columns(self, columns: Sequence[str] | None) -> list[str]:
        have = self.schema.names
        names = have if columns is None else list(columns)
        if isinstance(columns, str) or not names or len(set(names)) < len(names):
            raise InvalidError(
                f"columns are no list of names: table={self.name} columns={columns!r}.",
                fix="Give a list of one or more different names, or leave it out for all.",
            )
        for name in names:
            if name not in have:
                raise InvalidError(
                    f"no such column: table={self.name} column={name}.", fix=unknown_name(str(name), have)
                )
        return names

    def _filter(self, where: Where) -> Filter:
        return filter_of(self._shard.schema, where)
