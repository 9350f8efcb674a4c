"""Spark Declarative Pipelines read tables: the blocks of the guide, run by `spark-pipelines` of Spark 4.3."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

from support.cli.cluster import Cluster
from support.docs.examples import blocks
from support.spark.connect_server import connect_server
from support.waiting import SCENARIO_S

pytestmark = [pytest.mark.spark, pytest.mark.processes, pytest.mark.extended]

GUIDE = Path(__file__).parents[2] / "docs/guides/declarative-pipelines.md"
COMMAND = Path(pyspark.__file__).parent / "pipelines" / "cli.py"

LAST_BY_SEQUENCE = """
from pyspark.sql import SparkSession
from pyspark.sql.functions import expr, max_by, struct

spark = SparkSession.builder.remote({url!r}).getOrCreate()
changes = spark.table("order_changes")
last = changes.groupBy("k").agg(max_by(struct("v", "_diff"), expr({sequence!r})).alias("last"))
print(sorted((row.k, row["last"].v) for row in last.where("NOT last._diff < 0").collect()))
print(sorted((row.v, row["count"]) for row in spark.table("orders_by_status").collect()))
"""
"""The rows that Auto CDC keeps as SCD type 1: the change with the greatest sequence, unless it is a deletion."""


def run(url: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYSPARK_", "SPARK_"))}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=SCENARIO_S,
        env={**environ, "SPARK_REMOTE": url}, check=False,
    )  # fmt: skip


def test_the_declarations_of_the_guide_run_and_the_order_of_its_auto_cdc_flow_gives_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (_, spec), (_, tables), (_, flow) = blocks(GUIDE.read_text())
    for name in ("cluster", "server", "shop/transformations"):
        (tmp_path / name).mkdir(parents=True)
    cluster = Cluster(tmp_path / "cluster")
    monkeypatch.setenv("TIDEMILL_CONFIG", str(cluster.config))
    specified = tmp_path / "shop" / "spark-pipeline.yml"
    specified.write_text(spec.replace("/var/lib/shop", str(tmp_path)))
    # The table of the tests has the columns k and v.
    declared, flow = tables.replace('"status"', '"v"'), flow.replace('"id"', '"k"')
    (tmp_path / "shop" / "transformations" / "orders.py").write_text(declared)
    cluster.append([(1, "a", 1), (2, "b", 1)], [(1, "a", -1), (1, "c", 1)], [(2, "b", -1), (3, "c", 1)])
    [sequence] = [line.split('"')[1] for line in flow.splitlines() if "sequence_by" in line]
    with connect_server(tmp_path / "server") as url:
        for more, rows in (([], {1: "c", 3: "c"}), ([(3, "c", -1), (3, "d", 1), (1, "c", -1)], {3: "d"})):
            if more:
                cluster.append(more)
            done = run(url, COMMAND, "run", "--spec", specified)
            assert done.returncode == 0, done.stderr[-3000:]
            read = run(url, "-c", LAST_BY_SEQUENCE.format(url=url, sequence=sequence))
            assert read.returncode == 0, read.stderr[-3000:]
            last, counts = read.stdout.splitlines()
            assert last == str(sorted(rows.items()))
            assert counts == str(sorted((v, list(rows.values()).count(v)) for v in set(rows.values())))
        (tmp_path / "shop" / "transformations" / "copy.py").write_text("from pyspark import pipelines as dp\n" + flow)
        refused = run(url, COMMAND, "run", "--spec", specified)
        assert refused.returncode == 1
        assert "AUTOCDC_TARGET_DOES_NOT_SUPPORT_MERGE" in refused.stderr, refused.stderr[-3000:]
