"""HTTP certificates are renewed while the server runs: new connections get the new one, existing ones continue."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from support.kafka.security import Authority
from support.waiting import until
from tidemill.base.errors import InvalidError
from tidemill.node.http import embedded_granian
from tidemill.node.http import server as http_module
from tidemill.node.http.connection_limits import close_descriptor_copies
from tidemill.node.http.server import HttpServer


class World:
    def __init__(self, directory: Path) -> None:
        self.authority = Authority(directory / "ca")
        self.go_on = asyncio.Event()
        routes = [Route("/", self._hello), Route("/slow", self._slow)]
        self.server = HttpServer(Starlette(routes=routes), on_failure=_broke, tls=self.authority.tls())
        self.context = ssl.create_default_context(cafile=self.authority.certificate)
        self.reported: list[BaseException] = []
        self.works = 0

    async def _hello(self, request: Request) -> Response:
        return PlainTextResponse("hello")

    async def _slow(self, request: Request) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            yield b"first"
            await self.go_on.wait()
            yield b"last"

        return StreamingResponse(parts())

    async def follow(self) -> None:
        """Watch the certificates and restart after an error, like a supervised unit."""

        def works() -> None:
            self.works += 1

        while True:
            try:
                await self.server.watch_certificates(works)
            except InvalidError as error:
                self.reported.append(error)
                await asyncio.sleep(0.02)

    async def serial(self) -> int:
        """Return the serial number of the certificate that a new connection gets. A connection made while a worker ends
        may be reset."""
        while True:
            with contextlib.suppress(ConnectionError):
                _, writer = await asyncio.open_connection("127.0.0.1", self.server.port, ssl=self.context)
                shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
                writer.close()
                return x509.load_der_x509_certificate(shown).serial_number

    async def settled(self) -> None:
        """Return when new connections get the certificate of the file. A former worker may accept one more connection
        before its thread gets a core and sees that it must end."""
        file = self.authority.certificate.parent / "server.pem"
        named = x509.load_pem_x509_certificate(file.read_bytes()).serial_number
        async with asyncio.timeout(40):
            alike = 0
            while alike < 10:
                alike = alike + 1 if await self.serial() == named else 0

    def replace(self) -> None:
        self.authority.server("next")
        folder = self.authority.certificate.parent
        for name in ("key", "pem"):
            os.replace(folder / f"next.{name}", folder / f"server.{name}")

    async def renewed(self) -> None:
        self.replace()
        await self.settled()


def _broke(name: str, error: BaseException) -> None:
    raise AssertionError(name) from error


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_module, "RENEW_INTERVAL_S", 0.05)


async def test_f249_new_connections_get_the_new_certificate_and_old_ones_go_on(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.server.start()
    following = asyncio.ensure_future(world.follow())
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", world.server.port, ssl=world.context)
        writer.write(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"first" in await reader.readuntil(b"first")
        for _ in range(2):
            await world.renewed()
        world.go_on.set()
        assert b"last" in await reader.readuntil(b"last"), "a request under way ends as it began"
        writer.close()
        key = world.authority.certificate.parent / "server.key"
        good, works = key.read_bytes(), world.works
        world.reported.clear()  # of a key that was there before its certificate
        key.write_text("nothing")
        await until(lambda: world.reported)
        await world.settled()  # the former one serves
        key.write_bytes(good)
        await until(lambda: world.works > works + 1)
        await world.settled()
    finally:
        following.cancel()
        await world.server.aclose()
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", world.server.port, ssl=world.context)


async def test_a_connection_that_never_ends_holds_no_renewal_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_module, "FORMER_CONNECTIONS_S", 0.3)
    world = World(tmp_path)
    await world.server.start()
    following = asyncio.ensure_future(world.follow())
    try:
        for _ in range(3):
            reader, writer = await asyncio.open_connection("127.0.0.1", world.server.port, ssl=world.context)
            writer.write(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
            await reader.readuntil(b"first")
            await world.renewed()
            async with asyncio.timeout(40):
                with contextlib.suppress(OSError):
                    await reader.read()  # until it is ended
            writer.close()
        await until(lambda: listening(world.server.port) <= 2)
        # Between the writes of the two files, the certificate does not match the key: this is reported, and the read
        # repeated.
        assert [each for each in world.reported if "certificate and key" not in str(each)] == []
    finally:
        world.go_on.set()
        following.cancel()
        await world.server.aclose()


async def test_a_renewal_that_is_cut_off_leaves_no_worker_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node ends while it waits for the next worker to serve."""
    monkeypatch.setattr(embedded_granian, "WORKER_START_CHECK_S", 600.0)
    world = World(tmp_path)
    await world.server.start()
    inner, workers = world.server._server, list[Any]()
    spawn = inner._spawn_worker
    inner._spawn_worker = lambda *what: workers.append(spawn(*what)) or workers[-1]
    following = asyncio.ensure_future(world.follow())
    world.replace()
    await until(lambda: workers)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    await world.server.aclose()
    await until(lambda: all(worker._task.done() for worker in workers))
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", world.server.port, ssl=world.context)


def listening(port: int) -> int:
    """Return the number of this process's descriptors that listen on `port`."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as found:
            count += bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and found.getsockname()[1] == port)
    return count


def test_copies_of_a_listening_socket_end_without_waking_those_who_wait_on_them() -> None:
    """A worker that missed its stop signal polls a copy. `shutdown` would wake it, and every accept would fail: a busy
    loop."""
    with socket.create_server(("127.0.0.1", 0)) as listening, select.epoll() as waiting:
        copy = os.dup(listening.fileno())
        waiting.register(copy, select.EPOLLIN)
        assert close_descriptor_copies(listening) == 1
        assert listening.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN), "the original still listens"
        address = listening.getsockname()
        listening.close()
        assert waiting.poll(0.05) == []
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, 5)
        os.close(copy)  # its owner's, also now
