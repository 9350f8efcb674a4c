"""Proxies in front of the stores of a node, with a fault that is switched on and off."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Self
from urllib.parse import urlsplit


class Proxy:
    """Accepts on `port` and serves each connection until it closes; `cut` ends all of them."""

    def __init__(self) -> None:
        self.fault = ""
        self.port = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self.cut()

    def switch(self, fault: str) -> None:
        self.fault = fault

    async def cut(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await self._serve(reader, writer)
        finally:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raise NotImplementedError


class FaultyPostgres(Proxy):
    """`refused`: every connection is closed; `swallowed`: bytes are accepted and never passed on; `slow`: each piece of
    what the server says waits SLOW_S."""

    SLOW_S = 10.0

    def __init__(self, dsn: str) -> None:
        super().__init__()
        self._parts = urlsplit(dsn)
        self._flows = asyncio.Event()
        self._flows.set()

    @property
    def dsn(self) -> str:
        user = f"{self._parts.username}@" if self._parts.username else ""
        return self._parts._replace(netloc=f"{user}127.0.0.1:{self.port}").geturl()

    def switch(self, fault: str) -> None:
        super().switch(fault)
        if fault == "swallowed":
            self._flows.clear()
        else:
            self._flows.set()
        if fault == "refused":
            for task in list(self._tasks):
                task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.fault == "refused":
            return
        await self._flows.wait()
        inner_reader, inner_writer = await asyncio.open_connection(self._parts.hostname, self._parts.port)
        pumps = [
            asyncio.ensure_future(self._pump(reader, inner_writer, slows=False)),
            asyncio.ensure_future(self._pump(inner_reader, writer, slows=True)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            inner_writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, slows: bool) -> None:
        while data := await reader.read(65536):
            await self._flows.wait()
            if slows and self.fault == "slow":
                await asyncio.sleep(self.SLOW_S)
            writer.write(data)
            await writer.drain()


class FaultyS3(Proxy):
    """A proxy in front of an S3 server, one request per connection.

    `fault` is the status that it answers instead (`404` and `412` only a PUT, and `412` after the PUT was done),
    `hang`, `flip` (a bit of each object that is read), `flip-once` (of the first answer to each request), or "" for
    none.
    """

    CODES = {"500": "InternalError", "503": "SlowDown", "404": "NoSuchKey", "412": "PreconditionFailed"}

    def __init__(self, endpoint: str) -> None:
        super().__init__()
        self._inner = urlsplit(endpoint)
        self._flipped: set[tuple[str, str]] = set()
        """Requests that were answered with a flipped bit."""
        self._answers = asyncio.Event()
        self._answers.set()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def switch(self, fault: str) -> None:
        super().switch(fault)
        if fault == "hang":
            self._answers.clear()
        else:
            self._answers.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        headers = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])
        }
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        await self._answers.wait()
        put = lines[0].startswith("PUT ")
        if self.fault in ("500", "503") or (self.fault == "404" and put):
            answer = self._refusal()
        else:
            answer = await self._asked(lines, body)
            if self.fault == "412" and put:
                answer = self._refusal()
            elif self.fault.startswith("flip") and lines[0].startswith("GET ") and "list-type" not in lines[0]:
                answer = self._flip(answer, (lines[0], headers.get("range", "")))
        writer.write(answer)
        await writer.drain()

    def _flip(self, answer: bytes, asked: tuple[str, str]) -> bytes:
        """Flip one bit of the last byte, which in a batch of records belongs to a record."""
        known = asked in self._flipped
        self._flipped.add(asked)
        if (known and self.fault == "flip-once") or answer.endswith(b"\r\n\r\n"):
            return answer
        return answer[:-1] + bytes((answer[-1] ^ 1,))

    def _refusal(self) -> bytes:
        code = self.CODES[self.fault]
        body = f"<Error><Code>{code}</Code><Message>planted</Message></Error>".encode()
        return (
            f"HTTP/1.1 {self.fault} {code}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body
        )

    async def _asked(self, lines: list[str], body: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(self._inner.hostname, self._inner.port)
        try:
            passed = [line for line in lines if line and not line.lower().startswith("connection:")]
            writer.write("\r\n".join([*passed, "connection: close", "", ""]).encode("latin-1") + body)
            await writer.drain()
            answer = await reader.read(-1)
        finally:
            writer.close()
        head, _, rest = answer.partition(b"\r\n\r\n")
        kept = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"connection:")]
        return b"\r\n".join([*kept, b"connection: close", b"", rest])
