"""`tidemill pipeline describe`: the contents of the catalogue and of the drivers' reports, with nothing running."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from support.cli.cluster import Cluster
from support.waiting import eventually
from tidemill.base.clock import ManualClock
from tidemill.base.errors import InvalidError
from tidemill.base.limits import STATUS_BLIND_AFTER_MS
from tidemill.base.status.status import StatusReport, StatusTracker, this_process
from tidemill.cli.context import open_stores
from tidemill.cli.main import app
from tidemill.cli.pipeline.restart import PROGRESS_INTERVAL_S, Progress, describe_wait
from tidemill.consensus.status.board import StatusBoard
from tidemill.metastore.catalogue import PipelineRow
from tidemill.node.supervise.driver_instances import is_driver

MADE = {"sums": {"clicks": ("product",), "lines": ("item",), "names": ()}, "top": {"sums": ()}}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tidemill.toml"
    path.write_text(f'[node]\ndata = "{tmp_path}/data"\n')
    (tmp_path / "data").mkdir()
    return path


def describe(config: Path, *more: str) -> str:
    done = CliRunner().invoke(app, ["pipeline", "describe", "p", "--config", str(config), *more])
    assert done.exit_code == 0, (done.output, done.exception)
    return done.stdout


def words(output: str, count: int = 3) -> set[tuple[str, ...]]:
    """Return the first words of each line."""
    return {tuple(line.split()[:count]) for line in output.splitlines()}


def put(config: Path, row: PipelineRow, **facts: Any) -> None:
    with open_stores(config, create=True) as opened:
        opened.portal.call(opened.catalogue.put(row))
        for process, tables in facts.items():
            report = StatusReport(f"pipeline:p:{process}", opened.clock.now_ms(), (), facts={"tables": tables})
            opened.portal.call(StatusBoard(opened.consensus, opened.rand).publish(report))


def test_a_derived_table_is_described_with_its_inputs_how_it_is_kept_and_why(config: Path) -> None:
    row = PipelineRow("p", {"clicks": "topic:clicks", "sums": "derived", "top": "derived"}, "", MADE)
    put(config, row)
    reported = describe(config)
    assert words(reported) >= {("clicks", "topic:clicks", "0"), ("sums", "clicks,", "lines,"), ("top", "sums", "0")}
    assert (
        "by group: by=… groups by clicks (product), lines (item); a change in names, which is read whole, r" in reported
    )
    assert "whole: no by=… names the columns to group by\n" in reported
    first = {"sums": {"recomputed": 1, "groups": -1, "whole_because": "names, which is given whole, changed"}}
    put(config, row, a=first, b={"sums": {"recomputed": 0, "groups": -1, "whole_because": ""}})
    assert "recomputes everything; last round whole, because names, which is given whole, changed\n" in describe(config)
    put(config, row, b={"sums": {"recomputed": 7, "groups": 1234, "whole_because": ""}})
    assert "computes everything; last round 1,234 groups\n" in describe(config)
    tables = {t["table"]: t for t in json.loads(describe(config, "--json").splitlines()[-1])["tables"]}
    assert tables["sums"]["inputs"] == {"clicks": ["product"], "lines": ["item"], "names": []}
    assert [tables["sums"][k] for k in ("input", "maintained", "last_groups")] == ["derived", "by group", 1234]
    assert "inputs" not in tables["clicks"]


def test_a_derived_table_of_an_older_driver_is_described_without_its_inputs(config: Path) -> None:
    put(config, PipelineRow("p", {"sums": "derived"}), a={"sums": {"recomputed": 3, "groups": -1}})
    assert ("sums", "derived", "0") in words(describe(config))
    put(config, PipelineRow("p", {"sums": "derived"}, "", {"sums": {"t": ("k",)}}))
    assert "by=… groups by t (k); last round whole\n" in describe(config)


def test_the_rows_of_a_table_are_counted_where_its_state_shows_them_and_otherwise_unknown(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    cluster.append([(1, "a", 1), (2, "b", 1)], [(1, "a", -1), (1, "c", 1), (3, "d", 1)])
    cluster.append(name="never")
    names = ("absent", "never", "orders")
    cluster.pipeline(PipelineRow("p", dict.fromkeys(names, "topic:clicks")))
    found = json.loads(describe(cluster.config, "--json").splitlines()[-1])
    assert [(row["table"], row["rows"], row["written"], row["updates"]) for row in found["tables"]] == [
        ("absent", None, None, 0), ("never", None, None, 0), ("orders", 3, None, 5),
    ]  # fmt: skip
    assert found["lag_ms"] is None
    assert " unknown  unknown        0 " in describe(cluster.config)


def paused(process: str, pid: int, at_ms: int) -> StatusReport:
    tracker, (_, host) = StatusTracker(), this_process()
    tracker.fail(process, "its file does not import.", now_ms=at_ms, parked=True)
    return StatusReport(process, at_ms, tracker.report(process, at_ms).marks, {}, pid, host)


def test_pipelines_that_share_a_driver_are_described_with_each_other_and_restarted_together(config: Path) -> None:
    sleep = "import time; print(flush=True); time.sleep(600)"
    command = [sys.executable, "-c", sleep, "tidemill.spark.pipeline.driver"]
    with (
        open_stores(config, create=True) as opened,
        subprocess.Popen(command, stdout=subprocess.PIPE) as driver,
        ExitStack() as ending,
    ):
        board, host, clock = StatusBoard(opened.consensus, opened.rand), this_process()[1], opened.clock
        ending.callback(driver.kill)  # leaving a Popen waits for the process
        assert driver.stdout is not None and driver.stdout.readline()

        def publish(process: str, pid: int, ago_ms: int = 0) -> None:
            opened.portal.call(board.publish(StatusReport(process, clock.now_ms() - ago_ms, (), {}, pid, host)))

        publish("pipeline:p", driver.pid)
        publish("pipeline:other", driver.pid + 1)
        publish("pipeline:gone", driver.pid, 2 * STATUS_BLIND_AFTER_MS)
        opened.portal.call(board.publish(paused("pipeline:q", driver.pid, clock.now_ms())))
        assert ("pipeline:p", "starting", str(driver.pid), host) in words(described := describe(config), 4)
        assert "shared with pipeline:q\n" in described
        lines = CliRunner().invoke(app, ["pipeline", "list", "--config", str(config)]).stdout.splitlines()
        assert [line.split()[:4] for line in lines if line.startswith("q ")] == [["q", "0", "0", "1"]], lines

        def started_anew() -> None:
            driver.wait()
            publish("pipeline:p", 4_000_001)
            publish("pipeline:q", 4_000_001)

        supervisor = threading.Thread(target=started_anew)
        supervisor.start()
        done = CliRunner().invoke(app, ["pipeline", "restart", "p", "--config", str(config)])
        supervisor.join()
        assert done.stdout.splitlines() == [
            f"pipeline:p: its driver, pid {driver.pid}, also runs pipeline:q: all of them restart",
            f"pipeline:p: pid {driver.pid} → 4000001",
        ]
        first, *rest = done.stderr.splitlines()
        assert first == f"pipeline:p: waiting until pid {driver.pid} has finished its batch and ends (0 s)"
        assert all(line.startswith("pipeline:p: ") for line in rest)


def test_a_restart_with_a_file_that_does_not_parse_ends_no_driver(config: Path) -> None:
    file = config.parent / "p.py"
    file.write_text("\ndef build(p:\n")
    config.write_text(f'{config.read_text()}[pipeline.p]\nfile = "p.py"\n')
    with open_stores(config, create=True) as opened:
        report = StatusReport("pipeline:p", opened.clock.now_ms(), (), {}, 1, "elsewhere")
        opened.portal.call(StatusBoard(opened.consensus, opened.rand).publish(report))
    for option in ([], ["--dry-run"]):
        error = CliRunner().invoke(app, ["pipeline", "restart", "p", *option, "-c", str(config)]).exception
        assert isinstance(error, InvalidError) and "nothing was restarted, because the pipeline file does not" in str(
            error
        )
        assert f"file={file} line=2" in str(error)


def test_a_driver_whose_successor_is_paused_is_not_waited_for(config: Path) -> None:
    command = [sys.executable, "-c", "input()", "tidemill.spark.pipeline.driver"]
    with (
        open_stores(config, create=True) as opened,
        subprocess.Popen(command, stdin=subprocess.PIPE) as driver,
        ExitStack() as ending,
    ):
        ending.callback(driver.kill)
        board, now_ms = StatusBoard(opened.consensus, opened.rand), opened.clock.now_ms()
        report = StatusReport("pipeline:p", now_ms, (), {}, driver.pid, this_process()[1])
        opened.portal.call(board.publish(report))
        supervisor = StatusTracker()
        supervisor.fail("pipeline:p", "its file does not import.", now_ms=now_ms, parked=True)
        opened.portal.call(board.publish(supervisor.report("up:node-1", now_ms)))
        eventually(lambda: is_driver(driver.pid), "the process has its command line")
        error = CliRunner().invoke(app, ["pipeline", "restart", "p", "--config", str(config)]).exception
        assert isinstance(error, InvalidError) and "a new one cannot run: process=pipeline:p error='its file" in str(
            error
        )
        driver.wait(10)


def test_a_wait_is_told_when_it_changes_and_every_few_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    clock = ManualClock()
    progress = Progress("pipeline:p", clock)
    for text, pause_s in (("a", 0), ("a", PROGRESS_INTERVAL_S), ("a", 0), ("b", 0), ("b", 0)):
        progress.print_progress(text)
        clock.advance(int(pause_s * 1000))
    said = capsys.readouterr()
    assert (said.out, said.err.splitlines()) == (
        "",
        ["pipeline:p: a (0 s)", "pipeline:p: a (5 s)", "pipeline:p: b (5 s)"],
    )
    gone = 4_000_001
    assert describe_wait(gone, ["pipeline:p"], starts=False).startswith(f"pid {gone} has ended; waiting until its sup")
    assert describe_wait(gone, ["pipeline:q"], starts=True).endswith("waiting for the first report of pipeline:q")


def test_a_dry_run_of_a_restart_names_the_drivers_and_ends_none(config: Path) -> None:
    command = [sys.executable, "-c", "input()", "tidemill.spark.pipeline.driver"]
    with (
        open_stores(config, create=True) as opened,
        subprocess.Popen(command, stdin=subprocess.PIPE) as driver,
        ExitStack() as ending,
    ):
        ending.callback(driver.kill)
        board, later_ms = StatusBoard(opened.consensus, opened.rand), opened.clock.now_ms() + 3_600_000  # never silent
        for process in ("pipeline:p", "pipeline:q"):
            report = StatusReport(process, later_ms, (), {}, driver.pid, this_process()[1])
            opened.portal.call(board.publish(report))
        restart = ["pipeline", "restart", "p", "--dry-run", "--config", str(config)]
        eventually(lambda: is_driver(driver.pid), "the process has its command line")
        said = CliRunner().invoke(app, restart).stdout.splitlines()
        assert said[0] == "dry run: restart these drivers"
        assert said[-1].split() == ["pipeline:p", str(driver.pid), "pipeline:q"]
        assert json.loads(CliRunner().invoke(app, [*restart, "--json"]).stdout) == [
            {"dry_run": True, "process": "pipeline:p", "before": driver.pid, "with": ["pipeline:q"]}
        ]
        assert driver.poll() is None


@pytest.mark.parametrize(
    ("pid", "host", "words"),
    [(1, "elsewhere", "the driver runs on another machine"), (4_000_001, this_process()[1], "the driver is gone")],
)
def test_a_driver_that_cannot_be_ended_here_is_refused_in_a_dry_run_too(
    config: Path, pid: int, host: str, words: str
) -> None:
    with open_stores(config, create=True) as opened:
        report = StatusReport("pipeline:p", opened.clock.now_ms(), (), {}, pid, host)
        opened.portal.call(StatusBoard(opened.consensus, opened.rand).publish(report))
        for option in ([], ["--dry-run"]):
            done = CliRunner().invoke(app, ["pipeline", "restart", "p", *option, "--config", str(config)])
            assert isinstance(done.exception, InvalidError) and words in str(done.exception), option
