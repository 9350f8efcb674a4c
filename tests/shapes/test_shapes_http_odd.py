"""Requests that no regular client sends: other methods, bytes that are no text, interrupted bodies."""

from __future__ import annotations

import asyncio

import pytest

from support.shapes.world import ShapeWorld
from tidemill.shapes import ShapeSettings

pytestmark = pytest.mark.postgres

DDL = "CREATE TABLE item (id int PRIMARY KEY, name text); INSERT INTO item VALUES (1, 'a'), (2, 'b')"
PAGE = {"origin": "http://localhost:3000"}


async def raw(world: ShapeWorld, data: bytes, *, ends: bool = False) -> bytes:
    """Send these bytes and return the whole answer. With `ends`, the connection must end after it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", world.server.port)
    writer.write(data)
    if ends:
        writer.write_eof()
    try:
        return await reader.read()
    finally:
        writer.close()


@pytest.mark.parametrize("allow_delete", [True, False])
async def test_a_method_that_is_not_allowed_is_405_with_those_that_are_and_a_page_may_read_it(
    postgres_dsn: str, allow_delete: bool
) -> None:
    async with ShapeWorld(postgres_dsn, DDL, ShapeSettings(allow_delete=allow_delete)) as world:
        others = ["PUT", "PATCH", "TRACE", "PROPFIND", *([] if allow_delete else ["DELETE"])]
        for method in others:
            answer = await world.ask("/v1/shape?table=item", method, **PAGE)
            assert (answer.status, list(answer.json)) == (405, ["message"]), method
            allowed = set(answer.headers["allow"].split(", "))
            assert allowed == {"GET", "HEAD", "POST", "OPTIONS"} | ({"DELETE"} if allow_delete else set())
            assert answer.headers["cache-control"] == "no-store"
            assert answer.headers["access-control-allow-origin"] == PAGE["origin"]
            assert answer.headers["x-request-id"]


@pytest.mark.parametrize(
    ("query", "name"),
    [
        ("table=%ff", "table"),
        ("table=item&where=name='%ff'", "where"),
        ("table=item&where=name=$1&params[1]=%C3%28", "params[1]"),
        ("table=item&where=name=$1&params%5B1%5D=%ED%A0%80", "params[1]"),
        ("table=item&%fe=1", "\ufffd"),
        ("table=item&where=name='%EF%BF%BD'&handle=%80", "handle"),
    ],
)
async def test_what_is_no_utf_8_is_400_and_not_read_as_another_text(postgres_dsn: str, query: str, name: str) -> None:
    async with ShapeWorld(postgres_dsn, DDL, ShapeSettings(secret="s", allow_delete=True)) as world:
        for method in ("GET", "POST", "DELETE"):
            answer = await world.ask(f"/v1/shape?{query}&offset=-1&secret=s", method)
            assert (answer.status, answer.json.get("errors")) == (400, {name: ["is not UTF-8"]}), method
        assert (await world.ask(f"/v1/shape?{query}&offset=-1")).status == 401, "the secret is asked first"
        assert world.service.shapes() == []
        said = "/v1/shape?table=item&where=name='%EF%BF%BD'&offset=-1&secret=s"
        assert (await world.ask(said)).status == 200, "who writes the sign itself means it"


async def test_who_asks_for_a_table_that_is_not_captured_is_told_where_it_says_why(postgres_dsn: str) -> None:
    """The table may exist but be refused or parked; adding it to the capture would not help then."""
    async with ShapeWorld(postgres_dsn, DDL) as world:
        answer = await world.get(table="parked", offset="-1")
        (said,) = answer.json["errors"]["table"]
        assert answer.status == 400 and said.endswith("its state in `tidemill capture list`.")


async def test_if_none_match_may_come_in_several_lines(postgres_dsn: str) -> None:
    async with ShapeWorld(postgres_dsn, DDL) as world:
        tag = (await world.get(table="item", offset="-1")).headers["etag"]
        lines = "".join(f"if-none-match: {each}\r\n" for each in ('"x"', tag))
        head = f"GET /v1/shape?table=item&offset=-1 HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{lines}\r\n"
        assert (await raw(world, head.encode()))[9:12] == b"304"


async def test_a_body_that_breaks_off_is_400_and_one_that_never_says_how_long_it_is_413_beyond_the_limit(
    postgres_dsn: str,
) -> None:
    async with ShapeWorld(postgres_dsn, DDL) as world:
        head = b"POST /v1/shape?table=item&offset=now HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        chunked = head + b"transfer-encoding: chunked\r\n\r\n"
        for cut in (head + b"content-length: 50\r\n\r\n{", chunked + b"5\r\n{", chunked + b"zz\r\n{}\r\n0\r\n\r\n"):
            answer = await raw(world, cut, ends=True)
            assert answer[9:12] == b"400" and b"no-store" in answer, cut
        large = chunked + b"".join(b"10000\r\n" + b" " * 65536 + b"\r\n" for _ in range(17)) + b"0\r\n\r\n"
        assert (await raw(world, large))[9:12] == b"413"
        assert (await raw(world, chunked + b"2\r\n{}\r\n0\r\n\r\n"))[9:12] == b"200"


async def test_names_without_quotes_are_folded_as_the_database_folds_them(postgres_dsn: str) -> None:
    """A to Z only: other capitals remain, as do blanks that are not ASCII."""
    ddl = "CREATE TABLE ÄrgER (ID int PRIMARY KEY, ÜBER int, x\u00a0 int); INSERT INTO ÄRGER VALUES (1, 2, 3)"
    async with ShapeWorld(postgres_dsn, ddl) as world:
        for table in ("ÄRGER", "Ärger", "public.ÄrgeR", '"Ärger"', 'PUBLIC."Ärger"'):
            for columns in ("ID,ÜBER,X\u00a0", ' id , Über ,"x\u00a0"'):
                answer = await world.get(table=table, offset="-1", columns=columns, where="ÜBER = 2 AND X\u00a0 = 3")
                assert answer.status == 200, answer.body
                [row] = [item["value"] for item in answer.items if "value" in item]
                assert row == {"id": "1", "Über": "2", "x\u00a0": "3"}
        for columns in ("id,über", "id,x"):
            assert (await world.get(table="ÄRGER", offset="-1", columns=columns)).status == 400
        refused = await world.get(table="ärger", offset="-1")
        assert refused.status == 400 and 'Did you mean "public"."Ärger"' in refused.json["errors"]["table"][0]
