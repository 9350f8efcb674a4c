"""Settings of one capture: plain data."""

from __future__ import annotations

import msgspec

from tidemill.base.errors import Invalid
from tidemill.capture.naming import topic_name

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
    table_poll_s         how often the database is asked for tables that are new, made anew, changed or unpublished
    """

    name: str
    dsn: str
    tables: tuple[str, ...] = ("public.*",)
    partitions: int = 1
    binding_interval_ms: int = 50
    idle_binding_ms: int = 5_000
    heartbeat_s: float = 10.0
    table_poll_s: float = 5.0
    fragment_changes: int = 500
    queue_changes: int = 20_000
    budget_ms: int | None = None

    def __post_init__(self) -> None:
        if not self.name or len(self.name) > NAME_LENGTH or not set(self.name) <= _NAME_CHARS:
            raise Invalid(f"bad capture name: capture={self.name!r}.", fix=f"Use 1 to {NAME_LENGTH} of a-z 0-9 and _.")
        if not self.tables:
            raise Invalid(f"a capture without tables: capture={self.name}.", fix='Write tables = ["public.*"].')

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
