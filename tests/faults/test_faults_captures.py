"""Rows F613 and F614 of the table of faults: captures over several nodes, with real processes. They are spread over the
nodes, and move when a node is frozen, is killed or cannot capture. Each row is there once.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import confluent_kafka as ck
import psycopg
import pytest

from support.faults.cluster import Cluster, until
from support.ports import free_port
from support.waiting import DEADLINE_S
from tidemill.base.clock import Rand, SystemClock
from tidemill.consensus.factory import open_consensus

pytestmark = pytest.mark.postgres

CAPTURES = 4
"""Number of captures, each with a separate database."""


class Database:
    """One captured database; its rows are numbered."""

    def __init__(self, name: str, dsn: str) -> None:
        self.name = name
        self.dsn = dsn
        self.sql = psycopg.connect(dsn, autocommit=True)
        self.sql.execute("CREATE TABLE item (id int PRIMARY KEY)")
        self.last = 0

    def write(self) -> None:
        self.last += 1
        self.sql.execute("INSERT INTO item VALUES (%s)", [self.last])

    def moves(self) -> None:
        """Wait until the confirmed LSN of the slot advances."""
        slot = f"SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = 'tidemill_{self.name}'"
        until(lambda: self.sql.execute(slot).fetchone(), lambda: self.name)
        before = self.sql.execute(slot).fetchone()
        until(lambda: self.sql.execute(slot).fetchone() != before, lambda: self.name)

    def confirmed(self) -> int:
        """Write once and wait until everything written so far is confirmed to PostgreSQL. Return the number of rows."""
        self.write()
        (end,) = self.sql.execute("SELECT pg_current_wal_flush_lsn()").fetchone() or ("",)
        slot = f"SELECT confirmed_flush_lsn >= %s FROM pg_replication_slots WHERE slot_name = 'tidemill_{self.name}'"
        until(lambda: self.sql.execute(slot, [end]).fetchone() == (True,), lambda: self.name)
        return self.last


@contextmanager
def writing(databases: list[Database]) -> Iterator[None]:
    ended = threading.Event()

    def write() -> None:
        while not ended.wait(0.02):
            for database in databases:
                database.write()

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(DEADLINE_S)


def owners(consensus_url: str) -> dict[str, str]:
    """Capture → the node that holds its lease."""

    async def read() -> dict[str, str]:
        consensus = await open_consensus(consensus_url, SystemClock(), Rand())
        try:
            leases = await consensus.leases("capture/")
            return {x.name.removeprefix("capture/"): x.holder.partition("/")[0] for x in leases if x.live}
        finally:
            await consensus.aclose()

    return asyncio.run(read())


def records(address: str, database: Database) -> list[Any]:
    topic = f"{database.name}.public.item"
    client = ck.Consumer({"bootstrap.servers": address, "group.id": "none", "enable.auto.commit": False})
    try:
        client.assign([ck.TopicPartition(topic, 0, 0)])
        found: list[Any] = []

        def read() -> bool:
            found.extend(m for m in client.consume(1000, 0.2) if m.error() is None)
            return (
                bool(found) and found[-1].offset() + 1 == client.get_watermark_offsets(ck.TopicPartition(topic, 0))[1]
            )

        until(read, lambda: f"{topic}: {len(found)}")
        return found
    finally:
        client.close()


def test_f613_captures_are_spread_move_from_a_frozen_and_a_killed_node_and_have_each_row_once(
    tmp_path: Path, new_database: Callable[[], str]
) -> None:
    consensus = new_database()
    databases = [Database(f"moved{n}", new_database()) for n in range(CAPTURES)]
    toml = f'[objects]\nurl = "file://{tmp_path}/objects"\n[consensus]\nurl = "{consensus}"\n'
    toml += "".join(f'[capture.{d.name}]\ndsn = "{d.dsn}"\n' for d in databases)
    nodes = {name: Cluster(tmp_path / name, toml, name=name) for name in ("n1", "n2")}

    def held(node: str) -> int:
        return sum(owner == node for owner in owners(consensus).values())

    def reported() -> object:
        return owners(consensus), [node.said[-2000:] for node in nodes.values()]

    with ExitStack() as stack:
        for node in nodes.values():
            node.up()
            stack.callback(node.close)
        for node in nodes.values():
            node.ready()
        until(lambda: held("n1") == held("n2") == CAPTURES // 2, reported)
        with writing(databases):
            for database in databases:
                database.moves()
            nodes["n1"].signal("node", signal.SIGSTOP)
            until(lambda: held("n2") == CAPTURES, reported)
        for database in databases:
            database.confirmed()
        before = {d.name: len(records(nodes["n2"].kafka, d)) for d in databases}
        # The node resumes with changes that it had received and not written: none of them may be written or confirmed
        # now.
        nodes["n1"].signal("node", signal.SIGCONT)
        nodes["n1"].ready()
        after = {d.name: d.confirmed() for d in databases}
        assert before == {name: last - 1 for name, last in after.items()}
        # `status` names who captures.
        mark = f"capture:{databases[0].name}"
        owner = owners(consensus)[databases[0].name]
        until(lambda: nodes["n1"].marks()[mark]["process"] == f"node:{owner}", nodes["n1"].marks)
        with writing(databases):
            nodes["n2"].kill()
            until(lambda: held("n1") == CAPTURES, reported)
        for database in databases:
            last = database.confirmed()
            found = records(nodes["n1"].kafka, database)
            assert [int(m.key().decode().partition(":")[2].rstrip("}")) for m in found] == list(range(1, last + 1))
            assert len({dict(m.headers())["tm.pos"] for m in found}) == last


def test_f614_a_node_that_does_not_reach_a_database_gives_its_capture_to_one_that_does(
    tmp_path: Path, new_database: Callable[[], str]
) -> None:
    consensus, database = new_database(), Database("away", new_database())
    away = f"host=127.0.0.1 port={free_port()} dbname=away user=postgres"
    toml = f'[objects]\nurl = "file://{tmp_path}/objects"\n[consensus]\nurl = "{consensus}"\n[capture.away]\ndsn = '
    without = Cluster(tmp_path / "n1", f'{toml}"{away}"\n', name="n1")
    reaches = Cluster(tmp_path / "n2", f'{toml}"{database.dsn}"\n', name="n2")

    def reported() -> object:
        return owners(consensus), without.said[-2000:], reaches.said[-2000:]

    with ExitStack() as stack:
        stack.callback(without.close)
        without.up()
        until(lambda: owners(consensus) == {"away": "n1"}, lambda: without.said)
        assert "WARNING: capture away: PostgreSQL does not answer" in without.said
        # The stage reports the failure while no other node can take the capture.
        until(lambda: without.state("capture:away") in ("stuck", "parked"), lambda: (without.marks(), reported()))
        stack.callback(reaches.close)
        reaches.up()
        until(lambda: owners(consensus) == {"away": "n2"}, reported)
        assert database.confirmed() == len(records(reaches.kafka, database)) == 1
        answers: list[Any] = []

        def status() -> bool:
            """`status` gives consensus 2.5 s, which is short on a busy machine."""
            answers[:] = without.command("status", "--facts")
            return bool(answers[0] == 0)

        until(status, lambda: answers)
        assert "refused" in answers[1]["node:n1"]["spread"]["given_up"]["away"]["error"], answers
