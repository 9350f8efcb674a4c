"""`verify` on a real PostgreSQL: every type, a point marked in the stream, concurrent writers, planted differences."""

from __future__ import annotations

import asyncio
import struct
from itertools import pairwise
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from support.waiting import run, slowness
from tidemill.base.clock import Rand, SystemClock
from tidemill.base.errors import InvalidError, MissingError, UnavailableError
from tidemill.capture.postgres.connection import DISPLAY_SETTINGS
from tidemill.cli.verify import postgres as verify_postgres
from tidemill.cli.verify.table import Verified, verify_captured, verify_expected
from tidemill.cli.verify.tables import canonical_keys
from tidemill.consensus.memory import MemoryConsensus
from tidemill.objects.memory import MemoryObjects
from tidemill.shards.api import DIFF, TIME, Binding, ShardSchema
from tidemill.shards.handle import LogShard
from tidemill.shards.parts.pg_columns import column_for, parse_column
from tidemill.shards.registry import open_shard

pytestmark = pytest.mark.postgres

TYPES = """
CREATE TABLE kinds (
  a int, b text, c numeric(12,2), d numeric, e timestamptz, f timestamp(3), g date, h bytea, i bool,
  j float4, k float8, l jsonb, m char(6), n inet, o uuid, p interval, q int[], r smallint, s bigint,
  PRIMARY KEY (b, a))
"""
ROWS = [
    "(1, 'ä', 1.50, 1.500, '2026-11-21 03:00+05:30', '2026-01-01 12:00:00.123', '2026-02-03', '\\xdead', true,"
    " 0.1, 0.1, '{\"a\": 1}', 'ab', '10.0.0.1', 'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11', '1 day', '{1,2}', 3, 4)",
    "(2, 'z', -0.01, 'NaN', 'infinity', '-infinity', 'infinity', '', false, 'NaN', '-Infinity', 'null', '',"
    " '10.0.0.0/8', NULL, '1 mon -3 sec', '{}', -32768, -9223372036854775808)",
    "(3, 'Z', NULL, NULL, '0044-03-15 12:00 BC', '9999-12-31', '0044-03-15 BC', NULL, NULL, NULL, '-0', NULL,"
    " NULL, NULL, NULL, NULL, NULL, NULL, NULL)",
    "(-7, '', 0, 0, '10000-01-01', 'epoch', 'epoch', '\\x00', true, 3e38, 5e-324, '[]', 'abcdef', '::1', NULL,"
    " '0', NULL, 0, 0)",
]


class StreamRemap:
    """Finds the marker in the real replication stream and binds it at its commit, as capture does."""

    name = "capture/test"

    def __init__(self, dsn: str, time_ms: int = 10) -> None:
        self._time_ms = time_ms
        # The slot is temporary: it is dropped with its session, which the garbage collector ends.
        self._connection = psycopg.connect(dsn, autocommit=True)
        self._connection.execute("CREATE PUBLICATION p FOR ALL TABLES")
        self._slot = f"v_{self._connection.info.dbname}_{self._connection.info.backend_pid}"
        self._connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput', true)", (self._slot,))

    async def latest(self) -> Binding | None:
        return None

    async def after(self, time_ms: int, limit: int = 10_000) -> list[Binding]:
        if time_ms >= self._time_ms:
            return []
        rows = self._connection.execute(
            "SELECT data FROM pg_logical_slot_get_binary_changes(%s, NULL, NULL, 'proto_version', '1',"
            " 'publication_names', 'p', 'messages', 'true')",
            (self._slot,),
        ).fetchall()
        tag = ""
        for (data,) in rows:
            if data[:1] == b"M":
                tag = data[data.index(b"\0", 10) + 5 :].decode()
            elif data[:1] == b"C" and tag:
                return [Binding(self._time_ms, {}, struct.unpack(">Q", data[2:10])[0], 0, tag)]
        return []

    async def wait(self, beyond_ms: int, timeout_s: float) -> bool:
        await asyncio.sleep(0.01)
        return False

    async def at(self, time_ms: int) -> Binding | None:
        return None

    async def mint(self, binding: Binding) -> Binding:
        raise NotImplementedError


def created(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(TYPES.encode())
        for row in ROWS:
            connection.execute(f"INSERT INTO kinds VALUES {row}".encode())


async def captured(
    dsn: str, table: str = "kinds", drop: int = 0, change: dict[str, Any] | None = None, arrays: bool = True
) -> LogShard:
    """The shard that capture and the pipeline would make of the table, parsed from the output text."""
    options = " ".join(f"-c {k}={v.replace(' ', chr(92) + ' ')}" for k, v in DISPLAY_SETTINGS.items())
    with psycopg.connect(dsn, options=options) as connection:
        described = connection.execute(
            "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute WHERE attrelid = %s::regclass"
            " AND attnum > 0 ORDER BY attnum",
            (table,),
        ).fetchall()
        cursor = connection.cursor()
        copied: list[list[str | None]] = []
        with cursor.copy(f"COPY {table} TO STDOUT".encode()) as copy:
            for row in copy.rows():
                copied.append([None if v is None else str(v) for v in row])
    columns = tuple(column_for(n, t, arrays=arrays) for n, t in described)
    keys = ("b", "a") if table == "kinds" else ("id",)
    schema = ShardSchema(columns, keys)
    clock, rand = SystemClock(), Rand()
    shard = await open_shard(MemoryConsensus(clock), MemoryObjects(clock), clock, rand, table, schema)
    copied = copied[drop:]
    arrays = {c.name: parse_column([r[i] for r in copied], c) for i, c in enumerate(columns)}
    arrays |= change or {}
    times = pa.array([5] * len(copied), pa.int64())
    rows = pa.table({**arrays, TIME: times, DIFF: pa.array([1] * len(copied), pa.int64())})
    await shard.compare_and_append(0, 11, [await shard.write_part(rows)], "")
    return shard


def verified(dsn: str, shard: LogShard, table: str = "public.kinds", remap: StreamRemap | None = None) -> Verified:
    async def scenario() -> Verified:
        return (await verify_captured(dsn, remap or StreamRemap(dsn), [(table, shard)], Rand()))[0]

    return run(scenario())  # type: ignore[no-any-return]


def test_every_type_equals_at_the_marked_commit(postgres_dsn: str) -> None:
    created(postgres_dsn)
    found = verified(postgres_dsn, run(captured(postgres_dsn)))
    assert (found.rows, found.missing, found.extra, found.different, found.examples) == (4, 0, 0, 0, ())
    assert found.clean and found.source_hash == found.shard_hash and found.time_ms == 10 and found.lsn > 0


ARRAYS: dict[str, str] = {
    "int[]": "{}|{1,NULL,-2147483648}|[0:1]={1,2}",
    "smallint[]": "{32767}",
    "bigint[]": "{9223372036854775807,NULL}",
    "oid[]": "{0,4294967295}",
    "bool[]": "{t,f,NULL}",
    "real[]": "{NaN,Infinity,-0,0.1,1e-45}",
    "float8[]": "{NaN,-Infinity,-0,0.1,5e-324}",
    "numeric(12,2)[]": "{1.50,-0.01,0,NULL}",
    "numeric(38,10)[]": "{0,1234567890123456789012345678.0123456789}",
    "numeric[]": "{1.500,NaN}",
    "date[]": "{infinity,-infinity,0044-03-15 BC,2026-02-03}",
    "timestamptz[]": '{"2026-11-21 03:00:00.000001+05:30",infinity,"0044-03-15 12:00 BC"}',
    "timestamp(3)[]": '{"2026-11-21 03:00:00.123",-infinity}',
    "bytea[]": '{"\\\\x00ff5c27","\\\\x",NULL}',
    "text[]": '{NULL,"NULL","","a,b","{}","q\\"\\\\",é😀}|{}',
    "char(6)[]": "{ab}",
    "inet[]": "{10.0.0.1,10.0.0.0/8}",
    "jsonb[]": '{"{\\"a\\": [1, null]}",null}',
    "interval[]": '{"1 mon -3 sec"}',
    "place[]": '{"(1,\\"a,b\\")","(,)",NULL}',
    "box[]": "{(1,1),(0,0);(2,2),(0,0)}",
    "place": "(,)|(1,)",
}
"""Values of each type, between bars."""


def test_arrays_of_every_type_equal_and_a_changed_element_is_found(postgres_dsn: str) -> None:
    fields = ", ".join(f"c{n} {kind}" for n, kind in enumerate(ARRAYS))
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        connection.execute("CREATE TYPE place AS (x int, y text)")
        connection.execute(f"CREATE TABLE t (id int PRIMARY KEY, {fields})".encode())
        connection.execute("INSERT INTO t VALUES (0)")
        for n, (kind, values) in enumerate(ARRAYS.items()):
            for at, value in enumerate(values.split("|")):
                query = f"INSERT INTO t (id, c{n}) VALUES (%s, %s::text::{kind})"
                connection.execute(query.encode(), (100 * (n + 1) + at, value))
    remap = StreamRemap(postgres_dsn)
    assert verified(postgres_dsn, run(captured(postgres_dsn, "t", arrays=False)), "t", remap).clean, "as text, too"
    shard = run(captured(postgres_dsn, "t"))
    found = verified(postgres_dsn, shard, "t", remap)
    assert (found.missing, found.extra, found.different, found.examples, found.columns) == (0, 0, 0, (), "")
    assert found.clean and found.rows == 1 + sum(len(values.split("|")) for values in ARRAYS.values())
    changes = {
        101: "c0 = '{1,-2147483648,NULL}'",  # the order
        102: "c0 = '{{1},{2}}'",  # more than one dimension
        301: "c0 = '{}'",
        600: "c5 = '{NaN,Infinity,0,0.1,1e-45}'",  # the sign of zero
        800: "c7 = '{1.50,-0.01,0}'",
        1200: "c11[1] = c11[1] + interval '1 microsecond'",
        1500: "c14[1] = 'NULL'",
        1501: "c14 = NULL",
        2000: "c19[2] = NULL",
    }
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        connection.execute("DELETE FROM t WHERE id = 0")
        for key, change in changes.items():
            connection.execute(f"INSERT INTO t (id) VALUES ({key}) ON CONFLICT DO NOTHING".encode())
            connection.execute(f"UPDATE t SET {change} WHERE id = {key}".encode())
    found = verified(postgres_dsn, shard, "t", remap)
    assert (found.missing, found.different, found.extra) == (1, len(changes) - 1, 1) and not found.clean


def test_rows_that_are_dead_letters_are_poisoned_not_missing_and_never_equal(postgres_dsn: str) -> None:
    """The last days of PostgreSQL's range are read too, although no shard can hold them."""
    created(postgres_dsn)
    shard = run(captured(postgres_dsn))
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        connection.execute("INSERT INTO kinds (a, b, c) VALUES (5, 'x', 'NaN')")
        connection.execute("INSERT INTO kinds (a, b, e) VALUES (6, 'x', '294276-12-31')")
        connection.execute("INSERT INTO kinds (a, b, f) VALUES (8, 'x', '294276-12-31')")
        connection.execute("INSERT INTO kinds (a, b) VALUES (7, 'x')")

    async def poisoned(table: str, of: object) -> dict[tuple[Any, ...], str]:
        assert (table, of) == ("public.kinds", shard)
        keys = [b'{"b":"x","a":5}', b'{"a":6,"b":"x"}', b'{"b":"gone","a":1}', b'{"b":"x","a":8}']
        return {key: f"letter {place}" for key, place in canonical_keys(keys, shard.schema).items()}

    async def scenario() -> Verified:
        tables = [("public.kinds", shard)]
        return (await verify_captured(postgres_dsn, StreamRemap(postgres_dsn), tables, Rand(), poisoned=poisoned))[0]

    found = run(scenario())
    assert (found.poisoned, found.missing, found.extra, found.different) == (3, 1, 0, 0)
    said = {"poisoned x, 5: letter 0", "poisoned x, 6: letter 1", "missing x, 7", "poisoned x, 8: letter 3"}
    assert set(found.examples) == said
    assert not found.clean


def test_a_missing_an_extra_and_a_different_row_are_each_counted(postgres_dsn: str) -> None:
    created(postgres_dsn)
    shard = run(captured(postgres_dsn, drop=1))
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        connection.execute("DELETE FROM kinds WHERE a = 2")
        connection.execute("UPDATE kinds SET e = e + interval '1 microsecond' WHERE a = 3")
    found = verified(postgres_dsn, shard)
    assert (found.rows, found.missing, found.extra, found.different) == (3, 1, 1, 1)
    assert not found.clean
    assert found.examples == ("different Z, 3", "extra z, 2", "missing ä, 1")


def test_an_included_column_of_the_primary_key_is_no_difference(postgres_dsn: str) -> None:
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int, v int, PRIMARY KEY (id) INCLUDE (v))")
        connection.execute("INSERT INTO t VALUES (1, NULL)")
    assert verified(postgres_dsn, run(captured(postgres_dsn, "t")), "t").clean


def test_writers_that_go_on_meanwhile_do_not_show(postgres_dsn: str) -> None:
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id bigint PRIMARY KEY, v text)")
        connection.execute("INSERT INTO t SELECT i, md5(i::text) FROM generate_series(1, 50000) i")
    shard = run(captured(postgres_dsn, "t"))

    async def scenario() -> Verified:
        stop = asyncio.Event()

        async def write() -> int:
            """Hold the locks that verify waits for. Every write after the point must be invisible."""
            done = 0
            async with await psycopg.AsyncConnection.connect(postgres_dsn, autocommit=True) as connection:
                while not stop.is_set():
                    await connection.execute("UPDATE t SET v = 'later' WHERE id = %s", (done % 50_000 + 1,))
                    done += 1
            return done

        class Late(StreamRemap):
            async def after(self, time_ms: int, limit: int = 10_000) -> list[Binding]:
                if not writers:
                    writers.append(asyncio.ensure_future(write()))
                    await asyncio.sleep(0.1)
                return await super().after(time_ms, limit)

        writers: list[asyncio.Future[int]] = []
        progress: list[int] = []
        found = await verify_captured(
            postgres_dsn, Late(postgres_dsn), [("t", shard)], Rand(), progress=lambda _, rows, __: progress.append(rows)
        )
        stop.set()
        assert await writers[0] > 0
        assert progress == sorted(progress) and progress[-1] == 50_000
        return found[0]

    found = run(scenario())
    assert found.clean and found.rows == 50_000


def test_f418_verify_behind_an_open_transaction_names_it_and_keeps_no_writer_waiting(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_postgres, "LOCK_BUDGET_S", 4.0)
    created(postgres_dsn)
    shard = run(captured(postgres_dsn))
    remap = StreamRemap(postgres_dsn)  # its slot waits for open transactions
    waits: list[float] = []
    tries: list[tuple[float, float]] = []
    try_once = verify_postgres._mark_commit

    async def timed(*args: Any) -> tuple[int, int]:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            return await try_once(*args)
        finally:
            tries.append((began_s, loop.time()))

    monkeypatch.setattr(verify_postgres, "_mark_commit", timed)

    async def write(stop: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        async with await psycopg.AsyncConnection.connect(postgres_dsn, autocommit=True) as connection:
            while not stop.is_set():
                began_s = loop.time()
                await connection.execute("UPDATE kinds SET c = c WHERE a = 2")
                waits.append(loop.time() - began_s)

    async def scenario() -> str:
        stop = asyncio.Event()
        writing = asyncio.ensure_future(write(stop))
        with pytest.raises(UnavailableError) as error:
            await verify_captured(postgres_dsn, remap, [("kinds", shard)], Rand())
        stop.set()
        await writing
        return str(error.value)

    with psycopg.connect(postgres_dsn) as writer:
        writer.execute("UPDATE kinds SET c = 9 WHERE a = 1")
        said = run(scenario())
        assert f"pid={writer.info.backend_pid}" in said and "UPDATE kinds" in said
        writer.rollback()
    assert max(waits) < (verify_postgres.LOCK_TIMEOUT_MS / 1000 + 0.15) * slowness(), "a writer waits briefly"
    assert len(tries) >= 2
    for (began_s, ended_s), (next_s, _) in pairwise(tries):
        # A writer waits only during a try, so the pauses limit its share of waiting, on a busy machine too.
        pause_s = max(verify_postgres.LOCK_PAUSE_S, (ended_s - began_s) / verify_postgres.LOCK_SHARE)
        assert next_s - ended_s > 0.99 * pause_s


@pytest.mark.parametrize(
    ("ddl", "words"),
    [
        ("ALTER TABLE kinds ADD x int", "column 'x' is not in the table"),
        ("ALTER TABLE kinds ADD x int GENERATED ALWAYS AS (a * 2) STORED", "generated column 'x' is not in the table"),
        ("ALTER TABLE kinds ADD x int GENERATED ALWAYS AS (a * 2) VIRTUAL", "virtual generated column 'x' is not in"),
        ("ALTER TABLE kinds DROP q", "column 'q' is not in the source"),
        ("ALTER TABLE kinds RENAME q TO x", "column 'q' is not in the source"),
        ("ALTER TABLE kinds ALTER r TYPE int", "column 'r' is integer in the source, int16 in the table"),
        ("ALTER TABLE kinds DROP CONSTRAINT kinds_pkey", "the primary key is () in the source"),
    ],
)
def test_f417_verify_compares_the_columns_and_never_says_equal_where_they_differ(
    postgres_dsn: str, ddl: str, words: str
) -> None:
    created(postgres_dsn)
    shard = run(captured(postgres_dsn))
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        connection.execute(ddl.encode())
    found = verified(postgres_dsn, shard)
    assert words in found.columns
    assert not found.clean
    assert found.rows in (0, 4) and not found.different, "what both have is compared all the same"


def test_a_parked_table_is_said_to_be_and_is_never_equal() -> None:
    from types import SimpleNamespace

    from tidemill.cli.verify.tables import Verifier
    from tidemill.metastore.catalogue import CaptureTableRow, PipelineRow

    class Rows:
        async def list(self, _: Any) -> list[PipelineRow]:
            return [PipelineRow("p", {"orders": "capture:shop:public.orders"})]

        async def table(self, capture: str, table: str) -> CaptureTableRow:
            return CaptureTableRow(capture, table, state="parked", reason="column 'x' is new", paused_lsn=7)

    clock = SystemClock()
    stores: Any = SimpleNamespace(
        config=SimpleNamespace(capture={"shop": SimpleNamespace(dsn="")}), consensus=MemoryConsensus(clock),
        catalogue=Rows(), clock=clock, rand=Rand(),
    )  # fmt: skip
    (found,) = run(Verifier(stores, lambda *_: None).tables())
    assert found.parked == "column 'x' is new" and not found.clean


def test_of_all_tables_those_that_cannot_be_compared_are_told_and_the_others_are_verified() -> None:
    from types import SimpleNamespace

    from tidemill.cli.verify.command import verdict_of
    from tidemill.cli.verify.tables import Verifier
    from tidemill.metastore.catalogue import CaptureTableRow, PipelineRow, TableSnapshot

    tables = {
        "clicks": "topic:clicks",
        "orders": "capture:shop:public.orders",
        "lines": "capture:shop:public.lines",
        "totals": "derived:orders",
        "old_a": "capture:old:public.a",
        "old_b": "capture:old:public.b",
    }

    class Rows:
        async def list(self, _: Any) -> list[PipelineRow]:
            return [PipelineRow("p", tables)]

        async def get(self, *_: Any) -> None:
            return None  # the topic does not exist yet

        async def table(self, capture: str, table: str) -> CaptureTableRow:
            if table == "public.lines":
                return CaptureTableRow(capture, table, state="parked", reason="column 'x' is new")
            return CaptureTableRow(capture, table, state="captured", snapshot=TableSnapshot(1, 1, (), 1, 0, ()))

    clock = SystemClock()
    stores: Any = SimpleNamespace(
        config=SimpleNamespace(capture={"shop": SimpleNamespace(dsn="")}, pipeline={}),
        consensus=MemoryConsensus(clock), objects=MemoryObjects(clock), catalogue=Rows(), clock=clock, rand=Rand(),
    )  # fmt: skip
    verifier = Verifier(stores, lambda *_: None)
    found = {v.table: (verdict_of(v), v.clean, v.unverified) for v in run(verifier.tables())}
    assert found == {
        "clicks": ("UNVERIFIED", False, "the topic of this table does not exist: table=clicks topic=clicks."),
        "orders": ("UNVERIFIED", False, "no such table: table=orders. See `tidemill table list`."),
        "lines": ("PARKED", False, ""),
        "totals": (
            "UNVERIFIED",
            False,
            "the configuration has no such pipeline: key=pipeline.p. Add the pipeline with its file.",
        ),
        **dict.fromkeys(
            ("old_a", "old_b"),
            (
                "UNVERIFIED",
                False,
                "the configuration has no such capture: key=capture.old. Add the capture with its DSN.",
            ),
        ),
    }
    for name in ("clicks", "orders", "totals", "old_a"):
        with pytest.raises(InvalidError):
            run(verifier.tables([name, "lines"]))


def test_a_table_that_left_the_source_leaves_the_others_of_its_capture_to_be_compared(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from types import SimpleNamespace

    from tidemill.cli.verify.tables import Verifier
    from tidemill.metastore.catalogue import CaptureTableRow, PipelineRow, TableSnapshot

    created(postgres_dsn)
    shard, remap = run(captured(postgres_dsn)), StreamRemap(postgres_dsn)

    class Rows:
        async def list(self, _: Any) -> list[PipelineRow]:
            return [PipelineRow("p", {"gone": "capture:shop:public.gone", "kinds": "capture:shop:public.kinds"})]

        async def table(self, capture: str, table: str) -> CaptureTableRow:
            return CaptureTableRow(capture, table, state="captured", snapshot=TableSnapshot(1, 1, (), 1, 0, ()))

    async def opened(*_: Any) -> Any:
        return shard

    async def remap_of(*_: Any) -> Any:
        return remap

    stores: Any = SimpleNamespace(
        config=SimpleNamespace(capture={"shop": SimpleNamespace(dsn=postgres_dsn)}), catalogue=Rows(), rand=Rand()
    )
    monkeypatch.setattr(Verifier, "_open_shard", opened)
    monkeypatch.setattr(Verifier, "_open_remap", remap_of)
    gone, kinds = run(Verifier(stores, lambda *_: None).tables())
    assert (gone.table, kinds.table) == ("gone", "kinds")
    assert "public.gone" in gone.unverified and not gone.clean
    assert kinds.clean and kinds.rows == 4


def test_bad_input_is_named(postgres_dsn: str) -> None:
    created(postgres_dsn)
    shard = run(captured(postgres_dsn))
    remap = StreamRemap(postgres_dsn)
    with pytest.raises(MissingError, match="nowhere"):
        verified(postgres_dsn, shard, "public.nowhere", remap)
    with pytest.raises(UnavailableError, match="cannot be reached"):
        verified("postgresql://localhost:1/x", shard, remap=remap)


def test_a_role_that_only_reads_is_told_the_privilege_that_the_lock_or_the_rows_need(postgres_dsn: str) -> None:
    created(postgres_dsn)
    shard, remap = run(captured(postgres_dsn)), StreamRemap(postgres_dsn)
    role = postgres_dsn.rpartition("/")[2] + "_reader"
    dsn = postgres_dsn.replace("postgres@", f"{role}@")
    with psycopg.connect(postgres_dsn, autocommit=True) as owner:
        owner.execute(f"CREATE ROLE {role} LOGIN")
        try:
            owner.execute(f"GRANT SELECT ON kinds TO {role}")
            with pytest.raises(InvalidError, match="permission denied for table kinds") as denied:
                verified(dsn, shard, remap=remap)
            owner.execute(denied.value.fix.removeprefix("Have an administrator run: "))
            assert verified(dsn, shard, remap=remap).clean
            owner.execute("ALTER TABLE kinds ENABLE ROW LEVEL SECURITY")
            with pytest.raises(InvalidError, match="row-level security") as hidden:
                verified(dsn, shard, remap=remap)
            assert "BYPASSRLS" in hidden.value.fix
            owner.execute(f"ALTER ROLE {role} BYPASSRLS")
            assert verified(dsn, shard, remap=remap).clean
        finally:
            owner.execute(f"DROP OWNED BY {role}")
            owner.execute(f"DROP ROLE {role}")


def test_a_shard_that_does_not_reach_the_time_is_named(postgres_dsn: str) -> None:
    created(postgres_dsn)
    shard = run(captured(postgres_dsn))

    async def scenario() -> None:
        remap = StreamRemap(postgres_dsn, time_ms=99)
        with pytest.raises(UnavailableError, match="table=kinds time_ms=99"):
            await verify_captured(postgres_dsn, remap, [("kinds", shard)], Rand(), timeout_s=0.05)

    run(scenario())


async def test_expected_rows_from_anywhere_can_be_compared() -> None:
    clock, rand = SystemClock(), Rand()
    schema = ShardSchema((column_for("k", "text"), column_for("n", "bigint")), ("k",))
    shard = await open_shard(MemoryConsensus(clock), MemoryObjects(clock), clock, rand, "derived", schema)
    rows = pa.table({"k": ["b", "a"], "n": [2, 1], TIME: [1, 2], DIFF: [1, 1]})
    await shard.compare_and_append(0, 3, [await shard.write_part(rows)], "")

    async def expected(_: Any) -> Any:
        yield [("a", 1)]
        yield [("b", 2)]

    assert (await verify_expected(shard, 2, expected)).clean
    early = await verify_expected(shard, 1, expected)
    assert (early.rows, early.missing, early.extra, early.different) == (2, 1, 0, 0)
    with pytest.raises(UnavailableError):
        await verify_expected(shard, 3, expected, timeout_s=0.01)
    keyless = ShardSchema(schema.columns, ())
    other = await open_shard(MemoryConsensus(clock), MemoryObjects(clock), clock, rand, "bag", keyless)
    with pytest.raises(InvalidError, match="no key"):
        await verify_expected(other, 0, expected)
