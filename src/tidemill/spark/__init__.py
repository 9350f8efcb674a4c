"""spark: pipelines that keep exact keyed tables in shards, on PySpark.

    topics ─► ingest (sources, steps) ─► formats, decode ─► merge ─► shard
    shards ─► derived (user functions) ─► shard;  shards ─► read, source ─► DataFrames ─► write
    session: Java and Spark;  pipeline: the driver process

Owns the Spark session, the decoding of topics to Arrow, the upsert operator and its local mirror, the data source
`format("tidemill")`, the user's declarations (`definition`), derived tables and the driver process. It does not own
topics or shards: its code runs on executors and uses only the interfaces of their readers and writers.

Invariant (one live row): a key has at most one live row. The order of commands decides the winner of each (key, time),
never the batch they arrived in.
Invariant (three-way rule): a command below the shard's upper is dropped, one at the upper is processed, one above is
stashed. `merge.operator.classify` is the only implementation.
Invariant (mirror of the output): the operator's state mirrors the output shard only, and is tagged with the upper that
it mirrors.
Invariant (recompute): a lost compare-and-append is recomputed from the new upper, never trimmed. An abort deletes
nothing.
Invariant (scratch checkpoint): Spark's checkpoint may be fresh, deleted, stale or ahead. That costs time, never data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidemill.spark.definition import Pipeline as Pipeline
    from tidemill.spark.pipeline.session_run import run as run
    from tidemill.spark.session.session import build_session as build_session
    from tidemill.spark.source import register as register
    from tidemill.spark.source.write import upsert as upsert
    from tidemill.spark.table_reader import read as read

__all__ = ["Pipeline", "build_session", "read", "register", "run", "upsert"]


def __getattr__(name: str) -> Any:
    """Import lazily, so that executors and commands import only what they use."""
    if name == "Pipeline":
        from tidemill.spark.definition import Pipeline

        return Pipeline
    if name == "build_session":
        from tidemill.spark.session.session import build_session

        return build_session
    if name == "read":
        from tidemill.spark.table_reader import read

        return read
    if name == "run":
        from tidemill.spark.pipeline.session_run import run

        return run
    if name == "upsert":
        from tidemill.spark.source.write import upsert

        return upsert
    if name == "register":
        from tidemill.spark.source import register

        return register
    raise AttributeError(name)
