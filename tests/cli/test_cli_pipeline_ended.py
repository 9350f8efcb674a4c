"""`tidemill pipeline` without a running driver: a driver that was stopped intentionally is not reported as missing."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from support.waiting import DEADLINE_S
from tidemill.base.errors import InvalidError
from tidemill.base.limits import STATUS_BLIND_AFTER_MS
from tidemill.base.status.status import StatusReport, this_process
from tidemill.cli.context import open_stores
from tidemill.cli.main import app
from tidemill.consensus.status.board import StatusBoard
from tidemill.metastore.catalogue import PipelineRow


def marks(config: Path) -> set[str]:
    done = CliRunner().invoke(app, ["status", "--json", "--config", str(config)])
    return {row["name"] for row in json.loads(done.stdout.splitlines()[-1])}


def cluster(directory: Path) -> Path:
    config = directory / "tidemill.toml"
    config.write_text(f'[node]\ndata = "{directory}/data"\n[pipeline.shop]\nfile = "shop.py"\n')
    (directory / "data").mkdir()
    return config


def test_a_pipeline_that_was_given_up_takes_its_silent_drivers_from_the_status(tmp_path: Path) -> None:
    config = cluster(tmp_path)
    delete = ["pipeline", "delete", "shop", "--yes", "--json", "--config", str(config)]
    with open_stores(config, create=True) as opened:
        board, now_ms = StatusBoard(opened.consensus, opened.rand), opened.clock.now_ms()
        silent_ms = now_ms - 2 * STATUS_BLIND_AFTER_MS
        opened.portal.call(opened.catalogue.put(PipelineRow("shop", {}, "")))
        for process in ("shop", "shop:2", "shopping"):
            opened.portal.call(board.publish(StatusReport(f"pipeline:{process}", silent_ms, ())))
        opened.portal.call(board.publish(StatusReport("pipeline:shop:3", now_ms, (), {}, 7, "there")))
        with pytest.raises(InvalidError, match="pid=7 host=there"):
            raise CliRunner().invoke(app, delete).exception or AssertionError("it was deleted while it ran")
        opened.portal.call(board.drop_report("pipeline:shop:3"))
        assert marks(config) == {"process:pipeline:shop", "process:pipeline:shop:2", "process:pipeline:shopping"}
        assert CliRunner().invoke(app, delete).exit_code == 0
        assert marks(config) == {"process:pipeline:shopping"}
        assert opened.portal.call(opened.catalogue.get(PipelineRow, "shop")) is None


def test_drivers_that_were_scaled_away_after_a_crash_are_not_missed(tmp_path: Path) -> None:
    """Their supervisor was killed and restarted with fewer instances: here with none, while a peer keeps working."""
    config = cluster(tmp_path)
    run = [sys.executable, "-m", "tidemill", "pipeline", "run", "shop", "--label", "b", "--instances", "0"]
    host = this_process()[1]
    with open_stores(config, create=True) as opened:
        board = StatusBoard(opened.consensus, opened.rand)
        silent_ms = opened.clock.now_ms() - 2 * STATUS_BLIND_AFTER_MS
        with subprocess.Popen(["true"]) as dead:
            dead.wait()
        for process, at_ms in (("shop:b", silent_ms), ("shop:b-2", silent_ms), ("shop:c", silent_ms)):
            opened.portal.call(board.publish(StatusReport(f"pipeline:{process}", at_ms, (), {}, dead.pid, host)))
        with subprocess.Popen([*run, "--config", str(config)], stderr=subprocess.PIPE) as other:
            clock, left = opened.clock, {""}
            until_s = clock.monotonic_s() + 60
            while left != {"pipeline:shop", "pipeline:shop:c"} and clock.monotonic_s() < until_s:
                opened.portal.call(board.publish(StatusReport("pipeline:shop", clock.now_ms(), ())))
                left = {report.process for report in opened.portal.call(board.reports())}
                opened.portal.call(asyncio.sleep(0.2))
            other.terminate()
            assert (other.wait(DEADLINE_S), left) == (0, {"pipeline:shop", "pipeline:shop:c"})
