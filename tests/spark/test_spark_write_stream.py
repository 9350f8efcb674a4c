"""Streaming queries and batches of a user that write a table: each epoch takes effect once, despite repetitions."""

from __future__ import annotations

import inspect
import json
import pkgutil
from pathlib import Path
from typing import Any

import pytest

import tidemill.spark
from support.spark.frames import SMALL, batches
from support.spark.frames import config as config
from tidemill.base.errors import InvalidError, UnknownOutcomeError
from tidemill.shards.api import Column, staged_key
from tidemill.shards.state.stream_registers import STREAM_REGISTERS, mark_restored
from tidemill.spark.write import stream_epoch
from tidemill.spark.write.commit import WriteCommit
from tidemill.spark.write.schema_match import WriteFrame
from tidemill.spark.write.staging import stage_rows
from tidemill.spark.write.stream_epoch import StreamEpoch

FRAME = WriteFrame("stock", (Column("id", "int64"), Column("n", "int64")), ("id",))


def append(harbour: Any, epoch: int, rows: list[tuple[int, int]], query: str = "5f7b-aa") -> None:
    portal, stores = harbour.portal, harbour.stores

    def put(data: bytes) -> str:
        key = staged_key("test", stores.clock.now_ms(), stores.rand.nonce())
        portal.call(stores.objects.put(key, data))
        return key

    found = list(stage_rows(FRAME, batches(FRAME, rows), put))
    WriteCommit(portal, stores, FRAME, StreamEpoch(query, epoch), SMALL).run(found)


def stock(harbour: Any) -> dict[int, int]:
    return {row["id"]: row["n"] for row in harbour.contents("stock")}


def test_an_epoch_is_appended_once_though_others_wrote_since(harbour: Any) -> None:
    append(harbour, 0, [(1, 10), (2, 20)])
    append(harbour, 1, [(1, 11)])
    append(harbour, 0, [(1, 99)], query="another")
    append(harbour, 1, [(1, 11)])  # repeated
    append(harbour, 0, [(1, 10), (2, 20)])  # and one that is long done
    assert stock(harbour) == {1: 99, 2: 20}
    append(harbour, 2, [(2, 22)])
    assert stock(harbour) == {1: 99, 2: 22}


def test_f337_an_epoch_is_appended_once_though_the_state_has_forgotten_it(
    harbour: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(harbour, 0, [(1, 10)])
    with monkeypatch.context() as patch:  # the process dies before it has recorded that the epoch is done
        patch.setattr(StreamEpoch, "end", _nothing)
        append(harbour, 0, [(2, 20)], query="killed")
    append(harbour, 0, [(2, 20)], query="killed")  # its token is still there
    for n in range(64):
        append(harbour, 0, [(1, n)], query=f"other-{n}")
    append(harbour, 0, [(1, 10)])
    assert stock(harbour) == {1: 63, 2: 20}, "done, and known by the register alone"
    with pytest.raises(UnknownOutcomeError, match="query=killed epoch=0"):
        append(harbour, 0, [(2, 20)], query="killed")
    append(harbour, 1, [(2, 21)], query="killed")
    append(harbour, 1, [(1, 12)])
    assert stock(harbour) == {1: 12, 2: 21}


async def _nothing(*_: Any) -> None: ...


def restored(harbour: Any) -> None:
    """Leave the table as a restore does: the state, without the registers of queries."""
    shard_id, consensus = harbour.shard("stock").shard_id, harbour.stores.consensus
    for key, version in harbour.portal.call(consensus.scan(STREAM_REGISTERS)):
        harbour.portal.call(consensus.drop(key, version.seq))
    harbour.portal.call(mark_restored(consensus, shard_id, "nonce"))


def test_f338_a_query_whose_epochs_a_restore_may_lack_is_refused(harbour: Any) -> None:
    append(harbour, 0, [(1, 10)], query="ahead")
    append(harbour, 0, [(2, 20)], query="forgotten")
    append(harbour, 1, [(2, 21)], query="forgotten")
    for n in range(63):
        append(harbour, 0, [(3, n)], query=f"other-{n}")
    append(harbour, 1, [(1, 11)], query="ahead")
    restored(harbour)
    append(harbour, 1, [(1, 11)], query="ahead")  # the state knows it
    append(harbour, 2, [(1, 12)], query="ahead")
    append(harbour, 0, [(4, 40)], query="new")
    for query, epoch, known in (("forgotten", 1, -1), ("other-62", 2, 0)):
        with pytest.raises(UnknownOutcomeError, match=f"restored.*query={query} epoch={epoch} newest_known={known}"):
            append(harbour, epoch, [(2, 22)], query=query)
    assert stock(harbour) == {1: 12, 2: 21, 3: 62, 4: 40}


def test_the_queries_that_have_written_a_table_are_limited(harbour: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_epoch, "QUERIES_MAX", 2)
    for query in ("a", "b"):
        append(harbour, 0, [(1, 10)], query=query)
    with pytest.raises(InvalidError, match="too many streaming queries have written the table: table=stock limit=2"):
        append(harbour, 0, [(1, 11)], query="c")
    append(harbour, 1, [(1, 12)], query="a")
    assert stock(harbour) == {1: 12}


def written(directory: Path, name: str, rows: list[tuple[int, int | None]]) -> None:
    directory.mkdir(exist_ok=True)
    (directory / f"{name}.tmp").write_text("".join(json.dumps({"id": i, "n": n}) + "\n" for i, n in rows))
    (directory / f"{name}.tmp").rename(directory / f"{name}.json")


@pytest.mark.spark
def test_a_query_repeats_its_last_epoch_without_effect(harbour: Any, spark: Any, config: str, tmp_path: Path) -> None:
    incoming, checkpoint = tmp_path / "incoming", tmp_path / "checkpoint"

    def run(*, mode: str = "append", **options: str) -> None:
        frame = spark.readStream.schema("id bigint, n bigint").option("maxFilesPerTrigger", 1).json(str(incoming))
        frame = frame if mode == "append" else frame.groupBy("id").sum("n").withColumnRenamed("sum(n)", "n")
        place = checkpoint if mode == "append" else tmp_path / mode
        query = frame.writeStream.format("tidemill").outputMode(mode).option("checkpointLocation", str(place))
        query = query.queryName("q").options(config=config, **options).trigger(availableNow=True).start("stock")
        query.awaitTermination()

    written(incoming, "a", [(1, 10), (2, 20)])
    written(incoming, "b", [(1, 11), (3, 30)])
    run(key="id")
    assert stock(harbour) == {1: 11, 2: 20, 3: 30}
    tidemill.spark.upsert(spark.createDataFrame([(1, 99)], "id long, n long"), "stock", config=config)
    upper = harbour.upper("stock")
    for file in (checkpoint / "commits").glob("*1"):  # as if the process was killed before Spark knew
        file.unlink()
    run()
    assert stock(harbour)[1] == 99 and harbour.upper("stock") == upper
    written(incoming, "c", [(4, 40)])
    run()
    assert stock(harbour) == {1: 99, 2: 20, 3: 30, 4: 40}
    run(mode="complete")
    assert stock(harbour) == {1: 21, 2: 20, 3: 30, 4: 40}, "the table is the result"
    written(incoming, "d", [(5, 1), (5, 2)])
    for options, says in (
        ({"as_of": "3"}, "option has no effect on a streaming write: option=as_of"),
        ({"key": "n"}, "the table has another key"),
        ({}, "a key occurs twice: id=5"),
    ):
        with pytest.raises(Exception, match=says):
            run(**options)


@pytest.mark.spark
def test_upsert_writes_and_deletes_in_one_append(harbour: Any, spark: Any, config: str) -> None:
    frame = spark.createDataFrame([(1, 10), (2, 20), (3, 30)], "id long, n long")
    tidemill.spark.upsert(frame, "stock", key=["id"], config=config)
    changed = spark.createDataFrame([(1, 11), (2, None), (4, 0)], "id long, n long")
    tidemill.spark.upsert(changed, "stock", delete_when="n IS NULL", config=config)
    assert stock(harbour) == {1: 11, 3: 30, 4: 0}
    tidemill.spark.upsert(changed, "stock", delete_when=changed.n == 0, config=config)
    assert stock(harbour) == {1: 11, 2: None, 3: 30}
    wide = changed.selectExpr("id", "n", "'x' AS note").where("id = 1")
    with pytest.raises(Exception, match="Set option mergeSchema=true"):
        tidemill.spark.upsert(wide, "stock", config=config)
    tidemill.spark.upsert(wide, "stock", merge_schema=True, config=config)
    assert [row["note"] for row in harbour.contents("stock")] == ["x", None, None]


def test_no_sub_package_has_the_name_of_a_function() -> None:
    """Python sets an imported sub-package as an attribute of its package, in the place of the function."""
    assert {found.name for found in pkgutil.iter_modules(tidemill.spark.__path__)}.isdisjoint(tidemill.spark.__all__)
    assert inspect.isfunction(tidemill.spark.upsert)
