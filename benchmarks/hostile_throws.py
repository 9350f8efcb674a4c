"""The throws of `./dev bench hostile`: each is a fault of one unit that reaches a running cluster from outside.

A throw takes a `World`, does its harm within some seconds and puts back what it changed outside the cluster (its
transactions, its sockets, a stopped process), never anything inside: from that the cluster must recover.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import struct
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from urllib.error import HTTPError, URLError
from urllib.parse import quote
from urllib.request import urlopen

import msgspec
import psycopg

from tidemill.topics.batch import Record, encode_batch

HTTP_TIMEOUT_S = 10.0


class World(msgspec.Struct):
    """Addresses of the cluster, and what the throws must tell the bench for its final sums."""

    http: list[str]
    kafka: list[str]
    dsn: str
    rand: random.Random
    driver_pid: Callable[[], int | None]
    poison_records: int = 0
    said: list[str] = []


class Throw(msgspec.Struct, frozen=True):
    name: str
    unit: str
    run: Callable[[World], None]


def get(address: str, path: str) -> tuple[int, bytes]:
    try:
        with urlopen(f"http://{address}{path}", timeout=HTTP_TIMEOUT_S) as answer:
            return int(answer.status), answer.read(1 << 20)
    except HTTPError as error:
        return error.code, b""
    except (URLError, OSError):
        return 0, b""


# shapes and HTTP ------------------------------------------------------------------------------------

WHERES = (
    "1e30000/(o_id - o_id) > 0",
    "1e30000/o_id > 0",
    "o_id OPERATOR(evil.=) 1",
    "(" * 2_000 + "o_id = 1" + ")" * 2_000,
    " OR ".join(f"o_id = {n}" for n in range(5_000)),
    "o_id / 0 = 1",
    "status LIKE '" + "%a" * 500 + "'",
    "o_id::numeric ^ 100000 > 1",
    "pg_sleep(10) IS NULL",
    "o_id = ANY(ARRAY[" + ",".join("1" for _ in range(20_000)) + "])",
)


def bad_where(world: World) -> None:
    where = world.rand.choice(WHERES)
    get(world.rand.choice(world.http), f"/v1/shape?table=public.orders&offset=-1&where={quote(where)}"[:60_000])


def many_shapes(world: World) -> None:
    for number in range(60):
        clause = quote(f"c_id = {world.rand.randrange(1_000_000)} OR o_id = {number}")
        get(world.rand.choice(world.http), f"/v1/shape?table=public.orders&offset=-1&where={clause}")


def wild_http(world: World) -> None:
    host, port = world.rand.choice(world.http).split(":")
    requests = (
        b"GET / HTTP/1.1\r\n" + b"x-h: " + b"a" * 100_000 + b"\r\n\r\n",
        b"GET /v1/shape?" + b"p=" * 50_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"POST /v1/shape HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n{",
        bytes(world.rand.randrange(256) for _ in range(4_096)),
        b"GET /v1/shape?table=%00%ff&offset=-1 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /v1/shape?table=public.orders&offset=9999999999999999999999_0&handle=x HTTP/1.1\r\nhost: x\r\n\r\n",
    )
    with socket.create_connection((host, int(port)), HTTP_TIMEOUT_S) as sock, suppress(OSError):
        sock.sendall(world.rand.choice(requests))
        sock.settimeout(1)
        sock.recv(65_536)


def silent_http_connections(world: World) -> None:
    host, port = world.rand.choice(world.http).split(":")
    with ExitStack() as held:
        for _ in range(300):
            with suppress(OSError):
                held.enter_context(socket.create_connection((host, int(port)), 2)).sendall(b"GET /v1/sh")
        time.sleep(2)


# Kafka ----------------------------------------------------------------------------------------------


def _kafka(world: World) -> socket.socket:
    host, port = world.rand.choice(world.kafka).split(":")
    return socket.create_connection((host, int(port)), HTTP_TIMEOUT_S)


def _produce(topic: str, batch: bytes) -> bytes:
    body = b"\xff\xff" + struct.pack(">hii", -1, 5_000, 1) + struct.pack(">h", len(topic)) + topic.encode()
    body += struct.pack(">iii", 1, 0, len(batch)) + batch
    head = struct.pack(">hhih", 0, 7, 1, 1) + b"h"
    return struct.pack(">i", len(head) + len(body)) + head + body


def _send(world: World, data: bytes, wait_s: float = 2.0) -> None:
    with _kafka(world) as sock, suppress(OSError):
        sock.sendall(data)
        sock.settimeout(wait_s)
        sock.recv(65_536)


def garbage_frames(world: World) -> None:
    for _ in range(20):
        noise = bytes(world.rand.randrange(256) for _ in range(world.rand.randrange(4, 400)))
        _send(world, struct.pack(">i", len(noise)) + noise, 0.2)


def huge_frames(world: World) -> None:
    with ExitStack() as held:
        for _ in range(14):
            with suppress(OSError):
                sock = held.enter_context(_kafka(world))
                sock.sendall(struct.pack(">i", 99 << 20))
                sock.sendall(b"\0" * (4 << 20))
        time.sleep(2)


def silent_kafka_connections(world: World) -> None:
    with ExitStack() as held:
        for _ in range(400):
            with suppress(OSError):
                held.enter_context(_kafka(world))
        time.sleep(2)


def forged_batches(world: World) -> None:
    good = encode_batch([Record(b"k", b"v", timestamp_ms=1)])
    for _ in range(20):
        forged = bytearray(good)
        for _ in range(3):
            forged[world.rand.randrange(len(forged))] = world.rand.randrange(256)
        if world.rand.random() < 0.5:
            forged[17:21] = struct.pack(">I", _crc(bytes(forged[21:])))
        _send(world, _produce("hostile", bytes(forged)), 1)


def bombs(world: World) -> None:
    bomb = encode_batch([Record(b"k", b"\0" * (64 << 20), timestamp_ms=1)], compression="zstd")
    _send(world, _produce("hostile", bomb), 5)


def _crc(data: bytes) -> int:
    import crc32c

    return crc32c.crc32c(data)


POISON = (
    b'{"click_id": "x", "z": ' + b"[" * 100_000 + b"}",
    b'{"click_id": "y", "at_ms": 1e400}',
    b"\xff\xfe\x00",
    b'{"click_id": null}',
    b'{"click_id": "z", "product_id": 99999999999999999999999999}',
    b"[" * 50_000,
)


def poison_records(world: World) -> None:
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": ",".join(world.kafka), "log_level": 0})
    delivered: list[object] = []
    for value in world.rand.sample(POISON, 3):
        producer.produce("clicks", value, on_delivery=lambda error, _: delivered.append(error))
    producer.flush(60)
    # Counted when acknowledged: each must be exactly one dead letter at the end.
    world.poison_records += sum(error is None for error in delivered)
    world.said.extend(str(error) for error in delivered if error is not None)


def old_offsets_by_time(world: World) -> None:
    body = struct.pack(">ib", -1, 0) + struct.pack(">i", 1) + struct.pack(">h", 6) + b"clicks"
    body += struct.pack(">i", 4) + b"".join(struct.pack(">iq", partition, 1) for partition in range(4))
    head = struct.pack(">hhih", 2, 2, 1, 1) + b"h"
    _send(world, struct.pack(">i", len(head) + len(body)) + head + body, 5)


# Postgres -------------------------------------------------------------------------------------------


def _sql(world: World, *statements: str) -> None:
    with psycopg.connect(world.dsn, autocommit=True, connect_timeout=5) as connection:
        for statement in statements:
            connection.execute(statement.encode())


def odd_tables(world: World) -> None:
    name = f'hostile."{world.rand.choice(["ä ö/ü", "a.b", "x" * 60, "DROP", "semi;colon"])}{world.rand.randrange(99)}"'
    _sql(world, f"CREATE TABLE IF NOT EXISTS {name} (id int PRIMARY KEY, v text)", f"INSERT INTO {name} VALUES (1, 'a')"
         " ON CONFLICT DO NOTHING", f"UPDATE {name} SET v = 'b'")  # fmt: skip


def no_key(world: World) -> None:
    name = f"hostile.nokey{world.rand.randrange(9999)}"
    _sql(world, f"CREATE TABLE {name} (id int, v text)", f"INSERT INTO {name} VALUES (1, 'a')", f"DROP TABLE {name}")


def schema_change(world: World) -> None:
    name = f"hostile.changing{world.rand.randrange(9999)}"
    _sql(world, f"CREATE TABLE {name} (id int PRIMARY KEY, v text)", f"INSERT INTO {name} VALUES (1, 'a')")
    time.sleep(1)
    change = world.rand.choice(["ADD COLUMN w int DEFAULT 7", "RENAME COLUMN v TO u", "ALTER COLUMN v TYPE varchar",
                                "DROP CONSTRAINT {0}_pkey", "DROP COLUMN v"])  # fmt: skip
    _sql(world, f"ALTER TABLE {name} " + change.format(name.split(".")[1]), f"INSERT INTO {name} (id) VALUES (2)")


def poison_values(world: World) -> None:
    _sql(world, "CREATE TABLE IF NOT EXISTS hostile.poison (id int PRIMARY KEY, n numeric(6,2), t timestamp)",
         f"INSERT INTO hostile.poison VALUES ({world.rand.randrange(1 << 30)}, 'NaN', '294276-12-31')"
         " ON CONFLICT DO NOTHING")  # fmt: skip


def foreign_notify(world: World) -> None:
    _sql(world, "SELECT pg_notify(c, repeat('x', 7000)) FROM unnest(ARRAY['tidemill', 'tidemill_wake']) c")


def walsender_killed(world: World) -> None:
    _sql(world, "SELECT pg_terminate_backend(pid) FROM pg_stat_replication")


def long_transaction(world: World) -> None:
    with psycopg.connect(world.dsn) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS hostile.wide (id bigint PRIMARY KEY, v text)")
        rows = "SELECT g, repeat('x', 100) FROM generate_series(1, 50000) g ON CONFLICT DO NOTHING"
        connection.execute(f"INSERT INTO hostile.wide {rows}".encode())
        time.sleep(2)


# processes ------------------------------------------------------------------------------------------


def driver_stopped(world: World) -> None:
    pid = world.driver_pid()
    if pid is not None:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(1.0)
        os.kill(pid, signal.SIGCONT)


THROWS = tuple(
    Throw(run.__name__.replace("_", "-"), unit, run)
    for unit, runs in {
        "shape": (bad_where, many_shapes),
        "connection": (wild_http, silent_http_connections, huge_frames, silent_kafka_connections),
        "request": (garbage_frames, forged_batches, bombs, old_offsets_by_time),
        "record": (poison_records, poison_values),
        "table": (odd_tables, no_key, schema_change),
        "capture": (walsender_killed, long_transaction),
        "node": (foreign_notify,),
        "pipeline": (driver_stopped,),
    }.items()
    for run in runs
)
