"""`tidemill up` with a partly broken pipeline and one that does not import: real node, drivers and clients."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from support.faults.cluster import Cluster, cluster, until
from support.waiting import slowness

pytestmark = pytest.mark.spark

BUDGET_S = 5.0
NAMED_WITHIN_S = 5.0
"""Limit in addition to the freshness budget."""
SLACK_S = 6.0
"""Time of a call on a busy machine: each command is a process."""

TOML = """
[topics.clicks]
partitions = 1
[pipeline.shop]
file = "{directory}/shop.py"
[pipeline.broken]
file = "{directory}/broken.py"
[spark]
master = "local[1]"
"""
SHOP = """
from pathlib import Path
from pyspark.sql.functions import rand

def build(p):
    p.table("clicks", p.topic("clicks", key="click_id", schema="click_id string, product_id long"))

    @p.derived("counts", key="product_id", inputs=("clicks",), every_s=0.5)
    def counts(spark, clicks):
        if Path("{directory}/raise").exists():
            raise SystemExit("leaving")
        # A random number prevents a prepared plan, so the function is called in every round.
        return clicks.where(rand() >= 0).groupBy("product_id").count()
"""


def produce(made: Cluster, *values: bytes) -> None:
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": made.kafka})
    for value in values:
        producer.produce("clicks", value=value)
    assert producer.flush(30) == 0


def driver(made: Cluster, name: str) -> int:
    """Return its pid, or 0 while it does not run."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().split(b"\0")
        except OSError:
            continue
        scratch = str(made.data / "scratch" / name).encode()
        if b"tidemill.spark.pipeline.driver" in command and scratch in command:
            return int(path.parent.name)
    return 0


def position(made: Cluster, name: str) -> int:
    return int(made.marks().get(name, {}).get("position", 0))


def click(n: int) -> bytes:
    return json.dumps({"click_id": f"k{n}", "product_id": n % 3}).encode()


def named(made: Cluster, table: str, words: str) -> tuple[float, dict[str, Any]]:
    """Return the seconds until `why TABLE` exits 3 with these words, and its output."""
    found: dict[str, Any] = {}

    def stuck() -> bool:
        nonlocal found
        code, found = made.why(table)
        return code == 3 and words in json.dumps(found)

    return until(stuck, lambda: f"{found} {made.said}"), found


def test_f311_what_fails_in_a_pipeline_fails_alone_is_named_in_time_and_heals_without_up(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SHOP.format(directory=tmp_path))
    (tmp_path / "broken.py").write_text("import nothing_of_that_name\n")
    with cluster(tmp_path, TOML.format(directory=tmp_path)) as made:
        made.ready()
        produce(made, *(click(n) for n in range(30)))
        until(lambda: made.state("shard:counts") in ("idle", "moving") and position(made, "shard:counts") > 0)

        code, found = made.why("broken")
        assert code == 3 and "ModuleNotFoundError" in json.dumps(found), found
        assert made.said.count("ModuleNotFoundError") == 1, "up prints it once"

        # A poison record becomes a dead letter, and its table does not wait.
        before = position(made, "shard:clicks")
        produce(made, b'{"click_id":"x","more":' + b"[" * 100_000, click(31))
        until(lambda: made.command("dead-letters", "shop", "--json")[1].get("total") == 1)
        until(lambda: position(made, "shard:clicks") > before)

        # A derived function that wants to end the process.
        pids = {"node": made.children()["node"], "shop": driver(made, "shop")}
        (tmp_path / "raise").touch()
        produce(made, click(32))
        seconds, found = named(made, "counts", "SystemExit: leaving")
        assert seconds < (BUDGET_S + NAMED_WITHIN_S + SLACK_S) * slowness()
        after = {"node": made.children()["node"], "shop": driver(made, "shop")}
        assert after == pids and made.running, "nothing was restarted for it"
        before = position(made, "shard:clicks")
        produce(made, click(33))
        until(lambda: position(made, "shard:clicks") > before)
        assert made.state("shard:clicks") != "stuck"
        (tmp_path / "raise").unlink()
        until(lambda: made.why("counts")[0] == 0)

        # A driver that is stopped is blind, and named with its pid.
        pid = pids["shop"]
        os.kill(pid, signal.SIGSTOP)
        began_s = time.monotonic()
        try:
            _, found = named(made, "clicks", f"pid {pid}")
            assert time.monotonic() - began_s < (10 + NAMED_WITHIN_S + SLACK_S) * slowness(), "blind after ten seconds"
        finally:
            os.kill(pid, signal.SIGCONT)
        until(lambda: made.why("clicks")[0] == 0)

        # The broken file is repaired: its driver starts without further action.
        text = SHOP.format(directory=tmp_path).replace('"clicks", p', '"twin", p').replace('("clicks",)', '("twin",)')
        (tmp_path / "broken.py").write_text(text.replace('"counts"', '"twins"'))
        until(lambda: position(made, "shard:twin") > 0)
        assert made.running
