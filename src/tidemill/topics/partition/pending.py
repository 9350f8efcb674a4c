"""One produced batch on its way from `produce_nowait` to its result."""

from __future__ import annotations

import asyncio
from typing import Protocol

from tidemill.base.errors import TidemillError
from tidemill.objects.store import Buffer
from tidemill.topics.batch.header import BatchHeader
from tidemill.topics.front import ProduceResult
from tidemill.topics.queue import Line, Ticket


class Owner(Protocol):
    """The partition that led when the batch arrived."""

    topic_id: str
    partition: int

    def batch_uploaded(self, pending: Pending) -> None: ...

    def batch_failed(self, pending: Pending, error: TidemillError) -> None: ...


class Pending:
    """Ends exactly once. Implements `l0.writer.Staged`; `futures` has one entry per caller that shares the result.

    `checked`: its bytes are good; only then may it be staged, and only then is `max_timestamp_ms` known.
    """

    __slots__ = (
        "abandoned",
        "buffer",
        "checked",
        "data",
        "first_byte",
        "futures",
        "header",
        "line",
        "max_timestamp_ms",
        "object_key",
        "owner",
        "partition",
        "size_bytes",
        "staged_s",
        "ticket",
        "topic_id",
    )

    def __init__(
        self, owner: Owner, header: BatchHeader, buffer: Buffer, future: asyncio.Future[ProduceResult], line: Line
    ) -> None:
        self.owner = owner
        self.topic_id = owner.topic_id
        self.partition = owner.partition
        self.header = header
        self.line = line
        self.checked = False
        self.max_timestamp_ms = 0
        self.buffer: Buffer = buffer
        self.size_bytes = len(buffer)
        self.staged_s = 0.0
        self.futures = [future]
        self.ticket: Ticket | None = None
        self.abandoned = False
        self.object_key = ""
        self.first_byte = 0
        self.data: bytearray | None = None

    @property
    def identity(self) -> tuple[int, int, int, int]:
        """What makes a retry the same batch: producer id, epoch, first sequence, record count."""
        h = self.header
        return (h.producer_id, h.producer_epoch, h.base_sequence, h.record_count)

    def uploaded(self, object_key: str, first_byte: int, data: bytearray) -> None:
        self.object_key, self.first_byte, self.data = object_key, first_byte, data
        self.buffer = b""
        self.owner.batch_uploaded(self)

    def upload_failed(self, error: TidemillError) -> None:
        self.owner.batch_failed(self, error)

    def succeed(self, result: ProduceResult) -> None:
        self.abandoned = True
        for future in self.futures:
            if not future.done():
                future.set_result(result)

    def fail(self, error: TidemillError) -> None:
        self.abandoned = True
        self.buffer = b""
        for future in self.futures:
            fail_future(future, error)


def fail_future(future: asyncio.Future[ProduceResult], error: TidemillError) -> None:
    """Set the error and mark it as seen: a client that went away is no fault of ours to log."""
    if not future.done():
        future.set_exception(error)
        future.exception()
