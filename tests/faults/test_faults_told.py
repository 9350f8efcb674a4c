"""Reports of a running node about itself, read by the commands of the CLI."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from support.faults.cluster import cluster, until
from tidemill.base.config.config import exposed_servers, parse


def test_doctor_knows_the_node_that_holds_its_ports(tmp_path: Path) -> None:
    with cluster(tmp_path) as made:
        made.ready()
        until(lambda: "process:node:n1" in made.marks(), made.marks)
        _, reported = made.command("doctor", "--json")
        found = {row["check"]: row for row in reported["rows"]}
        for key in ("node.http", "node.kafka"):
            assert found[key]["ok"], found[key]
            assert f"pid={made.children()['node']}" in found[key]["found"]


def test_status_shows_the_memory_of_every_process(tmp_path: Path) -> None:
    with cluster(tmp_path) as made:
        made.ready()
        until(lambda: "process:node:n1" in made.marks(), made.marks)
        _, reported = made.command("status", "--memory", "--json")
        used, _ = reported["node:n1"]["resident"]
        assert used > 1 << 20


@pytest.mark.postgres
def test_a_table_without_a_primary_key_is_skipped_and_nothing_is_done_to_it(tmp_path: Path, postgres_dsn: str) -> None:
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE keyless (a int)")
        connection.execute("CREATE TABLE keyed (a int PRIMARY KEY)")
        toml = f'[capture.shop]\ndsn = "{postgres_dsn}"\n'
        with cluster(tmp_path, toml) as made:
            made.ready()
            until(lambda: made.state("capture:shop") == "idle", made.marks)
            assert "table:shop/public.keyless" not in made.marks() and made.get("/freshz")[0] == 200
            code, listed = made.command("capture", "list", "--json")
            (keyless,) = [table for table in listed["rows"] if table["table"] == "public.keyless"]
            assert code == 0 and keyless["state"] == "skipped" and "needs a primary key" in keyless["reason"]
            assert "Add a primary key to public.keyless" in keyless["fix"]
            code, why = made.command("why", "public.keyless")
            assert code == 2 and "skipped" in str(why) and "needs a primary key" in str(why)
            connection.execute("INSERT INTO keyless VALUES (1)")
            connection.execute("UPDATE keyless SET a = 2")
            connection.execute("DELETE FROM keyless")
        published = connection.execute("SELECT tablename FROM pg_publication_tables").fetchall()
        assert published == [("keyed",)]


@pytest.mark.parametrize(
    ("http", "kafka", "found"),
    [
        ("127.0.0.1:1", "localhost:2", []),
        ("0.0.0.0:1", "127.0.0.1:2", ["node.http=0.0.0.0:1"]),
        ("[::1]:1", "example.org:2", ["node.kafka=example.org:2"]),
    ],
)
def test_what_other_machines_can_reach_is_named(http: str, kafka: str, found: list[str]) -> None:
    assert exposed_servers(parse({"node": {"http": http, "kafka": kafka}}, origin="t.toml")) == found


def test_a_node_that_serves_is_no_longer_told_as_starting(tmp_path: Path) -> None:
    with cluster(tmp_path) as made:
        made.ready()
        until(lambda: made.state("node:n1") == "idle", made.marks)
        assert made.why()[0] == 0


@pytest.mark.postgres
def test_a_captured_table_without_a_pipeline_shows_its_capture_and_the_line_to_write(
    tmp_path: Path, postgres_dsn: str
) -> None:
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE orders (id int PRIMARY KEY)")
        connection.execute("INSERT INTO orders VALUES (7)")
    line = 'p.table("orders", p.capture("shop").table("public.orders"))'
    with cluster(tmp_path, f'[capture.shop]\ndsn = "{postgres_dsn}"\n') as made:
        made.ready()
        until(lambda: made.state("capture:shop") == "idle", made.marks)
        for name in ("orders", "public.orders"):
            code, why = made.why(name)
            assert code == 0 and why["chain"][0]["name"] == "capture:shop/topics", why
            assert "no pipeline maintains it" in why["note"] and line in why["note"]
        until(lambda: "ready after" in made.said, lambda: made.said)
        assert not [each for each in made.said.splitlines() if each.startswith("{")], "log lines are in a file"
        for name in ("curl", "shell") if shutil.which("curl") else ("shell",):
            (shown,) = [each.strip() for each in made.said.splitlines() if each.strip().startswith(name)]
            pasted = shown.removeprefix(name).strip().replace("tidemill ", f"{sys.executable} -m tidemill ", 1)
            done = subprocess.run(pasted, shell=True, capture_output=True, text=True, timeout=60, env=made.environ)
            rows = ["id", "--", "7"]
            printed = done.stdout.split() == rows if name == "shell" else '"id"' in done.stdout
            assert done.returncode == 0 and printed, (pasted, done)
        code, verified = made.command("verify", "orders")
        assert code == 2 and "no pipeline maintains this table: table=orders" in verified["error"], verified
        assert line in verified["error"]
        for name in ("a.b.c", '"a'):
            code, unknown = made.why(name)
            assert code == 2 and "no such stage or table" in unknown["error"]
        code, unknown = made.why("ordres")
        assert code == 2 and "no such stage or table" in unknown["error"]
