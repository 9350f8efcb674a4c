"""spark: pipelines that keep exact keyed tables in shards, on PySpark.

    topics ─► ingest (sources, steps) ─► decode ─► upsert ─► shard
    shards ─► derived (user functions) ─► shard;  shards ─► read, source ─► DataFrames ─► write
    session: Java and Spark;  pipeline: the driver process

Owns the Spark session, the decoding of topics to Arrow, the upsert operator and its local mirror, the data source
`format("tidemill")`, the user's declarations (`definition`), derived tables and the driver process. Does not own topics
or shards: its code travels to executors and uses the interfaces of their readers and writers only.

U1  Per key at most one live row; the winner per (key, time) is decided by order, never by batch.
U2  Below the shard's upper: drop; at upper: process; above: keep. One spelling, `upsert.classify`.
U3  State mirrors the output shard only, and is tagged with the upper it mirrors.
U4  A lost race is recomputed from the new upper, never trimmed. An abort deletes nothing.
U5  Spark's checkpoint is scratch: fresh, deleted, stale or ahead, it costs time, never data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidemill.spark.definition import Pipeline as Pipeline
    from tidemill.spark.session.session import build_session as build_session
    from tidemill.spark.source import register as register
    from tidemill.spark.table_reader import read as read

__all__ = ["Pipeline", "build_session", "read", "register"]


def __getattr__(name: str) -> Any:
    """Lazy, so that executors and commands import only what they use."""
    if name == "Pipeline":
        from tidemill.spark.definition import Pipeline

        return Pipeline
    if name == "build_session":
        from tidemill.spark.session.session import build_session

        return build_session
    if name == "read":
        from tidemill.spark.table_reader import read

        return read
    if name == "register":
        from tidemill.spark.source import register

        return register
    raise AttributeError(name)
