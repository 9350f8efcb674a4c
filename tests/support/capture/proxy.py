"""A TCP proxy in front of PostgreSQL that can swallow packets: accepted, acknowledged, never passed on."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Self
from urllib.parse import urlsplit


class Proxy:
    """Connect to `proxy.dsn`; `swallow()` and `flow()` turn the black hole on and off."""

    def __init__(self, dsn: str) -> None:
        self._parts = urlsplit(dsn)
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self.port = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def dsn(self) -> str:
        user = f"{self._parts.username}@" if self._parts.username else ""
        return self._parts._replace(netloc=f"{user}127.0.0.1:{self.port}").geturl()

    def lead_to(self, dsn: str) -> None:
        """Another server from now on; every connection is cut."""
        self._parts = urlsplit(dsn)
        for writer in list(self._writers):
            writer.transport.abort()

    def swallow(self) -> None:
        self._flowing.clear()

    def flow(self) -> None:
        self._flowing.set()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await self._flowing.wait()
        try:
            inner_reader, inner_writer = await asyncio.open_connection(self._parts.hostname, self._parts.port)
        except OSError:
            writer.close()
            return
        self._writers |= {writer, inner_writer}
        try:
            pumps = [self._pump(reader, inner_writer), self._pump(inner_reader, writer)]
            await asyncio.wait([asyncio.ensure_future(p) for p in pumps], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._writers -= {writer, inner_writer}
            inner_writer.close()
            writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                await self._flowing.wait()
                writer.write(data)
                await writer.drain()
