"""Two processes, kill -9 of the leader: acknowledged commits survive, and leadership is taken over in time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.consensus.urls import url as url
from support.metastore.domain_world import DomainWorld, rows_of
from support.waiting import DEADLINE_S, eventually, run
from tidemill.metastore.domain.apply import apply
from tidemill.metastore.domain.codec import decode_state, encode_state
from tidemill.metastore.domain.settings import DomainSettings
from tidemill.metastore.domain.state import DomainState, assert_invariants

CHILD = Path(__file__).parents[1] / "support" / "metastore" / "domain_child.py"
TTL_MS = 1_500
MARGIN_S = 12.0
"""Time for the sequencer's own takeover and for opening, on a machine that runs other tests at the same time."""


class Child:
    """One node. A thread reads its output, so that it never blocks on a full pipe."""

    def __init__(self, url: str, bucket: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(CHILD), url, str(bucket), str(TTL_MS)], stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.said: list[dict[str, Any]] = []
        self.at_s: list[float] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if not line.startswith("{") or not line.endswith("}\n"):
                continue  # a log line, or the last words of a killed process
            self.said.append(json.loads(line))
            self.at_s.append(time.monotonic())

    @property
    def acknowledged(self) -> dict[str, int]:
        return {fact["key"]: fact["seqno"] for fact in list(self.said) if "key" in fact}

    def wait(self, count: int) -> None:
        """Wait until the node has acknowledged `count` commits."""

        def acknowledged() -> bool:
            assert self.process.poll() is None, "the node ended by itself"
            return len(self.acknowledged) >= count

        eventually(acknowledged, lambda: f"only {len(self.acknowledged)} of {count} commits")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(DEADLINE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextlib.contextmanager
def children(url: str, bucket: Path) -> Iterator[list[Child]]:
    started: list[Child] = []
    try:
        yield started
    finally:
        for child in started:
            with contextlib.suppress(ValueError):
                child.kill()


@contextlib.contextmanager
def hosted(url: str) -> Iterator[None]:
    """Host SQLite's sequencer in a process that is never stopped. Otherwise the first process that opens the database
    would host it."""
    if not url.startswith("sqlite"):
        yield
        return
    host = subprocess.Popen(
        [sys.executable, str(Path(__file__).parents[1] / "support" / "consensus" / "worker.py"), "visit", url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert host.stdin is not None and host.stdout is not None
    try:
        assert json.loads(host.stdout.readline())["ready"]
        yield
    finally:
        host.kill()
        host.wait()
        host.stdin.close()
        host.stdout.close()


def everything(url: str, bucket: Path) -> dict[bytes, tuple[int, bytes]]:
    """Return all rows with their seqnos as a follower sees them, and check the invariants of the replicated state."""
    found: dict[bytes, tuple[int, bytes]] = {}

    async def body() -> None:
        async with DomainWorld(url, bucket) as world:
            follower = await world.node(DomainSettings(lead=False, may_lead=False))
            for key in await rows_of(follower):
                row = await follower.get_row(key)
                assert row is not None
                found[key] = (row.seqno, row.value)
            assert_invariants(follower.state)
            await follower.aclose()

    run(body())
    return found


def test_acknowledged_commits_survive_kill_after_kill_and_the_next_node_leads_in_time(url: str, tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    source = random.Random(7)
    acknowledged: dict[str, int] = {}
    with children(url, bucket) as nodes:
        nodes.append(Child(url, bucket))
        nodes[0].wait(100)
        for _ in range(3):
            old = nodes[-1]
            standby = Child(url, bucket)
            nodes.append(standby)
            time.sleep(source.uniform(0.3, 1.2))  # where in its flushes the old one is
            old.kill()
            killed_s = time.monotonic()
            acknowledged |= old.acknowledged
            standby.wait(100)
            leading_s = next(at_s for fact, at_s in zip(standby.said, standby.at_s, strict=False) if "key" in fact)
            assert leading_s - killed_s < TTL_MS / 1000 + MARGIN_S
        nodes[-1].kill()
        acknowledged |= nodes[-1].acknowledged
    found = everything(url, bucket)
    missing = [key for key, seqno in acknowledged.items() if found.get(key.encode(), (0, b""))[0] != seqno]
    assert len(acknowledged) >= 400 and not missing
    terms = [fact["leading"] for node in nodes for fact in node.said if "leading" in fact]
    assert terms == sorted(set(terms)) and len(terms) == 4
    by_term = [max(node.acknowledged.values()) for node in nodes]
    assert by_term == sorted(by_term)


def test_a_stopped_leader_that_wakes_up_again_finds_itself_deposed(url: str, tmp_path: Path) -> None:
    """Paused for longer than its lease, it may still believe that it leads; the log rejects it."""
    bucket = tmp_path / "bucket"
    with hosted(url), children(url, bucket) as nodes:
        paused = Child(url, bucket)
        nodes.append(paused)
        paused.wait(DEADLINE_S)
        other = Child(url, bucket)
        nodes.append(other)
        paused.process.send_signal(signal.SIGSTOP)
        other.wait(DEADLINE_S)
        paused.process.send_signal(signal.SIGCONT)
        before = len(paused.acknowledged)
        paused.wait(before + 20)  # through the request log now, or as leader again later
        for node in (paused, other):
            node.kill()
    found = everything(url, bucket)
    for node in nodes:
        assert all(found[key.encode()][0] == seqno for key, seqno in node.acknowledged.items())


async def test_the_state_of_a_killed_node_is_what_replay_and_rollup_say() -> None:
    """A rollup in the middle of any history gives the same state as the whole history."""
    async with DomainWorld() as world:
        leader = await world.node()
        for i in range(30):
            await leader.commit([(b"k%d" % (i % 7), b"%d" % i)])
            if i % 10 == 9:
                await leader.flush(10)
        records = [r for r in world.memory.records["metastore/main"] if r.data[:1] == b"\x00"]
        for cut in range(0, len(records), 3):
            state = DomainState()
            for index, record in enumerate(records):
                state = apply(state, record.data[1:], record.position, record.term)
                if index == cut:
                    state = decode_state(encode_state(state))
                assert_invariants(state)
            assert encode_state(state) == encode_state(leader.state)
        await asyncio.sleep(0)
