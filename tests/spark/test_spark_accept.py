"""`capture accept`: a table with a changed description continues, and each shard of it changes as shown and
confirmed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from support.spark.captured_under_ddl import Ground
from support.spark.running import error_of, mark, pipeline
from support.waiting import eventually
from tidemill.base.errors import MissingError
from tidemill.capture.tables.recopy_requests import predict_shard_effect
from tidemill.cli.capture import accept
from tidemill.metastore.catalogue import AcceptedSchemaChange
from tidemill.shards.api import Column, ShardSchema
from tidemill.shards.registry import drop_shard, read_registration
from tidemill.shards.state.state import ShardState
from tidemill.spark.decode.captured import CapturedDecoder
from tidemill.spark.decode.records import Records
from tidemill.topics.batch import Record, decode_columns, encode_batch

pytestmark = pytest.mark.postgres

T = (
    "CREATE TABLE t (id int PRIMARY KEY, v int, w text)",
    "INSERT INTO t SELECT g, g, 'w' || g FROM generate_series(1, 200) g",
)


def test_records_without_a_row_are_decoded_for_a_shard_that_has_a_column_more_than_its_source() -> None:
    schema = ShardSchema((Column("id", "int32"), Column("v", "int32"), Column("w", "string", retired=2)), ("id",))
    known = ((Column("id", "int32"), Column("v", "int32")),)

    def decoded(*records: Record) -> list[dict[str, Any]]:
        _, columns = decode_columns(encode_batch(records))
        found = CapturedDecoder(schema, "public.t", known).decode(Records("t", 0, columns.offsets * 10, columns))
        assert found.stop is None and not found.dead.num_rows
        return [{k: row[k] for k in ("id", "v", "w", "_live")} for row in found.commands.rows.to_pylist()]

    gone = Record(b'{"id":1}', None, (("tm.pos", b"1_0"), ("tm.op", b"delete"), ("tm.xid", b"1")), 0)
    row = Record(b'{"id":2}', b'{"id":2,"v":3}', (("tm.pos", b"2_0"), ("tm.op", b"insert"), ("tm.xid", b"1")), 0)
    absent, live = {"id": 1, "v": None, "w": None, "_live": False}, {"id": 2, "v": 3, "w": None, "_live": True}
    assert decoded(gone) == [absent] and decoded(row) == [live]
    assert sorted(decoded(gone, row), key=lambda r: r["id"]) == [absent, live]


def with_null(rows: list[dict[str, Any]], *names: str) -> list[dict[str, Any]]:
    return [row | dict.fromkeys(names) for row in rows]


def test_a_column_that_lost_its_zone_stays_an_instant_in_the_shard_and_an_array_its_text_and_both_are_told() -> None:
    def schema(kind: str) -> ShardSchema:
        return ShardSchema((Column("id", "int32"), Column("at", kind)), ("id",))

    found = predict_shard_effect(ShardState("s", "1", schema("timestamp")), schema("timestamp_ntz"))
    assert (found.how, found.instants) == ("kept", ("at",))
    assert "at: a timestamp without time zone in the source, an instant in the table" in accept._format_effect(found)
    text = predict_shard_effect(ShardState("s", "1", schema("string")), schema("array<string>"))
    assert (text.how, text.instants, text.texts) == ("kept", (), ("at",))
    assert "at: an array in the source, its text in the table as before" in accept._format_effect(text)
    assert predict_shard_effect(ShardState("s", "1", schema("array<int32>")), schema("array<int64>")).how == "anew"
    same = predict_shard_effect(ShardState("s", "1", schema("timestamp")), schema("timestamp"))
    assert (same.how, same.instants) == ("kept", ())
    assert accept._format_effect(same) == "is kept unchanged and continues with the new copy"


def test_f468_dropped_and_renamed_columns_are_accepted_and_the_shard_keeps_its_history(
    postgres_dsn: str, harbour: Any, tmp_path: Path
) -> None:
    """Capture is killed during the copy."""
    with Ground(postgres_dsn, harbour, tmp_path) as ground:
        ground.sql(*T)
        with pipeline(harbour, tmp_path / "one", ground.pipeline("one")):
            eventually(lambda: len(ground.contents("one")) == 200)
            before, at = ground.contents("one"), harbour.upper("one") - 1
            shard_id = harbour.shard("one").shard_id
            ground.sql("ALTER TABLE t DROP w, ADD x int DEFAULT 3", "ALTER TABLE t RENAME v TO u")
            ground.sql("INSERT INTO t (id, u) VALUES (900, 900)", "DELETE FROM t WHERE id = 1")
            assert "capture accept 'public.t'" in ground.parked().fix
            code, said = ground.command("capture", "accept", "t", "--json")
            assert code == 2 and "nothing was done" in said and not ground.row().accepted
            code, said = ground.command("capture", "accept", "t", "--json", "--yes")
            assert code == 0 and said["copied_again"] and "column 'w' is gone" in said["difference"]
            assert said["shards"] == [
                {"shard": "one", "becomes": "grown",
                 "changes": "+u int32, +x int32, v is null from then on, w is null from then on"}
            ]  # fmt: skip
            eventually(lambda: ground.row().snapshot is None or ground.row().generation > 0)
            ground.restart()
            ground.sql("UPDATE t SET u = u + 1 WHERE id < 50")
            eventually(lambda: ground.contents("one") == with_null(ground.selected(), "v", "w"))
            eventually(lambda: not error_of(harbour, "shard:one"))
            assert harbour.shard("one").shard_id == shard_id
            old = [{k: row[k] for k in ("id", "v", "w")} for row in ground.contents("one", at)]
            assert old == before, "times of before read as they did"
            code, said = ground.command("table", "describe", "one", "--json")
            assert code == 0 and set(said["retired"]) == {"v", "w"} and said["versions"][-1]["retired"] == ["v", "w"]
            assert verified(ground, "one")
            code, said = ground.command("capture", "accept", "t", "--json")
            assert code == 0 and not said["copied_again"] and not said["difference"], "nothing is left to accept"
            # The column is there again, null in all rows of before: it flows, and is the shard's again.
            ground.sql("ALTER TABLE t ADD w text", "UPDATE t SET w = 'new' WHERE id = 2")
            eventually(lambda: ground.contents("one") == with_null(ground.selected(), "v"))
            assert harbour.shard("one").shard_id == shard_id and verified(ground, "one")
        with pipeline(harbour, tmp_path / "two", ground.pipeline("two")):
            eventually(lambda: ground.contents("two") == ground.selected())


def verified(ground: Ground, shard: str) -> bool:
    code, said = ground.command("verify", shard, "--json")
    found: dict[str, Any] = said[shard]
    assert code == 0, found
    return not found["columns"] and found["rows"] > 100


def test_f468_another_type_and_another_key_are_accepted_and_the_shard_is_made_anew(
    postgres_dsn: str, harbour: Any, tmp_path: Path
) -> None:
    with Ground(postgres_dsn, harbour, tmp_path) as ground:
        ground.sql(*T)
        with pipeline(harbour, tmp_path / "one", ground.pipeline("one")):
            eventually(lambda: len(ground.contents("one")) == 200)
            shard_id = harbour.shard("one").shard_id
            ground.sql("ALTER TABLE t ALTER v TYPE text USING 'v' || v", "UPDATE t SET w = 'later' WHERE id = 3")
            ground.parked()
            code, said = ground.command("capture", "accept", "t", "--json", "--yes")
            assert code == 0 and said["copied_again"]
            assert said["shards"] == [{"shard": "one", "becomes": "anew", "changes": "v int32→string"}]
            eventually(lambda: ground.contents("one") == ground.selected())
            assert harbour.shard("one").shard_id != shard_id
            shard_id = harbour.shard("one").shard_id
            ground.sql("ALTER TABLE t DROP CONSTRAINT t_pkey, ADD PRIMARY KEY (id, v)", "DELETE FROM t WHERE id = 3")
            ground.parked()
            code, said = ground.command("capture", "resnapshot", "t", "--json", "--yes")
            assert code == 0 and not ground.row().accepted, said
            eventually(lambda: "capture accept" in error_of(harbour, "shard:one"))
            assert harbour.shard("one").shard_id == shard_id, "nobody has agreed to what that would cost"

        def made_anew() -> bool:
            try:
                return bool(harbour.shard("one").shard_id != shard_id)
            except MissingError:
                return False

        code, said = ground.command("capture", "accept", "t", "--json", "--yes")
        assert code == 0 and not said["copied_again"], "it flows; only the shard has not followed"
        assert ground.row().accepted == (AcceptedSchemaChange(shard_id, anew=True),)
        with pipeline(harbour, tmp_path / "one", ground.pipeline("one")):
            # a reader of the former shard, which is dropped in between, is refused
            eventually(lambda: harbour.upper("one") > 0 and made_anew())
            eventually(lambda: ground.contents("one") == ground.selected())
            assert harbour.shard("one").schema.key == ("id", "v")
            assert verified(ground, "one")


def test_f469_a_shard_whose_drop_was_cut_off_is_made_anew_and_a_peers_is_left_alone(
    harbour: Any, tmp_path: Path
) -> None:
    s, call = harbour.stores, harbour.portal.call
    columns = [("id", "integer", 0), ("v", "integer", -1)]
    old = harbour.capture("shop", {"public.t": columns})["public.t"]
    text = 'def build(p):\n    p.table("t", p.capture("shop").table("t"))\n'
    with pipeline(harbour, tmp_path / "1", text):
        harbour.produce(old, [({"id": 1}, {"id": 1, "v": 1})])
        harbour.mint("capture/shop", 1000, old)
        eventually(lambda: harbour.upper("t") == 1001)
    created = call(read_registration(s.consensus, "t"))[0]
    new = harbour.capture_more("shop", {"public.t": [("id", "integer", 0), ("v", "text", -1)]})["public.t"]
    row = call(s.catalogue.table("shop", "public.t"))
    agreed = (AcceptedSchemaChange(created.shard_id, anew=True),)
    call(s.catalogue.change_table("shop", "public.t", lambda _: replace(row, accepted=agreed)))
    shard = harbour.shard("t")
    call(shard.drop())  # and here its process died
    with pipeline(harbour, tmp_path / "1", text):
        harbour.produce(new, [({"id": 1}, {"id": 1, "v": "one"})])
        harbour.mint("capture/shop", 2000, old, new)
        eventually(lambda: harbour.upper("t") == 2001)
        assert harbour.contents("t") == [{"id": 1, "v": "one"}]
    there = harbour.shard("t").shard_id
    assert there != created.shard_id
    call(drop_shard(s.consensus, s.objects, s.clock, s.rand, created))  # a slower peer comes to it
    assert harbour.shard("t").shard_id == there and harbour.contents("t") == [{"id": 1, "v": "one"}]


def test_f470_of_a_table_that_is_gone_nobody_is_told_to_accept_it_and_its_pipeline_stands_with_its_shard(
    harbour: Any, tmp_path: Path
) -> None:
    """World 104 of the oracle: the timeout of each new driver counted as progress of the pipeline, while its table was
    parked."""
    s, call = harbour.stores, harbour.portal.call
    old = harbour.capture("shop", {"public.t": [("id", "integer", 0), ("v", "integer", -1)]})["public.t"]
    text = 'def build(p):\n    p.table("t", p.capture("shop").table("t"))\n'
    with pipeline(harbour, tmp_path / "1", text):
        harbour.produce(old, [({"id": 1}, {"id": 1, "v": 1})])
        harbour.mint("capture/shop", 1000, old)
        eventually(lambda: harbour.upper("t") == 1001)
    harbour.capture_more("shop", {"public.t": [("id", "integer", 0), ("v", "text", -1)]})
    row = call(s.catalogue.table("shop", "public.t"))
    with pipeline(harbour, tmp_path / "1", text):
        eventually(lambda: "capture accept 'public.t'" in error_of(harbour, "shard:t"))
    gone = replace(row, state="dropped", reason="DROP TABLE", fix="Make it anew.")
    call(s.catalogue.change_table("shop", "public.t", lambda _: gone))
    with pipeline(harbour, tmp_path / "1", text) as runner:
        runner.session_ready.set()
        eventually(lambda: "no longer captured (DROP TABLE)" in error_of(harbour, "shard:t"))
        assert "capture accept" not in error_of(harbour, "shard:t")
        shard, whole = mark(harbour, "shard:t"), eventually(lambda: mark(harbour, "pipeline:p"))
        assert shard is not None and shard.parked and whole.held_by == "shard:t" and whole.position < whole.target
        eventually(lambda: (m := mark(harbour, "pipeline:p")) and m.progress == 0)
        since = mark(harbour, "pipeline:p").since_ms  # type: ignore[union-attr]
        reported = harbour.stores.clock.now_ms()
        eventually(lambda: harbour.stores.clock.now_ms() > reported + 2_500)
        assert mark(harbour, "pipeline:p").since_ms == since  # type: ignore[union-attr]
    created = call(read_registration(s.consensus, "t"))[0]
    call(drop_shard(s.consensus, s.objects, s.clock, s.rand, created))  # as it says
    with pipeline(harbour, tmp_path / "1", text) as runner:
        eventually(lambda: [c.type for table in runner.tables() for c in table.schema.columns] == ["int32", "string"])
