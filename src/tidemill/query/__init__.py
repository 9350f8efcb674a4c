"""query: a cluster's tables for Python programs, at one time, as Arrow, Polars and DuckDB views.

Owns the synchronous front (`connect`, `Cluster`, `Table`), and how a read is held and streamed. Does not own: what a
shard holds at a time (shards), which cluster is meant and how its stores are opened (spark, whose data source asks the
same; nothing of Spark's is imported), what a command prints (cli).

A1  A read holds its time before it chooses what it reads, and what it chose stays until the read ends.    reading
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidemill.query.cluster import Cluster as Cluster
    from tidemill.query.cluster import connect as connect
    from tidemill.query.table import Table as Table

__all__ = ["Cluster", "Table", "connect"]


def __getattr__(name: str) -> Any:
    """Lazy: `import tidemill` must cost next to nothing."""
    if name in ("Cluster", "connect"):
        from tidemill.query import cluster

        return getattr(cluster, name)
    if name == "Table":
        from tidemill.query.table import Table

        return Table
    raise AttributeError(name)
