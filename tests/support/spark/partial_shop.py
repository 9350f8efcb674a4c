"""A captured table whose updates may leave a column unchanged, written record by record."""

from __future__ import annotations

import json
from typing import Any

from tidemill.topics.batch import Record, encode_batch


class PartialShop:
    """Tables orders and other of the capture shop, with id, total and note."""

    def __init__(self, harbour: Any) -> None:
        self.harbour = harbour
        columns = [("id", "integer", 0), ("total", "integer", -1), ("note", "text", -1)]
        self.topics = harbour.capture("shop", {"public.orders": columns, "public.other": columns})

    def write(self, key: int, total: int | None, note: str | None = None, *, table: str = "orders") -> None:
        """`total` None: a deletion; `note` None: unchanged."""
        topic = self.topics[f"public.{table}"]
        value = None if total is None else {"id": key, "total": total, **({} if note is None else {"note": note})}
        headers = (("tm.pos", b"0_0"), ("tm.op", b"update"), ("tm.xid", b"1"))
        if value is not None and note is None:
            headers = (*headers, ("tm.unchanged", b'["note"]'))  # type: ignore[assignment]
        record = Record(
            json.dumps({"id": key}).encode(), None if value is None else json.dumps(value).encode(), headers, 0, 0
        )

        async def run() -> int:
            found = await self.harbour.topics.produce_nowait(topic.topic_id, 0, encode_batch([record]))
            return found.last_offset + 1

        self.harbour.heads[topic.topic_id][0] = self.harbour.portal.call(run())

    def bind(self, time: int) -> None:
        self.harbour.mint("capture/shop", time, *self.topics.values())
