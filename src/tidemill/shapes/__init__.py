"""shapes: tables followed live over HTTP, by Electric's protocol.

    request ─► http ─► definition ─► service ─► tables | shards ─► log ─► http ─► client
    where: the where clause, parsed and evaluated as PostgreSQL does

Owns shape definitions and handles, the log of each shape, where clauses, the join of initial rows to the stream, and
the HTTP endpoints. Does not own replication (`capture`), shards, or the HTTP server (`node`).

H1  A handle is never reused; a client with another handle than the current one is told to refetch.
L1  Offsets of a log grow strictly; readers see whole transactions, each item once.
V2  A shape is registered before its snapshot, and the snapshot sees all that was streamed before.
K1  A commit is owed to PostgreSQL for as long as what came of it is neither durable nor over; a shard is never held
    back: it remembers by itself what a shape has yet to write.
"""

from __future__ import annotations

from tidemill.shapes.http import shape_routes
from tidemill.shapes.log.log import LogLimits
from tidemill.shapes.service import ShapeService
from tidemill.shapes.settings import ShapeSettings
from tidemill.shapes.tables.capture_tap import ShapeTap

__all__ = ["LogLimits", "ShapeService", "ShapeSettings", "ShapeTap", "shape_routes"]
