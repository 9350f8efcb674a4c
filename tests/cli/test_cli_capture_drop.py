"""`capture drop` next to the nodes of its cluster."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from support.cli.cluster import Cluster
from tidemill.base.errors import ConflictError, MissingError
from tidemill.base.status.status import StageStatus, StatusReport, this_process
from tidemill.cli.context import open_stores
from tidemill.cli.main import app
from tidemill.consensus.status.board import StatusBoard

HERE, GONE = this_process()[1], 4_000_001


@pytest.mark.parametrize(
    ("pid", "host", "ago_ms", "left", "supervised", "running"),
    [
        (os.getpid(), HERE, -600_000, False, False, True),
        (GONE, "elsewhere", -600_000, False, False, True),
        (GONE, HERE, -600_000, False, False, False),
        (GONE, HERE, -600_000, False, True, True),
        (os.getpid(), HERE, 60_000, False, False, False),
        (os.getpid(), HERE, -600_000, True, False, False),
    ],
    ids=["live", "live elsewhere", "dead", "restarted", "silent", "left"],
)
def test_a_capture_is_not_dropped_while_a_node_would_continue_it(
    tmp_path: Path, pid: int, host: str, ago_ms: int, left: bool, supervised: bool, running: bool
) -> None:
    cluster = Cluster(tmp_path)
    with open_stores(cluster.config) as opened:
        marks = (StageStatus("capture:shop", 1, 1),)
        report = StatusReport("node:n", opened.clock.now_ms() - ago_ms, marks, pid=pid, host=host, left=left)
        board, later_ms = StatusBoard(opened.consensus, opened.rand), opened.clock.now_ms() + 600_000
        opened.portal.call(board.publish(report))
        if supervised:
            killed = StageStatus("node:n", 0, 1, error="node killed by SIGKILL")
            opened.portal.call(board.publish(StatusReport("up", later_ms, (killed,), pid=os.getpid(), host=HERE)))
    for option in ("--dry-run", "--force"):
        for capture, refused in (("shop", running), ("other", False)):
            command = ["capture", "drop", capture, "--dsn", "postgresql:///x", option, "-c", str(cluster.config)]
            error = CliRunner().invoke(app, command).exception
            assert isinstance(error, ConflictError if refused else MissingError), error
            if refused:
                assert f"running: capture=shop node=n pid={pid} host={host}. Stop its node (Ctrl-C" in str(error)
