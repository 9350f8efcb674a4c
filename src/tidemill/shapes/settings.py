"""Settings of the shape service and their limits, as plain data; filled from `[shapes]` of the configuration."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tidemill.base.limits import LOOPBACK_ORIGINS
from tidemill.shapes.log.log import LogLimits
from tidemill.shapes.loop_share import SHARE
from tidemill.shapes.tables.backlog import BacklogLimits


class CacheAges(msgspec.Struct, frozen=True):
    """Seconds for which caches may keep responses: the initial rows (shared caches), later chunks, live responses.

    `stale_s`: for how long they may serve a stale later chunk while they revalidate it.
    """

    initial_s: int = 3_600
    later_s: int = 60
    live_s: int = 5
    stale_s: int = 300


class ShapeSettings(msgspec.Struct, frozen=True):
    """Settings of the shape service.

    max_shapes          live shapes; another one is rejected unless one was not read for idle_s. By default memory_bytes
                        is the limit
    memory_bytes        memory of all initial rows, logs and open transactions together
    directory           where logs are stored over a restart; None = in memory only
    disk_bytes          size of all stored logs together
    idle_s              a shape that was not read for this long may be evicted for another one
    long_poll_s         a live request without news is answered after this long
    sse_s               an event stream is closed after this long
    keep_alive_s        interval of comment lines on a quiet event stream
    load_timeout_s      a client waits this long for the initial rows
    max_initial         concurrent requests for initial rows and subsets; 503 beyond
    subset_bytes        largest size of the rows of one subset response
    max_existing        other concurrent requests, long polls and event streams included
    secret              required as `secret` in every request when set
    allow_delete        DELETE /v1/shape drops a shape (405 otherwise)
    allowed_origins     origins whose pages may read responses in a browser; `*` = all; `:*` at the end = any port
    loop_share          share of the event loop's time that shapes may use
    limits              size limits of one shape's log
    backlog             limits of changes that are not evaluated yet, per database
    cache               cache lifetimes of responses
    """

    max_shapes: int = 1_000_000
    memory_bytes: int = 512 << 20
    directory: Path | None = None
    disk_bytes: int = 4 << 30
    idle_s: float = 300.0
    long_poll_s: float = 20.0
    sse_s: float = 60.0
    keep_alive_s: float = 21.0
    load_timeout_s: float = 45.0
    max_initial: int = 300
    max_existing: int = 10_000
    subset_bytes: int = 16 << 20
    secret: str = ""
    allow_delete: bool = False
    allowed_origins: tuple[str, ...] = LOOPBACK_ORIGINS
    loop_share: float = SHARE
    limits: LogLimits = LogLimits()
    backlog: BacklogLimits = BacklogLimits()
    cache: CacheAges = CacheAges()
