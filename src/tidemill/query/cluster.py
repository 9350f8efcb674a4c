"""`connect`: a cluster's stores, for one process."""

from __future__ import annotations

import contextlib
import threading
import weakref
from contextlib import AbstractAsyncContextManager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from tidemill.base.errors import InvalidError
from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.base.runtime.sync_context import SyncContext
from tidemill.query.common_time import common_time
from tidemill.query.table import WAIT_S, Moment, Table
from tidemill.query.table_read import NEWEST_ATTEMPTS
from tidemill.shards.api import HistoryLostError
from tidemill.shards.read.time_parsing import as_of_ms
from tidemill.shards.registry import created_shards
from tidemill.spark.session.cluster_lookup import find_cluster
from tidemill.spark.stores import Stores, open_stores

if TYPE_CHECKING:
    from collections.abc import Sequence

    import duckdb

    from tidemill.query.fsspec_bucket import Bucket

T = TypeVar("T")


def connect(config: str | Path | None = None, *, objects: str = "", consensus: str = "") -> Cluster:
    """Open the cluster that `objects` and `consensus` (URLs), or the file `config`, name.

    Without them: TIDEMILL_OBJECTS__URL and TIDEMILL_CONSENSUS__URL, else the file of TIDEMILL_CONFIG, else
    `./tidemill.toml`, as for the Spark data source and every command. Needs neither a running node nor Java.

    Raises InvalidError (a file or URL is wrong, or there is no cluster: connecting makes none), Unavailable (naming
    which store is away).
    """
    urls = find_cluster(objects, consensus, str(config or ""))
    portal = BlockingPortal("tidemill-python")
    try:
        return Cluster(portal, portal.call(open_stores(urls)))
    except BaseException:
        portal.close()
        raise


class Cluster:
    """A cluster's tables. A context manager: leaving it closes the stores and ends every read of it.

    Safe from several threads. A process that was forked opens its own.
    """

    def __init__(self, portal: BlockingPortal, stores: Stores) -> None:
        self._portal = portal
        self._stores = stores
        self._entered = weakref.WeakSet[SyncContext[Any]]()
        self._close = weakref.finalize(self, _close, portal, stores, self._entered)

    def tables(self) -> list[str]:
        """The names of all tables, in order. Raises Unavailable, Closed."""
        return [created.name for created in self._portal.call(created_shards(self._stores.consensus))]

    def table(self, name: str) -> Table:
        """Raises Missing (no such table), InvalidError (no name of a table), Unavailable, Closed."""
        return Table(self, self._portal, self._stores, name)

    def common_time(self, names: Sequence[str]) -> int:
        """The newest time (ms) that is final in all of these tables: give it to their reads as `as_of`.

        A table whose source is idle is waited for three seconds at most. Raises Missing, HistoryLostError (they have no
        time in common: one of them stands), Unavailable (one was never written, or a store is away).
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
        """Each of these tables as a temporary view of `connection` (`Table.to_duckdb`), all at one time, in ms.

        Raises as `common_time` and `Table.to_duckdb`. What was made of them before it raised stays.
        """
        seen: dict[str, str] = {}
        for name in names:
            if seen.setdefault(name.casefold(), name) != name:
                raise InvalidError(
                    f"DuckDB cannot tell two tables apart: names={seen[name.casefold()]},{name}.",
                    fix="Make views under names of your own: cluster.table(…).to_duckdb(connection, name).",
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
            except HistoryLostError:  # the history of one moved on before it was held: there is a newer time in common
                if given is not None or attempt == NEWEST_ATTEMPTS - 1:
                    raise
        return at

    def close(self) -> None:
        """Again: nothing. What is used afterwards raises Closed."""
        self._close()

    @cached_property
    def _bucket(self) -> Bucket:
        """For engines that open files."""
        from tidemill.query.fsspec_bucket import Bucket

        return Bucket(self._portal, self._stores.objects)

    def _enter(self, context: AbstractAsyncContextManager[T]) -> SyncContext[T]:
        """A read's hold: left by the reader, or when the cluster is closed."""
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
    """Reads let go of what they hold while the stores are still open."""
    if portal.is_here:  # collected there, with a cycle of references that it was in
        threading.Thread(target=_close, args=(portal, stores, entered), name="tidemill-close").start()
        return
    try:
        for each in list(entered):
            each.leave()
        with contextlib.suppress(RuntimeError):  # the interpreter ends, and its thread pools ended before
            portal.call(stores.aclose())
    finally:
        portal.close()
