"""Settings of one capture: plain data."""

from __future__ import annotations

from typing import Literal

import msgspec

from tidemill.base.errors import InvalidError
from tidemill.capture.naming import topic_name

Envelope = Literal["row", "debezium", "debezium-avro"]
Cleanup = Literal["delete", "compact"]

NAME_LENGTH = 41
"""Length limit of a name: `tidemill_<name>` must fit PostgreSQL's 63 bytes for slots and publications, with some
reserve.
"""
_NAME_CHARS = frozenset("abcdefghijklmnopqrstuvwxyz0123456789_")


class CaptureConfig(msgspec.Struct, frozen=True):
    """Settings of one capture.

    name                 a-z 0-9 _; slot and publication are `tidemill_<name>`, topics as in naming.py
    dsn                  anything that libpq accepts (URI or key=value), TLS and authentication included
    tables               `schema.table`, `table` (schema public), with * and ?; `!pattern` excludes
    partitions           of each new topic
    linger_ms            time for which small transactions are gathered and written together; the first one after a
                         longer pause, and one with a marker, are written immediately
    binding_interval_ms  at most one binding per interval while changes arrive (a marker is not delayed)
    idle_binding_ms      while only the idle LSN moves: at most one binding per interval
    heartbeat_s          a message is written to the database if no commit was seen for this long
    budget_ms            freshness budget of its stages; None: that of the process
    envelope             format of records: rows, or Debezium's events, in JSON or Avro; for tables that are copied from
                         now on
    cleanup              of the topics: `compact` retains the newest record of each key, `delete` every one
    identity             full: tables are set to REPLICA IDENTITY FULL; as-is: each keeps its identity
    manual               nothing in the database is altered: what is missing is reported as statements
    failover             the slot is a failover slot for standbys, PostgreSQL 17 or newer
    table_poll_s         interval of checks for tables that are new, re-created, changed or unpublished
    copy_again           a paused table whose shard loses nothing by a copy is re-snapshotted automatically
                         (auto_recopy.py)
    copy_again_pause_s   minimum interval between automatic re-snapshots of one table
    copy_again_max_mb    larger tables are re-snapshotted only on request
    copy_connections     number of connections that read tables concurrently during a copy
    copy_rows_per_s      maximum rate of a copy, 0 = unlimited
    copy_chunk_blocks    blocks of a table per chunk (chunks.py)
    copy_aside_after_s   a concurrent copy that takes longer releases WAL: changes of its table go to a side topic
    copy_aside_max_mb    maximum size of a side topic; WAL is retained from there on. 0 = no side topics
    """

    name: str
    dsn: str
    tables: tuple[str, ...] = ("public.*",)
    partitions: int = 1
    linger_ms: int = 100
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
            raise InvalidError(f"a capture without tables: capture={self.name}.", fix='Set tables = ["public.*"].')
        if self.envelope != "row" and not self.requires_full_identity:
            raise InvalidError(
                f"events contain the old row, which the stream carries only with REPLICA IDENTITY FULL:"
                f" capture={self.name} envelope={self.envelope} identity={self.identity}.",
                fix='Set identity = "full", or envelope = "row".',
            )

    @property
    def topic_config(self) -> dict[str, str]:
        return {} if self.cleanup == "delete" else {"cleanup.policy": self.cleanup}

    @property
    def requires_full_identity(self) -> bool:
        """True if every UPDATE and DELETE must carry its whole old row."""
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
    def remap_name(self) -> str:
        return f"capture/{self.name}"

    def topic_name_of(self, schema: str, table: str) -> str:
        return topic_name(self.name, schema, table)

    def table_mark(self, table: str) -> str:
        return f"table:{self.name}/{table}"
