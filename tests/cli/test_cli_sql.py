"""`tidemill sql` on a cluster with nothing running: one time for all tables, held while the query runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from support.cli.cluster import DAY, Cluster
from tidemill.base.errors import InvalidError, MissingError, TidemillError, UnavailableError
from tidemill.base.status.status import StageStatus, StatusReport
from tidemill.cli.context import EXIT_UNAVAILABLE, exit_code_of, open_stores
from tidemill.cli.main import app
from tidemill.consensus.status.board import StatusBoard
from tidemill.metastore.catalogue import PipelineRow
from tidemill.query import duckdb_views
from tidemill.shards.api import HistoryLostError


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def ask(cluster: Cluster, query: str, *more: str) -> str:
    done = CliRunner().invoke(app, ["sql", query, *more, "--config", str(cluster.config)])
    if isinstance(done.exception, TidemillError):
        raise done.exception
    assert done.exit_code == 0, (done.output, done.exception)
    return done.stdout


def rows(cluster: Cluster, query: str, *more: str) -> tuple[int | None, list[Any]]:
    found = json.loads(ask(cluster, query, *more, "--json").splitlines()[-1])
    return found["as_of_ms"], found["rows"]


def test_a_join_is_of_one_time_that_both_tables_have(cluster: Cluster) -> None:
    cluster.append([(1, "a", 1), (2, "b", 1)], name="left")
    cluster.append([(1, "x", 1)], [(1, "x", -1), (1, "y", 1)], name="right-1")
    joined = 'SELECT l.v, r.v FROM "left" l JOIN "right-1" r USING (k)'
    assert rows(cluster, joined) == (DAY + 999, [["a", "x"]])
    cluster.append([(3, "c", 1)], name="left")
    assert rows(cluster, joined) == (DAY + 1999, [["a", "y"]])
    assert rows(cluster, joined, "--as-of", str(DAY + 999)) == (DAY + 999, [["a", "x"]])
    assert rows(cluster, joined, "--as-of", "2023-11-14T22:13:20.999Z") == (DAY + 999, [["a", "x"]])
    named = 'WITH r AS (SELECT * FROM "left"), "right-1" AS (SELECT * FROM "right-1") SELECT count(*) FROM r, "right-1"'
    assert rows(cluster, named) == (DAY + 1999, [[3]])
    assert rows(cluster, "WITH r AS (SELECT 7 AS a) SELECT a FROM r") == (None, [[7]])
    assert len(rows(cluster, 'EXPLAIN SELECT * FROM "left"')[1]) == 1
    assert rows(cluster, "SELECT 42 AS answer") == (None, [[42]])
    assert f"as of {DAY + 1999}" in ask(cluster, 'SELECT * FROM "left"') and "as of" not in ask(cluster, "SELECT 1")


def test_values_and_names_are_printed_as_they_are_though_they_look_like_markup(cluster: Cluster) -> None:
    shown = ask(cluster, "SELECT '[bold]x[/bold] :heart:' AS \"[/a]\", '[/x]' AS b")
    assert "[bold]x[/bold] :heart:" in shown and "[/a]" in shown and "[/x]" in shown


def test_times_that_python_has_not_are_shown_as_they_are(cluster: Cluster) -> None:
    ends = "TIMESTAMPTZ 'infinity' AS a, DATE '-infinity' AS a, TIMESTAMP 'infinity'"
    days = "DATE '9999-12-31', TIMESTAMPTZ '2026-11-22 12:00:00+02'"
    assert rows(cluster, f"SELECT {ends}, {days}, NULL::DATE, '\\xFF'::BLOB, 1 ORDER BY 1") == (
        None,
        [["infinity", "-infinity", "infinity", "9999-12-31", "2026-11-22 10:00:00+00", None, "\\xFF", 1]],
    )
    lists = "[DATE 'infinity', NULL] AS a, [['\\xFF'::BLOB], []] AS b, [1, NULL] AS c, {a: [DATE '2026-01-02']} AS d"
    assert rows(cluster, f"SELECT {lists}")[1] == [
        [["infinity", None], [["\\xFF"], []], [1, None], "{'a': [2026-01-02]}"]
    ], "a list has an element for each of its own, a struct is one text"


def test_a_with_is_meant_whatever_its_case(cluster: Cluster) -> None:
    cluster.append([(1, "a", 1)], name="c")
    assert rows(cluster, "WITH c AS (SELECT 7 AS a) SELECT a FROM C") == (None, [[7]])
    assert rows(cluster, "WITH C AS (SELECT 7 AS a) SELECT a FROM c")[1] == [[7]]
    assert rows(cluster, "WITH T AS (SELECT * FROM c) SELECT k FROM t")[1] == [[1]]


def test_what_cannot_be_asked_is_refused_in_a_sentence(cluster: Cluster) -> None:
    (cluster.config.parent / "data" / "consensus.db").unlink()
    with pytest.raises(MissingError, match=r"was never started: there is no cluster here.*: tidemill up"):
        ask(cluster, "SELECT * FROM orders")
    cluster.append([(1, "a", 1)], [(1, "a", -1)])
    for query, kind, said in (
        ("SELEKT 1", InvalidError, "the query does not parse"),
        ("DROP TABLE orders", InvalidError, r"does not read: kind=DROP\. .*`tidemill table drop NAME`"),
        ("SELECT nothing FROM orders", InvalidError, "the query failed"),
        ("PIVOT orders ON v USING count(*)", InvalidError, "PIVOT t ON column IN"),
        ("SELECT * FROM nothing", MissingError, "no such table: table=nothing"),
        ("SELECT * FROM Orders", MissingError, r'no such table: table=Orders\. Did you mean "orders"\?'),
    ):
        with pytest.raises(kind, match=said):
            ask(cluster, query)
    with pytest.raises(UnavailableError, match="time is not final yet"):
        ask(cluster, "SELECT * FROM orders", "--as-of", str(DAY * 2))
    with pytest.raises(UnavailableError, match=r"cannot read its input: .*nowhere.*tidemill doctor"):
        ask(cluster, "SELECT * FROM orders, read_parquet('/nowhere.parquet')")
    with pytest.raises(InvalidError, match="as_of is not a time"):
        ask(cluster, "SELECT * FROM orders", "--as-of", "noon")
    with pytest.raises(HistoryLostError):
        ask(cluster, "SELECT * FROM orders", "--as-of", "-1")
    assert json.loads(cluster.command("describe", "orders", "--json"))["holds"] == []


def test_what_a_query_reads_is_held_while_it_runs(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.append([(n, "a", 1) for n in range(300)])
    held: list[str] = []
    real = duckdb_views.make_view

    def then_look(*arguments: Any) -> None:
        real(*arguments)
        with open_stores(cluster.config, create=True) as opened:
            shard = opened.shard("orders")
            held.extend(hold.reader for hold in shard.state.holds)
            opened.portal.call(shard.aclose())

    monkeypatch.setattr(duckdb_views, "make_view", then_look)
    assert rows(cluster, "SELECT count(*) FROM orders") == (DAY + 999, [[300]])
    assert [name.partition("/")[0] for name in held] == ["python"]
    assert json.loads(cluster.command("describe", "orders", "--json"))["holds"] == []


def test_as_a_command_it_imports_no_pandas(cluster: Cluster) -> None:
    """Importing pandas, where it is installed, would take half of the time of a small query."""
    cluster.append([(1, "a", 1)], [(1, "a", -1), (1, "b", 1)])
    arguments = ["tidemill", "sql", "SELECT v FROM orders", "--config", str(cluster.config), "--json"]
    program = f"import sys; sys.argv = {arguments!r}\nfrom tidemill.cli.main import run\n" + (
        "try:\n    run()\nfinally:\n    assert not {'pandas', 'pyspark', 'pyarrow.dataset'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and json.loads(done.stdout.splitlines()[-1])["rows"] == [["b"]], done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize("created", [True, False])
def test_a_table_that_was_never_computed_is_an_error_with_its_reason_and_not_empty(
    cluster: Cluster, created: bool
) -> None:
    cluster.append([(1, "a", 1)])
    if created:
        cluster.append(name="by_v")
    queries = ("SELECT * FROM by_v", "SELECT * FROM by_v JOIN orders USING (k)", "WITH t AS (FROM by_v) FROM t")

    def errors() -> set[str]:
        found = set()
        for query in queries:
            with pytest.raises(TidemillError) as raised:
                ask(cluster, query)
            assert exit_code_of(raised.value) == EXIT_UNAVAILABLE
            found.add(str(raised.value))
        return found

    cluster.pipeline(PipelineRow("shop", {"orders": "topic:orders", "by_v": "derived"}))
    (said,) = errors()
    assert "not been computed yet, and no process that writes it is running: table=by_v pipeline=shop" in said
    assert said.endswith("tidemill up.")
    with open_stores(cluster.config) as opened:
        waits = StageStatus("shard:by_v", 0, 1, "shard:orders", "opening", since_ms=1, unit="ms")
        report = StatusReport("pipeline:shop", opened.clock.now_ms() + 50_000, (waits,))  # not silent for a minute
        opened.portal.call(StatusBoard(opened.consensus, opened.rand).publish(report))
    (said,) = errors()
    assert "state=stuck blocked_by=shard:orders reason='opening'" in said and "`tidemill why by_v`" in said
