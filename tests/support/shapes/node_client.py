"""Electric's TypeScript client in a Node process."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any, Self

import pytest

from tidemill.base.runtime.tasks import Tasks

CLIENTS = Path(__file__).parents[2] / "clients"


class NodeProcess:
    """A program of tests/clients that prints a line of JSON per event, each of which `_take` gets."""

    def __init__(self, program: str, *arguments: str) -> None:
        if shutil.which("node") is None or not (CLIENTS / "node_modules/@electric-sql/client").is_dir():
            pytest.skip("needs node and the packages of tests/clients: tests/clients/install")
        self._arguments = [str(CLIENTS / program), *arguments]
        self._tasks = Tasks(print)

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            "node", *self._arguments, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1 << 26
        )
        self._tasks.spawn(self._read(), name="node-output")
        return self

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            self._take(json.loads(line))

    def _take(self, line: dict[str, Any]) -> None:
        raise NotImplementedError

    async def __aexit__(self, *exc: object) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
        await self._tasks.aclose()


class NodeClient(NodeProcess):
    def __init__(self, url: str, params: dict[str, str], mode: str = "", headers: dict[str, str] | None = None) -> None:
        super().__init__("follow_shape.mjs", url, json.dumps(params), mode, json.dumps(headers or {}))
        self.lines: list[dict[str, Any]] = []

    @property
    def last(self) -> dict[str, Any]:
        return self.lines[-1] if self.lines else {"rows": {}, "upToDate": False, "refetches": 0}

    @property
    def rows(self) -> list[dict[str, Any]]:
        return sorted(self.last["rows"].values(), key=lambda row: str(row.get("id")))

    def _take(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
