"""Several pipelines in one real driver process: one JVM, and each pipeline a separate unit."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.waiting import DEADLINE_S, eventually
from tidemill.base.clock import Rand
from tidemill.base.config.config import parse
from tidemill.base.status.drivers import processes_sharing_driver
from tidemill.base.status.status import StatusReport
from tidemill.consensus.status.board import StatusBoard
from tidemill.node.supervise.processes import driver_spec

CLICKS = """
from pathlib import Path
def build(p):
    p.table("clicks", p.topic("clicks", key="click_id", schema="click_id string, n long"))
    @p.derived("counts", key="n", inputs=("clicks",), every_s=0.2)
    def counts(spark, clicks):
        if Path({raises!r}).exists():
            raise SystemExit("leaving")
        spark.conf.set("spark.sql.limit.scaleUpFactor", "3")
        clicks.createOrReplaceTempView("mine")
        # A random number prevents a prepared plan, so the function is called in every round.
        return spark.sql("SELECT n % 3 AS n, count(*) AS rows FROM mine WHERE rand() >= 0 GROUP BY n % 3")
"""
VIEWS = """
def build(p):
    p.table("views", p.topic("views", key="view_id", schema="view_id string, n long"))
    @p.derived("settings", key="factor", inputs=("views",), every_s=0.2)
    def settings(spark, views):
        views.createOrReplaceTempView("mine")
        factor = spark.conf.get("spark.sql.limit.scaleUpFactor")
        return spark.sql(f"SELECT '{factor}' AS factor, count(*) AS rows FROM mine")
"""
COPY = """
def build(p):
    @p.derived("copy_of_{name}", key="n", inputs=("{name}",), every_s=0.2)
    def copied(spark, rows):
        return rows.select("n").distinct()
"""
LATE = """
def build(p):
    p.table("late", p.topic("views", key="view_id", schema="view_id string, n long"))
"""


class World:
    def __init__(self, harbour: Any, directory: Path) -> None:
        self.harbour, self.directory, self.n = harbour, directory, 0
        self.topics = {name: harbour.create_topic(name, 2) for name in ("clicks", "views")}
        self.rows: dict[str, list[tuple[str, int]]] = {"clicks": [], "views": []}
        self.raises = directory / "raises"
        self.file("clicks", CLICKS.format(raises=str(self.raises)))
        self.file("views", VIEWS)

    def file(self, name: str, text: str) -> None:
        (self.directory / f"{name}.py").write_text(text)

    def spec(self, *names: str) -> Any:
        pipelines = {
            name: {"file": str(self.directory / f"{name}.py"), "driver": "small", "spark": {"master": "local[1]"}}
            for name in names
        }
        urls = self.harbour.urls
        values = {
            "node": {"data": str(self.directory / "data")},
            "objects": {"url": urls.objects},
            "consensus": {"url": urls.consensus},
            "pipeline": pipelines,
        }
        return driver_spec(parse(values, origin=""), names)

    @contextmanager
    def started(self, spec: Any) -> Iterator[subprocess.Popen[bytes]]:
        with (self.directory / "driver.log").open("ab") as log:
            process = subprocess.Popen(spec.command, env={**os.environ, **spec.environ}, stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def come(self) -> None:
        for name, topic in self.topics.items():
            self.n += 1
            key = f"k{self.n % 20}"
            row = {f"{name[:-1]}_id": key, "n": self.n}
            self.harbour.produce(topic, [(key.encode(), row)], hash(key) % 2)
            self.harbour.mint(f"topic/{name}", self.n, topic)
            self.rows[name].append((key, self.n))

    def at(self, table: str, time_ms: int) -> dict[str, int]:
        """Return the rows at a time: each record is bound to the time that is its number."""
        return {key: n for key, n in self.rows[table] if n <= time_ms}

    def reports(self) -> dict[str, StatusReport]:
        board = StatusBoard(self.harbour.stores.consensus, Rand())
        return {report.process: report for report in self.harbour.portal.call(board.reports())}

    def error(self, mark: str) -> str:
        return next((m.error for r in self.reports().values() for m in r.marks if m.name == mark), "")

    def moves(self, table: str) -> None:
        before = self.harbour.upper(table)
        self.until(lambda: self.harbour.upper(table) > before, f"{table} moves")

    def until(self, check: Callable[[], Any], what: str) -> None:
        def looked() -> Any:
            found = check()
            if not found:
                self.come()
            return found

        eventually(looked, lambda: f"{what}\n{(self.directory / 'driver.log').read_text()[-3000:]}")


def jvms(pid: int) -> list[int]:
    found, ahead = [], [pid]
    while ahead:
        here = ahead.pop()
        for task in Path(f"/proc/{here}/task").glob("*/children"):
            children = [int(child) for child in task.read_text().split()]
            ahead += children
            found += [child for child in children if "java" in Path(f"/proc/{child}/comm").read_text()]
    return found


@pytest.mark.spark
def test_f316_pipelines_of_one_driver_fail_alone_and_come_back_together_exact(harbour: Any, tmp_path: Path) -> None:
    world = World(harbour, tmp_path)
    world.file("late", "import nothing_of_that_name\n")
    world.raises.touch()
    spec = world.spec("clicks", "views", "late")
    processes = {"pipeline:clicks", "pipeline:views", "pipeline:late"}
    with world.started(spec) as process:
        world.until(lambda: "ModuleNotFoundError" in world.error("pipeline:late"), "the file is named")
        world.until(lambda: "SystemExit: leaving" in world.error("shard:counts"), "the function is named")
        for table in ("clicks", "views", "settings"):
            world.moves(table)
        found = world.reports()
        assert found.keys() == processes
        assert {report.pid for report in found.values()} == {process.pid}
        assert set(
            processes_sharing_driver(found["pipeline:clicks"], found.values(), harbour.stores.clock.now_ms())
        ) == (processes - {"pipeline:clicks"})
        assert len(jvms(process.pid)) == 1

        # A repaired file starts its pipeline in the same process, without further action.
        world.file("late", LATE)
        world.raises.unlink()
        for table in ("late", "counts"):
            world.moves(table)
        world.until(lambda: not world.error("pipeline:late"), "it is healed")
        assert [row["factor"] for row in harbour.contents("settings")] == ["4"], "settings are each one's own"
        process.send_signal(signal.SIGKILL)
        process.wait()

    # All tables are derived: only they can notice that the JVM is gone. Only a new process gets another JVM.
    for name in ("clicks", "views"):
        world.file(f"of_{name}", COPY.format(name=name))
    with world.started(world.spec("of_clicks", "of_views")) as process:
        for name in ("clicks", "views"):
            world.until(lambda name=name: harbour.upper(f"copy_of_{name}") > 0, "Spark runs")  # type: ignore[misc]
        for pid in jvms(process.pid):
            os.kill(pid, signal.SIGKILL)
        assert process.wait(DEADLINE_S) == 1

    # Its directory is available again. Records that arrived in the meantime are read, and none twice.
    world.file("late", "def build(p):\n    raise SystemExit(0)\n")
    for _ in range(5):
        world.come()
    with world.started(spec) as process:
        for table in ("clicks", "views"):
            world.moves(table)
        world.until(lambda: "its pipeline does not run" in world.error("shard:late"), "its table says why it stands")
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0
    for table in ("clicks", "views"):
        at = world.harbour.upper(table) - 1
        assert {row[f"{table[:-1]}_id"]: row["n"] for row in harbour.contents(table, at)} == world.at(table, at)
