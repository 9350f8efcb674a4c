"""tidemill: every change from Postgres commits and Kafka producers, through one bucket, into exact keyed tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidemill.query import Cluster as Cluster
    from tidemill.query import Table as Table
    from tidemill.query import connect as connect

__version__ = "0.1.0"
__all__ = ["Cluster", "Table", "__version__", "connect"]


def __getattr__(name: str) -> Any:
    """Import the query API lazily: executors, nodes and commands import this package without it."""
    if name in ("Cluster", "Table", "connect"):
        from tidemill import query

        return getattr(query, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
