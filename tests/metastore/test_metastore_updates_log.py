"""The four updates on the log of a real engine: the table *LSM updates*, as leader, follower and newcomer see it.

A leader on SQLite and on PostgreSQL proposes each row of the table (in brackets). A follower that replays the records
and a newcomer that begins at a rollup must hold the same bytes, and the proposer of a rejected update gets the error.
test_metastore_updates has the same rules without a log.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from support.consensus.urls import url as url
from tidemill.base.clock import Rand, SystemClock
from tidemill.base.errors import ConflictError, InvalidError, TidemillError
from tidemill.consensus.api import Consensus
from tidemill.consensus.factory import open_consensus
from tidemill.consensus.state_log.state_log import StateLog, StateMachine
from tidemill.metastore.domain.apply import apply
from tidemill.metastore.domain.codec import decode_state, encode_command, encode_state
from tidemill.metastore.domain.commands import Command, PersistManifest, ResetManifest, SetDomainUuid, WriteBatch
from tidemill.metastore.domain.state import DomainState, PersistedManifest, VolatileBatch, assert_invariants

UUID = "6a4b"
LOG = "metastore/main"


def proposed(log: StateLog[Any], command: bytes) -> asyncio.Future[Any]:
    return log.propose_deferred(lambda _: command)


def write(*rows: tuple[bytes, bytes], uuid: str = UUID) -> WriteBatch:
    return WriteBatch(uuid, [key for key, _ in rows], [value for _, value in rows])


def manifest(last_seqno: int, epoch: int = 1) -> PersistedManifest:
    return PersistedManifest(b"manifest %d" % last_seqno, last_seqno, epoch)


class Machine:
    """A leader and a follower of one log, with separate clients."""

    def __init__(self, leader: StateLog[DomainState], follower: StateLog[DomainState]) -> None:
        self.leader = leader
        self.follower = follower

    @property
    def state(self) -> DomainState:
        return self.leader.state

    async def lead(self, term: int) -> None:
        await self.leader.lead(term)

    async def fill(self, position: int) -> None:
        """Propose rejected updates, which change nothing, until the next record has position `position`."""
        refused = encode_command(write((b"x", b"x"), uuid="nobody"))
        futures = [proposed(self.leader, refused) for _ in range(position - self.leader.position)]
        outcomes = await asyncio.gather(*futures, return_exceptions=True)
        assert all(isinstance(outcome, ConflictError) for outcome in outcomes) and self.leader.position == position

    async def do(self, command: Command) -> int:
        """Propose an accepted command and return its position. Both replicas must have the same state after it."""
        command.check(self.state)
        position = await self.leader.propose(encode_command(command))
        await self.same()
        return position

    async def refused(self, command: Command, kind: type[TidemillError], words: str) -> None:
        """Check that the command is rejected before it is proposed. If it is appended nevertheless, its proposer gets
        the error and no state changes."""
        before = encode_state(self.state)
        with pytest.raises(kind, match=words):
            command.check(self.state)
        with pytest.raises(kind, match=words):
            await self.leader.propose(encode_command(command))
        assert encode_state(self.state) == before
        await self.same()

    async def same(self) -> None:
        await self.follower.catch_up()
        assert self.follower.position == self.leader.position
        assert encode_state(self.follower.state) == encode_state(self.state)
        assert_invariants(self.follower.state)


@asynccontextmanager
async def opened_machine(url: str) -> AsyncIterator[Machine]:
    """Open two handles on one log, the first of which leads. At the end a third one must read the same state."""
    clock, rand = SystemClock(), Rand()
    clients: list[Consensus] = []
    logs: list[StateLog[DomainState]] = []

    async def log() -> StateLog[DomainState]:
        clients.append(await open_consensus(url, clock, rand))
        machine = StateMachine(DomainState, apply, encode_state, decode_state)
        logs.append(StateLog(clients[-1], LOG, machine, rand))
        return logs[-1]

    try:
        machine = Machine(await log(), await log())
        await machine.lead(1)
        yield machine
        await machine.leader.rollup()
        newcomer = await log()
        await newcomer.catch_up()
        assert encode_state(newcomer.state) == encode_state(machine.state)
    finally:
        for each in logs:
            await each.aclose()
        for client in clients:
            await client.aclose()


async def test_write_happy_path_on_a_log(url: str) -> None:
    """[write happy (all seqno 10)]"""
    async with opened_machine(url) as machine:
        await machine.do(SetDomainUuid(UUID))
        await machine.fill(10)
        assert await machine.do(write((b"a", b"1"), (b"b", b"2"), (b"c", b""))) == 10
        assert list(machine.state.volatile) == [VolatileBatch(10, [b"a", b"b", b"c"], [b"1", b"2", b""])]


async def test_write_with_a_wrong_uuid_on_a_log(url: str) -> None:
    """[write: wrong uuid]"""
    async with opened_machine(url) as machine:
        await machine.refused(write((b"a", b"1")), ConflictError, "another domain")
        await machine.do(SetDomainUuid(UUID))
        await machine.refused(
            write((b"a", b"1"), uuid="old"), ConflictError, "another domain: uuid='old' current='6a4b'"
        )


async def test_write_of_empty_rows_on_a_log(url: str) -> None:
    """[write: empty rows]"""
    async with opened_machine(url) as machine:
        await machine.do(SetDomainUuid(UUID))
        await machine.refused(write(), InvalidError, "needs rows")


async def written(machine: Machine, *positions: int) -> None:
    await machine.do(SetDomainUuid(UUID))
    for position in positions:
        await machine.fill(position)
        await machine.do(write((b"k%d" % position, b"v")))


async def test_a_manifest_trims_on_a_log(url: str) -> None:
    """[manifest trims ≤ 10]"""
    async with opened_machine(url) as machine:
        await written(machine, 5, 10, 15)
        await machine.do(PersistManifest(UUID, manifest(10)))
        assert [batch.seqno for batch in machine.state.volatile] == [15] and machine.state.persisted_seqno == 10


async def test_a_manifest_of_a_wrong_uuid_on_a_log(url: str) -> None:
    """[manifest: wrong uuid]"""
    async with opened_machine(url) as machine:
        await written(machine, 10)
        await machine.refused(PersistManifest("old", manifest(10)), ConflictError, "another domain")


async def test_a_manifest_of_a_lower_seqno_or_epoch_on_a_log(url: str) -> None:
    """[manifest: lower seqno/epoch rejected]"""
    async with opened_machine(url) as machine:
        await written(machine, 10, 20)
        await machine.lead(4)
        await machine.do(PersistManifest(UUID, manifest(20, epoch=4)))
        await machine.refused(
            PersistManifest(UUID, manifest(19, epoch=4)), ConflictError, "newer manifest is persisted"
        )
        await machine.refused(
            PersistManifest(UUID, manifest(20, epoch=3)), ConflictError, "newer manifest is persisted"
        )


async def test_a_manifest_of_equal_seqno_and_epoch_on_a_log(url: str) -> None:
    """[manifest: equal accepted]"""
    async with opened_machine(url) as machine:
        await written(machine, 10)
        await machine.do(PersistManifest(UUID, manifest(10)))
        again = PersistedManifest(b"after a compaction", 10, 1)
        await machine.do(PersistManifest(UUID, again))
        assert machine.state.manifest == again


async def test_a_uuid_is_set_once_on_a_log(url: str) -> None:
    """[uuid once]"""
    async with opened_machine(url) as machine:
        await machine.do(SetDomainUuid(UUID))
        await machine.refused(SetDomainUuid("other"), ConflictError, "already has a uuid")
        assert machine.state.domain_uuid == UUID


async def test_reset_happy_path_on_a_log(url: str) -> None:
    """[reset happy] The worked example, at its very position and term: offset 50, term 3, with (1000, epoch 5)."""
    async with opened_machine(url) as machine:
        await machine.do(SetDomainUuid(UUID))
        await machine.lead(3)
        await machine.fill(50)
        assert await machine.do(ResetManifest("restored", manifest(1000, epoch=5))) == 50
        state = machine.state
        assert (state.domain_uuid, state.seqno_delta, state.epoch_delta) == ("restored", 950, 2)
        assert await machine.do(write((b"a", b"1"), uuid="restored")) == 51
        assert [batch.seqno for batch in state.volatile] == [1001]


async def test_reset_with_nothing_on_a_log(url: str) -> None:
    """[reset none] At (10, term 2): deltas −10 and −2, and the next write gets 1."""
    async with opened_machine(url) as machine:
        await machine.do(SetDomainUuid(UUID))
        await machine.lead(2)
        await machine.fill(10)
        assert await machine.do(ResetManifest("fresh", None)) == 10
        state = machine.state
        assert (state.seqno_delta, state.epoch_delta, state.manifest) == (-10, -2, None)
        await machine.do(write((b"a", b"1"), uuid="fresh"))
        assert [batch.seqno for batch in state.volatile] == [1]


async def test_reset_of_a_non_empty_buffer_on_a_log(url: str) -> None:
    """[reset: non-empty buffer]"""
    async with opened_machine(url) as machine:
        await written(machine, 10)
        await machine.refused(ResetManifest("restored", manifest(1000)), ConflictError, "not empty")


async def test_reset_of_existing_data_on_a_log(url: str) -> None:
    """[reset: existing data]"""
    async with opened_machine(url) as machine:
        await written(machine, 10)
        await machine.do(PersistManifest(UUID, manifest(10)))
        assert not machine.state.volatile
        await machine.refused(ResetManifest("restored", manifest(1000)), ConflictError, "not empty")
