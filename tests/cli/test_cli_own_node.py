"""Commands recognise the node of their configuration at its address, however its HTTP server is protected."""

from __future__ import annotations

import json
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from support.cli.cluster import create_stores
from support.cli.node import node_answering, server_sending
from support.cli.process import run_tidemill
from support.kafka.security import Authority
from tidemill.base.config.config import Config, load
from tidemill.base.errors import TidemillError
from tidemill.base.status.status import StatusReport
from tidemill.cli.cluster import doctor
from tidemill.cli.cluster.own_node import own_node_pid
from tidemill.cli.context import open_stores
from tidemill.consensus.status.board import StatusBoard

ALERT = b"\x15\x03\x03\x00\x02\x02\x46"
"""Answer of a TLS server to a request without TLS."""

ANSWERS: dict[str, Callable[[], AbstractContextManager[str]]] = {
    "requires a token": lambda: node_answering(401, '{"message": "authentication is required"}'),
    "speaks TLS": lambda: server_sending(ALERT),
    "ends connections": lambda: server_sending(b""),
    "is no JSON": lambda: node_answering(200, "<html>"),
}


@pytest.fixture
def other_pid() -> Iterator[int]:
    """Yield the pid of a process that runs until the end of the test."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process.pid
        process.communicate(b"\n")


def configured(directory: Path, address: str, more: str = "") -> Config:
    path = directory / "tidemill.toml"
    path.write_text(f'[node]\ndata = "{directory}/data"\nhttp = "{address}"\n{more}')
    (directory / "data").mkdir(exist_ok=True)
    create_stores(path)
    return load(path)


def report(directory: Path, pid: int, *, host: str = "", left: bool = False) -> None:
    """Publish a report of the node."""
    with open_stores(directory / "tidemill.toml") as opened:
        said = StatusReport(
            "node:node-1", opened.clock.now_ms(), (), pid=pid, host=host or socket.gethostname(), left=left
        )
        opened.portal.call(StatusBoard(opened.consensus, opened.rand).publish(said))


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_node_that_does_not_say_who_it_is_is_known_by_its_report(tmp_path: Path, other_pid: int, answer: str) -> None:
    with ANSWERS[answer]() as address:
        config = configured(tmp_path, address)
        with pytest.raises(TidemillError, match="cannot be bound"):
            doctor._check_port(config, address, "node.http")
        report(tmp_path, other_pid)
        assert doctor._check_port(config, address, "node.http").endswith(f"which is running: pid={other_pid}")
        done = run_tidemill("up", cwd=tmp_path)
        assert done.exit_code == 2 and "this node is running already" in done.errors, done
        for others in ({"host": "elsewhere"}, {"left": True}):
            report(tmp_path, other_pid, **others)
            assert own_node_pid(config) == 0, others
        report(tmp_path, os.getpid())  # the pid of an earlier process, in a container that was restarted
        assert own_node_pid(config) == 0


def test_the_report_of_a_process_that_ended_is_of_no_running_node(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with node_answering(401, "") as address:
        config = configured(tmp_path, address)
        report(tmp_path, ended.pid)
        assert own_node_pid(config) == 0


def test_a_node_is_known_over_tls_with_a_certificate_that_this_machine_does_not_trust(tmp_path: Path) -> None:
    certificate, key = Authority(tmp_path / "ca").server()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    more = f'[http]\ntls = true\n[security.tls]\ncertificate = "{certificate}"\nkey = "{key}"\n'
    with node_answering(200, json.dumps({"processes": {"node:node-1": 123}}), context) as address:
        config = configured(tmp_path, address, more)
        assert own_node_pid(config) == 0
        report(tmp_path, 123, host="h")
        assert own_node_pid(config) == 123


def test_requests_to_a_node_do_not_use_the_proxy_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    proxy = {"http_proxy": "http://127.0.0.1:1", "https_proxy": "http://127.0.0.1:1"}
    for name, value in proxy.items():
        monkeypatch.setenv(name, value)
    with node_answering(200, json.dumps({"processes": {"node:node-1": 123}})) as address:
        config = configured(tmp_path, address)
        report(tmp_path, 123, host="h")
        assert own_node_pid(config) == 123
    with node_answering(200, "[]") as address:
        configured(tmp_path, address)
        done = run_tidemill("shape list", cwd=tmp_path)
    assert (done.exit_code, done.output) == (0, "no shapes\n"), done
