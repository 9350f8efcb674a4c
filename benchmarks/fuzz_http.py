"""Mutated HTTP requests and where clauses against a real node that captures a real database.

    bytes       a good request with bytes changed, cut, repeated, on a raw socket
    parameters  good requests with wild values for each parameter of the shape protocol
    clauses     expressions grown at random from a grammar of types, operators, casts, literals at their limits,
                with rows of every kind inserted concurrently, so that clauses are evaluated and not only parsed
Watches: the node's pid (a restart is a failure), a bystander's row count, resident memory, the longest stall of the
loop, and that every answer is one the protocol knows.
"""

from __future__ import annotations

import json
import random
import socket
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote
from urllib.request import urlopen

import psycopg

import paths  # noqa: F401
from support.faults.cluster import Cluster, cluster, until
from support.postgres import EmbeddedPostgres

STALL_LIMIT_MS = 50.0
KNOWN = {200, 204, 304, 307, 400, 401, 404, 405, 409, 411, 413, 414, 415, 429, 431, 503}
COLUMNS = ("id", "n", "f", "t", "b", "d", "ts", "u", "a", "j")
SCHEMA = """CREATE TABLE fuzzed (id int PRIMARY KEY, n numeric, f float8, t text, b bool, d date, ts timestamptz,
 u uuid, a int[], j jsonb)"""
ROWS = (
    "1, 1.5, 'NaN', 'a', true, '2020-01-01', now(), gen_random_uuid(), '{1,NULL}', '{}'",
    "2, 'NaN', 'Infinity', E'\\\\x01\\u00e4', NULL, 'infinity', '-infinity', NULL, '{}', '[]'",
    "3, 1e100, -0.0, repeat('x', 100000), false, '4713-01-01 BC', '294276-12-31', NULL, NULL, NULL",
)
LITERALS = ("0", "1", "-1", "2147483648", "1e308", "1e30000", "'a'", "''", "NULL", "true", "'NaN'", "'{1}'", "'%'",
            "'\\'", "1.000000000000000000000000001", "'2020-01-01'", "99999999999999999999", "$1")  # fmt: skip
OPERATORS = ("=", "<>", "<", ">", "<=", ">=", "+", "-", "*", "/", "%", "^", "||", "AND", "OR", "LIKE", "ILIKE", "IN",
             "IS DISTINCT FROM", "BETWEEN", "@>", "&&", "&", "|", "#", "<<", ">>", "~",
             "OPERATOR(pg_catalog.=)")  # fmt: skip
FUNCTIONS = ("lower", "upper", "coalesce", "greatest", "concat", "length", "abs", "pg_sleep", "now", "array_length")
TYPES = ("int", "numeric", "text", "bool", "date", "timestamptz", "uuid", "int[]", "numeric(3,1)", "interval", "oid")


def expression(rand: random.Random, depth: int) -> str:
    if depth <= 0:
        return rand.choice((*COLUMNS, *LITERALS))
    a, b = expression(rand, depth - 1), expression(rand, depth - rand.randrange(1, 3))
    operator = rand.choice(OPERATORS)
    forms = (
        f"({a} {operator} {b})",
        f"({a})::{rand.choice(TYPES)}",
        f"{rand.choice(FUNCTIONS)}({a}, {b})",
        f"NOT ({a})",
        f"({a} IN ({b}, {a}))",
        f"({a} BETWEEN {b} AND {a})",
        f"{a} = ANY({b})",
        f"CASE WHEN {a} THEN {b} END",
        f"({a} IS NULL)",
        "(" * depth * 20 + a + ")" * depth * 20,
    )
    return rand.choice(forms)


def wild(rand: random.Random) -> str:
    return rand.choice(("", "-1", "0_0", "-1_-1", "99999999999999999999_0", "now", "1_", "\0", "ä" * 50, "a" * 9_000,
                        "null", "[]", "%", "true", "0_inf", "-1.5", "١٢", "$1", "public.fuzzed", '"'))  # fmt: skip


def parameters(rand: random.Random) -> str:
    good = {"table": "public.fuzzed", "offset": "-1"}
    for name in rand.sample(("table", "offset", "handle", "live", "cursor", "where", "columns", "replica", "params[1]",
                             "subset__where", "subset__limit", "subset__order_by", "log", "live_sse", "secret",
                             "params[0]", "params[99999]"), rand.randrange(1, 5)):  # fmt: skip
        good[name] = wild(rand)
    return "&".join(f"{quote(name)}={quote(value)}" for name, value in good.items())


def mutated(rand: random.Random) -> bytes:
    data = bytearray(
        b"GET /v1/shape?table=public.fuzzed&offset=-1 HTTP/1.1\r\nhost: x\r\naccept: */*\r\n"
        b"connection: close\r\ncontent-length: 0\r\n\r\n"
    )
    for _ in range(rand.randrange(1, 8)):
        place = rand.randrange(len(data))
        kind = rand.randrange(4)
        if kind == 0:
            data[place] = rand.randrange(256)
        elif kind == 1:
            del data[place : place + rand.randrange(20)]
        elif kind == 2:
            data[place:place] = bytes(data[place : place + 30]) * rand.randrange(1, 200)
        else:
            data[place:place] = rand.choice((b"\r\n", b"\0", b"transfer-encoding: chunked\r\n\r\nffffffffff\r\n", b":"))
    return bytes(data) or b"\r\n"


def ask(made: Cluster, query: str) -> int:
    try:
        with urlopen(f"http://{made.http}/v1/shape?{query}", timeout=20) as answer:
            answer.read(1 << 22)
            return int(answer.status)
    except HTTPError as error:
        error.read()
        return error.code
    except (URLError, OSError) as error:
        return -2 if "timed out" in str(error) else -1


def raw(made: Cluster, data: bytes) -> None:
    host, port = made.http.split(":")
    with suppress(OSError), socket.create_connection((host, int(port)), 5) as sock:
        sock.sendall(data)
        sock.settimeout(0.2)
        sock.recv(65_536)


def run(seconds: float, seed: int) -> dict[str, Any]:
    rand = random.Random(seed)
    directory = Path(tempfile.mkdtemp(prefix="tidemill-fuzz-http-"))
    answers: Counter[str] = Counter()
    failures: list[str] = []
    peak_bytes = 0
    with (
        EmbeddedPostgres(directory / "postgres", settings={"fsync": "off"}) as server,
        psycopg.connect(server.dsn, autocommit=True) as connection,
    ):
        connection.execute(SCHEMA)
        toml = f'[capture.db]\ndsn = "{server.dsn}"\ntables = ["public.fuzzed"]\n'
        with cluster(directory / "cluster", toml) as made:
            made.ready()
            until(lambda: ask(made, "table=public.fuzzed&offset=-1") == 200, lambda: made.said)
            pid, until_s, number = made.children()["node"], time.monotonic() + seconds, 10
            while time.monotonic() < until_s:
                turn = rand.randrange(4)
                if turn == 0:
                    raw(made, mutated(rand))
                    answers["raw"] += 1
                elif turn == 1:
                    answers[f"parameters {_known(ask(made, parameters(rand)), failures)}"] += 1
                else:
                    clause = expression(rand, rand.randrange(1, 6))[:8_000]
                    query = f"table=public.fuzzed&offset=-1&where={quote(clause)}&params%5B1%5D=1"
                    status = _known(ask(made, query), failures, clause)
                    answers[f"clause {status}"] += 1
                if rand.random() < 0.1:
                    number += 1
                    row = rand.choice(ROWS)
                    connection.execute(f"INSERT INTO fuzzed VALUES ({number}{row[1:]})".encode())
                    connection.execute(b"DELETE FROM fuzzed WHERE id = %s", (number - 40,))
                if made.children().get("node") != pid:
                    failures.append("the node was restarted")
                    pid = made.children().get("node", 0)
                with suppress(OSError):
                    peak_bytes = max(peak_bytes, int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096)
            until(lambda: made.get("/readyz")[0] == 200, lambda: made.get("/readyz"))
            facts = json.loads(made.get("/api/status")[1])["facts"].get("node:n1", {})
            loop = facts.get("loop", {})
            stall_ms, memory = loop.get("longest_stall_cpu_ms", -1), facts.get("memory")
            marks = made.marks()
            capture = marks.get("capture:db", {})
            until(lambda: made.state("capture:db") in ("idle", "moving"), made.marks)
    if stall_ms > STALL_LIMIT_MS:
        failures.append(f"the loop stood still for {stall_ms} ms")
    return {
        "answers": dict(answers.most_common()),
        "rows_inserted": number - 10,
        "capture": capture.get("state"),
        "peak_mib": peak_bytes >> 20,
        "loop": loop,
        "memory": memory,
        "failures": sorted(set(failures))[:40],
        "logs": str(directory),
    }


def _known(status: int, failures: list[str], clause: str = "") -> int:
    if status not in KNOWN:
        failures.append(f"answer {status} {clause[:300]}".strip())
    return status
