"""shapes: tables followed live over HTTP, by Electric's protocol.

    request ─► http ─► definition ─► service ─► tables | shards ─► log ─► http ─► client
    where: the where clause, parsed and evaluated as PostgreSQL does

Owns shape definitions and handles, the log of each shape, where clauses, the join of initial rows to the stream, and
the HTTP endpoints. Does not own replication (`capture`), shards, or the HTTP server (`node`).

Invariant (unique handles): a handle is never reused. A client that sends another handle than the current one must
refetch. Invariant (exactly once): the offsets of a log strictly increase. Readers see whole transactions, and each item
once. Invariant (no gap): a shape is registered with the stream before its snapshot is taken, and the snapshot sees
every transaction that was streamed before the registration. Invariant (no early confirm): a commit is not confirmed to
PostgreSQL until its items are durable or their shapes have ended. A shard is not held back: its own history still has
the changes that a shape has not written yet.
"""

from __future__ import annotations

from tidemill.shapes.http import shape_routes
from tidemill.shapes.log.log import LogLimits
from tidemill.shapes.service import ShapeService
from tidemill.shapes.settings import ShapeSettings
from tidemill.shapes.tables.capture_tap import ShapeTap

__all__ = ["LogLimits", "ShapeService", "ShapeSettings", "ShapeTap", "shape_routes"]
