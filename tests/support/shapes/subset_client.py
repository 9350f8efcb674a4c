"""Electric's client of subsets in a Node process."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

from support.shapes.node_client import NodeProcess
from support.waiting import until


class SubsetClient(NodeProcess):
    """`ask` gives the answer to one request; `rows` are what the application would hold."""

    def __init__(self, url: str, params: dict[str, str], **options: Any) -> None:
        super().__init__("subset_shape.mjs", url, json.dumps(params), json.dumps(options))
        self._answers: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self.batches: list[dict[str, Any]] = []
        self.errors: list[dict[str, Any]] = []

    def _take(self, line: dict[str, Any]) -> None:
        if line["event"] == "snapshot":
            self._answers.pop(line["tag"]).set_result({**line, "up_to_dates": self.up_to_dates})
        else:
            (self.batches if line["event"] == "batch" else self.errors).append(line)

    async def ask(self, kind: str = "request", **opts: Any) -> dict[str, Any]:
        tag = f"{kind}-{len(self._answers)}-{random.random()}"
        self._answers[tag] = asyncio.get_running_loop().create_future()
        answer = self._answers[tag]
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"kind": kind, "tag": tag, "opts": opts}).encode() + b"\n")
        return await answer

    @property
    def up_to_dates(self) -> int:
        """Return how often the stream reported that it is up to date."""
        return sum("up-to-date" in batch["controls"] for batch in self.batches)

    async def gone_on(self, answer: dict[str, Any]) -> None:
        """Wait until the stream, which pauses while a snapshot is fetched, has continued after this one.

        The client considers five requests at one offset within half a second a loop and starts over, so it gets
        everything again. A further snapshot that is requested before the stream has continued causes such a loop.
        """
        await until(lambda: self.up_to_dates > answer["up_to_dates"])

    @property
    def last(self) -> dict[str, Any]:
        return self.batches[-1] if self.batches else {"rows": {}, "refetches": 0, "duplicates": [], "upToDate": False}

    @property
    def rows(self) -> dict[int, tuple[Any, ...]]:
        return {row["id"]: (row["project"], row["title"], row["done"]) for row in self.last["rows"].values()}
