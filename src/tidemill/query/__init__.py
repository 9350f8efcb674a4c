"""query: the tables of a cluster for Python programs, at one time, as Arrow, Polars and DuckDB views.

    connect ─► cluster (one time for several tables) ─► table ─┬─► table_read (hold, plan, stream, changelog)
                                                          └─► polars_scan, duckdb_views ─► verified_paths

Owns the synchronous interface, and how a read is held and streamed. Does not own the contents of a shard (`shards`),
the choice of the cluster (`spark/settings`), or the output of commands (`cli`).

Invariant (hold first): a read holds its time before it chooses the parts that it reads, and these parts stay until the
read ends (table_read).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidemill.query.cluster import Cluster as Cluster
    from tidemill.query.cluster import connect as connect
    from tidemill.query.table import Table as Table

__all__ = ["Cluster", "Table", "connect"]


def __getattr__(name: str) -> Any:
    """Import lazily: `import tidemill` must cost next to nothing."""
    if name in ("Cluster", "connect"):
        from tidemill.query import cluster

        return getattr(cluster, name)
    if name == "Table":
        from tidemill.query.table import Table

        return Table
    raise AttributeError(name)
