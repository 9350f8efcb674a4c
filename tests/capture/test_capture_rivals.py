"""Primary keys that two rows hold simultaneously inside a transaction: in every envelope, the last record of a key is
the row that SELECT returns for it.
"""

from __future__ import annotations

import asyncio
import io
import json
import random
import struct
from collections.abc import Sequence

import fastavro
import psycopg
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from support.capture.on_every_server import (
    as_selected,
    test_f486_keys_that_move_within_a_statement_leave_the_topic_as_select_has_the_table,
)
from support.capture.wire import INT4, TEXT, Log, Notices, bursts, feed, framed, message
from support.capture.world import World
from support.waiting import until
from tidemill.base.clock import Rand, SystemClock
from tidemill.base.errors import TidemillError
from tidemill.capture.catalog import relations
from tidemill.capture.changes import Column, Fragment, Relation, Row
from tidemill.capture.delivery import deferrable_keys
from tidemill.capture.delivery.deferrable_keys import DeferrableKeys
from tidemill.capture.encode.avro_schemas import schemas_of
from tidemill.capture.encode.debezium_json import EventSource
from tidemill.capture.postgres import control_connection
from tidemill.capture.postgres.connection import PgConnection
from tidemill.capture.postgres.errors import SqlError
from tidemill.capture.postgres.pg_snapshot import PgSnapshot
from tidemill.capture.topics.captured_table import CapturedTable
from tidemill.capture.topics.topic_writer import TopicWriter
from tidemill.metastore.catalogue import PipelineRow, TopicRow
from tidemill.shapes.definition.definition import ShapeDefinition
from tidemill.shapes.definition.definition import Source as ShapeSource
from tidemill.shapes.live_shape import LiveShape
from tidemill.shapes.log.log import ShapeLog
from tidemill.shapes.log.log_offset import BASE_END
from tidemill.shapes.log.row_writer import RowWriter
from tidemill.shapes.loop_share import Turn
from tidemill.shapes.tables.backlog import Backlog, InboxEntry, PendingFragment, Transaction
from tidemill.shapes.tables.table_consumer import TableConsumer
from tidemill.topics.batch import Record, decode_batch

__all__ = [
    "test_f486_keys_that_move_within_a_statement_leave_the_topic_as_select_has_the_table",
]

D = Relation(
    1, "public", "d", (Column("v", TEXT, -1, "", -1), Column("id", INT4, -1, "integer", 0)), deferrable=True
)  # fmt: skip
AVRO = EventSource("shop", "db", ((5, 6),))
KEY_SCHEMA, VALUE_SCHEMA = (fastavro.parse_schema(json.loads(text)) for text in schemas_of("shop.public.d", D.columns))
Table = dict[str, str]
"""id → v."""


class Model:
    """A table whose key is checked only at the commit, and the frames of its changes."""

    def __init__(self, rand: random.Random) -> None:
        self.rand = rand
        self.rows: list[list[str]] = []
        self.out: list[bytes] = []
        self.states: list[Table] = []
        self.lsn = 100

    def _say(self, kind: str, old: list[str] | None, new: list[str] | None) -> None:
        self.out.append(framed(self.lsn, message(kind, 1, old, new)))

    def transaction(self) -> None:
        rand = self.rand
        self.lsn += 100
        xid = 7 + self.lsn
        self.out.append(framed(self.lsn, b"B" + struct.pack(">qqI", self.lsn, 0, xid)))
        for _ in range(rand.choice([0, 1, 2, 5, 30])):
            self._step()
        while True:
            taken = [row[1] for row in self.rows]
            twice = [row for row in self.rows if taken.count(row[1]) > 1]
            if not twice:
                break
            row = rand.choice(twice)
            if rand.random() < 0.3:
                self._say("D", row, None)
                self.rows.remove(row)
            else:
                self._move(row, str(rand.randint(1, 40)))
        self.out.append(framed(self.lsn, b"C" + struct.pack(">Bqqq", 0, self.lsn, self.lsn + 8, 0)))
        self.states.append({key: value for value, key in self.rows})

    def _move(self, row: list[str], key: str) -> None:
        new = [row[0] if self.rand.random() < 0.7 else self.rand.choice("ab"), key]
        self._say("U", row, new)
        self.rows[next(n for n, each in enumerate(self.rows) if each is row)] = new

    def _step(self) -> None:
        rand = self.rand
        match rand.choice(["insert", "delete", "update", "move", "move", "shift", "permute", "truncate"]):
            case "insert":
                new = [rand.choice("ab"), str(rand.randint(1, 12))]
                self._say("I", None, new)
                self.rows.append(new)
            case "delete" if self.rows:
                row = self.rows.pop(rand.randrange(len(self.rows)))
                self._say("D", row, None)
            case "update" if self.rows:
                row = rand.choice(self.rows)
                self._move(row, row[1])
            case "move" if self.rows:
                self._move(rand.choice(self.rows), str(rand.randint(1, 12)))
            case "shift":
                by = rand.choice([1, -1])
                for row in list(self.rows):
                    self._move(row, str(int(row[1]) + by))
            case "permute":
                keys = [row[1] for row in self.rows]
                rand.shuffle(keys)
                for row, key in zip(list(self.rows), keys, strict=True):
                    self._move(row, key)
            case "truncate" if rand.random() < 0.1:
                self.out.append(framed(self.lsn, b"T" + struct.pack(">IBI", 1, 0, 1)))
                self.rows.clear()
            case _:
                pass


def settled(
    fragments: Sequence[Fragment], now: dict[int, Table], asked: list[int], limit: int = 1 << 20
) -> list[Fragment]:
    """Resolve rivals. `now` maps a commit LSN to the rows that the database returns while that transaction is
    processed.
    """
    at = [0]

    async def ask(relation: Relation, rows: Sequence[Row]) -> list[Row | None]:
        asked.append(len(rows))
        table = now[at[0]]
        return [{"v": table[row["id"]], "id": row["id"]} if row["id"] in table else None for row in rows]

    async def refuse(*_: object) -> None:
        raise AssertionError

    async def run() -> list[Fragment]:
        out = []
        pure = DeferrableKeys(ask, refuse, remembered_bytes=limit, waiting_bytes=limit)
        for fragment in fragments:
            at[0] = fragment.commit_lsn
            out += await pure.resolve_fragment(fragment)
        return out

    return asyncio.run(run())


def written(fragments: Sequence[Fragment], partitions: int, source: EventSource | None) -> list[list[Record]]:
    """The records of each partition."""

    async def run() -> list[list[Record]]:
        log = Log()
        table = CapturedTable(
            "public.d", TopicRow(name="d", topic_id="d", partitions=partitions), 5, oid=1, source=source
        )
        writer = TopicWriter("w", [table], log, Rand(1), lambda _: None)  # type: ignore[arg-type]
        for each in table.writers:
            each.start_at(0, 0, None)
        for fragment in fragments:
            await writer.deliver(fragment, Notices())
        await writer.wait_drained()
        await writer.aclose()
        return [
            [record for batch in log.batches.get(("d", p), []) for record in decode_batch(batch).records]
            for p in range(partitions)
        ]

    return asyncio.run(run())


class Literal:
    """A client of a shape over the whole table that takes every operation literally."""

    def __init__(self) -> None:
        shape = LiveShape("h", ShapeDefinition(ShapeSource("table", "main", "public", "d")), b"{}", ShapeLog())
        shape.log.seal_base()
        shape.mark_ready()
        self._turn = Turn(SystemClock(), float("inf"))
        self._shape = shape
        self._consumer = TableConsumer(shape, D, None, RowWriter("public", "d", ["id", "v"], ["id"], [], "default"))
        self._consumer.set_snapshot(PgSnapshot(1, 1, frozenset()))
        self._consumer.publish_waiting(self._turn)
        self._transaction = Transaction(0, 0)

    def take(self, fragment: Fragment) -> None:
        if fragment.begins:
            self._transaction = Transaction(fragment.xid, fragment.commit_lsn)
        changes = list(fragment.changes)
        self._consumer.offer(
            InboxEntry(self._transaction, PendingFragment(Backlog(), 0, 0, 0), changes, fragment.commits, 0.0), 0
        )
        while self._consumer.evaluate(self._turn):
            pass

    @property
    def over(self) -> bool:
        """Return whether the shape has ended, as a truncate does."""
        return self._shape.has_ended

    def held(self) -> Table:
        rows: Table = {}
        for text in self._shape.log.read(BASE_END).items:
            item = json.loads(text)
            key, operation = item["value"]["id"], item["headers"]["operation"]
            assert (key in rows) is (operation != "insert"), f"{operation} of {key} in {rows}"
            if operation == "delete":
                del rows[key]
            else:
                rows[key] = item["value"].get("v", rows.get(key))
        return rows


def row_of(record: Record, source: EventSource | None) -> tuple[str, str | None, str]:
    """(id, v or None, op) of a record."""
    assert record.key is not None
    if source is AVRO:
        key = fastavro.schemaless_reader(io.BytesIO(record.key[5:]), KEY_SCHEMA)
        if record.value is None:
            return str(key["id"]), None, "tombstone"
        event = fastavro.schemaless_reader(io.BytesIO(record.value[5:]), VALUE_SCHEMA)
    else:
        key = json.loads(record.key)
        if record.value is None:
            return str(key["id"]), None, "tombstone"
        event = json.loads(record.value)
    if source is None:
        return str(key["id"]), event["v"], "row"
    return str(key["id"]), event["after"]["v"] if event["after"] else None, event["op"]


def folded(parts: Sequence[Sequence[Record]], source: EventSource | None, end_lsn: int) -> Table:
    """Return the last record of each key as of a commit."""
    table: Table = {}
    for part in parts:
        mine: Table = {}
        for record in part:
            if int(dict(record.headers)["tm.pos"].split(b"_")[0]) > end_lsn:  # type: ignore[union-attr]
                break
            if dict(record.headers)["tm.op"] == b"truncate":
                mine.clear()
                continue
            key, value, _ = row_of(record, source)
            if value is None:
                mine.pop(key, None)
            else:
                mine[key] = value
        table |= mine
    return table


def keys_of(parts: Sequence[Sequence[Record]]) -> list[list[bytes | None]]:
    return [[record.key for record in part] for part in parts]


@settings(max_examples=150)
@example(26_885, 1, None, 2_000)
@given(
    st.integers(0, 1 << 32), st.sampled_from([1, 3]), st.sampled_from([None, EventSource("shop", "db"), AVRO]),
    st.sampled_from([1 << 20, 1 << 20, 2_000]),
)  # fmt: skip
def test_after_each_transaction_the_last_record_of_a_key_is_the_row_that_the_table_has(
    seed: int, partitions: int, source: EventSource | None, limit: int
) -> None:
    """Swaps, chains, cycles, permutations, rows of equal content, deletes and inserts of the same key, and truncates,
    in fragments, by columns and row by row, and beyond the memory limit.
    """
    rand = random.Random(seed)
    model = Model(rand)
    for _ in range(rand.randint(2, 7)):
        model.transaction()
    by_rows = feed(model.out, None, 1, relations={1: D})[0]
    by_columns = feed(model.out, bursts(rand, len(model.out)), 1, relations={1: D})[0]
    lsns = sorted({fragment.commit_lsn for fragment in by_rows})
    now = dict(zip(lsns, model.states, strict=True))
    parts = written(settled(by_rows, now, [], limit), partitions, source)
    columns = written(settled(by_columns, now, [], limit), partitions, source)
    # Changes have another size as columns. So the limit is reached elsewhere, and which records between the first and
    # the last one of a key are tombstones differs.
    assert columns == parts if limit > 2_000 else keys_of(columns) == keys_of(parts)
    for lsn, state in now.items():
        assert folded(parts, source, lsn) == folded(columns, source, lsn) == state
    # Answers of the future come true, and change no offset.
    later = written(settled(by_rows, dict.fromkeys(lsns, model.states[-1]), [], limit), partitions, source)
    assert folded(later, source, lsns[-1]) == model.states[-1]
    assert keys_of(later) == keys_of(parts)


@settings(max_examples=300)
@given(st.integers(0, 1 << 32))
def test_a_client_that_takes_every_operation_literally_has_the_table_after_each_transaction(seed: int) -> None:
    """Some rows have equal content, and the stream does not show which of them left a key."""
    rand = random.Random(seed)
    model = Model(rand)
    for _ in range(rand.randint(1, 4)):
        model.transaction()
    fragments = feed(model.out, None, 1, relations={1: D})[0]
    now = dict(zip(sorted({fragment.commit_lsn for fragment in fragments}), model.states, strict=True))
    client = Literal()
    for fragment in settled(fragments, now, []):
        client.take(fragment)
        if client.over:
            return
        if fragment.commits:
            assert client.held() == now[fragment.commit_lsn]


def one(*messages: bytes, lsn: int = 100) -> list[bytes]:
    begin = framed(lsn, b"B" + struct.pack(">qqI", lsn, 0, 7))
    return [begin, *[framed(lsn, m) for m in messages], framed(lsn, b"C" + struct.pack(">Bqqq", 0, lsn, lsn + 8, 0))]


def test_events_of_a_key_that_is_taken_add_up_and_end_with_the_row_that_took_it() -> None:
    frames = one(message("U", 1, ["a", "1"], ["a", "2"]), message("U", 1, ["b", "2"], ["b", "3"]))
    asked: list[int] = []
    (part,) = written(settled(feed(frames, None, 1, relations={1: D})[0], {}, asked), 1, AVRO)
    assert [row_of(record, AVRO) for record in part] == [
        ("1", None, "d"), ("1", None, "tombstone"), ("2", "a", "c"),
        ("2", None, "d"), ("2", "a", "u"), ("3", "b", "c"),
    ]  # fmt: skip
    assert not asked, "rows of different content are told apart"


def test_rows_of_equal_content_are_asked_for_once_a_fragment_and_immediate_keys_never() -> None:
    moves = [message("U", 1, ["x", str(n)], ["x", str(n + 1)]) for n in range(1, 10)]
    asked: list[int] = []
    (part,) = written(settled(feed(one(*moves), None, 1, relations={1: D})[0], {100: {"10": "x"}}, asked), 1, None)
    assert asked == [8]
    assert folded([part], None, 100) == {"10": "x"}, "one row went all the way"
    immediate = Relation(1, "public", "d", D.columns)
    fragments = feed(one(*moves), None, 1, relations={1: immediate})[0]
    asked.clear()
    assert settled(fragments, {}, asked) == fragments and not asked


@pytest.mark.parametrize("kinds", ["I", "D", "U", "DI"])
def test_a_flow_without_rivals_stays_by_columns_and_nothing_of_it_is_decoded(
    kinds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {"I": (None, ["a", "{}"]), "D": (["a", "{}"], None), "U": (["a", "{}"], ["b", "{}"])}

    def of(kind: str, n: int) -> bytes:
        old, new = rows[kind]
        return message(kind, 1, *[each and [t.format(n) for t in each] for each in (old, new)])

    frames = [f for k, kind in enumerate(kinds) for f in one(*[of(kind, n) for n in range(300)], lsn=100 + 100 * k)]
    fragments = feed(frames, [len(frames)], 1, relations={1: D})[0]

    def decoded(_: object) -> None:
        raise AssertionError("a row was decoded")

    monkeypatch.setattr(deferrable_keys, "changes_of", decoded)
    assert all(a is b for a, b in zip(settled(fragments, {}, []), fragments, strict=True))


def test_what_cannot_be_asked_for_refuses_its_table_alone() -> None:
    async def ask(relation: Relation, rows: Sequence[Row]) -> list[Row | None]:
        raise SqlError("no lock.", sqlstate="55P03")

    refused: list[str] = []

    async def refuse(relation: Relation, fragment: Fragment, error: TidemillError) -> None:
        refused.append(f"{relation.name} {fragment.commit_lsn} {error.message}")

    frames = one(message("I", 1, None, ["a", "1"]), message("D", 1, ["a", "1"], None))
    (fragment,) = feed(frames, None, 1, relations={1: D})[0]
    (passed,) = asyncio.run(DeferrableKeys(ask, refuse).resolve_fragment(fragment))
    assert [(c.op, c.old, c.new) for c in passed.changes] == [(c.op, c.old, c.new) for c in fragment.changes]
    assert refused == ["public.d 100 no lock."]


# against PostgreSQL ---------------------------------------------------------------------------------


@pytest.mark.postgres
async def test_f486_rows_that_exchange_keys_before_their_table_is_dropped_are_in_its_topic(postgres_dsn: str) -> None:
    """A session that begins after the DROP finds no key of the table in the catalogue, deferrable or not. Found by the
    oracle."""
    async with World(postgres_dsn) as world:
        await world.sql(
            "CREATE TABLE d (id int PRIMARY KEY DEFERRABLE, v text)", "ALTER TABLE d REPLICA IDENTITY FULL",
            "INSERT INTO d SELECT g, 'v' || g FROM generate_series(1, 5) g", "CREATE TABLE good (id int PRIMARY KEY)",
        )  # fmt: skip
        async with world.capture():
            await world.caught_up()
        # deletes of a deferrable key make the capture ask for the remaining row
        await world.transaction("INSERT INTO d VALUES (9, 'x')", "DELETE FROM d WHERE id = 9")
        await world.sql("UPDATE d SET id = id + 1")
        await world.sql("UPDATE d SET id = CASE id WHEN 3 THEN 4 ELSE 3 END WHERE id IN (3, 4)")
        rows = [json.loads(row) for (row,) in await world.select("SELECT row_to_json(d)::text FROM d")]
        # a reader retains the topic
        await world.catalogue.put(PipelineRow("p", {"d": f"capture:{world.name}:public.d"}))
        await world.sql("DROP TABLE d", "INSERT INTO good VALUES (1)")
        async with world.capture():
            await world.paused("d", "was dropped from the database")
            await as_selected(world, "good")
            held = list((await world.folded("d")).values())
        assert sorted(map(str, held)) == sorted(map(str, rows))


@pytest.mark.postgres
async def test_f486_rows_are_asked_for_under_a_type_that_the_catalogue_describes_otherwise_by_now(
    postgres_dsn: str,
) -> None:
    """Found by the oracle: the type had no name at that time, and the table was paused."""
    async with World(postgres_dsn) as world:
        await world.sql(
            "CREATE TABLE d (id int PRIMARY KEY DEFERRABLE, v varchar(10))", "ALTER TABLE d REPLICA IDENTITY FULL",
            "INSERT INTO d SELECT g, 'same' FROM generate_series(1, 5) g",
        )  # fmt: skip
        async with world.capture():
            await world.flowing("d")
        await world.sql(
            "ALTER TABLE d ALTER v TYPE varchar(20)", "UPDATE d SET id = id + 1",
            "ALTER TABLE d ALTER v TYPE varchar(40)", "UPDATE d SET id = 9 - id",
        )  # fmt: skip
        async with world.capture(copy_again=False):
            await as_selected(world, "d")
            row = await world.table("public.d")
            assert row is not None and row.is_streaming


@pytest.mark.postgres
async def test_f486_a_table_whose_rows_cannot_be_asked_for_is_parked_alone_and_copied_again(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(
            "CREATE TABLE d2 (id int PRIMARY KEY DEFERRABLE)", "CREATE TABLE good (id int PRIMARY KEY)",
            "INSERT INTO d2 VALUES (1), (2)", "ALTER TABLE d2 REPLICA IDENTITY FULL",
        )  # fmt: skip
        async with world.capture(copy_again=True, copy_again_pause_s=0.1, table_poll_s=0.1):
            async with await psycopg.AsyncConnection.connect(world.dsn) as other:
                await world.sql("BEGIN", "UPDATE d2 SET id = id + 1")
                locked = asyncio.ensure_future(other.execute("LOCK TABLE d2"))

                async def queued() -> bool:
                    return bool(
                        await world.select("SELECT FROM pg_locks WHERE NOT granted AND relation = 'd2'::regclass")
                    )

                await until(queued, "the lock is asked for")
                await world.sql("COMMIT")
                await locked
                row = await world.paused("d2", "the row that holds a deferrable key cannot be read")
                assert row.again_ms
                await world.sql("INSERT INTO good VALUES (1)")
                await as_selected(world, "good")
            await world.flowing("d2")
            await as_selected(world, "d2", "good")


REKEYED = "ALTER TABLE {0} DROP CONSTRAINT {0}_pkey, ADD PRIMARY KEY (id) {1}"


@pytest.mark.postgres
async def test_keys_that_were_deferrable_when_they_moved_are_told_apart_though_the_catalogue_says_otherwise_now(
    postgres_dsn: str,
) -> None:
    async with World(postgres_dsn) as world:
        for table in ("d", "late"):
            await world.sql(
                f"CREATE TABLE {table} (id int PRIMARY KEY, v text)", f"ALTER TABLE {table} REPLICA IDENTITY FULL",
                f"INSERT INTO {table} SELECT g, 'v' || g FROM generate_series(1, 5) g",
            )  # fmt: skip
        async with world.capture() as capture:
            await world.flowing("d", "late")
            await world.transaction(
                REKEYED.format("d", "DEFERRABLE"), "UPDATE d SET id = id + 1", REKEYED.format("d", "")
            )
            await as_selected(world, "d")
            await world.sql("UPDATE d SET v = 'new' WHERE id = 3", "DELETE FROM d WHERE id = 2")
            await as_selected(world, "d")
            assert not capture._session._converter.relations[await oid(world, "d")].deferrable, "only for as long"
        # recognised once a later transaction has replaced the key
        await world.sql(REKEYED.format("late", "DEFERRABLE"), "UPDATE late SET id = id + 1", REKEYED.format("late", ""))
        async with world.capture():
            await as_selected(world, "late")
            for table in ("d", "late"):
                row = await world.table(f"public.{table}")
                assert row is not None and row.is_streaming and row.generation == 0


@pytest.mark.postgres
async def test_a_key_that_was_made_anew_is_no_deferrable_one_where_the_stream_says_only_keys_of_old_rows(
    postgres_dsn: str,
) -> None:
    """Keys alone do not identify rivals. The identity itself shows whether the key may be deferred."""
    async with World(postgres_dsn) as world:
        await world.sql("CREATE TABLE d (id int PRIMARY KEY, v text)", "INSERT INTO d VALUES (1, 'a'), (2, 'b')")
        async with world.capture(identity="as-is"):
            await world.flowing("d")
            await world.transaction(
                REKEYED.format("d", ""), "INSERT INTO d VALUES (3, 'c')", "UPDATE d SET v = 'd' WHERE id = 3",
                "DELETE FROM d WHERE id = 3", "UPDATE d SET id = 9 WHERE id = 1",
            )  # fmt: skip
            await as_selected(world, "d")
            row = await world.table("public.d")
            assert row is not None and row.is_streaming


async def oid(world: World, table: str) -> int:
    return int((await world.select(f"SELECT '{table}'::regclass::oid::bigint"))[0][0])


@pytest.mark.postgres
async def test_rows_that_are_asked_for_over_a_slow_link_have_a_deadline_for_each_question_not_for_all_of_them(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the session ends, and the next one receives the same transaction and asks for the same rows."""
    some, slices = relations._read_rows_by_key, list[int]()

    async def slowly(wire: PgConnection, relation: Relation, rows: Sequence[Row]) -> list[Row | None]:
        slices.append(len(rows))
        await asyncio.sleep(0.5)
        return await some(wire, relation, rows)

    async with World(postgres_dsn) as world:
        await world.sql(
            "CREATE TABLE d2 (id int PRIMARY KEY DEFERRABLE)", "ALTER TABLE d2 REPLICA IDENTITY FULL",
            "INSERT INTO d2 SELECT g FROM generate_series(1, 101) g",
        )  # fmt: skip
        async with world.capture() as capture:
            await world.flowing("d2")
            session = capture._session
            monkeypatch.setattr(relations, "KEYS_PER_QUERY", 10)
            monkeypatch.setattr(relations, "_read_rows_by_key", slowly)
            monkeypatch.setattr(control_connection, "ANSWER_DEADLINE_S", 3.0)
            await world.sql("UPDATE d2 SET id = id + 1")
            await as_selected(world, "d2")
            assert capture._session is session and slices == [10] * 10
