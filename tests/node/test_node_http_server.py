"""The embedded HTTP server: ports, streaming, disconnecting clients, and a clean shutdown."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from support.waiting import eventually, run, until
from tidemill.base.errors import InvalidError
from tidemill.node.http import embedded_granian
from tidemill.node.http.server import HttpServer


def broke(name: str, error: BaseException) -> None:
    raise AssertionError(name) from error


async def hello(request: Request) -> Response:
    return PlainTextResponse("hello")


def app(*routes: Route) -> Starlette:
    return Starlette(routes=[Route("/", hello), *routes])


async def fetch(port: int, path: str = "/") -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
    try:
        return await reader.read()
    finally:
        writer.close()


async def test_port_zero_gives_a_free_port_that_answers_and_is_free_again_after_the_end() -> None:
    server = HttpServer(app(), on_failure=broke)
    port = await server.start()
    assert port == server.port > 0
    assert (await fetch(port)).endswith(b"hello")
    await server.aclose()
    await server.aclose()
    with pytest.raises(OSError):
        await fetch(port)
    again = HttpServer(app(), port=port, on_failure=broke)
    assert await again.start() == port
    assert (await fetch(port)).endswith(b"hello")
    await again.aclose()


def test_at_its_end_no_thread_is_left_to_ask_for_connections() -> None:
    """A thread that polls a closed listener spins for as long as the process lives."""

    async def main() -> None:
        for _ in range(3):
            server = HttpServer(app(), on_failure=broke)
            assert (await fetch(await server.start())).endswith(b"hello")
            await server.aclose()

    before = len(os.listdir("/proc/self/task"))
    run(main())
    eventually(lambda: len(os.listdir("/proc/self/task")) <= before)


async def test_a_taken_port_is_invalid_and_names_the_key() -> None:
    first = HttpServer(app(), on_failure=broke)
    port = await first.start()
    with pytest.raises(InvalidError, match=r"key=node\.http"):
        await HttpServer(app(), port=port, on_failure=broke).start()
    assert (await fetch(port)).endswith(b"hello")
    await first.aclose()
    with socket.socket() as foreign:
        foreign.bind(("127.0.0.1", 0))
        foreign.listen()
        with pytest.raises(InvalidError, match="Set node"):
            await HttpServer(app(), port=foreign.getsockname()[1], on_failure=broke).start()


async def test_a_stream_arrives_piece_by_piece_and_is_cancelled_when_the_client_goes() -> None:
    over = asyncio.Event()

    async def stream(request: Request) -> Response:
        async def pieces() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield b"piece\n"
                    await asyncio.sleep(0.01)
            finally:
                over.set()

        return StreamingResponse(pieces())

    server = HttpServer(app(Route("/stream", stream)), on_failure=broke)
    port = await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\n")
    await reader.readuntil(b"piece")
    assert not over.is_set()
    writer.close()
    await over.wait()
    await server.aclose()


async def test_many_held_requests_are_answered_and_the_end_does_not_wait_for_them() -> None:
    gate = asyncio.Event()
    held = 0

    async def hold(request: Request) -> Response:
        nonlocal held
        held += 1
        await gate.wait()
        return PlainTextResponse("released")

    server = HttpServer(app(Route("/hold", hold)), on_failure=broke)
    port = await server.start()
    waiting = [asyncio.ensure_future(fetch(port, "/hold")) for _ in range(200)]
    await until(lambda: held >= 200)
    assert (await fetch(port)).endswith(b"hello")
    gate.set()
    assert all(answer.endswith(b"released") for answer in await asyncio.gather(*waiting))
    gate.clear()
    last = asyncio.ensure_future(fetch(port, "/hold"))
    await until(lambda: held >= 201)
    await server.aclose()
    gate.set()
    last.cancel()
    await asyncio.gather(last, return_exceptions=True)


async def test_an_unknown_granian_is_refused_at_the_start_and_the_installed_one_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    embedded_granian.check_version()
    for version in ("2.7.9", "2.80.0", "3.0.0"):
        with pytest.raises(InvalidError, match=rf"unsupported granian: version={version}\. Install granian 2\.8"):
            embedded_granian.check_version(version)

    class Changed(embedded_granian.Server):  # type: ignore[misc]
        def _spawn_worker(self, idx: int, target: Any) -> None:
            """Accept one parameter less than the overridden method."""

    with pytest.raises(InvalidError, match="method=_spawn_worker parameters="):
        embedded_granian.check_version(server=Changed)

    monkeypatch.setattr(embedded_granian, "_ATTRIBUTES", (*embedded_granian._ATTRIBUTES, "another"))
    server = HttpServer(app(), on_failure=broke)
    with pytest.raises(InvalidError, match="missing=another"):
        await server.start()
    await server.aclose()
