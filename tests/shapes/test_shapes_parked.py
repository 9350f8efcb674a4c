"""Recoverable states of a table are 503 and never 400: re-created, parked or being parked. Clients with its rows must
start over first."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from support.shapes.node_client import NodeClient
from support.shapes.real_world import RealWorld
from support.shapes.world import Answer, Client
from support.waiting import until
from tidemill.capture.tables import recopy_requests
from tidemill.capture.tables.table_states import TableStates
from tidemill.shapes import ShapeSettings
from tidemill.shapes.tables.initial_snapshot import PostgresSource

pytestmark = pytest.mark.postgres

DDL = "CREATE TABLE t (id int PRIMARY KEY, v text); INSERT INTO t VALUES (1, 'a')"
PARTED = """
CREATE TABLE p (id int, v text, PRIMARY KEY (id)) PARTITION BY RANGE (id);
CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (100);
CREATE TABLE p2 (id int PRIMARY KEY, v text);
INSERT INTO p VALUES (1, 'a');
INSERT INTO p2 VALUES (101, 'b');
"""


class Polled(RealWorld):
    table_poll_s = 0.2


class Unpolled(RealWorld):
    """A world whose tables are checked only on request."""

    table_poll_s = 600.0


class Parted(Polled):
    tables = ("public.p",)


class Asked(Polled):
    """A parked table is copied again only on request."""

    copy_again = False


SERVED = {200, 409, 503}
"""Statuses of a request without rows. A shape that ended while it was loaded gives 409, with the handle to start
with."""


async def states(world: RealWorld) -> dict[str, str]:
    return {row.table: row.state for row in await world.catalogue.all_tables()}


async def parks(world: RealWorld, table: str) -> bool:
    return (await states(world)).get(table) == "parked"


def assert_heals(answer: Answer, *words: str) -> None:
    assert answer.status == 503, answer.body
    assert int(answer.headers["retry-after"]) > 0
    assert all(word in answer.json["message"] for word in words), answer.json


def holder(world: RealWorld, client: Client, **more: str) -> Any:
    return world.get(**client.params, handle=client.handle, offset=client.offset, **more)


async def test_f121_a_table_that_was_made_anew_a_moment_ago_is_never_400(postgres_dsn: str) -> None:
    async with Unpolled(postgres_dsn, DDL, ShapeSettings(long_poll_s=0.5)) as world:
        await until(lambda: world.capture.streaming)
        await world.sync(table="t")
        for number in range(8):
            await world.db.execute("DROP TABLE t")
            await world.db.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
            await world.db.execute(f"INSERT INTO t VALUES ({number}, 'new')")
            where = f"id > {-1 - number}"
            answers = [await world.get(table="t", offset="-1", **more) for more in ({}, {"where": where})]
            answers.append(await world.get(table="t", offset="now", subset__where="true"))
            assert {answer.status for answer in answers} <= SERVED, [answer.body for answer in answers]

            async def served(number: int = number) -> bool:
                answer = await world.get(table="t", offset="-1")
                assert answer.status in SERVED, answer.body
                return answer.status == 200 and [item["value"]["id"] for item in answer.items] == [str(number)]

            await until(served)


async def test_f121_a_request_whose_shape_ends_while_it_loads_is_sent_to_the_table_made_anew(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading, go_on, load = asyncio.Event(), asyncio.Event(), PostgresSource.load

    async def slowly(source: PostgresSource, *args: Any) -> Any:
        loading.set()
        await go_on.wait()
        return await load(source, *args)

    async with Unpolled(postgres_dsn, DDL, ShapeSettings(long_poll_s=0.5)) as world:
        await until(lambda: world.capture.streaming)
        monkeypatch.setattr(PostgresSource, "load", slowly)
        young = asyncio.ensure_future(world.get(table="t", offset="-1"))
        await loading.wait()
        await world.db.execute("DROP TABLE t; CREATE TABLE t (id int PRIMARY KEY, v text)")
        await world.db.execute("INSERT INTO t VALUES (2, 'new')")
        world.capture.check_tables_soon()
        answer = await young
        go_on.set()
        assert answer.status == 409 and answer.json == [{"headers": {"control": "must-refetch"}}]
        again = await world.get(table="t", offset="-1", handle=answer.handle)
        assert again.status == 200 and again.handle == answer.handle
        assert [item["value"]["id"] for item in again.items] == ["2"]


async def test_f122_a_parked_table_is_409_to_its_holders_and_503_to_all_others_until_it_is_copied(
    postgres_dsn: str,
) -> None:
    """ATTACH is repaired by an immediate copy; DETACH within five minutes of it only after that pause."""
    async with Parted(postgres_dsn, PARTED, ShapeSettings(long_poll_s=30.0)) as world:
        await until(lambda: world.capture.streaming)
        await world.db.execute("ALTER TABLE p ATTACH PARTITION p2 FOR VALUES FROM (100) TO (200)")

        async def copied() -> bool:
            (row,) = await world.catalogue.all_tables()
            return row.is_streaming and len(row.partitions or ()) == 2 and row.again_last_ms > 0

        await until(copied)
        await until(lambda: world.capture.relations())
        client, other = await world.sync(table="p"), await world.sync(table="p", where="id < 100")
        assert len(client.rows) == 2
        live = asyncio.ensure_future(holder(world, client, live="true"))
        await world.db.execute("ALTER TABLE p DETACH PARTITION p2")
        reported = await live
        assert reported.status == 409 and reported.json == [{"headers": {"control": "must-refetch"}}]
        assert reported.handle != client.handle
        await until(lambda: parks(world, "public.p"))
        assert (await holder(world, other)).status == 409
        words = ("paused until it is copied", "a partition is gone", "public.p")
        for params in ({"offset": "-1"}, {"offset": "now"}, {"offset": "-1", "handle": reported.handle}):
            assert_heals(await world.get(table="p", **params), *words)
        assert_heals(await world.get(table="p", offset="now", subset__where="true"), *words)
        await recopy_requests.request_recopy(world.catalogue, world.capture.config.name, "public.p")
        world.capture.check_tables_soon()

        async def served() -> bool:
            return (await world.get(table="p", offset="-1")).status == 200

        await until(served)
        client.rows, client.offset, client.handle = {}, "-1", reported.handle
        await client.catch_up()
        assert {(row["id"], row["v"]) for row in client.rows.values()} == await world.select("p")


async def test_f123_a_table_parked_for_good_has_its_clients_start_over_once_and_wait(postgres_dsn: str) -> None:
    """The capture has no other table, so it has none to name, but it does not count as starting."""
    async with Asked(postgres_dsn, DDL, ShapeSettings(long_poll_s=30.0)) as world:
        await until(lambda: world.capture.streaming)
        client = await world.sync(table="t")
        async with NodeClient(f"{world.server.url}/v1/shape", {"table": "t"}) as node:
            await until(lambda: node.last["upToDate"] and len(node.last["rows"]) == 1)
            live = asyncio.ensure_future(holder(world, client, live="true"))
            await world.db.execute("ALTER TABLE t RENAME v TO w")
            await world.db.execute("INSERT INTO t VALUES (2, 'b')")
            assert (await live).status == 409
            await until(lambda: node.last["refetches"] >= 1)
            assert not node.last["rows"], "no rows are shown that may be incomplete"
            await until(lambda: parks(world, "public.t"))
            assert (await holder(world, client)).status == 409
            assert_heals(await world.get(table="t", offset="-1"), "until an operator has it copied", "public.t")
            assert await world.capture.wait_for_table("public", "t", 5.0), (
                "it is there, and no request is told otherwise"
            )
            assert (await world.get(table="none", offset="-1")).status == 400
            assert (await world.request("/v1/health", {})).json == {"status": "active"}

            await recopy_requests.request_recopy(world.catalogue, world.capture.config.name, "public.t")
            world.capture.check_tables_soon()
            await until(lambda: node.last["upToDate"] and len(node.last["rows"]) == 2)
            rows = {(str(row["id"]), row["w"]) for row in node.last["rows"].values()}
            assert rows == await world.select("t")
            assert not [line for line in node.lines if "error" in line]


async def test_f124_a_table_that_is_being_parked_is_409_to_its_holders_and_never_400(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shapes end, and wake their clients, before the catalogue shows the table as parked."""
    pausing, go_on, change = asyncio.Event(), asyncio.Event(), TableStates.update_row
    broken: list[bool] = []

    async def slowly(states: TableStates, name: str, changed: Any) -> Any:
        if broken and not go_on.is_set():
            pausing.set()
            await go_on.wait()
        return await change(states, name, changed)

    monkeypatch.setattr(TableStates, "update_row", slowly)
    ddl = f"{DDL}; CREATE TABLE other (id int PRIMARY KEY)"
    async with Asked(postgres_dsn, ddl, ShapeSettings(long_poll_s=30.0)) as world:
        await until(lambda: world.capture.streaming)
        client = await world.sync(table="t")
        live = asyncio.ensure_future(holder(world, client, live="true"))
        await until(lambda: any(shape["waiting"] for shape in world.service.shapes()))
        broken.append(True)
        await world.db.execute("ALTER TABLE t RENAME v TO w")
        await world.db.execute("INSERT INTO t VALUES (2, 'b')")
        await pausing.wait()
        young = asyncio.ensure_future(world.get(table="t", offset="-1"))
        assert (await live).status == 409, "while the catalogue does not say so yet"
        assert (await holder(world, client)).status == 409
        assert not young.done()
        go_on.set()
        assert_heals(await young, "is paused")


async def test_a_table_that_is_dropped_is_409_to_its_holders_and_then_400(postgres_dsn: str) -> None:
    async with Polled(postgres_dsn, DDL, ShapeSettings(long_poll_s=30.0)) as world:
        await until(lambda: world.capture.streaming)
        client = await world.sync(table="t")
        live = asyncio.ensure_future(holder(world, client, live="true"))
        await until(lambda: any(shape["waiting"] for shape in world.service.shapes()))
        await world.db.execute("DROP TABLE t")
        assert (await live).status == 409
        statuses: list[int] = []

        async def refused() -> bool:
            statuses.append((await world.get(table="t", offset="-1")).status)
            return statuses[-1] == 400

        await until(refused)
        assert set(statuses) <= {400, 503}


async def test_a_refused_table_is_503_with_the_reason_and_is_served_once_the_reason_is_gone(postgres_dsn: str) -> None:
    other = "CREATE TABLE u (id int PRIMARY KEY); CREATE PUBLICATION other FOR TABLE t (id)"
    async with Polled(postgres_dsn, f"{DDL}; {other}", ShapeSettings(long_poll_s=0.5)) as world:

        async def refused() -> bool:
            return (await states(world)).get("public.t") == "refused"

        await until(refused)
        assert_heals(await world.get(table="t", offset="-1"), "other", "column list")
        assert_heals(await world.get(table="t", offset="now", subset__where="true"), "other", "column list")
        await world.db.execute("DROP PUBLICATION other")

        async def served() -> bool:
            answer = await world.get(table="t", offset="-1")
            assert answer.status in (200, 503), answer.body
            return answer.status == 200 and [item["value"]["v"] for item in answer.items] == ["a"]

        await until(served)
