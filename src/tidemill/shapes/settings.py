"""Settings of the shape service: plain data."""

from __future__ import annotations

import msgspec

from tidemill.shapes.log import LogLimits


class ShapeSettings(msgspec.Struct, frozen=True):
    """
    max_shapes          live shapes at once
    total_bytes         JSON bytes of all bases and logs together; beyond it shapes end, least recently used first
    long_poll_s         a live request without news is answered after this long
    sse_s               an event stream is closed after this long
    keep_alive_s        a comment line on a quiet event stream
    load_timeout_s      a client waits this long for the initial rows
    max_initial         requests for initial rows under way at once, 503 beyond
    max_existing        other requests under way at once, live ones included
    secret              required as `secret` in every request when set
    allow_delete        DELETE /v1/shape drops a shape (405 otherwise)
    """

    max_shapes: int = 1_000
    total_bytes: int = 1 << 30
    long_poll_s: float = 20.0
    sse_s: float = 60.0
    keep_alive_s: float = 21.0
    load_timeout_s: float = 45.0
    max_initial: int = 300
    max_existing: int = 10_000
    secret: str = ""
    allow_delete: bool = False
    limits: LogLimits = LogLimits()
