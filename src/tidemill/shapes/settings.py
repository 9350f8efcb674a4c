"""Settings of the shape service: plain data, and what each may cost. `[shapes]` of the configuration fills them."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tidemill.base.limits import LOOPBACK_ORIGINS
from tidemill.shapes.log.log import LogLimits
from tidemill.shapes.loop_share import SHARE
from tidemill.shapes.tables.capture_tap import BacklogLimits


class CacheAges(msgspec.Struct, frozen=True):
    """Seconds that caches may keep answers: the initial rows (shared caches), later chunks, live answers. `stale_s`:
    for how long they may show a later chunk that is not fresh while they ask for it again."""

    initial_s: int = 3_600
    later_s: int = 60
    live_s: int = 5
    stale_s: int = 300


class ShapeSettings(msgspec.Struct, frozen=True):
    """
    max_shapes          live shapes at once; one more is refused unless another was not read for idle_s
    memory_bytes        what all bases, logs and transactions under way may hold together
    directory           where logs are kept over a restart; None = in memory only
    disk_bytes          … and how much of them
    idle_s              a shape that nobody read for so long may make room for another
    long_poll_s         a live request without news is answered after this long
    sse_s               an event stream is closed after this long
    keep_alive_s        a comment line on a quiet event stream
    load_timeout_s      a client waits this long for the initial rows
    max_initial         requests for initial rows and subsets under way at once, 503 beyond
    subset_bytes        of rows that one answer to a subset may hold
    max_existing        other requests under way at once, long polls and event streams included
    secret              required as `secret` in every request when set
    allow_delete        DELETE /v1/shape drops a shape (405 otherwise)
    allowed_origins     origins whose pages may read answers in a browser; `*` = all; `:*` at the end = any port
    loop_share          of the event loop's time that shapes may use
    """

    max_shapes: int = 1_000
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
