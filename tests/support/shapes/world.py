"""A database whose changes reach a ShapeService over HTTP, and a small HTTP client, for all shape tests.

The stream is real pgoutput, read from a slot with pg_logical_slot_get_binary_changes and decoded by capture's decoder
and converter. Only the connection and the collector are left out, so a test can hold the stream back (`world.hold()`)
and release it at a chosen moment.
"""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from typing import Any, Self, TypeVar

import psycopg
from starlette.types import ASGIApp

from support.waiting import DEADLINE_S
from tidemill.base.clock import Rand, SystemClock
from tidemill.base.runtime.tasks import Tasks
from tidemill.base.status.status import StatusTracker
from tidemill.capture.changes import Column, Fragment, Relation
from tidemill.capture.decode.transaction_builder import RelationSeen, TransactionBuilder
from tidemill.capture.postgres.pgoutput import decode_message
from tidemill.node.http.server import HttpServer, build_application
from tidemill.shapes import ShapeService, ShapeSettings, shape_routes
from tidemill.shapes.http.authorization import ShapeAuthorizer
from tidemill.shapes.tables.initial_snapshot import SESSION_SETTINGS

T = TypeVar("T")

COLUMNS_SQL = """
SELECT c.oid::bigint, n.nspname::text, c.relname::text, a.attname::text, a.atttypid::bigint, a.atttypmod,
       format_type(a.atttypid, a.atttypmod), coalesce(k.place - 1, -1)::int, a.attnotnull
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
LEFT JOIN pg_index i ON i.indrelid = c.oid AND i.indisprimary
LEFT JOIN LATERAL unnest(i.indkey::int2[]) WITH ORDINALITY AS k(attnum, place) ON k.attnum = a.attnum
WHERE c.relkind = 'r' AND n.nspname NOT IN ('pg_catalog', 'information_schema')
ORDER BY c.oid, a.attnum
"""


class Answer:
    def __init__(self, status: int, headers: Any, body: bytes) -> None:
        self.status = status
        self.headers = {name.lower(): value for name, value in headers.items()}
        self.body = body

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def items(self) -> list[dict[str, Any]]:
        return [item for item in self.json if "key" in item]

    @property
    def controls(self) -> list[str]:
        return [item["headers"]["control"] for item in self.json if "control" in item["headers"]]

    @property
    def handle(self) -> str:
        return str(self.headers["electric-handle"])

    @property
    def offset(self) -> str:
        return str(self.headers["electric-offset"])


def describe_relations(dsn: str) -> dict[int, Relation]:
    with psycopg.connect(dsn) as connection:
        rows = connection.execute(COLUMNS_SQL).fetchall()
    names: dict[int, tuple[str, str]] = {}
    columns: dict[int, list[Column]] = {}
    for oid, schema, table, *column in rows:
        names[oid] = (schema, table)
        columns.setdefault(oid, []).append(Column(*column))
    return {oid: Relation(oid, *names[oid], tuple(found)) for oid, found in columns.items()}


class ShapeWorld:
    """`async with ShapeWorld(dsn, ddl) as world`: tables made, published, streamed, served."""

    def __init__(
        self,
        dsn: str,
        ddl: str,
        settings: ShapeSettings | None = None,
        fragment_changes: int = 500,
        shards: Any = None,
        grants: ShapeAuthorizer | None = None,
        front: Callable[[ASGIApp], ASGIApp] = lambda app: app,
    ) -> None:
        """`front`: what stands before the routes."""
        self.dsn = dsn
        self.slot = "shapes_" + dsn.rpartition("/")[2].partition("?")[0].replace("-", "_").replace("=", "_")[-30:]
        self._ddl = ddl
        self._shards = shards
        self._grants = grants
        self._front = front
        self.settings = settings or ShapeSettings(long_poll_s=2.0)
        self.relations: dict[int, Relation] = {}
        self._fragment_changes = fragment_changes
        self._flowing = asyncio.Event()
        self._tasks = Tasks(print)
        self.delivered: list[Fragment] = []
        self.tracker = StatusTracker()

    async def __aenter__(self) -> Self:
        self.db = await psycopg.AsyncConnection.connect(self.dsn, autocommit=True)
        await self.db.execute(self._ddl)
        self.learn()
        for relation in self.relations.values():
            await self.db.execute(f'ALTER TABLE "{relation.schema}"."{relation.table}" REPLICA IDENTITY FULL')
        await self.db.execute(f"CREATE PUBLICATION {self.slot} FOR ALL TABLES")
        await self.db.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", (self.slot,))
        self.service = ShapeService(SystemClock(), Rand(7), self.tracker, self.settings)
        self.sink = self.service.add_database("main", self.dsn, lambda: self.relations.values())
        if self._shards is not None:
            self.service.add_shards(self._shards)
        app = build_application(shape_routes(self.service, self._grants))
        self.server = HttpServer(self._front(app), on_failure=lambda *_: None)
        await self.server.start()
        self._flowing.set()
        self._pump = self._tasks.spawn(self._run_pump(), name="pump")
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._tasks.aclose()
        await self.service.aclose()
        await self.server.aclose()
        # The server may still see the pump's connection; the fixture of the database drops the slot then.
        mine = "FROM pg_replication_slots WHERE slot_name = %s AND active_pid IS NULL"
        await self.db.execute(f"SELECT pg_drop_replication_slot(slot_name) {mine}", (self.slot,))
        await self.db.close()

    def learn(self) -> None:
        self.relations = describe_relations(self.dsn)

    def hold(self) -> None:
        self._flowing.clear()

    def release(self) -> None:
        self._flowing.set()

    async def _run_pump(self) -> None:
        options = " ".join(f"-c {k}={v.replace(' ', chr(92) + ' ')}" for k, v in SESSION_SETTINGS.items())
        connection = await psycopg.AsyncConnection.connect(self.dsn, autocommit=True, options=options)
        converter = TransactionBuilder(self.relations, max_changes=self._fragment_changes)
        sql = (
            "SELECT data FROM pg_logical_slot_get_binary_changes(%s, NULL, NULL,"
            " 'proto_version', '1', 'publication_names', %s, 'messages', 'true')"
        )
        try:
            while True:
                await self._flowing.wait()
                cursor = await connection.execute(sql, (self.slot, self.slot), binary=True)
                for (data,) in await cursor.fetchall():
                    out = converter.feed_message(decode_message(bytes(data)), len(data))
                    if isinstance(out, RelationSeen) and out.changed:
                        self.learn()
                        converter.set_relation(self.relations[out.message.oid])
                    elif isinstance(out, Fragment):
                        await self._flowing.wait()
                        self.delivered.append(out)
                        self.sink.process_fragment(out)
                await asyncio.sleep(0.005)
        finally:
            await connection.close()

    async def request(
        self,
        path: str,
        params: dict[str, str],
        headers: dict[str, str] | None = None,
        method: str = "GET",
        body: bytes | None = None,
    ) -> Answer:
        url = f"{self.server.url}{path}?{urllib.parse.urlencode(params)}"
        return await asyncio.to_thread(_fetch, url, headers or {}, method, body)

    async def ask(self, target: str, method: str = "GET", body: bytes | None = None, **headers: str) -> Answer:
        """`target`: path and query, as they go over the wire, or a whole URL."""
        url = target if "://" in target else f"{self.server.url}{target}"
        return await asyncio.to_thread(_fetch, url, headers, method, body)

    async def get(self, **params: str) -> Answer:
        return await self.request("/v1/shape", params)

    async def post(self, body: Any, **params: str) -> Answer:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.request("/v1/shape", params, {"content-type": "application/json"}, "POST", data)

    async def sync(self, **params: str) -> Client:
        client = Client(self, params)
        await client.catch_up()
        return client

    async def select(self, table: str, where: str = "true") -> set[tuple[Any, ...]]:
        cursor = await self.db.execute(f"SELECT * FROM {table} WHERE {where}")  # type: ignore[arg-type]
        return {tuple(None if v is None else str(v) for v in row) for row in await cursor.fetchall()}


def _fetch(url: str, headers: dict[str, str], method: str, body: bytes | None) -> Answer:
    request = urllib.request.Request(url, body, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            return Answer(answer.status, answer.headers, answer.read())
    except urllib.error.HTTPError as error:
        return Answer(error.code, error.headers, error.read())


class Client:
    """A plain client of the protocol: rows by key, as the stock client would hold them."""

    def __init__(self, world: ShapeWorld, params: dict[str, str]) -> None:
        self.world = world
        self.params = params
        self.rows: dict[str, dict[str, Any]] = {}
        self.seen: list[dict[str, Any]] = []
        self.offset = "-1"
        self.handle = ""
        self.refetches = 0

    def _apply(self, item: dict[str, Any]) -> None:
        self.seen.append(item)
        operation = item["headers"]["operation"]
        if operation == "insert":
            assert item["key"] not in self.rows, f"inserted twice: {item}"
            self.rows[item["key"]] = item["value"]
        elif operation == "update":
            self.rows[item["key"]] = {**self.rows[item["key"]], **item["value"]}
        else:
            del self.rows[item["key"]]

    async def step(self, live: bool = False) -> Answer:
        params = {**self.params, "offset": self.offset}
        if self.handle:
            params["handle"] = self.handle
        if live:
            params["live"] = "true"
        answer = await self.world.get(**params)
        if answer.status == 409:
            self.rows, self.offset, self.handle = {}, "-1", answer.handle
            self.refetches += 1
            return answer
        assert answer.status == 200, answer.body
        for item in answer.items:
            self._apply(item)
        self.offset, self.handle = answer.offset, answer.handle
        return answer

    async def catch_up(self) -> None:
        while (answer := await self.step()).status == 409 or "up-to-date" not in answer.controls:
            pass

    async def follow_until(self, check: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not check():
                await self.step(live=self.offset not in ("-1",))
