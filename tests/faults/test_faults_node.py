"""Rows F601 to F609 of the table of faults: the node as a whole, with real processes."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest
from cluster import cluster, until

from tidemill.cli.demo.ports import free_address
from tidemill.cli.demo.postgres import EmbeddedPostgres

AWS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}


def test_f601_a_bucket_that_is_away_at_start_is_waited_for_and_named(tmp_path: Path) -> None:
    from urllib.request import Request, urlopen

    from moto.server import ThreadedMotoServer

    address = free_address()
    host, port = address.split(":")
    url = f"s3://harbour/x?endpoint=http://{address}&region=us-east-1"
    with cluster(tmp_path, f'[objects]\nurl = "{url}"\n', AWS) as made:
        until(lambda: "waiting for objects" in made.get("/readyz")[1], lambda: made.get("/readyz"))
        pid = made.children()["node"]
        assert made.get("/healthz")[0] == 200
        assert made.get("/v1/shape?table=x&offset=-1")[0] == 503
        until(lambda: made.why()[1].get("exit") == 2, made.why)
        _, told = made.why("objects@node:n1")
        assert address.split(":")[1] in told["worst"]["reason"]
        # Its bucket is there from its first answer on: what both are kept in is this process's, whatever the port.
        before = free_address()
        maker = ThreadedMotoServer(host, int(before.split(":")[1]), verbose=False)
        maker.start()
        urlopen(Request(f"http://{before}/harbour", method="PUT")).close()
        maker.stop()
        server = ThreadedMotoServer(host, int(port), verbose=False)
        server.start()
        try:
            made.ready()
            assert made.children()["node"] == pid
            until(lambda: made.state("objects@node:n1") == "idle", made.marks)
        finally:
            made.close()
            server.stop()


@pytest.mark.postgres
def test_f602_consensus_that_is_away_at_start_is_waited_for_and_named(tmp_path: Path) -> None:
    server = EmbeddedPostgres(tmp_path / "consensus", settings={"fsync": "off"})
    with server:
        dsn = server.dsn
    with cluster(tmp_path, f'[consensus]\nurl = "{dsn}"\n') as made:
        until(lambda: "waiting for consensus" in made.get("/readyz")[1], lambda: made.get("/readyz"))
        pid = made.children()["node"]
        assert made.get("/api/status")[0] == 503
        exit_code, told = made.why()
        assert exit_code == 2 and "error" in told
        with server:
            made.ready()
            assert made.children()["node"] == pid
            made.close()


@pytest.mark.postgres
def test_f603_a_frozen_node_is_named_with_its_pid(tmp_path: Path, postgres_dsn: str) -> None:
    with cluster(tmp_path, f'[consensus]\nurl = "{postgres_dsn}"\n') as made:
        made.ready()
        pid = made.children()["node"]
        until(lambda: "process:node:n1" in made.marks(), made.marks)
        made.signal("node", signal.SIGSTOP)
        until(lambda: made.why("process:node:n1")[0] == 2, lambda: made.why("process:node:n1"))
        _, told = made.why("process:node:n1")
        assert told["root"] == f"pid {pid} on {socket.gethostname()}"
        made.signal("node", signal.SIGCONT)
        until(lambda: made.why("process:node:n1")[0] == 0, lambda: made.why("process:node:n1"))
