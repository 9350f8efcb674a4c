"""Rows F601 to F609 of the table of faults: the node as a whole, with real processes."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest

from support.faults.cluster import Cluster, cluster, until
from support.objects.moto_access import start_server
from support.ports import free_address
from support.postgres import EmbeddedPostgres

AWS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}


def test_f601_a_bucket_that_is_away_at_start_is_waited_for_and_named(tmp_path: Path) -> None:
    from urllib.request import Request, urlopen

    address = free_address()
    host, port = address.split(":")
    url = f"s3://harbour/x?endpoint=http://{address}&region=us-east-1"
    with cluster(tmp_path, f'[objects]\nurl = "{url}"\n', AWS) as made:
        until(lambda: "waiting for objects" in made.get("/readyz")[1], lambda: made.get("/readyz"))
        pid = made.children()["node"]
        assert made.get("/healthz")[0] == 200
        assert made.get("/v1/shape?table=x&offset=-1")[0] == 503
        until(lambda: made.why()[1].get("exit") == 3, made.why)
        _, reported = made.why("objects@node:n1")
        assert address.split(":")[1] in reported["worst"]["reason"]
        # The bucket exists from the first answer on: moto keeps buckets in this process, for every port.
        before = free_address()
        maker = start_server(host, int(before.split(":")[1]))
        urlopen(Request(f"http://{before}/harbour", method="PUT")).close()
        maker.stop()
        server = start_server(host, int(port))
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
        exit_code, reported = made.why()
        assert exit_code == 4 and "error" in reported
        with server:
            made.ready()
            assert made.children()["node"] == pid
            made.close()


@pytest.mark.postgres
def test_f603_a_frozen_node_is_named_with_its_pid_by_its_peer_and_commands(tmp_path: Path, postgres_dsn: str) -> None:
    stores = f'[consensus]\nurl = "{postgres_dsn}"\n[objects]\nurl = "file://{tmp_path}/objects"\n'
    peer, frozen = (Cluster(tmp_path / name, stores, name=name) for name in ("n1", "n2"))
    try:
        for each in (peer, frozen):
            each.up()
        for each in (peer, frozen):
            each.ready()
        until(lambda: peer.get("/readyz") == (200, "ready\n"), lambda: peer.get("/readyz"))
        pid = frozen.children()["node"]
        holder = f"pid {pid} on {socket.gethostname()}"
        frozen.signal("node", signal.SIGSTOP)
        until(lambda: "process:node:n2: has not reported" in peer.get("/readyz")[1], lambda: peer.get("/readyz"))
        code, said = peer.get("/readyz")
        assert code == 200
        assert holder in said
        until(lambda: peer.why("process:node:n2")[0] == 3, lambda: peer.why("process:node:n2"))
        assert peer.why("process:node:n2")[1]["root"] == holder
        [row] = [row for row in peer.command("status", "--json")[1]["rows"] if row["name"] == "process:node:n2"]
        assert (row["state"], row["held_by"]) == ("blind", holder)
        frozen.signal("node", signal.SIGCONT)
        until(lambda: peer.why("process:node:n2")[0] == 0, lambda: peer.why("process:node:n2"))
        until(lambda: peer.get("/readyz") == (200, "ready\n"), lambda: peer.get("/readyz"))
    finally:
        for each in (frozen, peer):
            each.close()
