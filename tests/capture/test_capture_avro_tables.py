"""Captured tables with Avro topics: Confluent's deserializer reads every type, schemas grow with the table, and a
schema that the registry rejects pauses only its table.
"""

from __future__ import annotations

import asyncio
import json
import math
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext
from starlette.applications import Starlette

from support.capture.column_types import BUILT_IN, columns, filled, quoted, selected
from support.capture.world import World, header
from support.postgres import EmbeddedPostgres
from support.waiting import until
from tidemill.base.errors import TidemillError, UnavailableError, UnknownOutcomeError
from tidemill.base.pgtypes.debezium import json_writer, value_form
from tidemill.capture.encode.avro_schemas import field_names
from tidemill.capture.snapshot.exported_snapshot import ExportedSnapshot
from tidemill.capture.tables.recopy_requests import request_recopy
from tidemill.node.http.server import HttpServer
from tidemill.registry.http import registry_routes
from tidemill.registry.registry import LocalSchemaRegistrar, Registry
from tidemill.registry.schema import SubmittedSchema
from tidemill.shards.api import run_inline
from tidemill.topics.batch import Record

pytestmark = pytest.mark.postgres

INSTALLED = Path(__file__).parents[1] / "clients" / "node_modules"


@pytest.fixture(params=["15", "18"])
def dsn(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "18":
        yield request.getfixturevalue("postgres_dsn")
        return
    binaries = INSTALLED / f"postgres-{request.param}" / "native" / "bin"
    if not (binaries / "postgres").exists():
        pytest.skip(f"PostgreSQL {request.param} is not here: tests/clients/install")
    intervals = [value for value in BUILT_IN["interval"] if "infinity" not in value]  # from PostgreSQL 17 on
    monkeypatch.setitem(BUILT_IN, "interval", intervals)
    settings = {"fsync": "off", "shared_buffers": "16MB"}
    with EmbeddedPostgres(tmp_path / "data", settings=settings, binaries=binaries) as server:
        yield server.dsn


class Registered:
    """A registrar that records the subjects of all registrations."""

    def __init__(self, world: World) -> None:
        self.registry = Registry(world.metastore, world.clock, world.rand, run_inline)
        self._registrar = LocalSchemaRegistrar(self.registry)
        self.subjects: list[str] = []

    async def register(self, subject: str, schema: str) -> int:
        self.subjects.append(subject)
        return await self._registrar.register(subject, schema)


@asynccontextmanager
async def registered_world(dsn: str, name: str = "") -> AsyncIterator[tuple[World, Registered]]:
    async with World(dsn, name=name) as world:
        yield world, Registered(world)


async def read(world: World, registry: Registry, table: str) -> list[tuple[Any, Any, Record]]:
    """Return (key, event, record) as Confluent's client reads them over HTTP."""
    records = await world.records(table)
    failures: list[BaseException] = []
    http = HttpServer(Starlette(routes=registry_routes(registry)), on_failure=lambda _, error: failures.append(error))
    await http.start()

    def decode() -> list[tuple[Any, Any, Record]]:
        topic = f"{world.name}.public.{table}"
        with SchemaRegistryClient({"url": f"http://127.0.0.1:{http.port}"}) as client:
            deserialize = AvroDeserializer(client)
            contexts = [SerializationContext(topic, field) for field in (MessageField.KEY, MessageField.VALUE)]
            return [(deserialize(r.key, contexts[0]), deserialize(r.value, contexts[1]), r) for r in records]

    try:
        return await asyncio.to_thread(decode)
    finally:
        await http.aclose()
        assert not failures


def said(text: str | None, oid: int, mod: int) -> Any:
    """Return the value in the event for a text that PostgreSQL prints."""
    if text is None:
        return None
    form = value_form(oid, mod)
    if form != "float":
        return json.loads(json_writer(form)(text))
    value = float(text)
    if oid == 700 and math.isfinite(value):
        (value,) = struct.unpack("<f", struct.pack("<f", value))
    return value


async def test_every_type_is_what_select_says_to_confluents_deserializer_with_a_column_added_in_the_midst(
    dsn: str,
) -> None:
    async with registered_world(dsn, name="kinds") as (world, registered):
        count = await filled(world)
        names = ", ".join(quoted(name) for name, _, _ in columns())
        async with world.capture(envelope="debezium-avro", schemas=registered):
            await world.sql(f"INSERT INTO kinds (id, {names}) SELECT id + 100, {names} FROM kinds")
            await world.sql("ALTER TABLE kinds ADD later timestamptz DEFAULT '2026-11-24 10:00:00.5+00'")
            await world.sql("UPDATE kinds SET id = id + 100 WHERE id >= 100")
            # By columns with every column: one round of many rows.
            await world.sql(
                f"INSERT INTO kinds (id, {names}) SELECT k.id + 1000 + 100 * g, {names} FROM kinds k,"
                " generate_series(1, 20) g WHERE k.id < 100"
            )
            await world.caught_up()
        row = (await world.tables())["public.kinds"]
        assert len(row.schemas) == row.version == 2 and row.schemas[0][0] == row.schemas[1][0]
        assert sorted(registered.subjects) == sorted([f"{row.topic}-key", f"{row.topic}-value"] * 2)
        found: dict[int, Any] = {}
        for key, event, record in await read(world, registered.registry, "kinds"):
            version = 1 + any(name == "tm.version" for name, _ in record.headers)
            assert int.from_bytes((record.key or b"")[1:5], "big") == row.schemas[0][0]
            if event is None or event["op"] == "d":
                found.pop(key["id"], None)
                continue
            assert int.from_bytes((record.value or b"")[1:5], "big") == row.schemas[version - 1][1]
            assert ("later" in event["after"]) == (version == 2) and event["after"]["id"] == key["id"]
            assert (event["op"] == "r") == (event["source"]["txId"] is None)
            found[key["id"]] = event["after"]
        fields = field_names([c.name for c in row.columns])
        rows = await selected(world, "SELECT * FROM kinds")
        assert len(rows) == len(found) == 22 * count
        for texts in rows:
            after = found[int(texts[0] or 0)]
            for column, field, text in zip(row.columns, fields, texts, strict=True):
                wanted = said(text, column.type_oid, column.type_mod)
                got = after.get(field, wanted if column.name == "later" else "no such field")
                assert repr(got) == repr(wanted), (texts[0], column.name, column.type_name)


async def test_a_schema_that_the_registry_refuses_parks_its_table_alone_until_it_is_allowed(postgres_dsn: str) -> None:
    async with registered_world(postgres_dsn) as (world, registered):
        registry = registered.registry
        await world.sql("CREATE TABLE a (id int PRIMARY KEY, n int)", "CREATE TABLE b (id int PRIMARY KEY, n int)")
        subject = f"{world.name}.public.a-value"
        settings: dict[str, Any] = {"envelope": "debezium-avro", "schemas": registered, "table_poll_s": 0.1}
        async with world.capture(**settings):
            await world.sql("INSERT INTO a VALUES (1, 1)", "INSERT INTO b VALUES (1, 1)")
            await world.caught_up()
            await registry.set_level(subject, "FORWARD")
            await world.transaction("ALTER TABLE a ALTER n TYPE bigint", "INSERT INTO a VALUES (2, 1)")
            await world.sql("ALTER TABLE b ALTER n TYPE bigint", "INSERT INTO b VALUES (2, 1)")
            paused = await world.paused("a", f"rejected the schema of a topic: subject={subject}")
            assert "Give the subject" in paused.reason and len(paused.schemas) == 1
            # It is copied again: the schema is rejected before the existing rows are deleted, and the rejection is
            # reported.
            await request_recopy(world.catalogue, world.name, "public.a")

            def reported() -> bool:
                failure = world.tracker.failure(f"table:{world.name}/public.a")
                return failure is not None and failure.error.count(subject) > 1

            await until(reported, "the copy is refused, too")
            assert (await world.tables())["public.a"].snapshot is not None
            await world.caught_up()
            assert [key["id"] for key, _, _ in await read(world, registry, "b")] == [1, 2]
            await registry.set_level(subject, "NONE")
            await world.flowing("a")
            await world.caught_up()
            assert [event["after"] for _, event, _ in await read(world, registry, "a")] == [
                {"id": 1, "n": 1}, {"id": 2, "n": 1},
            ]  # fmt: skip


async def test_k1_a_wider_key_is_copied_again_and_a_restart_asks_the_registry_nothing(postgres_dsn: str) -> None:
    async with registered_world(postgres_dsn) as (world, registered):
        await world.sql("CREATE TABLE t (id int PRIMARY KEY, v text)", "INSERT INTO t VALUES (1, 'x')")
        settings: dict[str, Any] = {"envelope": "debezium-avro", "table_poll_s": 0.1, "copy_again": True}
        async with world.capture(schemas=registered, **settings):
            before = (await world.tables())["public.t"].schemas
            await world.sql("ALTER TABLE t ALTER id TYPE bigint", "INSERT INTO t VALUES (2, 'y')")

            async def copied() -> bool:
                row = (await world.tables())["public.t"]
                return row.is_streaming and row.columns[0].type_name == "bigint"

            await until(copied, "the table is copied again")
            await world.flowing("t")
        (after,) = (await world.tables())["public.t"].schemas
        assert after[0] != before[0][0]
        # The schema ids belong to the table, even if the registry has changed or is off.
        for which in ("key", "value"):
            await registered.registry.delete(f"{world.name}.public.t-{which}", None)
        async with world.capture(schemas=None, **settings):
            await world.sql("INSERT INTO t VALUES (3, 'z')", "DELETE FROM t WHERE id = 1")
            await world.caught_up()
        records = await world.records("t")
        assert {record.key[:5] for record in records if record.key} == {b"\0" + after[0].to_bytes(4, "big")}
        assert [header(record, "tm.op") for record in records] == ["insert"] * 3 + ["delete"] * 2


async def test_without_a_registry_the_tables_are_refused_with_what_to_do(postgres_dsn: str) -> None:
    async with registered_world(postgres_dsn) as (world, _):
        await world.sql("CREATE TABLE t (id int PRIMARY KEY)")
        async with world.capture(envelope="debezium-avro", wait=False):
            row = await world.paused("t", "the registry is disabled")
            assert row.state == "refused" and "registry.enabled = true" in row.fix


async def test_a_schema_is_one_for_equal_tables_whoever_registers_it(postgres_dsn: str) -> None:
    async with registered_world(postgres_dsn) as (world, registered):
        await world.sql("CREATE TABLE t (id int PRIMARY KEY)")
        async with world.capture(envelope="debezium-avro", schemas=registered):
            ((key_id, value_id),) = (await world.tables())["public.t"].schemas
        for which, known in (("key", key_id), ("value", value_id)):
            found = await registered.registry.find(f"{world.name}.public.t-{which}", None)
            assert (found.version.version, found.schema.id) == (1, known)
            again = await registered.registry.register(f"other-{which}", SubmittedSchema("AVRO", found.schema.text))
            assert again.version.id == known


async def test_an_included_column_of_a_primary_key_may_be_null(postgres_dsn: str) -> None:
    """Regression: the column was part of the record's key, whose schema has no null."""
    async with registered_world(postgres_dsn) as (world, registered):
        await world.sql(
            "CREATE TABLE t (id int, v int, PRIMARY KEY (id) INCLUDE (v))", "INSERT INTO t VALUES (1, NULL)"
        )
        async with world.capture(envelope="debezium-avro", schemas=registered):
            await world.sql("INSERT INTO t VALUES (2, NULL)", "UPDATE t SET v = 2")
            await world.caught_up()
        found = [
            (key, event["op"], event["after"]["v"]) for key, event, _ in await read(world, registered.registry, "t")
        ]
        one, two = {"id": 1}, {"id": 2}
        assert found == [(one, "r", None), (two, "c", None), (one, "u", 2), (two, "u", 2)]


@pytest.mark.parametrize("envelope", ["debezium-avro", "row"])
async def test_a_table_altered_between_its_description_and_the_lock_of_its_copy_is_copied_as_it_is_then(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch, envelope: str
) -> None:
    async with registered_world(postgres_dsn) as (world, registered):
        await world.sql("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
        begin, altered = ExportedSnapshot.open_snapshot, False

        async def begin_late(self: ExportedSnapshot) -> Any:
            nonlocal altered
            if not altered:
                altered = True
                await world.sql("ALTER TABLE t ADD x int DEFAULT 7")
            return await begin(self)

        monkeypatch.setattr(ExportedSnapshot, "open_snapshot", begin_late)
        async with world.capture(envelope=envelope, schemas=registered, table_poll_s=0.1) as capture:
            await world.flowing("t")
            relation = capture.relation("public", "t")
            assert relation is not None and [c.name for c in relation.columns] == ["id", "x"], "before any row of it"
            await world.sql("INSERT INTO t VALUES (2, 8)")
            await world.caught_up()
        row = (await world.tables())["public.t"]
        assert row.version == 1 and [c.name for c in row.columns] == ["id", "x"]
        if envelope == "row":
            assert await world.folded("t") == {'{"id":1}': {"id": 1, "x": 7}, '{"id":2}': {"id": 2, "x": 8}}
            return
        found = await read(world, registered.registry, "t")
        assert [event["after"] for _, event, _ in found] == [{"id": 1, "x": 7}, {"id": 2, "x": 8}]
        ids = {int.from_bytes((record.value or b"")[1:5], "big") for _, _, record in found}
        assert ids == {row.schemas[0][1]} and len(row.schemas) == 1


async def test_a_registry_that_does_not_answer_keeps_a_new_table_out_and_ends_no_session(postgres_dsn: str) -> None:
    async with registered_world(postgres_dsn) as (world, registered):
        await world.sql("CREATE TABLE a (id int PRIMARY KEY)", "CREATE TABLE first (id int PRIMARY KEY)")
        kinds: dict[str, type[TidemillError]] = {"first": UnavailableError, "t": UnknownOutcomeError}
        busy = {f"{world.name}.public.{table}-value": kind for table, kind in kinds.items()}
        register = registered.register

        async def register_later(subject: str, schema: str) -> int:
            if subject in busy:
                raise busy[subject]("the registry is busy.")
            return await register(subject, schema)

        registered.register = register_later  # type: ignore[method-assign]
        async with world.capture(envelope="debezium-avro", schemas=registered, table_poll_s=0.1) as capture:
            session = capture._session
            assert (await world.paused("first", "the registry is busy")).fix == "It is retried automatically."
            await world.sql("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
            assert (await world.paused("t", "the registry is busy")).state == "refused"
            await world.sql("INSERT INTO a VALUES (1)")
            await world.caught_up()
            assert capture._session is session, "the stream of the others goes on"
            busy.clear()
            await world.flowing("a", "first", "t")
