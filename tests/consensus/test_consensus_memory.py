from __future__ import annotations

import msgspec
import pytest

from contracts.consensus import ConsensusContract, OpenClient
from tidemill.base.clock import ManualClock, Rand, SystemClock
from tidemill.base.errors import ConflictError
from tidemill.consensus.api import Consensus
from tidemill.consensus.memory import MemoryConsensus, MemoryState
from tidemill.topics.membership import LEASE_PREFIX, Membership, NodeInfo


class TestMemory(ConsensusContract):
    @pytest.fixture
    def open_client(self) -> OpenClient:
        state = MemoryState()

        async def open_one() -> Consensus:
            return MemoryConsensus(SystemClock(), state)

        return open_one


@pytest.mark.parametrize(
    ("ahead_ms", "live"), [(-1, True), (0, True), (1, True), (6_000, True), (6_001, False), (7_200_000, False)]
)
async def test_a_lease_of_a_clock_that_was_set_back_by_more_than_its_time_to_live_is_expired(
    ahead_ms: int, live: bool
) -> None:
    state, clock = MemoryState(), ManualClock()
    consensus, name = MemoryConsensus(clock, state), LEASE_PREFIX + "a"
    await consensus.acquire(name, "a-1", 6_000, msgspec.msgpack.encode(NodeInfo("ha", 1)))
    row = state.leases[name]
    state.leases[name] = msgspec.structs.replace(row, expires_ms=row.expires_ms + ahead_ms)
    [found] = await consensus.leases(name)
    assert (found.live, found.remaining_ms) == (live, min(6_000, 6_000 + ahead_ms) if live else 0)

    node = Membership(consensus, "b", NodeInfo("hb", 2), clock, Rand(1))
    await node.start()
    assert sorted(member.name for member in node.members()) == (["a", "b"] if live else ["b"])
    assert node.late_nodes() == (() if live else ("a",))
    await node.aclose()

    if live:
        with pytest.raises(ConflictError):
            await consensus.acquire(name, "a-2", 6_000)
    else:
        assert (await consensus.acquire(name, "a-2", 6_000)).term == 2
