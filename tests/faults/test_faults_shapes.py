"""Rows F101, F104 and F106 of the table of faults on a real node that captures a real database."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import urlopen

import psycopg
import pytest

from support.faults.cluster import Cluster, cluster, until

pytestmark = pytest.mark.postgres

SCHEMA = """CREATE TABLE item (id int PRIMARY KEY, grp int NOT NULL, weight numeric NOT NULL, note text);
INSERT INTO item SELECT n, n % 300, 1, repeat('a', 50) FROM generate_series(1, 3000) n"""


def ask(made: Cluster, where: str) -> tuple[int, str]:
    return made.get(f"/v1/shape?table=public.item&offset=-1&where={quote(where)}")


def facts(made: Cluster) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(made.get("/api/status")[1])["facts"]["node:n1"]["shapes"]
    return found


def rows(made: Cluster, where: str) -> int:
    """Count the inserts in the base and the log of the shape under its present handle."""
    query, found = "offset=-1", 0
    while True:
        url = f"http://{made.http}/v1/shape?table=public.item&where={quote(where)}&{query}"
        with urlopen(url, timeout=10) as answer:
            found += sum("key" in item for item in json.load(answer))
            if "electric-up-to-date" in answer.headers:
                return found
            query = f"offset={answer.headers['electric-offset']}&handle={answer.headers['electric-handle']}"


def test_f101_anonymous_requests_end_nothing_but_their_own_shapes(tmp_path: Path, postgres_dsn: str) -> None:
    """Clients send failing clauses, more shapes than the limit, and expensive ones, while rows are written. The node,
    its capture and the table continue, and status raises no alarm about shapes that failed through their own clients.
    """
    toml = f'[capture.db]\ndsn = "{postgres_dsn}"\ntables = ["public.item"]\n'
    toml += "[shapes]\nmax_shapes = 250\nbacklog_s = 2\n"
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        connection.execute(SCHEMA)
        with cluster(tmp_path, toml) as made:
            made.ready()
            until(lambda: ask(made, "id = 1")[0] == 200, lambda: (ask(made, "id = 1"), made.said))
            pid = made.children()["node"]
            assert ask(made, "1e30000/id > 0")[0] == 400
            assert ask(made, "1 / (weight - 1) > 0")[0] == 400
            assert ask(made, "10 / weight < 100")[0] == 200
            for n in range(220):
                assert ask(made, f"grp = {n}")[0] == 200
            dear = " AND ".join(f"note LIKE '%a{n}%b' IS NOT NULL" for n in range(150))
            assert ask(made, dear)[0] == 200
            assert made.get("/v1/health") == (200, '{"status":"active"}')
            connection.execute("INSERT INTO item VALUES (9000, 7, 0, 'poison')")
            more = "INSERT INTO item SELECT n, n % 300, 1, repeat('a', 50) FROM generate_series(10001, 20000) n"
            connection.execute(more)
            until(lambda: ask(made, "10 / weight < 100")[0] == 400)
            (count,) = connection.execute("SELECT count(*) FROM item WHERE grp = 7").fetchone() or (0,)
            until(lambda: rows(made, "grp = 7") == count, lambda: rows(made, "grp = 7"))
            until(lambda: made.state("capture:db") == "idle", made.marks)
            for n in range(220, 400):
                status, said = ask(made, f"grp = {n}")
                assert status == 200 or "too many shapes on this node" in said
            reported = facts(made)
            assert reported["shapes"] <= 250
            assert reported["evicted_idle"] == 0
            assert reported["memory_bytes"] < reported["memory_limit_bytes"]
            assert made.children()["node"] == pid
            names = [name for name in made.marks() if name.startswith("shape")]
            assert names == ["shapes:db"], "one mark for all of them"
            until(lambda: made.why()[0] == 0, made.why)
