"""Two identical drivers under one `up`: killed, frozen and restarted while rows arrive, with a real node and
clients."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from support.faults.cluster import Cluster, cluster, until
from support.waiting import DEADLINE_S
from tidemill.base.errors import InvalidError

pytestmark = pytest.mark.spark

TOML = """
[topics.clicks]
partitions = 2
[pipeline.p]
file = "{directory}/p.py"
[pipeline.p.spark]
master = "local[1]"
instances = 2
driver_memory = "512m"
conf = {{ spark.sql.shuffle.partitions = 1 }}
"""
PIPELINE = """
def build(p):
    p.table("clicks", p.topic("clicks", key="click_id", schema="click_id string, product_id long"))
"""
FIRST, SECOND = "pipeline:p", "pipeline:p:2"


class Clicks:
    """A continuous source: each call adds a few rows."""

    def __init__(self, made: Cluster) -> None:
        from confluent_kafka import Producer

        self._made = made
        self._producer = Producer({"bootstrap.servers": made.kafka, "acks": "all", "log_level": 0})
        self.count = 0

    def come(self) -> None:
        for _ in range(20):
            value = {"click_id": f"k{self.count % 500}", "product_id": self.count}
            self._producer.produce("clicks", key=value["click_id"].encode(), value=json.dumps(value).encode())
            self.count += 1
        assert self._producer.flush(30) == 0

    def upper(self) -> int:
        self.come()
        return int(self._made.marks().get("shard:clicks", {}).get("position", 0))

    def moves(self) -> None:
        """Wait until the table passes its current upper, twice: work in progress at a freeze proves nothing."""
        for _ in range(2):
            before = self.upper()
            until(lambda before=before: self.upper() > before, lambda: self._made.why("clicks"))  # type: ignore[misc]


def command(made: Cluster, *arguments: str) -> tuple[int, Any]:
    """Run a command in this process, because starting Python for each call would take most of the test. Return its exit
    code and its output as JSON, or its exception."""
    from tidemill.cli.main import app

    done = CliRunner().invoke(app, [*arguments, "--json", "--config", str(made.config)])
    lines = done.stdout.strip().splitlines()
    return done.exit_code, json.loads(lines[-1]) if lines else done.exception


def described(made: Cluster) -> dict[str, Any]:
    code, found = command(made, "pipeline", "describe", "p")
    assert code == 0, found
    return dict(found)


def drivers(made: Cluster, state: str) -> dict[str, int]:
    """process → pid of those in `state`"""
    return {i["process"]: i["pid"] for i in described(made)["instances"] if i["state"] == state}


def test_f314_of_two_drivers_one_may_freeze_or_die_the_table_goes_on_and_the_frozen_one_is_named(
    tmp_path: Path,
) -> None:
    (tmp_path / "p.py").write_text(PIPELINE)
    with cluster(tmp_path, TOML.format(directory=tmp_path)) as made:
        made.ready()
        clicks = Clicks(made)
        until(lambda: clicks.upper() > 0 and drivers(made, "running").keys() == {FIRST, SECOND}, lambda: made.said)
        pids = drivers(made, "running")

        # One driver is frozen for longer than any lease: the table does not wait for it, and `status` names it.
        os.kill(pids[SECOND], signal.SIGSTOP)
        frozen: dict[str, Any] = {}

        def named() -> bool:
            nonlocal frozen
            clicks.come()
            frozen = made.marks().get(f"process:{SECOND}", {})
            return frozen.get("state") == "blind"

        until(named, lambda: made.marks())
        assert str(pids[SECOND]) in frozen["held_by"]
        clicks.moves()
        assert command(made, "status")[0] == 3
        assert drivers(made, "silent") == {SECOND: pids[SECOND]}

        # The other one is killed in the meantime: it restarts alone, and rows continue.
        os.kill(pids[FIRST], signal.SIGKILL)
        clicks.moves()
        assert drivers(made, "silent") == {SECOND: pids[SECOND]}

        # `restart` ends one after the other, the frozen one too.
        code, done = command(made, "pipeline", "restart", "p")
        assert code == 0, done
        assert [row["process"] for row in done] == [FIRST, SECOND]
        assert done[1]["before"] == pids[SECOND] != done[1]["pid"]
        clicks.moves()
        found = described(made)
        (table,) = found["tables"]
        assert (table["input"], table["upper"] > 0, found["silent"], found["dead_letters"]) == (
            "topic:clicks",
            True,
            0,
            0,
        )
        until(lambda: described(made)["tables"][0]["seats"] == [FIRST, SECOND], lambda: described(made))

        code, reported = command(made, "verify", "clicks")
        assert code == 0, reported
        ((row,), refused) = command(made, "pipeline", "list")[1], command(made, "pipeline", "delete", "p")[1]
        assert (row["pipeline"], row["running"], row["silent"]) == ("p", 2, 0)
        assert isinstance(refused, InvalidError) and "the pipeline runs" in str(refused)

        # An additional driver outside `up`, as on another machine: it takes part, and ends with its parent.
        run = [sys.executable, "-m", "tidemill", "pipeline", "run", "p", "--label", "b", "--instances", "1"]
        said = tmp_path / "run.log"
        with said.open("wb") as log, subprocess.Popen([*run, "--config", str(made.config)], stderr=log) as other:
            until(lambda: f"{FIRST}:b" in drivers(made, "starting") | drivers(made, "running"), said.read_text)
            pid = (drivers(made, "starting") | drivers(made, "running"))[f"{FIRST}:b"]
            other.terminate()
            assert other.wait(DEADLINE_S) == 0
        assert not Path(f"/proc/{pid}").exists()
        assert f"{FIRST}:b" not in drivers(made, "silent") | drivers(made, "running"), "it is not missed"
