"""The shape protocol over real changes of PostgreSQL; names of tests begin with their scenario ids."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from typing import Any

import pytest

from support.shapes.world import ShapeWorld
from support.waiting import DEADLINE_S, until
from tidemill.base.clock import Rand
from tidemill.shapes import LogLimits, ShapeSettings
from tidemill.shapes.http.responses import CURSOR_EPOCH_MS, next_cursor
from tidemill.shapes.log.log_offset import BASE_END, LogOffset
from tidemill.shapes.settings import CacheAges
from tidemill.shapes.tables.initial_snapshot import SESSION_SETTINGS

pytestmark = pytest.mark.postgres

DDL = """
CREATE TABLE item (id int PRIMARY KEY, name text, price numeric(10,2), done boolean NOT NULL DEFAULT false);
INSERT INTO item SELECT n, 'n' || n, n * 1.5, n % 2 = 0 FROM generate_series(1, 20) n;
CREATE TABLE "Odd.Name" ("K/1" text, k2 uuid, "naïve" varchar(20), list int[][], PRIMARY KEY (k2, "K/1"));
INSERT INTO "Odd.Name" VALUES ('a/b', '00000000-0000-0000-0000-000000000001', 'é', '{{1,2},{3,4}}');
"""


async def start(world: ShapeWorld, **params: str) -> dict[str, str]:
    """Follow a shape to its tail. Return the parameters of the next request."""
    client = await world.sync(table="item", **params)
    return {"table": "item", **params, "offset": client.offset, "handle": client.handle}


def shows_changes(world: ShapeWorld) -> bool:
    """Return whether a transaction is visible in the first shape; its items are staged before that."""
    return world.service.shapes()[0]["offset"] != str(BASE_END)


async def test_h1_initial_then_tail_then_live_gives_each_item_once_in_order(postgres_dsn: str) -> None:
    async with ShapeWorld(postgres_dsn, DDL, fragment_changes=2) as world:
        client = await world.sync(table="item")
        assert len(client.rows) == 20
        async with world.db.transaction():
            await world.db.execute("UPDATE item SET name = 'x' WHERE id <= 3")
            await world.db.execute("DELETE FROM item WHERE id = 4")
            await world.db.execute("INSERT INTO item VALUES (100, NULL, 1, true)")
        await client.follow_until(lambda: '"public"."item"/"100"' in client.rows)
        fresh = await world.sync(table="item")
        assert client.rows == fresh.rows
        streamed = client.seen[20:]
        positions = [(int(i["headers"]["lsn"]), i["headers"]["op_position"]) for i in streamed]
        assert positions == sorted(set(positions))
        assert [i["headers"]["operation"] for i in streamed] == ["update"] * 3 + ["delete", "insert"]
        assert len({i["headers"]["txids"][0] for i in streamed}) == 1


async def test_the_first_answer_has_the_schema_the_rows_and_cache_headers(postgres_dsn: str) -> None:
    async with ShapeWorld(postgres_dsn, DDL) as world:
        first = await world.get(table="item", offset="-1")
        assert json.loads(first.headers["electric-schema"]) == {
            "id": {"type": "int4", "dims": 0, "pk_index": 0, "not_null": True},
            "name": {"type": "text", "dims": 0},
            "price": {"type": "numeric", "dims": 0, "precision": 10, "scale": 2},
            "done": {"type": "bool", "dims": 0, "not_null": True},
        }
        assert first.items[0] == {
            "key": '"public"."item"/"1"',
            "value": {"id": "1", "name": "n1", "price": "1.50", "done": "false"},
            "headers": {"operation": "insert", "relation": ["public", "item"]},
        }
        assert first.controls == ["snapshot-end"]
        assert first.offset == "0_0"
        assert "electric-up-to-date" not in first.headers
        assert first.headers["cache-control"].startswith("public, max-age=604800")
        assert "electric-handle" in first.headers["access-control-expose-headers"]
        second = await world.get(table="item", offset=first.offset, handle=first.handle)
        assert second.headers["electric-up-to-date"] == ""
        assert second.controls == ["up-to-date"]
        assert second.headers["cache-control"] == "public, max-age=60, stale-while-revalidate=300"
        assert int(second.json[-1]["headers"]["global_last_seen_lsn"]) >= 0
        assert (await world.get(table="item", offset="-1")).handle == first.handle


async def test_odd_names_types_and_composite_keys_are_shown_as_the_protocol_says(postgres_dsn: str) -> None:
    async with ShapeWorld(postgres_dsn, DDL) as world:
        answer = await world.get(table='public."Odd.Name"', offset="-1")
        assert json.loads(answer.headers["electric-schema"]) == {
            "K/1": {"type": "text", "dims": 0, "pk_index": 1, "not_null": True},
            "k2": {"type": "uuid", "dims": 0, "pk_index": 0, "not_null": True},
            "naïve": {"type": "varchar", "dims": 0, "max_length": 20},
            "list": {"type": "int4", "dims": 2},
        }
        assert answer.items[0]["key"] == '"public"."Odd..Name"/"00000000-0000-0000-0000-000000000001"/"a//b"'
        assert answer.items[0]["value"]["list"] == "{{1,2},{3,4}}"


async def test_h2_and_h3_over_the_wire(postgres_dsn: str) -> None:
    async with ShapeWorld(postgres_dsn, DDL) as world:
        client = await world.sync(table="item", where="done = true AND id < $1", **{"params[1]": "15"})
        assert len(client.rows) == 7
        await world.db.execute("UPDATE item SET done = NOT done WHERE id IN (1, 2)")
        await world.db.execute("UPDATE item SET id = 12 + 1000 WHERE id = 12")
        await world.db.execute("UPDATE item SET id = 3, done = true WHERE id = 3")
        await client.follow_until(lambda: '"public"."item"/"3"' in client.rows)
        shown = {row["id"] for row in client.rows.values()}
        assert shown == {"1", "3", "4", "6", "8", "10", "14"}


async def test_h4_a_wrong_or_ended_handle_gets_409_with_the_new_one(postgres_dsn: str) -> None:
    async with ShapeWorld(postgres_dsn, DDL) as world:
        params = await start(world)
        wrong = await world.get(table="item", offset="0_inf", handle="123-456")
        assert wrong.status == 409
        assert wrong.json == [{"headers": {"control": "must-refetch"}}]
        assert wrong.handle == params["handle"]
        assert wrong.headers["cache-control"] == "public, max-age=60, must-revalidate"
        poll = asyncio.ensure_future(world.get(**params, live="true"))
        await until(lambda: any(s["waiting"] for s in world.service.shapes()))
        await world.db.execute("TRUNCATE item")
        gone = await poll
        assert gone.status == 409
        assert gone.handle != params["handle"]
        assert (await world.get(**params)).handle == gone.handle
        assert (await world.get(table="item", offset="-1", handle=gone.handle)).items == []


async def test_h5_a_live_request_without_news_is_200_and_up_to_date(postgres_dsn: str) -> None:
    assert ShapeSettings().long_poll_s == 20.0
    async with ShapeWorld(postgres_dsn, DDL, ShapeSettings(long_poll_s=0.3)) as world:
        params = await start(world)
        began = time.monotonic()
        one = await world.get(**params, live="true")
        assert 0.3 <= time.monotonic() - began < 5
        assert (one.status, one.controls, one.items) == (200, ["up-to-date"], [])
        assert one.offset == params["offset"]
        assert one.headers["cache-control"] == "public, max-age=5, stale-while-revalidate=5"
        two = await world.get(**params, live="true", cursor=one.headers["electric-cursor"])
        assert int(two.headers["electric-cursor"]) > int(one.headers["electric-cursor"])
        assert one.headers["etag"] != two.headers["etag"]


async def test_h6_a_write_between_read_and_subscribe_is_delivered_at_once(postgres_dsn: str) -> None:
    async with ShapeWorld(postgres_dsn, DDL, ShapeSettings(long_poll_s=20)) as world:
        params = await start(world)
        await world.db.execute("DELETE FROM item WHERE id = 1")
        await until(lambda: shows_changes(world))
        began = time.monotonic()
        answer = await world.get(**params, live="true")
        assert time.monotonic() - began < 5
        assert [i["headers"]["operation"] for i in answer.items] == ["delete"]
        assert answer.controls == ["up-to-date"]
        assert answer.json[-1]["headers"]["global_last_seen_lsn"] == answer.items[0]["headers"]["lsn"]


BAD: list[tuple[dict[str, str], str]] = [
    ({"table": "item", "offset": "-1", "live": "true"}, "live"),
    ({"table": "item", "offset": "now", "live": "true"}, "live"),
    ({"offset": "-1"}, "table"),
    ({"table": "item"}, "offset"),
    ({"table": "item", "offset": "xyz"}, "offset"),
    ({"table": "item", "offset": "1_0"}, "handle"),
    ({"table": "nope", "offset": "-1"}, "table"),
    ({"table": "a.b.c", "offset": "-1"}, "table"),
    ({"table": 'public."x', "offset": "-1"}, "table"),
    ({"table": "shard.nope", "offset": "-1"}, "table"),
    ({"table": "item", "offset": "-1", "where": "1 x 1"}, "where"),
    ({"table": "item", "offset": "-1", "where": "id = 1; DROP TABLE item"}, "where"),
    ({"table": "item", "offset": "-1", "where": "1 / (id - 1) > 0"}, "where"),
    ({"table": "item", "offset": "-1", "where": "id = $1"}, "where"),
    ({"table": "item", "offset": "-1", "where": "id = $2", "params[2]": "1"}, "params"),
    ({"table": "item", "offset": "-1", "columns": "name"}, "columns"),
    ({"table": "item", "offset": "-1", "columns": "id,nope"}, "columns"),
    ({"table": "item", "offset": "-1", "columns": 'id,"x'}, "columns"),
    ({"table": "item", "offset": "-1", "replica": "some"}, "replica"),
    ({"table": "item", "offset": "-1", "log": "none"}, "log"),
    ({"table": "item", "offset": "-1", "live_sse": "true"}, "live_sse"),
]


async def test_h7_and_other_bad_requests_are_400_and_name_the_parameter(postgres_dsn: str) -> None:
    async with ShapeWorld(postgres_dsn, DDL) as world:
        for params, field in BAD:
            answer = await world.get(**params)
            assert (answer.status, list(answer.json["errors"])) == (400, [field]), (params, answer.body)
            assert answer.json["message"] == "Invalid request"
            assert answer.headers["cache-control"] == "no-store"
        syntax = await world.get(table="item", offset="-1", where="1 x 1")
        assert syntax.json["errors"] == {"where": ['At location 17: syntax error at or near "x"']}
        assert await world.select("item")


async def test_h8_if_none_match_is_304(postgres_dsn: str) -> None:
    async with ShapeWorld(postgres_dsn, DDL) as world:
        first = await world.get(table="item", offset="-1")
        again = await world.request(
            "/v1/shape", {"table": "item", "offset": "-1"}, {"if-none-match": f'"x", W/{first.headers["etag"]}'}
        )
        assert (again.status, again.body) == (304, b"")
        other = await world.request("/v1/shape", {"table": "item", "offset": "-1"}, {"if-none-match": '"x"'})
        assert other.status == 200


async def test_h9_beyond_the_admission_limit_is_503_with_retry_after(postgres_dsn: str) -> None:
    async with ShapeWorld(postgres_dsn, DDL, ShapeSettings(long_poll_s=5, max_existing=1)) as world:
        params = await start(world)
        held = asyncio.ensure_future(world.get(**params, live="true"))
        await until(lambda: any(s["waiting"] for s in world.service.shapes()))
        refused = await world.get(**params, live="true")
        assert refused.status == 503
        assert 6 <= int(refused.headers["retry-after"]) <= 10
        await world.db.execute("DELETE FROM item WHERE id = 1")
        assert (await held).status == 200


async def test_h10_a_wrong_secret_is_401_on_every_spelling_of_the_path(postgres_dsn: str) -> None:
    async with ShapeWorld(postgres_dsn, DDL, ShapeSettings(secret="s3cret")) as world:
        for secret in ({}, {"secret": "wrong"}, {"secret": ""}):
            assert (await world.get(table="item", offset="-1", **secret)).status == 401
        for path in ("/v1/shape/", "//v1/shape", "/v1//shape", "/V1/shape", "/v1/shape;x", "/v1/%73hape"):
            assert (await world.request(path, {"table": "item", "offset": "-1"})).status in (401, 404)
        assert (await world.get(table="item", offset="-1", secret="s3cret")).status == 200
        assert (await world.request("/v1/shape", {}, method="OPTIONS")).status == 204


async def test_h11_a_table_made_anew_is_409_and_then_the_new_rows(postgres_dsn: str) -> None:
    async with ShapeWorld(postgres_dsn, DDL) as world:
        params = await start(world)
        await world.db.execute("DROP TABLE item; CREATE TABLE item (id int PRIMARY KEY, other text)")
        await world.db.execute("INSERT INTO item VALUES (1, 'new')")
        await until(lambda: any(len(r.columns) == 2 for r in world.relations.values()))
        answer = await world.get(**params)
        assert answer.status == 409
        client = await world.sync(table="item")
        assert [row for row in client.rows.values()] == [{"id": "1", "other": "new"}]


async def test_a_column_added_is_409_and_then_shown(postgres_dsn: str) -> None:
    async with ShapeWorld(postgres_dsn, DDL) as world:
        params = await start(world)
        await world.db.execute("ALTER TABLE item ADD COLUMN more int DEFAULT 7")
        await world.db.execute("UPDATE item SET name = 'y' WHERE id = 1")
        await until(lambda: any(len(r.columns) == 5 for r in world.relations.values()))
        assert (await world.get(**params, live="true")).status == 409
        client = await world.sync(table="item")
        assert client.rows['"public"."item"/"1"']["more"] == "7"


async def test_a_column_added_that_no_row_has_yet_is_409_and_then_shown(postgres_dsn: str) -> None:
    """The stream contains no change of the table. Found by the oracle's worlds, seed 26."""
    async with ShapeWorld(postgres_dsn, DDL, ShapeSettings(long_poll_s=60)) as world:
        params = await start(world)
        waiting = asyncio.ensure_future(world.get(**params, live="true"))
        await world.db.execute("ALTER TABLE item ADD COLUMN more int DEFAULT 7")
        world.learn()  # as a capture's watcher reports it
        assert (await asyncio.wait_for(waiting, DEADLINE_S)).status == 409
        client = await world.sync(table="item")
        assert client.rows['"public"."item"/"1"']["more"] == "7"


@pytest.mark.parametrize("chunk_bytes", [10 << 20, 1_000])
async def test_reads_from_every_end_of_a_snapshot_give_what_follows(postgres_dsn: str, chunk_bytes: int) -> None:
    """`0_0` is the end of a base of one chunk as well as of the first of several; `0_inf` the end of any."""
    settings = ShapeSettings(long_poll_s=1, limits=LogLimits(chunk_bytes=chunk_bytes))
    async with ShapeWorld(postgres_dsn, DDL, settings) as world:
        first = await world.get(table="item", offset="-1")
        rest = await world.get(table="item", offset="0_0", handle=first.handle)
        assert (rest.status, first.offset) == (200, "0_0")
        if chunk_bytes > 1_000:
            assert (rest.items, rest.offset, rest.controls) == ([], "0_inf", ["up-to-date"])
        else:
            assert rest.items[0]["key"] not in {item["key"] for item in first.items}
        client = await world.sync(table="item")
        assert (len(client.rows), client.offset) == (20, "0_inf")
        await world.db.execute("UPDATE item SET name = 'new' WHERE id = 1")
        live = await world.get(table="item", offset="0_inf", handle=first.handle, live="true")
        assert [item["headers"]["operation"] for item in live.items] == ["update"]
        late = await world.get(table="item", offset="0_999", handle=first.handle)
        assert (late.status, late.items, late.offset) == (200, live.items, live.offset)


async def test_a_live_answer_is_revalidated_and_a_quiet_one_never(postgres_dsn: str) -> None:
    async with ShapeWorld(postgres_dsn, DDL, ShapeSettings(long_poll_s=0.3)) as world:
        live = {**(await start(world)), "live": "true"}
        quiet = await world.get(**live)
        again = await world.request("/v1/shape", live, {"if-none-match": quiet.headers["etag"]})
        assert again.status == 200
        await world.db.execute("DELETE FROM item WHERE id = 1")
        await until(lambda: shows_changes(world))
        news = await world.get(**live)
        assert news.headers["etag"] == f'"{news.handle}:{live["offset"]}:{news.offset}"'
        again = await world.request("/v1/shape", live, {"if-none-match": news.headers["etag"]})
        assert (again.status, again.body) == (304, b"")
        assert again.headers["cache-control"] == "public, max-age=5, stale-while-revalidate=5"


async def test_every_answer_has_an_id_which_is_the_clients_when_it_sent_one(postgres_dsn: str) -> None:
    async with ShapeWorld(postgres_dsn, DDL) as world:
        query = {"table": "item", "offset": "-1"}
        named = await world.request("/v1/shape", query, {"x-request-id": "abc-1"})
        assert named.headers["x-request-id"] == "abc-1"
        strange = await world.request("/v1/shape", query, {"x-request-id": 'a"b'})
        other = await world.get(table="nope", offset="-1")
        made = {strange.headers["x-request-id"], other.headers["x-request-id"]}
        assert len(made) == 2 and all(len(each) == 16 for each in made)
        asked = {"access-control-request-headers": "authorization,content-type", "origin": "http://localhost"}
        preflight = await world.request("/v1/shape", {}, asked, method="OPTIONS")
        assert preflight.headers["access-control-allow-headers"] == "authorization,content-type"
        assert "POST" in preflight.headers["access-control-allow-methods"]


async def test_offset_now_answers_the_tail_without_rows(postgres_dsn: str) -> None:
    async with ShapeWorld(postgres_dsn, DDL) as world:
        now = await world.get(table="item", offset="now")
        assert (now.items, now.controls) == ([], ["up-to-date"])
        assert now.headers["electric-up-to-date"] == ""
        await world.db.execute("DELETE FROM item WHERE id = 1")
        live = await world.get(table="item", offset=now.offset, handle=now.handle, live="true")
        assert [i["headers"]["operation"] for i in live.items] == ["delete"]


async def test_changes_only_leaves_the_initial_rows_out(postgres_dsn: str) -> None:
    async with ShapeWorld(postgres_dsn, DDL) as world:
        client = await world.sync(table="item", log="changes_only")
        assert client.rows == {}
        await world.db.execute("INSERT INTO item VALUES (77, 'x', 1, true)")
        await client.follow_until(lambda: len(client.rows) == 1)


async def test_columns_are_cut_in_base_and_stream_and_unseen_changes_are_silent(postgres_dsn: str) -> None:
    async with ShapeWorld(postgres_dsn, DDL) as world:
        client = await world.sync(table="item", columns="id,name", where="price > 15")
        assert client.rows['"public"."item"/"11"'] == {"id": "11", "name": "n11"}
        await world.db.execute("UPDATE item SET price = price + 100 WHERE id > 5")
        await world.db.execute("UPDATE item SET name = 'z' WHERE id = 11")
        await client.follow_until(lambda: client.rows['"public"."item"/"11"']["name"] == "z")
        operations = [i["headers"]["operation"] for i in client.seen[10:]]
        assert operations == ["insert"] * 5 + ["update"]


async def test_an_offset_beyond_the_log_waits_and_is_then_refused(postgres_dsn: str) -> None:
    async with ShapeWorld(postgres_dsn, DDL, ShapeSettings(long_poll_s=0.4)) as world:
        params = await start(world)
        answer = await world.get(**{**params, "offset": "99999999999999_0"})
        assert (answer.status, list(answer.json["errors"])) == (400, ["offset"])


async def test_an_offset_beyond_a_log_of_an_earlier_life_is_asked_for_again_until_the_stream_comes_to_it(
    postgres_dsn: str,
) -> None:
    """The client saw the offset before the node died, so the answer must not call it invalid."""
    async with ShapeWorld(postgres_dsn, DDL, ShapeSettings(long_poll_s=0.4)) as world:
        params = await start(world)
        shape = world.service.find_by_handle(params["handle"])
        assert shape is not None
        shape.restored = True
        ahead = {**params, "offset": f"{world.service.last_seen(shape) + (1 << 40)}_0"}
        answer = await world.get(**ahead)
        assert answer.status == 503 and int(answer.headers["retry-after"]) >= 1
        shape.last_seen = 1 << 50
        assert (await world.get(**ahead)).status == 200


async def test_delete_is_405_unless_enabled(postgres_dsn: str) -> None:
    async with ShapeWorld(postgres_dsn, DDL) as world:
        params = await start(world)
        assert (await world.request("/v1/shape", {"table": "item"}, method="DELETE")).status == 405
        assert (await world.get(**params)).status == 200


async def test_delete_when_enabled_is_202_and_of_an_unknown_shape_404(postgres_dsn: str) -> None:
    async with ShapeWorld(postgres_dsn, DDL, ShapeSettings(allow_delete=True)) as world:
        params = await start(world)
        deleted = await world.request("/v1/shape", {"handle": params["handle"]}, method="DELETE")
        assert deleted.status == 202
        again = await world.request("/v1/shape", {"handle": params["handle"]}, method="DELETE")
        assert again.status == 404
        assert (await world.get(**params)).status == 409


async def test_health_list_and_preflight(postgres_dsn: str) -> None:
    async with ShapeWorld(postgres_dsn, DDL) as world:
        health = await world.request("/v1/health", {})
        assert (health.status, health.json) == (200, {"status": "active"})
        first = await world.get(table="item", offset="-1", where="id > 3")
        (listed,) = (await world.request("/api/shapes", {})).json
        assert (listed["handle"], listed["source"], listed["rows"]) == (first.handle, "public.item", 17)
        preflight = await world.request("/v1/shape", {}, method="OPTIONS")
        assert preflight.status == 204
        assert "GET" in preflight.headers["access-control-allow-methods"]


async def test_a_write_during_the_snapshot_is_seen_once(postgres_dsn: str) -> None:
    """The stream is paused, so that the same rows are in the snapshot and in the buffered stream."""
    async with ShapeWorld(postgres_dsn, DDL) as world:
        world.hold()
        await asyncio.sleep(0.05)
        await world.db.execute("INSERT INTO item VALUES (50, 'before', 1, true)")
        first = asyncio.ensure_future(world.sync(table="item"))
        client = await first
        assert client.rows['"public"."item"/"50"']["name"] == "before"
        await world.db.execute("UPDATE item SET name = 'after' WHERE id = 50")
        world.release()
        await client.follow_until(lambda: client.rows['"public"."item"/"50"']["name"] == "after")
        assert [i["headers"]["operation"] for i in client.seen[21:]] == ["update"]


async def test_a_transaction_open_during_the_snapshot_arrives_through_the_stream(postgres_dsn: str) -> None:
    import psycopg

    async with ShapeWorld(postgres_dsn, DDL) as world:
        async with await psycopg.AsyncConnection.connect(world.dsn) as writer:
            await writer.execute("INSERT INTO item VALUES (60, 'open', 1, true)")
            await world.db.execute("INSERT INTO item VALUES (61, 'done', 1, true)")
            client = await world.sync(table="item")
            assert '"public"."item"/"60"' not in client.rows
            assert '"public"."item"/"61"' in client.rows
            await writer.commit()
        await client.follow_until(lambda: '"public"."item"/"60"' in client.rows)


async def test_a_log_over_its_limit_starts_over_under_a_new_handle(postgres_dsn: str) -> None:
    settings = ShapeSettings(long_poll_s=2, limits=LogLimits(log_bytes=10_000))
    async with ShapeWorld(postgres_dsn, DDL, settings) as world:
        client = await world.sync(table="item")
        first = client.handle
        for n in range(40):
            await world.db.execute(f"INSERT INTO item VALUES ({1000 + n}, 'x', 1, true)")  # type: ignore[arg-type]
        await client.follow_until(lambda: '"public"."item"/"1039"' in client.rows and len(client.rows) == 60)
        assert client.refetches >= 1
        assert client.handle != first


async def test_shapes_of_a_capture_that_starts_anew_refetch_and_an_empty_one_is_503(postgres_dsn: str) -> None:
    async with ShapeWorld(postgres_dsn, DDL) as world:
        params = await start(world)
        poll = asyncio.ensure_future(world.get(**params, live="true"))
        await until(lambda: any(s["waiting"] for s in world.service.shapes()))
        world.sink = world.service.add_database("main", world.dsn, lambda: world.relations.values())
        assert (await poll).status == 409
        world.service.add_database("main", world.dsn, lambda: [])
        starting = await world.get(table="item", offset="-1")
        assert (starting.status, starting.headers["retry-after"]) == (503, "1")
        world.service.add_database("main", world.dsn, lambda: world.relations.values())
        assert (await world.get(table="item", offset="-1")).status == 200
        world.service.suspend_database("main")
        assert world.service.shapes() == []
        assert (await world.get(table="item", offset="-1")).status == 503


async def read_events(world: ShapeWorld, params: dict[str, str], until: Any, timeout_s: float = 10) -> tuple[str, bool]:
    """Read the text of an event stream until `until(text)` holds. Also return whether the server closed it."""
    import urllib.parse

    reader, writer = await asyncio.open_connection("127.0.0.1", world.server.port)
    query = urllib.parse.urlencode({**params, "live": "true", "live_sse": "true"})
    writer.write(f"GET /v1/shape?{query} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
    text = ""
    try:
        async with asyncio.timeout(timeout_s):
            while not until(text):
                data = await reader.read(65536)
                text += data.decode()
                if not data or text.endswith("0\r\n\r\n"):
                    return text, True
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    return text, False


async def test_sse_sends_items_up_to_date_and_keep_alives(postgres_dsn: str) -> None:
    settings = ShapeSettings(keep_alive_s=0.2, sse_s=1.5)
    async with ShapeWorld(postgres_dsn, DDL, settings) as world:
        params = await start(world)
        quiet, closed = await read_events(world, params, lambda text: ": keep-alive" in text)
        assert not closed
        assert "text/event-stream" in quiet
        assert "max-age=0" in quiet or "max-age=1" in quiet
        await world.db.execute("DELETE FROM item WHERE id = 1")
        news, _ = await read_events(world, params, lambda text: '"operation":"delete"' in text)
        assert news.index('"operation":"delete"') < news.rindex("up-to-date")
        _, closed = await read_events(world, params, lambda text: False)
        assert closed
        await until(lambda: all(not s["waiting"] for s in world.service.shapes()))


async def test_sse_says_nothing_until_there_is_something_and_resumes_where_its_up_to_date_item_says(
    postgres_dsn: str,
) -> None:
    async with ShapeWorld(postgres_dsn, DDL, ShapeSettings(long_poll_s=1, keep_alive_s=0.3)) as world:
        params = await start(world)
        await world.db.execute('DELETE FROM "Odd.Name"')
        await until(lambda: len(world.delivered) == 1)
        quiet, _ = await read_events(world, params, lambda text: text.count(": keep-alive") == 2)
        assert "data:" not in quiet
        others = {**params, "offset": f"{world.delivered[0].commit_lsn}_0"}
        assert (await world.get(**others, live="true")).status == 200, "a place of another table's transaction"
        await world.db.execute("DELETE FROM item WHERE id IN (1, 3, 4)")
        text, _ = await read_events(world, params, lambda text: '"up-to-date"' in text)
        assert text.count('"operation":"delete"') == 3
        control = json.loads(next(line for line in text.splitlines() if '"up-to-date"' in line)[len("data: ") :])
        lsn = control["headers"]["global_last_seen_lsn"]
        assert int(lsn) == world.delivered[1].commit_lsn
        await world.db.execute("DELETE FROM item WHERE id = 2")
        answer = await world.get(**{**params, "offset": f"{lsn}_0"}, live="true")
        ids = [i["value"]["id"] for i in answer.items]
        assert (answer.status, ids) == (200, ["2"]), "nothing of the transaction that was read comes again"


async def test_all_who_follow_one_shape_are_told_everything_once_and_in_order(postgres_dsn: str) -> None:
    """Readers that wait for the same transaction share its bytes; late readers are at other offsets."""
    count = 60
    async with ShapeWorld(postgres_dsn, DDL, ShapeSettings(keep_alive_s=0.2)) as world:
        params = await start(world)
        (shape,) = [world.service.find_by_handle(str(found["handle"])) for found in world.service.shapes()]
        assert shape is not None
        shared: list[int] = []
        tell = shape.share_frames

        def telling(after: LogOffset, end: LogOffset, frames: bytes) -> None:
            shared.append(end.tx)
            tell(after, end, frames)

        shape.share_frames = telling  # type: ignore[method-assign]

        def follow() -> asyncio.Task[tuple[str, bool]]:
            return asyncio.create_task(read_events(world, params, lambda text: f'"id":"{999 + count}"' in text, 30))

        readers = [follow() for _ in range(10)]
        await until(lambda: shape.waiting_count == 10)
        for n in range(count):
            await world.db.execute(f"INSERT INTO item (id) VALUES ({1000 + n})")
            if n % 10 == 5:
                readers.append(follow())
        for reader in readers:
            text, _ = await reader
            ids = [int(found) for found in re.findall(r'"value":\{"id":"(\d+)"', text)]
            assert ids == list(range(1000, 1000 + count))
        assert shape.shared_frames is None, "kept for a turn of the loop"
        assert len(shared) < 3 * count, "once for all who wait, not for each of them"


async def test_h13_sse_far_behind_the_head_sends_everything_and_closes(postgres_dsn: str) -> None:
    settings = ShapeSettings(limits=LogLimits(chunk_bytes=500))
    async with ShapeWorld(postgres_dsn, DDL, settings) as world:
        params = await start(world)
        await world.db.execute("UPDATE item SET name = 'z'")
        await until(lambda: shows_changes(world))
        text, closed = await read_events(world, params, lambda text: False)
        assert closed
        assert text.count('"operation":"update"') == 20
        assert "up-to-date" in text


async def test_a_client_that_goes_away_leaves_no_waiter(postgres_dsn: str) -> None:
    async with ShapeWorld(postgres_dsn, DDL, ShapeSettings(long_poll_s=30)) as world:
        params = await start(world)
        reader, writer = await asyncio.open_connection("127.0.0.1", world.server.port)
        query = "&".join(f"{k}={v}" for k, v in params.items())
        writer.write(f"GET /v1/shape?{query}&live=true HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        await until(lambda: any(s["waiting"] for s in world.service.shapes()))
        writer.close()
        await until(lambda: not any(s["waiting"] for s in world.service.shapes()))
        del reader


async def test_closing_the_service_answers_waiting_clients_at_once(postgres_dsn: str) -> None:
    async with ShapeWorld(postgres_dsn, DDL, ShapeSettings(long_poll_s=30)) as world:
        params = await start(world)
        polls = [asyncio.ensure_future(world.get(**params, live="true")) for _ in range(3)]
        await until(lambda: any(s["waiting"] == 3 for s in world.service.shapes()))
        await world.service.aclose()
        assert [answer.status for answer in await asyncio.gather(*polls)] == [503] * 3
        assert (await world.get(table="item", offset="-1")).status == 503


def test_cursors_join_clients_within_an_interval_and_never_repeat() -> None:
    rand = Rand(1)
    base = CURSOR_EPOCH_MS + 1_000_000_000
    assert next_cursor(base, None, 20, rand) == next_cursor(base + 19_000, None, 20, rand) == 1_000_020
    assert next_cursor(base, 999_999, 20, rand) == 1_000_020
    assert 1_000_020 < next_cursor(base, 1_000_020, 20, rand) <= 1_003_620


def test_snapshot_sessions_print_values_as_capture_does() -> None:
    from tidemill.capture.postgres.connection import DISPLAY_SETTINGS

    assert DISPLAY_SETTINGS.items() <= SESSION_SETTINGS.items()


async def test_only_pages_of_allowed_origins_may_read_answers(postgres_dsn: str) -> None:
    from tidemill.shapes.http.responses import AllowedOrigins

    chosen = AllowedOrigins(["https://shop.example", "http://localhost:*"])
    assert chosen.is_allowed("https://shop.example") and chosen.is_allowed("http://LOCALHOST:8600")
    assert chosen.is_allowed("http://localhost")
    strange = (
        "https://shop.example.evil",
        "http://shop.example",
        "http://localhost.evil:1",
        "null",
        "http://localhost:x",
    )
    for origin in strange:
        assert not chosen.is_allowed(origin)
    assert AllowedOrigins(["*"]).headers("https://any.where") == {"access-control-allow-origin": "*"}
    async with ShapeWorld(postgres_dsn, DDL) as world:
        query = {"table": "item", "offset": "-1"}
        own = await world.request("/v1/shape", query, {"origin": "http://localhost:3000"})
        assert own.headers["access-control-allow-origin"] == "http://localhost:3000"
        assert own.headers["vary"] == "Origin"
        foreign = await world.request("/v1/shape", query, {"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in foreign.headers
        refused = await world.request("/v1/shape", {"table": "nope"}, {"origin": "http://127.0.0.1:1"})
        assert refused.headers["access-control-allow-origin"] == "http://127.0.0.1:1"


async def test_the_secret_is_asked_of_every_request_that_shows_or_changes_something(postgres_dsn: str) -> None:
    async with ShapeWorld(postgres_dsn, DDL, ShapeSettings(secret="s3", allow_delete=True)) as world:
        for path, method in (("/v1/shape", "GET"), ("/v1/shape", "DELETE"), ("/api/shapes", "GET")):
            for given in ({}, {"secret": "wrong"}, {"secret": "s3x"}):
                answer = await world.request(path, {"table": "item", "offset": "-1", **given}, method=method)
                assert answer.status == 401, (path, method, given)
        assert (await world.get(table="item", offset="-1", secret="s3")).status == 200
        assert (await world.request("/v1/health", {})).status == 200


async def test_event_streams_and_slow_answers_hold_their_place_until_the_last_byte(postgres_dsn: str) -> None:
    settings = ShapeSettings(max_existing=2, sse_s=5.0)

    async def free(world: ShapeWorld, params: dict[str, str]) -> bool:
        return (await world.get(**params)).status == 200

    async with ShapeWorld(postgres_dsn, DDL, settings) as world:
        params = await start(world)
        seen = asyncio.Event()

        def deleted(text: str) -> bool:
            return '"operation":"delete"' in text and seen.is_set()

        streams = [asyncio.ensure_future(read_events(world, params, deleted)) for _ in range(2)]
        await until(lambda: any(s["waiting"] == 2 for s in world.service.shapes()))
        busy = await world.get(**params)
        assert (busy.status, 6 <= int(busy.headers["retry-after"]) <= 10) == (503, True)
        assert (await world.get(table="item", offset="-1")).status == 200, "initial requests have places of theirs"
        seen.set()
        await world.db.execute("DELETE FROM item WHERE id = 1")
        await asyncio.gather(*streams)
        await until(lambda: free(world, params))


async def test_health_says_starting_until_the_capture_names_its_tables(postgres_dsn: str) -> None:
    async with ShapeWorld(postgres_dsn, DDL) as world:
        world.service.add_database("late", world.dsn, lambda: [])
        starting = await world.request("/v1/health", {})
        assert (starting.status, starting.json) == (202, {"status": "starting"})
        world.service.suspend_database("late")
        active = await world.request("/v1/health", {})
        assert (active.status, active.json) == (200, {"status": "active"})
        await world.service.aclose()
        assert (await world.request("/v1/health", {})).status == 503


async def test_cache_ages_are_those_of_the_settings(postgres_dsn: str) -> None:
    settings = ShapeSettings(long_poll_s=0.2, cache=CacheAges(initial_s=7, later_s=11, live_s=2, stale_s=13))
    async with ShapeWorld(postgres_dsn, DDL, settings) as world:
        first = await world.get(table="item", offset="-1")
        assert "s-maxage=7," in first.headers["cache-control"]
        later = await world.get(table="item", offset=first.offset, handle=first.handle)
        assert later.headers["cache-control"] == "public, max-age=11, stale-while-revalidate=13"
        live = await world.get(table="item", offset=later.offset, handle=first.handle, live="true")
        assert live.headers["cache-control"] == "public, max-age=2, stale-while-revalidate=2"


async def test_a_request_whose_handling_raises_anything_is_500_and_the_next_one_is_served(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ShapeWorld(postgres_dsn, DDL) as world:

        def broken(*_: Any) -> None:
            raise RecursionError

        monkeypatch.setattr(world.service, "open_shape", broken)
        assert (await world.get(table="item", offset="-1")).status == 500
        monkeypatch.undo()
        assert (await world.get(table="item", offset="-1")).status == 200


async def test_operators_of_the_application_are_never_called_in_the_snapshot_query(postgres_dsn: str) -> None:
    """An operator in the search path that fits better than PostgreSQL's own would otherwise be chosen."""
    ddl = """
    CREATE TABLE item (id int PRIMARY KEY, name varchar(20));
    INSERT INTO item SELECT n, 'n' || n FROM generate_series(1, 20) n;
    CREATE FUNCTION evil(varchar, varchar) RETURNS boolean LANGUAGE plpgsql AS
      $$ BEGIN RAISE EXCEPTION 'called'; END $$;
    CREATE OPERATOR = (FUNCTION = evil, LEFTARG = varchar, RIGHTARG = varchar);
    CREATE FUNCTION lower(varchar) RETURNS text LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'called'; END $$;
    """
    async with ShapeWorld(postgres_dsn, ddl) as world:
        client = await world.sync(table="item", where="name = name AND name IN (name, name) AND lower(name) = 'n3'")
        assert [row["id"] for row in client.rows.values()] == ["3"]
        refused = await world.get(table="item", offset="-1", where="name OPERATOR(public.=) name")
        assert refused.status == 400
