"""`tidemill capture accept --dry-run`: the change of a table and its effect on a pipeline's table, which it does not
accept. `tests/spark/test_spark_accept` tests the effect of an acceptance."""

from __future__ import annotations

import json
from pathlib import Path

import psycopg
import pytest
from msgspec.structs import replace

from support.cli.cluster import Cluster
from tidemill.base.errors import InvalidError
from tidemill.capture.catalog.relations import describe_tables
from tidemill.capture.changes import Relation
from tidemill.capture.postgres.connection import PgConnection
from tidemill.capture.tables.table_setup import captured_columns_of
from tidemill.cli.capture import accept
from tidemill.cli.context import open_stores
from tidemill.metastore.catalogue import CaptureTableRow, PipelineRow
from tidemill.metastore.rows.captures import TableSnapshot

TABLE = "public.orders"


class CapturedCluster(Cluster):
    """A cluster whose capture `shop` has one table, which feeds the pipeline's table `orders` (k, v)."""

    group = "capture"

    def __init__(self, directory: Path, dsn: str) -> None:
        super().__init__(directory)
        self.config.write_text(f'{self.config.read_text()}[capture.shop]\ndsn = "{dsn}"\n')
        self.append([(1, "a", 1)])
        self.pipeline(PipelineRow("shop", {"orders": f"capture:shop:{TABLE}"}))

        async def describe(oid: int) -> CaptureTableRow:
            wire = await PgConnection.connect(dsn, purpose="test")
            try:
                relation = (await describe_tables(wire, [oid]))[oid]
            finally:
                await wire.aclose()
            columns = captured_columns_of(relation)
            return CaptureTableRow("shop", TABLE, f"shop.{TABLE}", oid=oid, columns=columns)

        with psycopg.connect(dsn, autocommit=True) as connection, open_stores(self.config) as opened:
            connection.execute("CREATE TABLE orders (k int PRIMARY KEY, v text)")
            oid = connection.execute("SELECT 'orders'::regclass::oid::int").fetchone()[0]  # type: ignore[index]
            snapshot = TableSnapshot(1, 1, (), 1, 7, (7,))
            row = replace(opened.portal.call(describe(oid)), snapshot=snapshot)
            opened.portal.call(opened.catalogue.change_table("shop", TABLE, lambda _: row))

    def row(self) -> CaptureTableRow:
        with open_stores(self.config) as opened:
            (row,) = opened.portal.call(opened.catalogue.all_tables())
        return row


@pytest.mark.postgres
def test_a_dry_run_shows_a_changed_table_and_accepts_nothing(postgres_dsn: str, tmp_path: Path) -> None:
    cluster = CapturedCluster(tmp_path, postgres_dsn)
    assert cluster.command("accept", "orders", "--dry-run").endswith(
        "Nothing to accept: the table is being captured and the pipelines' tables match it.\n"
    )
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        connection.execute("ALTER TABLE orders DROP v, ADD note text")
    before = cluster.row()
    text = cluster.command("accept", "orders", "--dry-run")
    reported = cluster.json("accept", "orders", "--dry-run")
    assert cluster.row() == before
    assert text.splitlines()[0].startswith("public.orders of capture shop: ") and "note" in text
    assert "it is copied again (7 rows last time) into re-created topic shop.public.orders" in text
    assert text.endswith("dry run: nothing was accepted\n")
    assert (reported["dry_run"], reported["copied_again"]) == (True, True)
    assert [(shard["shard"], shard["becomes"]) for shard in reported["shards"]] == [("orders", "grown")]
    assert f"  table orders: {reported['shards'][0]['changes']}\n" in text

    (row,) = map(json.loads, cluster.command("accept", "orders", "--dry-run", "-o", "jsonl").splitlines())
    assert (row["dry_run"], row["shard"]) == (True, "orders")
    assert "dry_run" in cluster.command("accept", "orders", "--dry-run", "-o", "csv").splitlines()[0]

    accepted = cluster.json("accept", "orders", "--yes")
    assert "dry_run" not in accepted
    assert accepted == {key: value for key, value in reported.items() if key != "dry_run"}
    assert cluster.row().recopy and len(cluster.row().accepted) == 1


@pytest.mark.parametrize("command", ["accept", "resnapshot"])
@pytest.mark.parametrize("state", ["refused", "left", "dropped"])
def test_a_table_that_is_not_captured_is_refused_by_a_dry_run_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, state: str
) -> None:
    cluster = Cluster(tmp_path)
    cluster.group = "capture"
    found = Relation(7, "public", "orders", ())
    monkeypatch.setattr(accept, "_describe_source_table", lambda *_: found)
    row = CaptureTableRow("shop", TABLE, f"shop.{TABLE}", state=state, reason="it is partitioned.", fix="Merge it.")
    with open_stores(cluster.config) as opened:
        opened.portal.call(opened.catalogue.change_table("shop", TABLE, lambda _: row))
    for option in ("--dry-run", "--yes", "--json"):
        with pytest.raises(InvalidError) as refused:
            cluster.command(command, "orders", option)
        assert str(refused.value) == "the table is not captured: it is partitioned. Merge it."
