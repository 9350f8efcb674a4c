"""Writing rows into a shard without a session: staged like tasks do, committed like the driver does."""

from __future__ import annotations

import pickle
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from pyspark.sql.types import DayTimeIntervalType, LongType, StringType, StructField, StructType
from structlog.testing import capture_logs

from support.spark.frames import SMALL, Row, batches, write
from support.spark.harbour import Harbour
from support.spark.sinks import clicks_sink
from tidemill.base.errors import ConflictError, CorruptError, InvalidError, MissingError, UnavailableError
from tidemill.metastore.catalogue import PipelineRow
from tidemill.shards.api import DIFF, HASH, TIME, Column, ShardSchema
from tidemill.shards.parts.schema_evolution import SchemaChanges
from tidemill.spark.derived.idle_advance import advance_idle
from tidemill.spark.merge.range_mirror import HashRange
from tidemill.spark.source import TidemillSource
from tidemill.spark.source.write import FrameWriter
from tidemill.spark.write import commit as committing
from tidemill.spark.write import staging
from tidemill.spark.write.commit import CommitLimits, WriteCommit
from tidemill.spark.write.schema_match import WriteFrame, plan_frame, required_schema
from tidemill.spark.write.staging import Staged, read_staged_rows, stage_rows

FRAME = WriteFrame("t", (Column("k", "int64"), Column("v", "string"), Column("gone", "bool")), ("k",), "gone")
PLAIN = WriteFrame("t", (Column("k", "int64"), Column("v", "string")), ("k",))


class Memory:
    """Staged objects in memory."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def put(self, data: bytes) -> str:
        key = f"o{len(self.objects)}"
        self.objects[key] = data
        return key

    def get(self, key: str, start: int, end: int) -> bytes:
        assert 0 <= start < end <= len(self.objects[key])
        return self.objects[key][start:end]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "STAGE_ROWS", 7)
    monkeypatch.setattr(staging, "CHUNK_ROWS", 2)


OPERATIONS = st.lists(
    st.tuples(
        st.booleans(),
        st.lists(st.tuples(st.integers(0, 12), st.sampled_from(["a", "b", None]), st.booleans()),
                 unique_by=lambda row: row[0], max_size=13),
        st.integers(1, 4),
    ),
    min_size=1, max_size=5,
)  # fmt: skip


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(OPERATIONS)
def test_appends_and_overwrites_equal_a_dictionary_at_every_time(
    harbour: Any, small_chunks: None, operations: list[tuple[bool, list[Row], int]]
) -> None:
    name = f"t{harbour.stores.rand.nonce()}"
    model: dict[int, Any] = {}
    seen: list[tuple[int, list[dict[str, Any]]]] = []
    for overwrite, rows, tasks in operations:
        frame = replace(PLAIN if overwrite else FRAME, shard=name, overwrite=overwrite)
        given = [row[:2] for row in rows] if overwrite else rows
        if overwrite:
            model = dict(given)
        else:
            for k, v, gone in rows:
                if gone:
                    model.pop(k, None)
                else:
                    model[k] = v
        upper = write(harbour, frame, *(given[at::tasks] for at in range(tasks)))
        seen.append((upper - 1, sorted(({"k": k, "v": v} for k, v in model.items()), key=lambda r: str(r["k"]))))
    for at, want in seen:
        assert harbour.contents(name, at) == want
    shard = harbour.shard(name)
    for batch in harbour.portal.call(shard.batches(0)):
        changes = harbour.portal.call(shard.read_batch(batch, 0, batch.upper)).to_pylist()
        assert {u[TIME] for u in changes} <= {batch.upper - 1}, "one write is one time"
        assert len({(u["k"], u["v"], u[DIFF]) for u in changes}) == len(changes)
        assert not {(u["k"], u["v"]) for u in changes if u[DIFF] > 0} & {
            (u["k"], u["v"]) for u in changes if u[DIFF] < 0
        }, "a row that stays says nothing"


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.integers(-(2**63), 2**63 - 1), unique=True, max_size=60), st.sampled_from([1, 2, 8, 64, 256]))
def test_ranges_of_any_number_give_every_staged_row_once(small_chunks: None, keys: list[int], count: int) -> None:
    memory = Memory()
    found = list(stage_rows(PLAIN, batches(PLAIN, [(k, "x" * (k % 50)) for k in keys]), memory.put))
    got: list[int] = []
    for number in range(count):
        part = HashRange(number, count)
        rows = read_staged_rows(PLAIN, found, part, memory.get)
        assert all(part.mask(rows.column(HASH).to_numpy()).to_pylist())
        got += rows.column("k").to_pylist()
    assert sorted(got) == sorted(keys)
    assert sum(one.rows for one in found) == len(keys)


def test_large_tasks_stage_objects_and_small_ones_nothing() -> None:
    memory = Memory()
    (small,) = stage_rows(PLAIN, batches(PLAIN, [(1, "a")]), memory.put)
    assert (memory.objects, small.object_key) == ({}, "")
    rows = [(k, f"value {k}") for k in range(20_000)]
    (large,) = stage_rows(PLAIN, batches(PLAIN, rows, 5_000), memory.put)
    assert len(large.ends) == 4 and large.ends[-1] == len(memory.objects[large.object_key])
    quarter = read_staged_rows(PLAIN, [small, large], HashRange(1, 4), memory.get)
    assert 4_500 < quarter.num_rows < 5_500


def test_a_flipped_bit_of_what_was_staged_is_corrupt_with_the_objects_key() -> None:
    memory = Memory()
    rows = [(k, f"value {k}") for k in range(20_000)]
    (large,) = stage_rows(PLAIN, batches(PLAIN, rows, 5_000), memory.put)
    damaged = bytearray(memory.objects[large.object_key])
    damaged[large.ends[0] - 2000] ^= 1
    memory.objects[large.object_key] = bytes(damaged)
    assert read_staged_rows(PLAIN, [large], HashRange(1, 4), memory.get).num_rows, "another chunk is whole"
    with pytest.raises(CorruptError, match="staged chunk: object=o0 is damaged"):
        read_staged_rows(PLAIN, [large], HashRange(0, 4), memory.get)


@pytest.mark.parametrize("tasks", [([(1, "a"), (1, "a")],), ([(1, "a")], [(2, "b")], [(1, "c")])])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_key_that_comes_twice_is_refused_and_named(harbour: Any, tasks: Any, overwrite: bool) -> None:
    upper = write(harbour, PLAIN, [(7, "x")])
    with pytest.raises(InvalidError, match=r"a key occurs twice: k=1 .*Group by the key"):
        write(harbour, replace(PLAIN, overwrite=overwrite), *tasks)
    assert (harbour.contents("t"), harbour.upper("t")) == ([{"k": 7, "v": "x"}], upper)
    with pytest.raises(InvalidError, match="a key occurs twice"):
        write(harbour, replace(PLAIN, shard="new", overwrite=overwrite), *tasks)
    with pytest.raises(MissingError):
        harbour.shard("new")


def test_a_null_in_the_key_is_refused(harbour: Any) -> None:
    with pytest.raises(InvalidError, match="a key column is null: table=t column=k"):
        write(harbour, PLAIN, [(1, "a"), (None, "b")])


def test_writers_at_once_are_as_if_one_after_another(harbour: Any) -> None:
    """The result has the last written row of each key, and all rows or none of each write."""
    write(harbour, PLAIN, [(k, "start") for k in range(8)])
    failures: list[BaseException] = []
    uppers: dict[int, str] = {}

    def body(name: str) -> None:
        try:
            for n in range(4):
                uppers[write(harbour, PLAIN, [(k, f"{name}{n}") for k in range(4)], [(9, name)])] = f"{name}{n}"
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=body, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures and len(uppers) == 12
    for upper, said in uppers.items():
        found = {row["k"]: row["v"] for row in harbour.contents("t", upper - 1)}
        assert found == {**dict.fromkeys(range(4), said), **dict.fromkeys(range(4, 8), "start"), 9: said[0]}


class Racing(WriteCommit):
    """A write during which others act between its computation and its append."""

    def __init__(self, harbour: Any, frame: WriteFrame, *meanwhile: Callable[[], object]) -> None:
        super().__init__(harbour.portal, harbour.stores, frame, harbour.stores.rand.nonce(), SMALL)
        self.meanwhile = list(meanwhile)
        self.attempts = 0

    def _compute_updates(self, *args: Any) -> Iterator[pa.Table]:
        self.attempts += 1
        yield from super()._compute_updates(*args)
        if self.meanwhile:
            self.meanwhile.pop(0)()


def staged_inline(frame: WriteFrame, rows: Sequence[Row]) -> list[Staged]:
    return list(stage_rows(frame, batches(frame, rows), lambda _: ""))


def test_a_lost_race_is_computed_anew_on_what_the_winner_wrote(harbour: Any) -> None:
    write(harbour, PLAIN, [(1, "a"), (2, "b")])

    def peer() -> None:
        """Let a writer append that does not take turns."""
        lower = harbour.upper("t")
        updates = [(1, "a", lower, -1), (1, "peer", lower, 1), (3, "p", lower + 1, 1)]
        rows = pa.Table.from_pylist([dict(zip(("k", "v", TIME, DIFF), u, strict=True)) for u in updates])
        shard = harbour.shard("t")
        part = harbour.portal.call(shard.write_part(rows))
        harbour.portal.call(shard.compare_and_append(lower, lower + 5, (part,), ""))

    frame = replace(PLAIN, overwrite=True)
    commit = Racing(harbour, frame, peer)
    upper = commit.run(staged_inline(frame, [(1, "z"), (2, "b")]))
    assert commit.attempts == 2
    assert harbour.contents("t", upper - 1) == [{"k": 1, "v": "z"}, {"k": 2, "v": "b"}]


def test_a_column_that_came_meanwhile_is_not_passed_over(harbour: Any) -> None:
    write(harbour, PLAIN, [(1, "a")])
    wide = replace(PLAIN, grows=True, columns=(*PLAIN.columns, Column("w", "int64")))
    commit = Racing(
        harbour, PLAIN, lambda: harbour.portal.call(harbour.shard("t").evolve(SchemaChanges((wide.columns[-1],))))
    )
    with pytest.raises(InvalidError, match=r"columns differ from the table's: .*-w int64"):
        commit.run(staged_inline(PLAIN, [(1, "b")]))
    commit = Racing(
        harbour, wide, lambda: harbour.portal.call(harbour.shard("t").evolve(SchemaChanges((), (wide.columns[-1],))))
    )
    commit.run(staged_inline(wide, [(1, "b", 7)]))
    assert harbour.contents("t") == [{"k": 1, "v": "b", "w": 7}]


def test_who_is_overtaken_every_time_says_so_and_has_written_nothing(harbour: Any) -> None:
    upper = write(harbour, PLAIN, [(1, "a")])

    def overtaken() -> None:
        raise ConflictError("another was first")

    with pytest.raises(UnavailableError, match=r"other writers were first each time: table=t attempts=20 rows=1"):
        Racing(harbour, PLAIN, *[overtaken] * 20).run(staged_inline(PLAIN, [(1, "b")]))
    assert harbour.upper("t") == upper


def test_a_commit_that_is_made_again_changes_nothing(harbour: Any) -> None:
    upper = write(harbour, PLAIN, [(1, "a")], token="job")
    write(harbour, PLAIN, [(1, "b")])
    assert write(harbour, PLAIN, [(1, "a")], token="job") == upper
    assert harbour.contents("t") == [{"k": 1, "v": "b"}]


def test_a_shard_that_is_written_moves_on_for_who_reads_it_beside_others_and_overtakes_no_write(harbour: Any) -> None:
    stores, call = harbour.stores, harbour.portal.call

    def advance(by_ms: int = 5_000) -> bool:
        shard = harbour.shard("t")
        upper = call(shard.frontiers())[1]
        return bool(call(advance_idle(stores.catalogue, stores.remap, shard, upper, upper + by_ms - 1)))

    upper = write(harbour, PLAIN, [(1, "a")])
    assert advance() and advance()
    assert harbour.upper("t") == upper + 10_000
    moved: list[bool] = []
    commit = Racing(harbour, PLAIN, lambda: moved.append(advance()))
    commit.run(staged_inline(PLAIN, [(2, "b")]))
    assert (moved, commit.attempts) == ([False], 1)
    assert harbour.contents("t") == [{"k": 1, "v": "a"}, {"k": 2, "v": "b"}]
    call(stores.catalogue.put(PipelineRow("p", {"t": "topic:clicks"})))
    assert not advance(), "what its source binds meanwhile would be passed over"


def test_what_a_pipeline_keeps_is_refused(harbour: Any) -> None:
    write(harbour, PLAIN, [(1, "a")])
    row = PipelineRow("p", {"t": "topic:clicks"}, "p.dead_letters")
    harbour.portal.call(harbour.stores.catalogue.put(row))
    with pytest.raises(InvalidError, match=r"a pipeline maintains this table: table=t pipeline=p.*`beside` to p"):
        write(harbour, PLAIN, [(1, "b")])
    with pytest.raises(InvalidError, match="only the pipeline writes its dead letters"):
        write(harbour, replace(PLAIN, shard="p.dead_letters", beside="p"), [(1, "b")])
    for beside in ("q", "P"):
        with pytest.raises(InvalidError, match="a pipeline maintains this table"):
            write(harbour, replace(PLAIN, beside=beside), [(1, "b")])
    with pytest.raises(InvalidError, match="does not maintain this table: table=other beside=p"):
        write(harbour, replace(PLAIN, shard="other", beside="p"), [(1, "b")])


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.sampled_from(["bind", "step", "write", "overwrite"]), st.integers(0, 3)), max_size=14))
def test_beside_a_pipeline_nothing_that_its_source_says_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, steps: list[tuple[str, int]]
) -> None:
    """The result has the last value of each key in the order of times, from records of bindings and from writes."""
    monkeypatch.setattr(committing, "ATTEMPTS", 2)
    monkeypatch.setattr(committing, "PAUSE_S", 0.0)
    with TemporaryDirectory(dir=tmp_path) as directory:
        harbour = Harbour(Path(directory))
        try:
            _write_while_maintained(harbour, Path(directory), [("bind", 0), *steps, ("step", 0)])
        finally:
            harbour.close()


def _write_while_maintained(harbour: Harbour, scratch: Path, steps: list[tuple[str, int]]) -> None:
    topic, call = harbour.create_topic("clicks"), harbour.portal.call
    sink = clicks_sink(harbour, scratch / "s")
    call(harbour.stores.catalogue.put(PipelineRow("p", {"clicks": "topic:clicks"}, "p.dead_letters")))
    remap = call(harbour.stores.remap("topic/clicks"))
    frame = WriteFrame(
        "clicks", (Column("click_id", "string"), Column("product_id", "int64")), ("click_id",), beside="p"
    )
    said: list[tuple[int, str, dict[str, int]]] = []
    for number, (what, key) in enumerate(steps):
        rows = {f"k{key}": number, f"k{key + 1}": number}
        if what == "step":
            sink.process(sink.latest())
        elif what == "bind":
            latest = call(remap.latest())
            time_ms = 10 if latest is None else latest.time_ms + 1 + key % 2
            harbour.produce(topic, [(b"", {"click_id": k, "product_id": v}) for k, v in rows.items()])
            harbour.mint("topic/clicks", time_ms, topic)
            said.append((time_ms, what, rows))
        else:
            try:
                upper = write(harbour, replace(frame, overwrite=what == "overwrite"), list(rows.items()))
                said.append((upper - 1, what, rows))
            except UnavailableError:
                pass  # a binding already has this time, and nothing is written
    assert len({time_ms for time_ms, _, _ in said}) == len(said)
    want: dict[str, int] = {}
    for _, what, rows in sorted(said, key=lambda one: one[0]):
        want = rows if what == "overwrite" else {**want, **rows}
    assert {row["click_id"]: row["product_id"] for row in harbour.contents("clicks")} == want


def test_a_shard_that_was_dropped_after_the_plan_is_not_made_of_what_was_to_be_added(harbour: Any) -> None:
    write(harbour, PLAIN, [(1, "a")])
    frame = plan_frame(replace(PLAIN, key=()), harbour.shard("t").schema)
    write(harbour, frame, [(2, "b")])
    harbour.drop_shard("t")
    with pytest.raises(MissingError, match=r"was dropped during the write: table=t\. Set option key"):
        write(harbour, frame, [(3, "c")])
    with pytest.raises(MissingError):
        harbour.shard("t")
    write(harbour, PLAIN, [(3, "c")])
    assert harbour.contents("t") == [{"k": 3, "v": "c"}]


def test_a_commit_of_many_ranges_says_how_far_it_is(harbour: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committing, "PROGRESS_LOG_S", 0.0)
    with capture_logs() as logs:
        write(harbour, PLAIN, [(n, "a") for n in range(40)])
    reported = [(e["shard"], e["rows"], int(e["done"].removesuffix(" %"))) for e in logs if e["event"] == "writing"]
    assert len(reported) > 3 and reported == sorted(reported) and reported[0] == ("t", 40, 0)


K, V = Column("k", "int64"), Column("v", "string")
HAVE = ShardSchema((K, V, Column("n", "decimal(5,2)")), ("k",))


@pytest.mark.parametrize(
    ("frame", "have", "said"),
    [
        (WriteFrame("t", (K, V), ()), None, "no such table: table=t.*option key"),
        (WriteFrame("t", (K, V), ("x",)), None, "key column is not a column: key=x"),
        (WriteFrame("t", (K, V), ()), HAVE, r"difference=\[-n decimal\(5,2\)\].*Rename, cast or add"),
        (WriteFrame("t", (*HAVE.columns, Column("w", "date")), ()), HAVE, r"difference=\[\+w date\].*mergeSchema=true"),
        (
            WriteFrame("t", (K, V, Column("n", "decimal(9,2)")), ()),
            HAVE,
            r"n decimal\(5,2\)→decimal\(9,2\).*mergeSchema",
        ),
        (WriteFrame("t", (K, V, Column("n", "float64")), (), grows=True), HAVE, r"n decimal\(5,2\)→float64.*cast"),
        (WriteFrame("t", HAVE.columns, ("v",)), HAVE, "another key: table=t key=k wanted=v"),
        (WriteFrame("t", HAVE.columns, (), "v"), HAVE, "delete=v type=string"),
        (WriteFrame("t", HAVE.columns, (), "w"), HAVE, "delete=w type=no such column"),
        (WriteFrame("t", (*HAVE.columns, Column("d", "bool")), (), "d", overwrite=True), HAVE, "nothing to delete"),
        (WriteFrame("t", (K, Column("_live", "bool")), ("k",)), None, "reserved column name: column='_live'"),
        (WriteFrame("t", (K, Column("_diff", "int64")), ("k",)), None, "reserved column name"),
        (WriteFrame("t", (K, Column("", "string")), ("k",)), None, "reserved column name: column=''"),
        (WriteFrame("t", (*HAVE.columns, Column("", "string")), ()), HAVE, "reserved column name: column=''"),
        (WriteFrame("t", (K, V), ()), ShardSchema((K, V), ()), "the table has no key"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_difference(
    frame: WriteFrame, have: ShardSchema | None, said: str
) -> None:
    with pytest.raises(InvalidError, match=said):
        plan_frame(frame, have)


def test_narrower_values_fit_and_a_schema_grows_where_it_is_told_to(harbour: Any) -> None:
    narrow = WriteFrame("t", (Column("n", "decimal(3,2)"), V, Column("k", "int16")), ())
    assert required_schema(plan_frame(narrow, HAVE), HAVE) == HAVE
    write(harbour, PLAIN, [(1, "a"), (2, "b")])
    wide = WriteFrame("t", (Column("k", "int32"), Column("w", "int32"), V), ("k",), grows=True)
    write(harbour, wide, [(1, 5, "c"), (3, 6, "d")])
    wider = replace(wide, columns=(Column("k", "int64"), Column("w", "int64"), V))
    upper = write(harbour, wider, [(2, 2**40, "e")])
    assert harbour.contents("t", upper - 1) == [
        {"k": 1, "v": "c", "w": 5}, {"k": 2, "v": "e", "w": 2**40}, {"k": 3, "v": "d", "w": 6},
    ]  # fmt: skip


def test_keys_alone_delete_and_nothing_else(harbour: Any) -> None:
    write(harbour, PLAIN, [(k, "a") for k in range(5)])
    frame = plan_frame(WriteFrame("t", (Column("gone", "bool"), K), (), "gone"), ShardSchema((K, V), ("k",)))
    write(harbour, frame, [(True, 1), (True, 3), (True, 77)])
    assert [row["k"] for row in harbour.contents("t")] == [0, 2, 4]
    with pytest.raises(InvalidError, match="a row that is not a deletion lacks columns: table=t delete=gone"):
        write(harbour, frame, [(True, 1), (None, 2)])


def test_rows_of_every_size_survive_many_ranges_and_parts(harbour: Any) -> None:
    source = random.Random(3)
    rows = {k: "x" * source.choice([0, 1, 50, 2_000]) for k in range(3_000)}
    items = list(rows.items())
    write(harbour, PLAIN, items[:2_000], items[2_000:], limits=CommitLimits(range_rows=200))
    changed = {k: "y" for k in range(0, 3_000, 7)}
    upper = write(harbour, PLAIN, list(changed.items()), limits=CommitLimits(range_rows=200, wanted_rows=10))
    want = {**rows, **changed}
    assert {r["k"]: r["v"] for r in harbour.contents("t")} == want
    parts = harbour.shard("t").state.batches[-1].parts
    assert sum(p.rows for p in parts) == 2 * len(changed) and 2 <= len(parts) <= 5
    assert harbour.upper("t") == upper


NAMED = {"BIGINT": LongType(), "STRING": StringType(), "INTERVAL": DayTimeIntervalType()}


def schema_of(text: str) -> StructType:
    return StructType([StructField(n, NAMED[kind]) for n, kind in (column.split() for column in text.split(", "))])


def writer_of(harbour: Any, schema: StructType | str, overwrite: bool = False, **options: str) -> FrameWriter:
    """Return a writer as Spark creates it and sends it to its tasks."""
    urls = {"objects": harbour.urls.objects, "consensus": harbour.urls.consensus}
    parsed = schema if isinstance(schema, StructType) else schema_of(schema)
    made: FrameWriter = pickle.loads(pickle.dumps(TidemillSource({**urls, **options}).writer(parsed, overwrite)))
    return made


def test_a_writer_of_sparks_stages_commits_and_leaves_nothing_behind(harbour: Any, tmp_path: Path) -> None:
    objects = tmp_path / "objects" / "shards"
    many = [(k, f"value {k}") for k in range(20_000)]
    writer = writer_of(harbour, "k BIGINT, v STRING", path="t", key="k")
    reported = [
        pickle.loads(pickle.dumps(writer.write(batches(PLAIN, rows, 1_000)))) for rows in (many[:9_000], many[9_000:])
    ]
    assert list((objects / "staged").glob("*.arrow")) and harbour.upper("t") == 0
    writer.commit([*pickle.loads(pickle.dumps(reported)), None])
    assert len(harbour.contents("t")) == 20_000
    given_up = writer_of(harbour, "k BIGINT, v STRING", path="t", overwrite=True)
    given_up.abort([given_up.write(batches(PLAIN, many[:9_000], 1_000)), None])
    assert not list((objects / "staged").rglob("*.arrow")) and len(harbour.contents("t")) == 20_000


@pytest.mark.parametrize(
    ("schema", "options", "said"),
    [
        ("k BIGINT, v STRING", {}, r"no table is named.*INSERT INTO t WITH \(table"),
        (
            "k BIGINT, v INTERVAL",
            {"shard": "t", "key": "k"},
            r"not supported in a table: column=v type=interval day to second\. Cast",
        ),
        ("k BIGINT, k BIGINT", {"shard": "t", "key": "k"}, "column named twice: column=k"),
        ("k BIGINT", {"shard": "t", "kee": "k"}, r"unknown option: option=kee\. Did you mean key"),
        ("k BIGINT", {"shard": "t", "key": "k", "as_of": "5"}, "has no effect on a write: option=as_of"),
        ("k BIGINT", {"shard": "t", "key": "k", "mergeSchema": "yes"}, "neither true nor false: option=mergeschema"),
        ("k BIGINT", {"shard": "a/b", "key": "k"}, "bad table name"),
        ("k BIGINT", {"table": "t", "key": "k", "beside": "p"}, "does not maintain this table"),
        ("k BIGINT", {"table": "t", "shard": "u", "key": "k"}, "two tables are named: table=t shard=u"),
    ],
)
def test_what_cannot_be_written_is_refused_before_anything_runs(
    harbour: Any, schema: str, options: dict[str, str], said: str
) -> None:
    with pytest.raises(InvalidError, match=said):
        writer_of(harbour, schema, **options)


def test_the_options_of_the_table_that_rows_were_read_from_are_not_those_of_the_write(harbour: Any) -> None:
    """Spark passes a write the columns of its rows, with the metadata that a catalogue keeps of their origin."""
    write(harbour, PLAIN, [(1, "a")])
    urls = {"objects": harbour.urls.objects, "consensus": harbour.urls.consensus}
    properties = {"provider": "tidemill", **{f"option.{k}": v for k, v in {**urls, "shard": "t"}.items()}}
    read_from = TidemillSource(properties).schema()
    assert "tidemill.options" in read_from.json()
    with pytest.raises(InvalidError, match="no table is named"):
        writer_of(harbour, read_from)
    for name in ("table", "shard"):
        assert writer_of(harbour, read_from, **{name: "other"}, key="k").frame.shard == "other"
