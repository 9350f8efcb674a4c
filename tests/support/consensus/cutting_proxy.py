"""A proxy between a client and its engine that breaks the connection around one marked request."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Literal

How = Literal["before", "after", "late", ""]


class CuttingProxy:
    """A proxy that, once armed with `how`, ends a connection at the next chunk of the client that contains `MARK`.

    before   the chunk never reaches the engine
    after    it does, and the engine's answer never reaches the client
    late     the client is disconnected immediately; the engine gets the chunk `LATE_S` later, if it still listens
    """

    MARK = b"*the-marked-request*"
    LATE_S = 0.4

    def __init__(self, engine: tuple[str, int] | str) -> None:
        self._engine = engine
        self.how: How = ""
        self.cuts = 0
        self.late_delivered = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def serve_tcp(self, port: int = 0) -> int:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", port)
        return int(self._server.sockets[0].getsockname()[1])

    async def serve_unix(self, path: str) -> None:
        self._server = await asyncio.start_unix_server(self._accept, path)

    async def aclose(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._carry(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if isinstance(self._engine, str):
            engine_reader, engine_writer = await asyncio.open_unix_connection(self._engine)
        else:
            engine_reader, engine_writer = await asyncio.open_connection(*self._engine)
        swallow = asyncio.Event()

        async def back() -> None:
            with contextlib.suppress(OSError):
                while data := await engine_reader.read(1 << 16):
                    if swallow.is_set():
                        break
                    writer.write(data)
                    await writer.drain()
            writer.close()

        answering = asyncio.ensure_future(back())
        try:
            while data := await reader.read(1 << 20):
                if self.how and self.MARK in data:
                    how, self.how = self.how, ""
                    self.cuts += 1
                    if how == "before":
                        return
                    swallow.set()
                    if how == "late":
                        writer.close()
                        await asyncio.sleep(self.LATE_S)
                    engine_writer.write(data)
                    with contextlib.suppress(OSError):
                        await engine_writer.drain()
                    self.late_delivered.set()
                    await answering
                    return
                engine_writer.write(data)
                await engine_writer.drain()
        finally:
            answering.cancel()
            engine_writer.close()
