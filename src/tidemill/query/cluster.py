"""`connect`: open a cluster's stores for one process. One time for several of its tables."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from tidemill.base.errors import InvalidError, UnavailableError
from tidemill.base.runtime.blocking_portal import BlockingPortal, SyncContext
from tidemill.query.table import WAIT_S, Moment, Table
from tidemill.query.table_read import NEWEST_ATTEMPTS
from tidemill.shards.api import HistoryLostError
from tidemill.shards.handle import LogShard
from tidemill.shards.read.holds import as_of_ms
from tidemill.shards.registry import list_created_shards
from tidemill.spark.derived.idle_advance import LAG_MS, advance_idle
from tidemill.spark.settings import find_cluster
from tidemill.spark.stores import Stores, open_stores

if TYPE_CHECKING:
    import duckdb

    from tidemill.query.fsspec_bucket import BucketFileSystem

T = TypeVar("T")

IDLE_WAIT_S = 3.0
"""Time for idle tables to pass the others' time; if their pipelines do not run, the tables are read at the older
time."""


def connect(config: str | Path | None = None, *, objects: str = "", consensus: str = "") -> Cluster:
    """Open the cluster named by `objects` and `consensus` (URLs), or by the file `config`.

    Without them: TIDEMILL_OBJECTS__URL and TIDEMILL_CONSENSUS__URL, else the file of TIDEMILL_CONFIG, else
    `./tidemill.toml`, as for the Spark data source and every command. Needs neither a running node nor Java.
    Raises InvalidError (a file or URL is invalid, or there is no cluster: connecting creates none), UnavailableError
    (naming the store).
    """
    urls = find_cluster(objects, consensus, str(config or ""))
    portal = BlockingPortal("tidemill-python")
    try:
        return Cluster(portal, portal.call(open_stores(urls, create=False)))
    except BaseException:
        portal.close()
        raise


class Cluster:
    """Tables of a cluster. A context manager: leaving it closes the stores and ends all of its reads.

    Safe for use from several threads. A forked process must open its own.
    """

    def __init__(self, portal: BlockingPortal, stores: Stores) -> None:
        self._portal = portal
        self._stores = stores
        self._entered = weakref.WeakSet[SyncContext[Any]]()
        self._close = weakref.finalize(self, _close, portal, stores, self._entered)

    def tables(self) -> list[str]:
        """Return the names of all tables, in order. Raises UnavailableError, ClosedError."""
        return [created.name for created in self._portal.call(list_created_shards(self._stores.consensus))]

    def table(self, name: str) -> Table:
        """Return a table. Raises MissingError (no such table), InvalidError (not a table name), UnavailableError,
        ClosedError."""
        return Table(self, self._portal, self._stores, name)

    def common_time(self, names: Sequence[str]) -> int:
        """Return the newest time (ms) that is final in all of these tables: pass it to their reads as `as_of`.

        Waits at most three seconds for tables whose source is idle. Raises MissingError, HistoryLostError (they have no
        time in common, because one of them is stalled), UnavailableError (one was never written, or a store is
        unavailable).
        """
        shards = [self.table(name)._shard for name in names]
        return self._portal.call(common_time(self._stores, shards))

    def to_duckdb(
        self,
        connection: duckdb.DuckDBPyConnection,
        names: Sequence[str],
        *,
        as_of: Moment = None,
        wait_s: float = WAIT_S,
    ) -> int:
        """Create a temporary view of `connection` for each of these tables (`Table.to_duckdb`) at one time; return it
        in ms.

        Raises as `common_time` and `Table.to_duckdb`. Views that were created before an error stay.
        """
        seen: dict[str, str] = {}
        for name in names:
            if seen.setdefault(name.casefold(), name) != name:
                raise InvalidError(
                    f"DuckDB cannot distinguish two tables: names={seen[name.casefold()]},{name}.",
                    fix="Create views under other names: cluster.table(…).to_duckdb(connection, name).",
                )
        given = as_of_ms(as_of)
        for attempt in range(NEWEST_ATTEMPTS):
            at = self.common_time(names) if given is None else given
            try:
                for name in names:
                    self.table(name).to_duckdb(
                        connection, as_of=None if given is None and at < 0 else at, wait_s=wait_s
                    )
                break
            except HistoryLostError:  # since passed the time before it was held: a newer common time exists
                if given is not None or attempt == NEWEST_ATTEMPTS - 1:
                    raise
        return at

    def close(self) -> None:
        """Close the cluster; closing it again has no effect. Later uses raise ClosedError."""
        self._close()

    @cached_property
    def _bucket(self) -> BucketFileSystem:
        """File system over the bucket, for engines that open files."""
        from tidemill.query.fsspec_bucket import BucketFileSystem

        return BucketFileSystem(self._portal, self._stores.objects)

    def _enter_read(self, context: AbstractAsyncContextManager[T]) -> SyncContext[T]:
        """Enter the hold of a read, which ends with the reader, or when the cluster is closed."""
        entered = SyncContext(self._portal, context)
        self._entered.add(entered)
        return entered

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return "<tidemill.Cluster>" if self._close.alive else "<tidemill.Cluster, closed>"


def _close(portal: BlockingPortal, stores: Stores, entered: weakref.WeakSet[SyncContext[Any]]) -> None:
    """End all reads while the stores are still open, then close the stores."""
    if portal.is_loop_thread:  # garbage collection of a cycle may run this on the portal's own thread
        threading.Thread(target=_close, args=(portal, stores, entered), name="tidemill-close").start()
        return
    try:
        for each in list(entered):
            each.exit()
        with contextlib.suppress(RuntimeError):  # at interpreter exit the thread pools have already shut down
            portal.call(stores.aclose())
    finally:
        portal.close()


async def common_time(stores: Stores, shards: Sequence[LogShard]) -> int:
    """Return the newest time that is final in all of them; -1 if none was ever written.

    The time of a table whose source is idle is advanced first, with a short wait. Raises HistoryLostError,
    UnavailableError.
    """
    frontiers = {shard.name: await shard.frontiers() for shard in shards}
    newest = max((upper for _, upper in frontiers.values()), default=0)
    moved = [
        shard
        for shard in shards
        if newest - frontiers[shard.name][1] > LAG_MS
        and await advance_idle(stores.catalogue, stores.remap, shard, frontiers[shard.name][1], newest - 1)
    ]
    for shard in moved:
        await shard.wait_upper(newest - 1, IDLE_WAIT_S)
        frontiers[shard.name] = await shard.frontiers()
    if not newest:
        return -1
    last, least = min((upper, name) for name, (_, upper) in frontiers.items())
    since, first = max((since, name) for name, (since, _) in frontiers.items())
    if not last:
        raise UnavailableError(
            f"nothing was written yet: table={least}.", fix="Wait for its pipeline, or omit the table."
        )
    if last <= since:
        raise HistoryLostError(
            f"the tables have no time in common: {first} is readable from {since} on, {least} before {last}.",
            fix=f"Find out why {least} does not advance: tidemill why {least}.",
        )
    return last - 1
