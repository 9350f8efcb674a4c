"""The HTTP server's bounds: slow heads, many connections, long heads and bodies, many requests of one address."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from support.waiting import until
from tidemill.node.http.limits import HttpLimits
from tidemill.node.http.server import HttpServer, build_application
from tidemill.shapes.http import responses
from tidemill.shapes.http.authorization import client_host
from tidemill.shapes.http.responses import ItemsResponse, split_pieces


async def hello(request: Request) -> Response:
    return PlainTextResponse("hello")


async def length(request: Request) -> Response:
    try:
        return PlainTextResponse(str(len(await request.body())))
    except ClientDisconnect:
        return PlainTextResponse("cut off", 499)


async def length_unguarded(request: Request) -> Response:
    return PlainTextResponse(str(len(await request.body())))


async def ask(port: int, head: str = "GET / HTTP/1.1", body: bytes = b"") -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{head}\r\nhost: x\r\nconnection: close\r\n\r\n".encode() + body)
    try:
        return await reader.read()
    finally:
        writer.close()


def serve(limits: HttpLimits, *routes: Route) -> HttpServer:
    def failed(name: str, error: BaseException) -> None:
        raise AssertionError(f"{name} ended") from error

    app = build_application([Route("/", hello), Route("/length", length, methods=["POST"]), *routes])
    return HttpServer(app, on_failure=failed, limits=limits)


async def test_f108_connections_beyond_the_limit_wait_and_silent_ones_are_closed() -> None:
    server = serve(HttpLimits(connections=16, header_timeout_s=0.5))
    port = await server.start()
    silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(16)]
    for _, writer in silent[:8]:
        writer.write(b"GET / HT")
    assert (await ask(port)).endswith(b"hello"), "the silent ones went and made room"
    for reader, writer in silent:
        await reader.read()
        writer.close()
    await server.aclose()


async def test_a_long_head_or_url_or_body_is_refused() -> None:
    unguarded = Route("/unguarded", length_unguarded, methods=["POST"])
    server = serve(HttpLimits(header_bytes=16 << 10, body_bytes=10_000), unguarded)
    port = await server.start()
    assert b"431" in (await ask(port, "GET / HTTP/1.1\r\nx-long: " + "a" * 50_000))[:20]
    assert (await ask(port, f"GET /?{'a' * 70_000} HTTP/1.1"))[9:12] in (b"414", b"431")
    posting = "POST /length HTTP/1.1\r\ncontent-length: {}"
    assert (await ask(port, posting.format(9_000), b"b" * 9_000)).endswith(b"9000")
    assert (await ask(port, posting.format(20_000), b"b" * 20_000))[9:12] == b"413"
    chunked = "".join(f"{1000:x}\r\n{'c' * 1000}\r\n" for _ in range(20)) + "0\r\n\r\n"
    for path in ("/length", "/unguarded"):
        answer = await ask(port, f"POST {path} HTTP/1.1\r\ntransfer-encoding: chunked", chunked.encode())
        assert answer[9:12] == b"413" and answer.endswith(b'too large."}'), "whatever the application says to it"
    assert (await ask(port)).endswith(b"hello")
    await server.aclose()


async def test_a_client_of_a_socket_for_both_kinds_of_addresses_is_known_by_its_own() -> None:
    async def who(request: Request) -> Response:
        return PlainTextResponse(f"{client_host(request.scope)} {list(server.bounded.under_way)}")

    server = HttpServer(build_application([Route("/who", who)]), "::", on_failure=lambda *_: None)
    port = await server.start()
    assert (await ask(port, "GET /who HTTP/1.1")).endswith(b"127.0.0.1 ['127.0.0.1']")
    await server.aclose()


async def test_requests_of_one_address_beyond_its_limit_are_refused_and_places_come_back() -> None:
    gate = asyncio.Event()

    async def held(request: Request) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            yield b"first"
            await gate.wait()

        return StreamingResponse(parts())

    server = serve(HttpLimits(per_address=3), Route("/held", held))
    port = await server.start()
    streams = [asyncio.ensure_future(ask(port, "GET /held HTTP/1.1")) for _ in range(3)]
    await until(lambda: server.bounded.under_way == {"127.0.0.1": 3})
    refused = await ask(port)
    assert refused[9:12] == b"503" and b"retry-after" in refused
    gate.set()
    await asyncio.gather(*streams)
    assert (await ask(port)).endswith(b"hello")
    await until(lambda: not server.bounded.under_way)
    await server.aclose()


async def test_f111_connections_of_one_address_beyond_its_share_are_closed_and_others_are_served() -> None:
    server = serve(HttpLimits(connections=64, address_connections=10))
    port = await server.start()
    crowd = [await asyncio.open_connection("127.0.0.1", port) for _ in range(64)]

    async def closed(reader: asyncio.StreamReader) -> None:
        assert await reader.read() == b""

    ends = [asyncio.ensure_future(closed(reader)) for reader, _ in crowd]
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert (await reader.read()).endswith(b"hello"), "another address found a place among 64 taken ones"
    await until(lambda: sum(end.done() for end in ends) >= 54)
    assert sum(end.done() for end in ends) == 54, "its share stays"
    for end in ends:
        end.cancel()
    for _, each in (*crowd, (reader, writer)):
        each.close()
    await server.aclose()


def test_pieces_join_to_the_array_whatever_the_sizes() -> None:
    for items in ([], [b"1"], [b"1", b"2"], [b"x" * 200_000], [b"a" * 10, b"b" * 65_536, b"c"], [b"y" * 65_535] * 3):
        found = list(split_pieces(items))
        assert b"".join(found) == b"[" + b",\n".join(items) + b"]"
        assert all(len(piece) <= responses.PIECE_BYTES + 10 for piece in found)


def memory_kb() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))


async def test_f109_readers_that_never_read_cost_no_copy_of_their_answer_and_are_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(responses, "STALL_TIMEOUT_S", 1.0)
    chunk = b'"' + b"x" * (20 << 20) + b'"'
    ended: list[BaseException] = []

    async def big(request: Request) -> Response:
        class Watched(ItemsResponse):
            async def __call__(self, *arguments: Any) -> None:
                try:
                    await super().__call__(*arguments)
                except BaseException as error:
                    ended.append(error)
                    raise

        return Watched((chunk,), 200, {})

    server = serve(HttpLimits(), Route("/big", big))
    port = await server.start()
    before_kb = memory_kb()
    stuck = []
    for _ in range(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(b"GET /big HTTP/1.1\r\nhost: x\r\n\r\n")
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        stuck.append((reader, writer))
    await asyncio.sleep(0.8)
    assert memory_kb() - before_kb < 100_000, "400 MB of answers are under way"
    assert (await ask(port)).endswith(b"hello")
    await until(lambda: len(ended) >= 20)
    assert all(isinstance(error, responses.StalledReaderError) for error in ended)
    await until(lambda: not server.bounded.under_way)
    reader, writer = stuck[0]
    writer.transport.resume_reading()  # type: ignore[attr-defined]
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await reader.readexactly(len(chunk))
    for _, writer in stuck:
        writer.close()
    await server.aclose()


ORIGIN = "Origin: http://localhost:5173"
SHAPE = "GET /v1/shape{} HTTP/1.1\r\n" + ORIGIN


async def test_a_url_may_be_as_long_as_a_head_and_every_refusal_of_a_shape_says_so_to_its_page() -> None:
    async def shape(request: Request) -> Response:
        return PlainTextResponse(str(len(request.url.query)))

    async def too_often(request: Request) -> Response:
        return JSONResponse({"message": "too often"}, 429)

    async def broken(request: Request) -> Response:
        raise RuntimeError("of a handler")

    limits = HttpLimits(per_address=1, body_bytes=10_000)
    server = serve(limits, Route("/v1/shape", shape), Route("/v1/none", too_often), Route("/v1/broken", broken))
    port = await server.start()
    room = limits.header_bytes - 200
    assert (await ask(port, SHAPE.format("?" + "a" * room))).endswith(str(room).encode())
    refused = {
        b"431": SHAPE.format("?" + "a" * 60_000) + "\r\nx-long: " + "b" * 60_000,
        b"413": "POST /v1/shape HTTP/1.1\r\ncontent-length: 20000\r\n" + ORIGIN,
        b"404": SHAPE.format("/none"),
        b"405": "PUT /v1/shape HTTP/1.1\r\n" + ORIGIN,
        b"500": "GET /v1/broken HTTP/1.1\r\n" + ORIGIN,
        b"429": "GET /v1/none HTTP/1.1\r\n" + ORIGIN,
    }
    answers = {status: await ask(port, head) for status, head in refused.items()}
    server.bounded.under_way["127.0.0.1"] = 1
    answers[b"503"] = await ask(port, SHAPE.format(""))
    del server.bounded.under_way["127.0.0.1"]
    for status, answer in answers.items():
        top, _, body = answer.partition(b"\r\n\r\n")
        head = top.lower()
        assert head[9:12] == status and json.loads(body)["message"]
        assert b"access-control-allow-origin: http://localhost:5173" in head, status
        assert b"access-control-expose-headers: electric-cursor" in head and head.count(b"vary:") == 1
    strange = await ask(port, "GET /v1/none HTTP/1.1\r\nOrigin: https://else.where")
    assert b"access-control-allow-origin" not in strange
    assert b"access-control" not in await ask(port, "GET /none HTTP/1.1\r\n" + ORIGIN)
    await server.aclose()


async def test_a_head_around_the_limit_is_served_or_refused_in_words_that_a_page_can_read() -> None:
    async def shape(request: Request) -> Response:
        return PlainTextResponse(str(len(request.url.query)))

    for header_bytes in (8 << 10, 64 << 10):
        server = serve(HttpLimits(header_bytes=header_bytes), Route("/v1/shape", shape))
        port = await server.start()
        around = len(SHAPE.format("?")) + len("\r\nhost: x\r\nconnection: close\r\n\r\n")
        for room in (header_bytes - around - 1, header_bytes - around):
            assert (await ask(port, SHAPE.format("?" + "a" * room))).endswith(b"\r\n" + str(room).encode())
        above = [
            SHAPE.format("?" + "a" * (header_bytes - around + 1)),
            SHAPE.format("") + "\r\nx-long: " + "a" * header_bytes,
            SHAPE.format("") + "\r\nx-long: " + "a" * 200_000,
            SHAPE.format("") + "".join(f"\r\nx-{number}: {'a' * (header_bytes // 90)}" for number in range(90)),
        ]
        for head in above:
            top, _, body = (await ask(port, head)).partition(b"\r\n\r\n")
            assert top[9:12] == b"431" and b"access-control-allow-origin: http://localhost:5173" in top.lower()
            assert json.loads(body)["message"].startswith(f"The request head is too large: limit_bytes={header_bytes}")
        await server.aclose()


async def test_what_the_parser_refuses_by_itself_is_an_answer_too_and_nothing_else_is_refused_by_it() -> None:
    """The parser's own answers carry no CORS headers; docs/guides/shapes.md lists them. This test fails if the parser
    adds them or refuses more."""
    server = serve(HttpLimits(), Route("/v1/shape", hello))
    port = await server.start()
    long, many = "?" + "a" * 70_000, "".join(f"\r\nx-{number}: 1" for number in range(101))
    bare = {
        SHAPE.format(long): b"414",
        SHAPE.format("?" + "a" * (1 << 20)): b"431",
        SHAPE.format("") + many: b"431",
        SHAPE.format("") + "\r\nx-long: " + "a" * (1 << 20): b"431",
        "hello": b"400",
        SHAPE.format("") + "\r\nno header": b"400",
    }
    for head, status in bare.items():
        answer = await ask(port, head)
        assert (answer[9:12], b"access-control" in answer) == (status, False), head[:60]
    for head in (SHAPE.format("?a|^{}`[]'\\$%zz"), SHAPE.format(""), SHAPE.format("") + "\r\nx: \u00e9"):
        assert (await ask(port, head)).endswith(b"hello"), "a browser writes these as they are"
    await server.aclose()
