"""Settings of one capture: plain data."""

from __future__ import annotations

from typing import Literal

import msgspec

from tidemill.base.errors import InvalidError
from tidemill.capture.naming import topic_name

Envelope = Literal["row", "debezium", "debezium-avro"]
Cleanup = Literal["delete", "compact"]

NAME_LENGTH = 41
"""`tidemill_<name>` must fit PostgreSQL's 63 bytes for slots and publications, with room to spare."""
_NAME_CHARS = frozenset("abcdefghijklmnopqrstuvwxyz0123456789_")


class CaptureConfig(msgspec.Struct, frozen=True):
    """
    name                 a-z 0-9 _; slot and publication are `tidemill_<name>`, topics as in naming.py
    dsn                  anything libpq accepts (URI or key=value), TLS and authentication included
    tables               `schema.table`, `table` (schema public), with * and ?; `!pattern` excludes
    partitions           of each new topic
    binding_interval_ms  at most one binding per this time while changes arrive (a marker is not delayed)
    idle_binding_ms      while only the idle LSN moves: at most one binding per this time
    heartbeat_s          a message is written to the database when no commit was seen for this long
    budget_ms            freshness budget of its marks; None: that of the process
    envelope             what records are: rows, or events as Debezium has them, in JSON or in Avro; of tables that are
                         copied from now on
    cleanup              of the topics: `compact` keeps the newest record of each key, `delete` every one
    identity             full: tables are given REPLICA IDENTITY FULL; as-is: each is captured with the one it has
    manual               nothing in the database is altered: what is missing is told as statements
    failover             the slot is one that standbys may keep in step with, PostgreSQL 17 or newer
    table_poll_s         how often the database is asked for tables that are new, made anew, changed or unpublished
    copy_again           a parked table whose shard loses nothing by a copy is copied again by itself (auto_recopy.py)
    copy_again_pause_s   one table not more often than this
    copy_again_max_mb    a larger one when somebody asks for it
    copy_connections     that read tables at once while they are copied
    copy_rows_per_s      at most so many rows are copied, 0 = as fast as it goes
    copy_chunk_blocks    of a table that are read at once (chunks.py)
    copy_aside_after_s   a copy beside the stream that takes longer lets WAL go: what changes of its table is set aside
    copy_aside_max_mb    at most so much of one table; WAL is kept from there on. 0 = nothing is set aside
    """

    name: str
    dsn: str
    tables: tuple[str, ...] = ("public.*",)
    partitions: int = 1
    binding_interval_ms: int = 50
    idle_binding_ms: int = 5_000
    heartbeat_s: float = 10.0
    table_poll_s: float = 5.0
    identity: Literal["full", "as-is"] = "full"
    manual: bool = False
    failover: bool = False
    copy_again: bool = True
    copy_again_pause_s: float = 300.0
    copy_again_max_mb: int = 10_240
    copy_connections: int = 1
    copy_rows_per_s: int = 0
    copy_chunk_blocks: int = 2048
    copy_aside_after_s: float = 30.0
    copy_aside_max_mb: int = 20_480
    envelope: Envelope = "row"
    cleanup: Cleanup = "delete"
    fragment_changes: int = 500
    queue_changes: int = 20_000
    budget_ms: int | None = None

    def __post_init__(self) -> None:
        if not self.name or len(self.name) > NAME_LENGTH or not set(self.name) <= _NAME_CHARS:
            raise InvalidError(
                f"bad capture name: capture={self.name!r}.", fix=f"Use 1 to {NAME_LENGTH} of a-z 0-9 and _."
            )
        if not self.tables:
            raise InvalidError(f"a capture without tables: capture={self.name}.", fix='Write tables = ["public.*"].')
        if self.envelope != "row" and not self.whole:
            raise InvalidError(
                f"events tell the row before, which the stream says with REPLICA IDENTITY FULL only:"
                f" capture={self.name} envelope={self.envelope} identity={self.identity}.",
                fix='Write identity = "full", or envelope = "row".',
            )

    @property
    def topic_configs(self) -> dict[str, str]:
        return {} if self.cleanup == "delete" else {"cleanup.policy": self.cleanup}

    @property
    def whole(self) -> bool:
        """Every UPDATE and DELETE is to say its whole old row."""
        return self.identity == "full"

    @property
    def slot(self) -> str:
        return f"tidemill_{self.name}"

    @property
    def publication(self) -> str:
        return f"tidemill_{self.name}"

    @property
    def mark(self) -> str:
        return f"capture:{self.name}"

    @property
    def remap(self) -> str:
        return f"capture/{self.name}"

    def topic_of(self, schema: str, table: str) -> str:
        return topic_name(self.name, schema, table)

    def table_mark(self, table: str) -> str:
        return f"table:{self.name}/{table}"
