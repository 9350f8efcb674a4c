"""Subsets over HTTP: their rows, their errors, and their consistency with the stream."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import psycopg
import pytest

from support.shapes.world import Answer, ShapeWorld
from support.waiting import until
from tidemill.capture.postgres.pg_snapshot import PgSnapshot
from tidemill.shapes import ShapeSettings

pytestmark = pytest.mark.postgres

DDL = """
CREATE TABLE item (id int PRIMARY KEY, tenant int NOT NULL, name text, price numeric(10,2), done boolean NOT NULL,
                   extra jsonb);
INSERT INTO item SELECT n, n % 4, 'n' || n, n % 10, n % 2 = 0, '{"n": 1}' FROM generate_series(1, 40) n;
CREATE TABLE "Odd.Name" ("K/1" text PRIMARY KEY, "v ""x" int);
INSERT INTO "Odd.Name" VALUES ('a/b', 1), ('c', 2);
"""


def ids(answer: Answer) -> list[int]:
    assert answer.status == 200, answer.body
    return [int(row["value"]["id"]) for row in answer.json["data"]]


async def subset(world: ShapeWorld, method: str, shape: dict[str, str], **wanted: Any) -> Answer:
    """The same subset, as GET or as POST."""
    if method == "POST":
        return await world.post(wanted, **shape)
    texts = {k: json.dumps(v) if k == "params" else str(v) for k, v in wanted.items()}
    return await world.get(**shape, **{f"subset__{name}": value for name, value in texts.items()})


TWICE = """
CREATE TABLE twice (id int PRIMARY KEY, n numeric, r real, s real);
INSERT INTO twice VALUES (1, 0.1, 9, 1), (2, 9, 0.1, 1), (3, 9, 9, 1), (4, 0.1, 0.1, 0.2), (5, 0.2, 0.1, 3)
"""


async def test_a_parameter_that_is_used_twice_means_the_same_to_shape_stream_and_subset(postgres_dsn: str) -> None:
    """The parameter means the same as a literal at each place, although PostgreSQL gives a parameter one type."""
    async with ShapeWorld(postgres_dsn, TWICE) as world:
        shape = {"table": "twice", "where": "n = $1 OR r = $1", "params[1]": "0.1"}
        client = await world.sync(**shape)
        assert {row["id"] for row in client.rows.values()} == {"1", "2", "4", "5"}
        await world.db.execute("UPDATE twice SET s = 1")
        await world.db.execute("INSERT INTO twice VALUES (6, 9, 0.1, 0.2), (7, 0.2, 9, 0.2)")
        await client.follow_until(lambda: '"public"."twice"/"6"' in client.rows)
        assert sorted(row["id"] for row in client.rows.values()) == ["1", "2", "4", "5", "6"]
        answer = await subset(
            world, "POST", shape | {"offset": "now", "log": "changes_only"},
            where="n = $2 OR s = $2 OR id = $1", params={"1": "2", "2": "0.2"}, order_by="id",
        )  # fmt: skip
        assert ids(answer) == [2, 5, 6]


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_subset_is_filtered_ordered_cut_and_marked(postgres_dsn: str, method: str) -> None:
    async with ShapeWorld(postgres_dsn, DDL) as world:
        shape = {"table": "item", "where": "tenant = $1 AND id < $2", "params[1]": "2", "params[2]": "38"}
        shape |= {"offset": "now", "log": "changes_only"}
        answer = await subset(
            world,
            method,
            shape,
            where="id > $1 AND name <> $2",
            params={"1": 5, "2": "n6"},
            order_by="price DESC, id",
            limit=3,
            offset=1,
        )
        cursor = await world.db.execute(
            "SELECT id FROM item WHERE tenant = 2 AND id < 38 AND id > 5 AND name <> 'n6'"
            " ORDER BY price DESC, id LIMIT 3 OFFSET 1"
        )
        assert ids(answer) == [row[0] for row in await cursor.fetchall()]
        metadata = answer.json["metadata"]
        assert set(metadata) == {"snapshot_mark", "xmin", "xmax", "xip_list", "database_lsn"}
        assert 0 <= metadata["snapshot_mark"] < 1 << 31
        assert all(int(metadata[name]) > 0 for name in ("xmin", "xmax", "database_lsn"))
        first = answer.json["data"][0]
        assert first["key"] == f'"public"."item"/"{first["value"]["id"]}"'
        assert first["value"]["done"] in ("true", "false")
        assert first["headers"] == {
            "operation": "insert",
            "relation": ["public", "item"],
            "snapshot_mark": metadata["snapshot_mark"],
        }
        assert answer.headers["electric-snapshot"] == "true"
        assert answer.headers["cache-control"] == "no-cache"
        assert set(json.loads(answer.headers["electric-schema"])) == {
            "id", "tenant", "name", "price", "done", "extra",
        }  # fmt: skip
        assert "electric-snapshot" in answer.headers["access-control-expose-headers"]
        stream = await world.get(**{**shape, "offset": answer.offset, "handle": answer.handle})
        assert (stream.status, stream.items) == (200, [])
        again = await subset(world, method, shape, limit=1, order_by="id")
        assert again.json["metadata"]["snapshot_mark"] != metadata["snapshot_mark"]


async def test_pages_of_equal_sort_values_neither_overlap_nor_leave_rows_out(postgres_dsn: str) -> None:
    async with ShapeWorld(postgres_dsn, DDL) as world:
        pages = [
            ids(await world.get(table="item", subset__order_by="done", subset__limit="7", subset__offset=str(start)))
            for start in range(0, 42, 7)
        ]
        assert sorted(row for page in pages for row in page) == list(range(1, 41))
        for order in ("extra, id DESC", "lower(name) DESC NULLS LAST", "item.price", "id + 1 ASC NULLS FIRST"):
            assert len(ids(await world.get(table="item", subset__order_by=order))) == 40
        odd = await world.get(table='"Odd.Name"', subset__order_by='"v ""x" DESC', subset__limit="1")
        assert odd.json["data"][0]["key"] == '"public"."Odd..Name"/"c"'


async def test_an_empty_body_or_a_nested_one_is_taken_and_what_names_the_shape_is_not(postgres_dsn: str) -> None:
    async with ShapeWorld(postgres_dsn, DDL) as world:
        assert len(ids(await world.post({}, table="item", offset="now"))) == 40
        assert len(ids(await world.post(b"", table="item", offset="now"))) == 40
        nested = {"subset": {"where": "id = 3"}, "table": '"Odd.Name"', "handle": "x"}
        assert ids(await world.post(nested, table="item", offset="-1")) == [3]


HOSTILE = [
    "id = 1; DROP TABLE item",
    "id = 1) OR (1 = 1",
    "id = 1 /* ",
    "id = 1 UNION SELECT 1",
    "id = 1 ORDER BY id",
    "id = 1 LIMIT 1",
    "id IN (SELECT id FROM item)",
    "EXISTS (SELECT 1)",
    "pg_sleep(1) IS NULL",
    "pg_read_file('/etc/passwd') = ''",
    "current_setting('port') = '1'",
    "set_config('search_path', 'x', false) = 'x'",
    "id OPERATOR(public.=) 1",
    "id = 1 FOR UPDATE",
    "ctid = '(0,1)'",
    "pg_class.oid = 1",
    "name = name COLLATE public.evil",
    "id = $1",
    "true; COMMIT",
    " ",
    "id = 1) -- ",
]
ORDERS = [
    "id; DROP TABLE item",
    "id LIMIT 1",
    "1",
    "'a'",
    "(SELECT 1)",
    "id USING <",
    "id, pg_sleep(1)",
    "id) --",
    "item.*",
    "other.id",
    "nope",
    "id FOR UPDATE",
    "random()",
    "$1",
    'id" DESC, "name',
]


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_h12_subset_injection_attempts_are_400_and_name_the_parameter(postgres_dsn: str, method: str) -> None:
    async with ShapeWorld(postgres_dsn, DDL) as world:
        shape = {"table": "item", "offset": "now", "log": "changes_only"}

        async def refused(field: str, **wanted: Any) -> None:
            answer = await subset(world, method, shape, **wanted)
            assert (answer.status, list(answer.json.get("errors", []))) == (400, [field]), (wanted, answer.body)
            assert answer.headers["cache-control"] == "no-store"

        for clause in HOSTILE:
            await refused("subset__where", where=clause)
        for order in ORDERS:
            await refused("subset__order_by", order_by=order)
        for limit in ("1; DROP TABLE item", "-1", "1.5", "all", "1e3", " 1", "9" * 30, "(SELECT 1)", "$1"):
            await refused("subset__limit", limit=limit, order_by="id")
            await refused("subset__offset", offset=limit, order_by="id")
        await refused("subset__params", where="id = $1", params={"2": "1"})
        await refused("subset__params", where="id = $1", params={"1": {"a": 1}})
        await refused("subset__params", params={"1": "1"})
        await refused("subset__where", where="id = $1", params={"1": "1 OR true"})
        await refused("subset__order_by", limit=1)
        await refused("subset__order_by", offset=1)
        await refused("subset", where="id / 0 > 1 OR 1 / (id - 3) > 5")
        value = await subset(world, method, shape, where="name = $1", params=["'; DROP TABLE item; --"])
        assert ids(value) == []
        assert ids(await subset(world, method, shape, where="id = 1 -- OR true")) == [1], "a comment cuts nothing off"
        assert ids(await subset(world, method, shape, where="id = 1 --", order_by="id --", limit=9)) == [1]
        assert len(await world.select("item")) == 40


async def test_a_clause_that_fails_tells_nothing_of_rows_that_are_not_the_shapes(postgres_dsn: str) -> None:
    """PostgreSQL may ask either side of an AND first; an error on a row of another tenant would show that it exists."""
    async with ShapeWorld(postgres_dsn, DDL) as world:
        own = {"table": "item", "where": "lower(upper(name)) LIKE 'n%' AND tenant = $1", "params[1]": "1"}
        for probe in ("1 / (id - 2) = 7", "(name || '5')::int = 3 OR id > 0", "-(id / (id - 2)) > 5"):
            answer = await world.get(**own, subset__where=probe)
            expected = 400 if "name" in probe else 200
            assert answer.status == expected, answer.body
        assert (await world.get(**own, subset__where="1 / (id - 5) = 7")).status == 400, "a row of its own"


async def test_queryable_columns_are_shown_by_default_and_bound_what_a_subset_may_ask(postgres_dsn: str) -> None:
    async with ShapeWorld(postgres_dsn, DDL) as world:
        allowed = {"table": "item", "queryable_columns": "id,name"}
        whole = await world.get(**allowed, offset="-1")
        assert whole.items[0]["value"] == {"id": "1", "name": "n1"}
        fewer = await world.get(**allowed, columns="id", offset="-1")
        assert fewer.items[0]["value"] == {"id": "1"}
        asked = await world.get(**allowed, columns="id", subset__where="name = 'n7'", subset__order_by="name")
        assert [row["value"] for row in asked.json["data"]] == [{"id": "7"}]
        own = await world.get(**allowed, where="tenant = 2", subset__where="id < 7")
        assert ids(own) == [2, 6], "the shape's own clause may ask any column"
        for field, wrong in [
            ("columns", {"columns": "id,price", "offset": "-1"}),
            ("columns", {"columns": "id,tenant,name,price,done,extra", "offset": "-1"}),
            ("subset__where", {"subset__where": "price > 1"}),
            ("subset__order_by", {"subset__order_by": "price"}),
            ("subset__order_by", {"subset__order_by": "name, price + 1"}),
            ("queryable_columns", {"queryable_columns": "name", "offset": "-1"}),
            ("queryable_columns", {"queryable_columns": "id,nope", "offset": "-1"}),
            ("queryable_columns", {"queryable_columns": 'id,"x', "offset": "-1"}),
        ]:
            answer = await world.get(**{**allowed, **wrong})
            assert (answer.status, list(answer.json["errors"])) == (400, [field]), (wrong, answer.body)


async def test_a_post_that_is_malformed_is_400_and_one_that_is_too_large_413(postgres_dsn: str) -> None:
    async with ShapeWorld(postgres_dsn, DDL) as world:
        for body in (b"{", b"[]", b'"x"', b'{"subset": 1}', b"\xff"):
            answer = await world.post(body, table="item", offset="now")
            assert (answer.status, list(answer.json["errors"])) == (400, ["body"]), body
        for field, wanted in [
            ("subset__where", {"where": 1}),
            ("subset__order_by", {"order_by": ["id"]}),
            ("subset__limit", {"limit": True, "order_by": "id"}),
            ("subset__params", {"where": "id = $1", "params": "1"}),
            ("table", {}),
        ]:
            table = {} if field == "table" else {"table": "item"}
            answer = await world.post(wanted, **table, offset="now")
            assert (answer.status, list(answer.json["errors"])) == (400, [field]), wanted
        live = await world.post({}, table="item", offset="0_inf", handle="1-1", live="true")
        assert (live.status, list(live.json["errors"])) == (400, ["live"])
        large = json.dumps({"where": "id = $1", "params": ["9" * (1 << 20)]}).encode()
        refused = await world.post(large, table="item", offset="now")
        assert refused.status == 413
        assert refused.headers["cache-control"] == "no-store"


async def test_what_the_metadata_calls_visible_is_what_the_rows_show(postgres_dsn: str) -> None:
    """A transaction that is open, one that is done and not yet streamed, and one that comes later."""
    async with ShapeWorld(postgres_dsn, DDL) as world:
        params = {"table": "item", "log": "changes_only"}
        world.hold()
        async with await psycopg.AsyncConnection.connect(world.dsn) as writer:
            await writer.execute("UPDATE item SET name = 'open' WHERE id = 1")
            await world.db.execute("UPDATE item SET name = 'done' WHERE id = 2")
            answer = await world.get(**params, offset="now", subset__where="id <= 3")
            await writer.commit()
        await world.db.execute("UPDATE item SET name = 'later' WHERE id = 3")
        names = {row["value"]["id"]: row["value"]["name"] for row in answer.json["data"]}
        assert names == {"1": "n1", "2": "done", "3": "n3"}
        world.release()
        client_params = {**params, "handle": answer.handle}
        found: dict[str, dict[str, Any]] = {}
        offset = answer.offset

        async def followed() -> bool:
            nonlocal offset
            news = await world.get(**client_params, offset=offset, live="true")
            offset = news.offset
            found.update({item["value"]["id"]: item for item in news.items})
            return len(found) >= 2

        await until(followed)
        metadata = answer.json["metadata"]
        xips = ",".join(metadata["xip_list"])
        snapshot = PgSnapshot.parse(f"{metadata['xmin']}:{metadata['xmax']}:{xips}")
        for row_id, item in found.items():
            assert snapshot.is_visible(item["headers"]["txids"][0]) == (row_id == "2")
        assert {"1", "3"} <= found.keys()
        assert int(found["3"]["headers"]["lsn"]) >= int(metadata["database_lsn"])


async def test_a_handle_that_ended_is_409_at_the_start_and_elsewhere_the_stream_is_left_to_find_out(
    postgres_dsn: str,
) -> None:
    async with ShapeWorld(postgres_dsn, DDL) as world:
        params = {"table": "item", "log": "changes_only"}
        first = await world.get(**params, offset="now", subset__where="id = 1")
        await world.db.execute("UPDATE item SET name = 'x' WHERE id = 9")
        await until(lambda: world.delivered and world.sink.last_seen_by)
        world.service.suspend_database("main", "test")
        world.sink = world.service.add_database("main", world.dsn, lambda: world.relations.values())
        ended = {**params, "handle": first.handle}
        for method in ("GET", "POST"):
            starts = await subset(world, method, {**ended, "offset": "now"}, where="id = 1")
            assert (starts.status, starts.json) == (409, [{"headers": {"control": "must-refetch"}}])
            assert starts.handle != first.handle
            placed = await subset(world, method, {**ended, "offset": first.offset}, where="id = 1")
            assert (ids(placed), placed.handle) == ([1], first.handle)
        stream = await world.get(**params, offset=first.offset, handle=first.handle)
        assert stream.status == 409
        forged = await subset(world, "GET", {**params, "offset": "5_0", "handle": "a\r\nx: y"}, where="id = 1")
        assert forged.status == 409


async def test_a_table_that_changed_leaves_the_stream_of_its_old_shape_to_find_out(postgres_dsn: str) -> None:
    """The capture knows the new column, and no change came yet that would have ended the shape."""
    async with ShapeWorld(postgres_dsn, DDL) as world:
        params = {"table": "item", "log": "changes_only"}
        first = await world.get(**params, offset="now", subset__where="id = 1")
        await world.db.execute("ALTER TABLE item ADD COLUMN more int DEFAULT 7")
        world.learn()
        placed = {**params, "handle": first.handle, "offset": first.offset}
        for method in ("GET", "POST"):
            answer = await subset(world, method, placed, where="id = 1")
            assert (ids(answer), answer.handle) == ([1], first.handle)
            assert answer.json["data"][0]["value"]["more"] == "7"
        assert (await world.get(**placed)).status == 409


async def test_subsets_are_bounded_in_bytes_places_and_memory_and_give_all_of_it_back(postgres_dsn: str) -> None:
    settings = ShapeSettings(max_initial=1, subset_bytes=20_000, memory_bytes=100_000)

    async def waiting(world: ShapeWorld) -> bool:
        cursor = await world.db.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND application_name LIKE 'tidemill%'"
        )
        row = await cursor.fetchone()
        return bool(row and row[0])

    async with ShapeWorld(postgres_dsn, DDL, settings) as world:
        params = {"table": "item", "log": "changes_only", "offset": "now"}
        await world.db.execute("UPDATE item SET name = repeat('x', 1000) WHERE id <= 30")
        await world.get(**params)
        before = world.service.facts()["memory_bytes"]
        large = await world.get(**params, subset__where="true")
        assert (large.status, list(large.json["errors"])) == (400, ["subset"])
        assert "too large" in large.json["errors"]["subset"][0]
        assert len(ids(await world.get(**params, subset__order_by="id", subset__limit="10"))) == 10
        assert world.service.facts()["memory_bytes"] == before
        async with await psycopg.AsyncConnection.connect(world.dsn) as writer:
            await writer.execute("LOCK TABLE item IN ACCESS EXCLUSIVE MODE")
            held = asyncio.ensure_future(world.get(**params, subset__where="id = 1"))
            await until(lambda: waiting(world))
            busy = await world.post({"where": "id = 2"}, **params)
            assert busy.status == 503
            assert 6 <= int(busy.headers["retry-after"]) <= 10
            await writer.rollback()
        assert ids(await held) == [1]
        taken = world.service.budget.limit_bytes - world.service.budget.used_bytes - 500
        world.service.budget.reserve(taken)
        assert ids(await world.get(**params, subset__where="id = 40")) == [40]
        full = await world.get(**params, subset__where="id <= 3")
        assert (full.status, int(full.headers["retry-after"]) > 0) == (503, True)
        world.service.budget.release(taken)
        assert world.service.facts()["memory_bytes"] == before


async def test_a_subset_that_is_not_read_in_time_is_503_and_its_query_is_cancelled(postgres_dsn: str) -> None:

    async def answered(world: ShapeWorld, params: dict[str, str]) -> bool:
        answer = await world.get(**params, subset__where="id = 1")
        return answer.status == 200 and ids(answer) == [1]

    async def nobody(world: ShapeWorld) -> bool:
        cursor = await world.db.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE state = 'active' AND application_name LIKE 'tidemill%'"
            " AND datname = current_database()"
        )
        row = await cursor.fetchone()
        return row is not None and row[0] == 0

    async with ShapeWorld(postgres_dsn, DDL, ShapeSettings(load_timeout_s=4.0)) as world:
        params = {"table": "item", "log": "changes_only", "offset": "now"}
        await world.get(**params)
        async with await psycopg.AsyncConnection.connect(world.dsn) as writer:
            await writer.execute("LOCK TABLE item IN ACCESS EXCLUSIVE MODE")
            late = await world.get(**params, subset__where="id = 1")
            assert (late.status, 6 <= int(late.headers["retry-after"]) <= 10) == (503, True)
            await until(lambda: nobody(world))
            await writer.rollback()
        await until(lambda: answered(world, params))
