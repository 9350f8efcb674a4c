"""Bad input: one sentence that names the key or object and the fix, exit 2, nothing half-made left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from support.cli.cluster import create_stores
from support.ports import free_port
from support.postgres import EmbeddedPostgres
from support.waiting import eventually
from tidemill.base.status.status import StatusReport
from tidemill.cli.context import open_stores
from tidemill.consensus.status.board import StatusBoard
from tidemill.metastore.catalogue import PipelineRow

TIMEOUT_S = 60


def tidemill(*arguments: str, cwd: Path, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tidemill", *arguments]
    environ = {**os.environ, "PYTHONFAULTHANDLER": "1", **(environ or {})}
    with subprocess.Popen(
        command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ
    ) as process:
        try:
            out, errors = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            for pid in [*map(int, children), process.pid]:
                os.kill(pid, signal.SIGABRT)  # it says where each of its threads is
            out, errors = process.communicate()
            logs = "".join(f"{log}:\n{log.read_text()}" for log in cwd.rglob("*.log"))
            raise AssertionError(f"it does not end:\n{out}\n{errors}\n{logs}") from None
    if process.returncode < 0:
        raise AssertionError(f"killed by {signal.Signals(-process.returncode).name}:\n{out}\n{errors}")
    return subprocess.CompletedProcess(command, process.returncode, out, errors)


def refused(done: subprocess.CompletedProcess[str], *named: str) -> str:
    """Return the sentence on stderr; log lines before it are structured."""
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    for text in named:
        assert text in last
    return last


def configuration(tmp_path: Path, more: str = "", **node: str) -> Path:
    values = {"http": f"127.0.0.1:{free_port()}", "kafka": f"127.0.0.1:{free_port()}", "data": str(tmp_path / "data")}
    lines = "\n".join(f'{key} = "{value}"' for key, value in {**values, **node}.items())
    path = tmp_path / "tidemill.toml"
    path.write_text(f"[node]\n{lines}\n{more}\n")
    return path


def capture(dsn: str, tables: str = "public.*") -> str:
    return f'[capture.shop]\ndsn = "{dsn}"\ntables = ["{tables}"]'


def test_a_malformed_key_is_named(tmp_path: Path) -> None:
    path = configuration(tmp_path, "[kafka]\nautocreate = true")
    refused(
        tidemill("status", "--config", str(path), cwd=tmp_path), "kafka.autocreate", "Write kafka.auto_create_topics"
    )
    assert not (tmp_path / "data").exists()


def test_a_pipeline_that_runs_is_not_deleted_and_one_that_was_stopped_is(tmp_path: Path) -> None:
    path = configuration(tmp_path)
    create_stores(path)
    arguments = ("pipeline", "delete", "p", "--yes", "--config", str(path))
    refused(tidemill(*arguments, cwd=tmp_path), "no such pipeline: name=p")
    refused(tidemill(*arguments, "--dry-run", cwd=tmp_path), "no such pipeline: name=p")
    with open_stores(path, create=True) as opened:
        opened.portal.call(opened.catalogue.put(PipelineRow("p", {"t": "topic:clicks"})))
        board, now_ms = StatusBoard(opened.consensus, opened.rand), opened.clock.now_ms()
        opened.portal.call(board.publish(StatusReport("pipeline:p:2", now_ms + 3_000_000, (), pid=7, host="h")))
        refused(tidemill(*arguments, cwd=tmp_path), "the pipeline runs", "process=pipeline:p:2 pid=7 host=h")
        opened.portal.call(board.publish(StatusReport("pipeline:p:2", now_ms - 60_000, ())))
        done = tidemill(*arguments, cwd=tmp_path)
        assert (done.returncode, done.stdout.strip()) == (0, "deleted p; its tables are kept"), done.stderr
        assert opened.portal.call(opened.catalogue.list(PipelineRow)) == []


def test_an_unknown_topic_is_named(tmp_path: Path) -> None:
    path = configuration(tmp_path)
    create_stores(path)
    refused(
        tidemill("topic", "describe", "nothing", "--config", str(path), cwd=tmp_path), "topic=nothing", "topic list"
    )


def test_a_topic_in_use_is_deleted_only_when_told_twice(tmp_path: Path) -> None:
    path = configuration(tmp_path)
    assert tidemill("topic", "create", "clicks", "--config", str(path), cwd=tmp_path).returncode == 0
    with open_stores(path, create=True) as opened:
        opened.portal.call(opened.catalogue.put(PipelineRow("keep", {"clicks": "topic:clicks"})))
    delete = ("topic", "delete", "clicks", "--yes", "--config", str(path))
    refused(tidemill(*delete, cwd=tmp_path), "by=pipeline:keep", "--force")
    assert tidemill("topic", "describe", "clicks", "--config", str(path), cwd=tmp_path).returncode == 0
    assert tidemill(*delete, "--force", cwd=tmp_path).returncode == 0
    refused(tidemill(*delete, cwd=tmp_path), "topic=clicks")


@pytest.mark.parametrize("key", ["http", "kafka"])
def test_a_taken_port_names_the_key(tmp_path: Path, key: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        path = configuration(tmp_path, **{key: f"127.0.0.1:{taken.getsockname()[1]}"})
        refused(tidemill("up", "--config", str(path), cwd=tmp_path), f"node.{key}")


def test_a_file_where_the_data_directory_should_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = configuration(tmp_path, data=str(tmp_path / "file" / "data"))
    refused(tidemill("up", "--config", str(path), cwd=tmp_path), "node.data")


def test_a_scheme_nobody_knows_is_named(tmp_path: Path) -> None:
    path = configuration(tmp_path, '[objects]\nurl = "ftp://bucket"')
    refused(tidemill("up", "--config", str(path), cwd=tmp_path), "objects.url")


def listening(port: int) -> None:
    def connects() -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
        return False

    eventually(connects, "the node does not listen")


def warned(path: Path, *named: str) -> str:
    """Return the warning that `up` prints in the foreground for a capture that cannot run yet. The node starts anyway
    and is then stopped.
    """
    command = [sys.executable, "-m", "tidemill", "up", "--config", str(path)]
    with subprocess.Popen(command, cwd=path.parent, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as up:
        assert up.stderr is not None
        killing = threading.Timer(TIMEOUT_S, up.kill)
        killing.start()
        said = []
        for line in up.stderr:
            said.append(line)
            if line.startswith("tidemill: node"):  # the last line before the node starts
                listening(int(line.split("http ")[1].split()[0].rpartition(":")[2]))
                up.send_signal(signal.SIGINT)
        killing.cancel()
    warnings = [line for line in said if line.startswith("tidemill: WARNING: capture shop: ")]
    assert len(warnings) == 1, said
    for text in named:
        assert text in warnings[0]
    whole = "".join(said)
    assert "Traceback" not in whole
    return whole


@pytest.mark.postgres
def test_a_dsn_that_leads_nowhere_is_named_without_its_password(tmp_path: Path) -> None:
    path = configuration(tmp_path, capture(f"postgresql://u:secret@127.0.0.1:{free_port()}/shop"))
    assert "secret" not in warned(path, "DSN")
    done = tidemill("doctor", "--config", str(path), cwd=tmp_path)
    assert done.returncode == 1 and "DSN" in done.stdout
    assert "secret" not in done.stdout + done.stderr


@pytest.mark.postgres
def test_a_server_without_logical_wal_is_told_the_setting(tmp_path: Path) -> None:
    with EmbeddedPostgres(tmp_path / "pg", settings={"wal_level": "replica", "fsync": "off"}) as server:
        path = configuration(tmp_path, capture(server.dsn))
        warned(path, "wal_level", "logical")
        done = tidemill("doctor", "--config", str(path), cwd=tmp_path)
        assert done.returncode == 1 and "wal_level" in done.stdout and "logical" in done.stdout


def test_a_bucket_without_rights_is_named(tmp_path: Path) -> None:
    path = configuration(tmp_path, '[objects]\nurl = "s3://none?endpoint=http://127.0.0.1:1&region=us-east-1"')
    environ = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y"}
    done = tidemill("doctor", "--config", str(path), "--json", cwd=tmp_path, environ=environ)
    assert done.returncode == 1
    checks = {check["check"]: check for check in json.loads(done.stdout.splitlines()[-1])}
    failed = [check for name, check in checks.items() if name.startswith("objects") and not check["ok"]]
    assert failed and all(check["fix"] for check in failed)


def test_doctor_passes_on_a_fresh_configuration_and_says_what_it_saw(tmp_path: Path) -> None:
    done = tidemill("doctor", "--config", str(configuration(tmp_path)), cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    for check in ("python", "java", "bash", "disk", "node.http", "node.kafka", "objects", "consensus.url"):
        assert f"ok   {check}" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("run", "nope"), "no such pipeline in the configuration: pipeline=nope. Known: p"),
        (("run", "p", "--conf", "executor.memory=2g"), "--conf"),
        (("run", "p", "--driver-memory", "lots"), "--driver-memory"),
        (("run", "p", "--label", "B!"), "--label"),
        (("run", "p", "--label", "1_2"), "with at least one letter"),
        (("describe", "nope"), "no such pipeline: pipeline=nope"),
        (("restart", "p"), "no such driver is reporting: pipeline=p"),
    ],
)
def test_a_pipeline_or_an_option_that_is_not_there_is_one_sentence(
    tmp_path: Path, arguments: tuple[str, ...], named: str
) -> None:
    path = configuration(tmp_path, '[pipeline.p]\nfile = "p.py"\n')
    create_stores(path)
    refused(tidemill("pipeline", *arguments, "--config", str(path), cwd=tmp_path), named)


def test_a_pipeline_of_the_configuration_is_listed_before_it_ever_ran(tmp_path: Path) -> None:
    path = configuration(tmp_path, '[pipeline.p]\nfile = "p.py"\n')
    create_stores(path)
    done = tidemill("pipeline", "list", "--json", "--config", str(path), cwd=tmp_path)
    (row,) = json.loads(done.stdout)
    assert row == {
        "pipeline": "p", "file": str(tmp_path / "p.py"), "running": 0, "silent": 0, "parked": 0, "tables": [],
        "lag_ms": None, "dead_letters": 0,
    }  # fmt: skip
