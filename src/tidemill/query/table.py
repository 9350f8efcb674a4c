"""`Table`: one shard of a cluster, read at one time, or followed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from tidemill.base.errors import InvalidError, MissingError, unknown_name_fix
from tidemill.base.runtime.blocking_portal import BlockingPortal, SyncContext
from tidemill.query.filters import Filter, Where, parse_filter
from tidemill.query.polars_scan import import_polars, lazy_frame
from tidemill.query.table_read import (
    ReadSelection,
    next_delta,
    open_changelog,
    read_rows,
    select_read,
)
from tidemill.shards.api import Delta
from tidemill.shards.parts.schema import contents_schema
from tidemill.shards.read.hash_ranges import count_rows
from tidemill.shards.read.holds import as_of_ms
from tidemill.shards.read.part_reader import fetch_through
from tidemill.spark.stores import Stores

if TYPE_CHECKING:
    import duckdb
    import polars as pl

    from tidemill.query.cluster import Cluster
    from tidemill.shards.handle import LogShard

Moment = int | str | datetime | None
"""ms since 1970, ISO 8601 text or a datetime (UTC if without a zone); None or "latest" = the newest time."""

WAIT_S = 60.0


class Frontiers(NamedTuple):
    """Readable times: since ≤ t < upper, in ms since 1970. While upper is 0, nothing was ever written."""

    since: int
    upper: int


class Table:
    """A table of a cluster. Every read returns the exact contents at one time, independent of concurrent writers.

    Common parameters of reads:

    columns   names, in the requested order; None = all. Only these (and the key) are fetched and decoded
    where     a filter (`query.filters.Where`); equality with the whole key reads only where that key may be
    as_of     the time, see `Moment`
    wait_s    maximum wait until `as_of` is final

    Reads raise InvalidError (an invalid column, filter or time), HistoryLostError (the time is below since),
    UnavailableError (the time is not final within `wait_s`, or a store is unavailable), MissingError (the table was
    dropped), CorruptError, ClosedError.
    """

    def __init__(self, cluster: Cluster, portal: BlockingPortal, stores: Stores, name: str) -> None:
        self.name = name
        self._cluster = cluster  # a reference that keeps the cluster open while the table is in use
        self._portal = portal
        self._stores = stores
        self._shard: LogShard = portal.call(stores.shard(name))

    @property
    def schema(self) -> pa.Schema:
        """Columns as of the last read: a table may gain columns and wider types."""
        return contents_schema(self._shard.schema)

    @property
    def key(self) -> tuple[str, ...]:
        """Columns with one row for each value; empty = the whole row is the key, and may occur several times."""
        return self._shard.schema.key

    def frontiers(self) -> Frontiers:
        """Return the times that can be read now."""
        return Frontiers(*self._portal.call(self._shard.frontiers()))

    def count(self, where: Where | None = None, *, as_of: Moment = None, wait_s: float = WAIT_S) -> int:
        """Return the number of rows. Without a filter no row is read: the diffs of all updates are summed."""
        if where is not None:
            only = self._parse_filter(where)
            with self.to_batches(only.names[:1] or None, where, as_of=as_of, wait_s=wait_s) as reader:
                return sum(batch.num_rows for batch in reader)
        with self._choose_batches(as_of, wait_s, long=False) as found:
            fetch = fetch_through(self._portal, self._stores.objects, whole=False)
            try:
                return count_rows(found.batches, found.at, fetch)
            except MissingError as error:
                raise self._portal.call(self._shard.explain_missing(error, found.batches)) from error

    def to_arrow(
        self,
        columns: Sequence[str] | None = None,
        where: Where | None = None,
        *,
        as_of: Moment = None,
        wait_s: float = WAIT_S,
    ) -> pa.Table:
        """Return all rows in memory, in no particular order."""
        with self._open_reader(columns, where, as_of, wait_s, long=False) as reader:
            return reader.read_all()

    def to_batches(
        self,
        columns: Sequence[str] | None = None,
        where: Where | None = None,
        *,
        as_of: Moment = None,
        wait_s: float = WAIT_S,
    ) -> pa.RecordBatchReader:
        """Return a stream of all rows. Memory holds one row group and the unmerged updates of the table (at most
        32 MiB encoded) or of one range of keys, for a table of any size.

        The call fixes and holds the time until the reader is exhausted, closed or garbage-collected: concurrent writes
        do not matter. It is an Arrow reader, so DuckDB, Polars and `pyarrow.dataset.write_dataset` accept it too.
        """
        return self._open_reader(columns, where, as_of, wait_s, long=True)

    def changes(self, since: Moment, *, follow: bool = False) -> Iterator[pa.Table]:
        """Yield every update after the time `since`, once, in tables of one or several whole appends: the columns,
        `_time` (ms) and `_diff`.

        An update of a row is its retraction (`_diff` −1) and the new row (+1), at one time. Ends with the updates that
        are final now; with `follow` it waits for more, indefinitely. The yielded tables are complete up to their
        greatest `_time`: resume from there. History is held while the iterator is in use, and for five minutes after.

        Raises HistoryLostError if updates after `since` are no longer available separately: restart with `to_arrow`, at
        a newer time. Raises SchemaEvolvedError if the table's schema changes: start another iterator, after the yielded
        updates.
        """
        at = as_of_ms(since)
        if at is None:
            at = self.frontiers().upper - 1
        deltas = open_changelog(self._refresh_shard(), self._stores.clock, at, follow=follow)
        return self._yield_changes(self._cluster._enter_read(deltas))

    def to_polars(
        self,
        columns: Sequence[str] | None = None,
        where: Where | None = None,
        *,
        as_of: Moment = None,
        wait_s: float = WAIT_S,
    ) -> pl.DataFrame:
        """Return all rows as a DataFrame. Also raises InvalidError if polars is not installed."""
        frame: pl.DataFrame = import_polars().from_arrow(self.to_arrow(columns, where, as_of=as_of, wait_s=wait_s))
        return frame

    def scan_polars(self, *, as_of: Moment = None, wait_s: float = WAIT_S) -> pl.LazyFrame:
        """Return a LazyFrame at one time, which is held until the last frame derived from it is gone; columns that a
        query does not use are not read. Also raises InvalidError if polars is not installed."""
        return lazy_frame(self, self._choose_batches(as_of, wait_s, long=True))

    def to_duckdb(
        self,
        connection: duckdb.DuckDBPyConnection,
        name: str | None = None,
        *,
        as_of: Moment = None,
        wait_s: float = WAIT_S,
    ) -> duckdb.DuckDBPyRelation:
        """Create a temporary view `name` (default: the table's name) of `connection` at one time, and return its
        relation.

        DuckDB reads only the data that a query uses. The time is held while the connection has the view: until it is
        closed, or this is called again for the same name at a newer time. For several tables at one time use
        `Cluster.to_duckdb`. Also raises InvalidError if DuckDB has another object of that name.
        """
        from tidemill.query.duckdb_views import make_view, quote_identifier

        chosen = self._choose_batches(as_of, wait_s, long=True)
        try:
            make_view(connection, self, chosen, name or self.name)
        except BaseException:
            chosen.exit()
            raise
        return connection.sql(f"SELECT * FROM {quote_identifier(name or self.name)}")

    def __repr__(self) -> str:
        return f"<tidemill.Table {self.name}: {', '.join(self.schema.names)}>"

    # ------------------------------------------------------------------------------------------------

    def _yield_changes(self, entered: SyncContext[AsyncIterator[Delta]]) -> Iterator[pa.Table]:
        with entered as deltas:
            while (delta := self._portal.call(next_delta(deltas))) is not None:
                if delta.rows.num_rows:
                    yield delta.rows

    def _open_reader(
        self, columns: Sequence[str] | None, where: Where | None, as_of: Moment, wait_s: float, *, long: bool
    ) -> pa.RecordBatchReader:
        found = self._choose_batches(as_of, wait_s, long=long)
        try:
            return self._stream_chosen(found, columns, where, end=found.exit)
        except BaseException:
            found.exit()
            raise

    def _stream_chosen(
        self,
        found: SyncContext[ReadSelection],
        columns: Sequence[str] | None,
        where: Where | None,
        end: Callable[[], None],
    ) -> pa.RecordBatchReader:
        """Return a stream of the chosen contents; `end` is called when it is exhausted or abandoned."""
        names = self._check_column_names(columns)
        only = None if where is None else self._parse_filter(where)
        read = names if only is None else [*names, *(n for n in only.names if n not in names)]
        wanted = None if only is None else only.hashes
        tables = read_rows(self._portal, self._stores.objects, self._shard, found.value, read, wanted)

        def batches() -> Iterator[pa.RecordBatch]:
            try:
                for table in tables:
                    rows = table if only is None else only.matching_rows(table).select(names)
                    yield from rows.to_batches()
            finally:
                end()

        schema = pa.schema([self.schema.field(name) for name in names])
        return pa.RecordBatchReader.from_batches(schema, batches())

    def _choose_batches(self, as_of: Moment, wait_s: float, *, long: bool) -> SyncContext[ReadSelection]:
        at = as_of_ms(as_of)
        found = self._cluster._enter_read(select_read(self._refresh_shard(), at, wait_s, long=long))
        if all(batch.schema_version <= self._shard.schema.version for batch in found.value.batches):
            return found
        found.exit()  # the schema changed between `_refresh_shard` and the choice
        return self._cluster._enter_read(select_read(self._refresh_shard(), at, wait_s, long=long))

    def _refresh_shard(self) -> LogShard:
        """Return the handle with the newest schema. Raises MissingError, UnavailableError."""
        self._portal.call(self._shard.frontiers())
        if self._shard.state.schema.version != self._shard.schema.version:
            self._shard = self._portal.call(self._stores.shard(self.name))
        return self._shard

    def _check_column_names(self, columns: Sequence[str] | None) -> list[str]:
        have = self.schema.names
        names = have if columns is None else list(columns)
        if isinstance(columns, str) or not names or len(set(names)) < len(names):
            raise InvalidError(
                f"columns must be a list of distinct names: table={self.name} columns={columns!r}.",
                fix="Pass a list of one or more distinct names, or None for all columns.",
            )
        for name in names:
            if name not in have:
                raise InvalidError(
                    f"no such column: table={self.name} column={name}.", fix=unknown_name_fix(str(name), have)
                )
        return names

    def _parse_filter(self, where: Where) -> Filter:
        return parse_filter(self._shard.schema, where)
