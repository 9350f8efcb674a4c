"""Stream → topics on real stores and a real PostgreSQL."""

from __future__ import annotations

import json

import pytest

from support.capture.on_every_server import (
    test_a_key_change_is_a_tombstone_then_an_upsert_at_the_next_ordinal,
    test_a_large_transaction_of_several_tables_is_one_boundary,
    test_an_unchanged_toasted_value_is_filled_in_from_the_old_row,
    test_partitions_of_a_table_are_captured_as_their_root,
    test_truncate_is_one_record_without_key_and_empties_the_table,
)
from support.capture.world import World, header, positions
from support.waiting import until

__all__ = [
    "test_a_key_change_is_a_tombstone_then_an_upsert_at_the_next_ordinal",
    "test_a_large_transaction_of_several_tables_is_one_boundary",
    "test_an_unchanged_toasted_value_is_filled_in_from_the_old_row",
    "test_partitions_of_a_table_are_captured_as_their_root",
    "test_truncate_is_one_record_without_key_and_empties_the_table",
]

pytestmark = pytest.mark.postgres

ORDERS = "CREATE TABLE orders (id int PRIMARY KEY, customer text, amount numeric(12,2), paid bool, at timestamptz)"


async def test_inserts_updates_and_deletes_arrive_in_order_with_their_headers(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(ORDERS)
        async with world.capture():
            await world.sql(
                "INSERT INTO orders VALUES (1, 'a', 12.5, true, '2026-01-02 03:04:05+00'), (2, NULL, 0, false, NULL)",
                "UPDATE orders SET amount = 13 WHERE id = 1",
                "DELETE FROM orders WHERE id = 2",
            )
            await world.caught_up()
            records = await world.records("orders")
        assert [r.key for r in records] == [b'{"id":1}', b'{"id":2}', b'{"id":1}', b'{"id":2}']
        assert json.loads(records[0].value or b"") == {
            "id": 1, "customer": "a", "amount": "12.50", "paid": True, "at": "2026-01-02 03:04:05+00",
        }  # fmt: skip
        assert json.loads(records[1].value or b"") == {
            "id": 2, "customer": None, "amount": "0.00", "paid": False, "at": None,
        }  # fmt: skip
        assert records[3].value is None
        assert [header(r, "tm.op") for r in records] == ["insert", "insert", "update", "delete"]
        found = positions(records)
        assert found == sorted(set(found))
        assert found[0].commit_lsn == found[1].commit_lsn < found[2].commit_lsn


async def test_awkward_values_survive(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(
            'CREATE TABLE "values" (id bigint PRIMARY KEY, f4 real, f8 float8, t text, b bytea, a int[], j jsonb,'
            " u uuid, i interval, d date, g int GENERATED ALWAYS AS (1) STORED)",
            """INSERT INTO "values" VALUES (9007199254740993, 'NaN', 1e-300,
               E'tab\\tquote"back\\\\nl\\n\\u00e9\\U0001F600', '\\xdeadbeef', '{1,NULL,3}', '{"k": [1]}',
               'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11', '1 day 2 hours', '2026-02-03')""",
        )
        async with world.capture():
            await world.sql("""INSERT INTO "values" SELECT -id, f4, -f8, t, b, a, j, u, i, d FROM "values" """)
            await world.caught_up()
            snapshot, stream = await world.records("values")
        first, second = json.loads(snapshot.value or b""), json.loads(stream.value or b"")
        assert first == {
            "id": 9007199254740993, "f4": "NaN", "f8": 1e-300, "t": 'tab\tquote"back\\nl\né😀', "b": "\\xdeadbeef",
            "a": "{1,NULL,3}", "j": '{"k": [1]}', "u": "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11", "i": "P1DT2H",
            "d": "2026-02-03", "g": 1,
        }  # fmt: skip
        assert second == {**first, "id": -first["id"], "f8": -1e-300}


async def test_every_binding_shows_all_tables_at_one_commit(postgres_dsn: str) -> None:
    """Each transaction adds one row to both tables, so their counts agree at every binding."""
    async with World(postgres_dsn) as world:
        await world.sql("CREATE TABLE a (id int PRIMARY KEY)", "CREATE TABLE b (id int PRIMARY KEY)")
        async with world.capture(binding_interval_ms=1):
            for i in range(150):
                await world.transaction(f"INSERT INTO a VALUES ({i})", f"INSERT INTO b VALUES ({i})")
                if i % 30 == 0:
                    await world.caught_up()  # bindings may be slow, but there are several
            last = await world.caught_up()
            a, b = await world.topic_id("a"), await world.topic_id("b")
            bindings = await world.remap().after(0)
            counts = [(x.offsets[a][0], x.offsets[b][0]) for x in bindings]
        assert all(left == right for left, right in counts)
        assert len({left for left, _ in counts}) > 3
        assert last.offsets[a] == last.offsets[b] == (150,)
        assert last.source_time_ms > 0


async def test_a_marker_is_bound_exactly_at_its_commit(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql("CREATE TABLE a (id int PRIMARY KEY)")
        async with world.capture(binding_interval_ms=200):
            for i in range(60):
                await world.transaction(
                    f"INSERT INTO a VALUES ({i})", f"SELECT pg_logical_emit_message(true, 'tidemill', 'mark-{i}')"
                )
            await world.caught_up()
            a = await world.topic_id("a")
            for i in range(60):
                assert (await world.tagged(f"mark-{i}")).offsets[a] == (i + 1,)


async def test_a_marker_and_the_transactions_before_it_are_not_gathered(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql("CREATE TABLE a (id int PRIMARY KEY)")
        async with world.capture(linger_ms=3_600_000):
            for i in range(3):
                await world.sql(f"INSERT INTO a VALUES ({i})")
            await world.sql("SELECT pg_logical_emit_message(true, 'tidemill', 'mark')")
            assert (await world.tagged("mark")).offsets[await world.topic_id("a")] == (3,)


async def test_time_advances_while_nothing_happens_and_the_slot_follows_the_wal(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql("CREATE TABLE a (id int PRIMARY KEY)", "CREATE TABLE unrelated (id int)")
        async with world.capture(tables=("a",), heartbeat_s=0.5):
            first = await world.caught_up()
            await world.sql("INSERT INTO unrelated SELECT generate_series(1, 10000)")
            end = await world.wal_end()

            async def confirmed() -> bool:
                return await world.confirmed() >= end

            await until(confirmed, "the slot is confirmed past foreign WAL")
            await world.bound(end)

            async def later() -> bool:
                return sum(x.offsets == first.offsets for x in await world.remap().after(first.time_ms)) >= 2

            await until(later, "time advances")


async def test_keys_stay_in_order_over_several_partitions_of_a_topic(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(
            "CREATE TABLE a (id int PRIMARY KEY, v int)", "INSERT INTO a SELECT g, 0 FROM generate_series(1,50) g"
        )
        async with world.capture(partitions=3):
            for round_ in range(1, 6):
                await world.sql(f"UPDATE a SET v = {round_}")
            await world.sql("DELETE FROM a WHERE id > 40")
            await world.caught_up()
            rows = await world.folded("a")
            assert sorted(r["id"] for r in rows.values()) == list(range(1, 41))
            assert {r["v"] for r in rows.values()} == {5}
            binding = await world.remap().latest()
            assert binding is not None
            offsets = binding.offsets[await world.topic_id("a")]
            assert len(offsets) == 3
            assert sum(offsets) == 50 * 6 + 10


async def test_the_catalogue_row_tells_topics_and_columns_and_own_tables_are_left_out(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(
            "CREATE TABLE a (v numeric(6,2), id bigint PRIMARY KEY)",
            "CREATE SCHEMA tidemill",
            "CREATE TABLE tidemill.registers (id int PRIMARY KEY)",
        )
        async with world.capture(tables=("*.*",)):
            (row,) = (await world.tables()).values()
            assert (row.table, row.topic) == ("public.a", f"{world.name}.public.a")
            columns = [(c.name, c.type_name, c.key_index) for c in row.columns]
            assert columns == [("v", "numeric(6,2)", -1), ("id", "bigint", 0)]
