"""`tidemill up`: next to a node that runs already, and ended with Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from support.cli.cluster import create_stores
from support.cli.node import node_answering
from tidemill.base.config.config import load
from tidemill.base.errors import ConflictError
from tidemill.base.status.status import StatusReport
from tidemill.cli.cluster import up
from tidemill.cli.context import open_stores
from tidemill.cli.main import app
from tidemill.cli.run_supervised import run_supervised
from tidemill.consensus.status.board import StatusBoard


class StartedError(Exception):
    """The command would start its processes."""


@pytest.mark.parametrize("own", [True, False], ids=["this node", "another cluster"])
def test_a_node_that_runs_already_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    def start(*_: object, **__: object) -> None:
        raise StartedError

    monkeypatch.setattr(up, "run_supervised", start)
    config, pid = tmp_path / "tidemill.toml", os.getpid()
    with node_answering(200, json.dumps({"processes": {"node:node-1": pid}})) as address:
        config.write_text(f'[node]\ndata = "{tmp_path}/data"\nhttp = "{address}"\n')
        (tmp_path / "data").mkdir()
        create_stores(config)
        with open_stores(config) as opened:
            report = StatusReport("node:node-1", opened.clock.now_ms(), (), pid=pid if own else pid + 1)
            opened.portal.call(StatusBoard(opened.consensus, opened.rand).publish(report))
        error = CliRunner().invoke(app, ["up", "-c", str(config)]).exception
    if own:
        assert isinstance(error, ConflictError) and f"node=node-1 http={address} pid={pid}. See it" in str(error)
    else:
        assert isinstance(error, StartedError)


def test_ctrl_c_is_answered_before_the_processes_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tidemill.cli.run_supervised.configure_logs", lambda **_: None)
    config = tmp_path / "tidemill.toml"
    config.write_text(f'[node]\ndata = "{tmp_path}/data"\n')
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        run_supervised(load(config), "node-1", lambda *_: os.kill(os.getpid(), signal.SIGINT), pipelines=[])
    finally:
        for number, handler in handlers.items():  # a loop that ends does not restore those of a Spark session
            signal.signal(number, handler)
    assert capsys.readouterr().err == "tidemill: stopping: each process finishes its current work, for at most 20 s.\n"
