"""Silent peers are named only by nodes that can read their reports."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from support.waiting import until
from tidemill.base.clock import ManualClock, Rand, SystemClock
from tidemill.base.errors import UnavailableError
from tidemill.base.limits import NODE_BLIND_AFTER_MS
from tidemill.base.status.status import StatusReport
from tidemill.consensus.api import Versioned
from tidemill.consensus.memory import MemoryConsensus
from tidemill.consensus.status.board import DROP_SILENT_AFTER_MS, StatusBoard
from tidemill.node import silent_peers as peers_module
from tidemill.node.silent_peers import FRESH_S, SilentPeers
from tidemill.topics.membership import Membership, NodeInfo


class Counting(MemoryConsensus):
    """Consensus that counts calls of `head` and can refuse them."""

    heads = 0
    away = False

    async def head(self, key: str) -> Versioned | None:
        self.heads += 1
        if self.away:
            raise UnavailableError("away")
        return await super().head(key)


class Leases:
    names: tuple[str, ...] = ()

    def late_nodes(self) -> tuple[str, ...]:
        return self.names


async def test_a_node_whose_lease_is_late_is_named_once_its_report_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "POLL_INTERVAL_S", 0.01)
    consensus, clock, leases = Counting(SystemClock()), ManualClock(), Leases()
    board = StatusBoard(consensus, Rand(1))
    frozen, left = (StatusReport(f"node:{name}", clock.now_ms(), (), pid=7, host="h") for name in ("frozen", "left"))
    await board.publish(frozen)
    await board.publish(StatusReport(left.process, left.at_ms, (), left=True))
    peers = SilentPeers(cast("Membership", leases), board, clock)
    looking = asyncio.create_task(peers.run())
    consensus.heads = 0
    clock.advance(NODE_BLIND_AFTER_MS + 1)
    await asyncio.sleep(0.1)
    assert (peers.silent_peer_lines(), consensus.heads) == ([], 0), "nothing is read while all renew their leases"

    leases.names = ("frozen", "left", "unheard")
    await until(peers.silent_peer_lines)
    said = ["process:node:frozen: has not reported for 3 s: it is stopped, disconnected or dead, pid 7 on h"]
    assert peers.silent_peer_lines() == said
    asked = consensus.heads
    await until(lambda: consensus.heads > asked + 10)
    assert peers.silent_peer_lines() == said, "a node that left in order, or never reported, is not missed"

    await board.publish(StatusReport("node:frozen", clock.now_ms(), (), pid=7, host="h"))
    await until(lambda: not peers.silent_peer_lines())
    clock.advance(NODE_BLIND_AFTER_MS + 1)
    await until(peers.silent_peer_lines)
    consensus.away = True
    clock.advance(int(FRESH_S * 1000) + 1)
    assert peers.silent_peer_lines() == [], "an old answer proves nothing"
    consensus.away = False
    await until(peers.silent_peer_lines)
    clock.advance(DROP_SILENT_AFTER_MS)
    await until(lambda: not peers.silent_peer_lines())
    looking.cancel()


async def member(consensus: MemoryConsensus, name: str) -> Membership:
    membership = Membership(consensus, name, NodeInfo("h", 1), SystemClock(), Rand(), ttl_ms=1_500, poll_s=0.02)
    await membership.start()
    return membership


async def test_a_lease_is_late_when_its_node_neither_renews_it_nor_gives_it_up() -> None:
    consensus = MemoryConsensus(SystemClock())
    here, frozen, left = [await member(consensus, name) for name in ("here", "frozen", "left")]
    await until(lambda: here.late_nodes() == () and len(here.members()) == 3)
    await left.aclose()
    await frozen._tasks.aclose()
    await until(lambda: here.late_nodes() == ("frozen",))
    await until(lambda: [each.name for each in here.members()] == ["here"])
    await until(lambda: here.late_nodes() == ("frozen",))
    await frozen._lease.acquire()
    await until(lambda: here.late_nodes() == ())
    await here.aclose()


async def test_no_lease_is_late_while_all_may_be_for_want_of_consensus() -> None:
    consensus = MemoryConsensus(SystemClock())
    here, other = await member(consensus, "here"), await member(consensus, "other")
    for each in (here, other):
        await each._tasks.aclose()  # neither renews, as if consensus was away
    await asyncio.sleep(1.2)
    await here._refresh_view()
    assert here.late_nodes() == ()
    await here._lease.acquire()
    here._lease._grace_until_s = 0.0
    await here._refresh_view()
    assert here.late_nodes() == ("other",)
