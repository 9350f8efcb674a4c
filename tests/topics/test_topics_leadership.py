from __future__ import annotations

import asyncio
from typing import Any

import pytest

from support.topics.world import FaultyConsensus, World, batch, fetch, read_all, values_of
from support.waiting import until
from tidemill.base.clock import ManualClock, Rand, SystemClock
from tidemill.base.errors import UnavailableError
from tidemill.consensus.api import Changes, Lease, LogHead, LogSlice
from tidemill.consensus.leader_election import LeaseRequest
from tidemill.consensus.memory import MemoryConsensus, MemoryState
from tidemill.topics import leader_check
from tidemill.topics.api import FetchRead, NotLeaderError
from tidemill.topics.membership import Membership, NodeInfo, rendezvous_leader
from tidemill.topics.node_lease import NodeLease
from tidemill.topics.produce.producer_ids import BLOCK_IDS, ProducerIds


async def member(world: World, name: str, ttl_ms: int = 2000, poll_s: float = 0.02) -> Membership:
    info = NodeInfo("h", 9092, f"http://{name}")
    membership = Membership(world.consensus, name, info, SystemClock(), Rand(), ttl_ms=ttl_ms, poll_s=poll_s)
    await membership.start()
    return membership


def test_a_node_that_leaves_moves_only_its_own_partitions() -> None:
    names = ["a", "b", "c", "d"]
    before = {p: rendezvous_leader(names, "t", p) for p in range(200)}
    after = {p: rendezvous_leader(["a", "b", "d"], "t", p) for p in range(200)}
    assert all(after[p] == before[p] for p in before if before[p] != "c")
    counts = [list(before.values()).count(name) for name in names]
    assert min(counts) > 20
    assert rendezvous_leader([], "t", 0) == ""


async def test_members_see_each_other_and_agree_on_leaders_and_ids() -> None:
    world = World()
    a = await member(world, "a")
    b = await member(world, "b")
    changes: list[int] = []
    a.on_change(lambda: changes.append(len(a.members())))
    await until(lambda: len(a.members()) == 2)
    assert changes == [2]
    assert a.members() == b.members()
    assert [(m.name, m.node_id, m.http_url) for m in a.members()] == [("a", 1, "http://a"), ("b", 2, "http://b")]
    assert [a.leader_of("t", p) for p in range(50)] == [b.leader_of("t", p) for p in range(50)]
    assert b.epoch() > a.epoch()
    await a.aclose()
    await until(lambda: [m.name for m in b.members()] == ["b"])
    again = await member(world, "a")
    assert [m.node_id for m in again.members()] == [1, 2]
    assert again.epoch() > b.epoch()
    await again.aclose()
    await b.aclose()


async def test_who_comes_and_who_leaves_is_heard_of_without_a_poll() -> None:
    world = World()
    a = await member(world, "a", ttl_ms=600_000, poll_s=600.0)
    for _ in range(3):
        b = await member(world, "b", ttl_ms=600_000, poll_s=600.0)
        await until(lambda: len(a.members()) == 2)
        await b.leave_cluster()
        assert [m.name for m in b.members()] == ["a"], "it tells its clients who leads now"
        await until(lambda: [m.name for m in a.members()] == ["a"])
        await b.aclose()
    head = await world.consensus.log_head("cluster/changes")
    assert head.next - head.start == 1 and head.next == 7
    await a.aclose()


async def test_others_see_which_captures_a_node_offers_with_the_next_renewal_and_it_keeps_its_lease() -> None:
    world = World()
    a, b = await member(world, "a", ttl_ms=300), await member(world, "b")
    (before,) = (lease for lease in await world.consensus.leases("node/") if lease.name == "node/a")
    for offered in (("x", "y"), ("y",), ()):
        a.set_captures(offered)
        await until(lambda offered=offered: b.members()[0].captures == offered)
    (after,) = (lease for lease in await world.consensus.leases("node/") if lease.name == "node/a")
    assert (after.holder, after.term) == (before.holder, before.term)
    assert a.superseded is None and [each.name for each in b.members()] == ["a", "b"]
    await a.aclose()
    await b.aclose()


async def test_of_many_that_come_at_once_each_is_seen_by_all() -> None:
    world = World()
    members = await asyncio.gather(*(member(world, f"n{n}", 600_000, 600.0) for n in range(6)))
    await until(lambda: all(len(each.members()) == 6 for each in members))
    await asyncio.gather(*(each.leave_cluster() for each in members[:5]))
    await until(lambda: [m.name for m in members[5].members()] == ["n5"])
    await asyncio.gather(*(each.aclose() for each in members))


@pytest.mark.parametrize("lost", ["release", "append"])
async def test_a_node_that_leaves_leads_nothing_though_its_lease_is_still_there(lost: str) -> None:
    world = World()
    a = await member(world, "a")
    b = await member(world, "b")
    await until(lambda: len(a.members()) == 2)
    real = getattr(world.consensus, lost)

    async def refused(*_: Any, **__: Any) -> None:
        raise UnavailableError("refused by this test.")

    setattr(world.consensus, lost, refused)
    await a.leave_cluster()
    setattr(world.consensus, lost, real)
    looks = a._refresh_view
    await looks()
    assert [m.name for m in a.members()] == ["b"]
    assert {a.leader_of("t", p) for p in range(50)} == {"b"}
    await until(lambda: [m.name for m in b.members()] == ["b"])
    await a.aclose()
    await b.aclose()


async def test_a_restarted_node_takes_its_name_at_once_and_the_old_process_stops_leading() -> None:
    world = World()
    old = await member(world, "a", ttl_ms=300)
    new = await member(world, "a", ttl_ms=60_000)
    assert new.leader_of("t", 0) == "a"
    await until(lambda: old.members() == [])
    assert old.leader_of("t", 0) == ""
    (lease,) = await world.consensus.leases("node/")
    assert lease.live and lease.ttl_ms == 60_000
    assert old.superseded is not None and new.superseded is None
    await old.aclose()
    (lease,) = await world.consensus.leases("node/")
    assert lease.live, "the old process gives up nothing that is not its own"
    await new.aclose()


async def test_a_dead_node_is_replaced_when_its_lease_runs_out() -> None:
    world = World()
    a = await member(world, "a", ttl_ms=150)
    b = await member(world, "b")
    await until(lambda: len(b.members()) == 2)
    await a._tasks.aclose()
    await until(lambda: [m.name for m in b.members()] == ["b"])
    await b.aclose()


async def test_a_lease_that_runs_out_is_seen_then_and_not_at_the_next_poll() -> None:
    world = World()
    a = await member(world, "a", ttl_ms=2_000, poll_s=600.0)
    b = await member(world, "b", ttl_ms=600_000, poll_s=600.0)
    assert len(b.members()) == 2
    await a._tasks.aclose()  # dies without notice to the others
    await until(lambda: [m.name for m in b.members()] == ["b"])
    await b.aclose()


class Halting(FaultyConsensus):
    """Consensus that delays renewals and reads of leases, and reads of log heads, while `goes_on` is cleared."""

    def __init__(self, state: MemoryState) -> None:
        super().__init__(state)
        self.goes_on = asyncio.Event()
        self.goes_on.set()

    async def acquire(self, name: str, holder: str, ttl_ms: int, info: bytes = b"") -> Lease:
        await self.goes_on.wait()
        return await super().acquire(name, holder, ttl_ms, info)

    async def leases(self, prefix: str) -> list[Lease]:
        await self.goes_on.wait()
        return await super().leases(prefix)

    async def changed(self, prefix: str, since: str = "") -> Changes:
        await self.goes_on.wait()
        return await super().changed(prefix, since)


@pytest.mark.parametrize("first", ["a", "b"])
async def test_when_consensus_was_away_who_lives_stays_a_member_and_who_died_meanwhile_goes(first: str) -> None:
    """The first node is answered before or after the others have renewed."""
    world = World()
    consensus = {name: Halting(world.consensus.state) for name in "abc"}
    nodes = {}
    for name in "abc":
        world.consensus = consensus[name]
        nodes[name] = await member(world, name, ttl_ms=1_500)
    await until(lambda: all(len(each.members()) == 3 for each in nodes.values()))
    views: dict[str, list[list[str]]] = {name: [] for name in "ab"}
    for name, seen in views.items():
        each = nodes[name]
        each.on_change(lambda each=each, seen=seen: seen.append([m.name for m in each.members()]))
    for each in consensus.values():
        each.goes_on.clear()
    await nodes["c"]._tasks.aclose()
    while any(lease.live for lease in await MemoryConsensus(SystemClock(), world.consensus.state).leases("node/")):
        await asyncio.sleep(0.01)
    consensus[first].goes_on.set()
    await nodes[first]._refresh_view()
    for each in consensus.values():
        each.goes_on.set()
    await until(lambda: all(len(nodes[name].members()) == 2 for name in "ab"))
    assert views == {"a": [["a", "b"]], "b": [["a", "b"]]}
    for name in "ab":
        await nodes[name].aclose()


async def test_partitions_follow_the_members_and_nothing_acknowledged_is_lost() -> None:
    world = World()
    row = await world.topic(partitions=16)
    a = await member(world, "a")
    topics_a = world.node(a)
    sent: dict[int, list[str]] = {p: [] for p in range(16)}

    async def produce(partition: int, value: str) -> None:
        number = len(sent[partition])
        while True:
            for topics in list(world.nodes):
                try:
                    data = batch(value, pid=partition, seq=number)
                    await topics.produce_nowait(row.topic_id, partition, data)
                    sent[partition].append(value)
                    return
                except NotLeaderError:
                    continue
            await asyncio.sleep(0.005)

    for partition in range(16):
        await produce(partition, "one")
    b = await member(world, "b")
    topics_b = world.node(b)
    for partition in range(16):
        await produce(partition, "two")
    await until(lambda: len(a.members()) == 2)
    for partition in range(16):
        await produce(partition, "three")
    leaders = {topics_b.leader_of(row.topic_id, p) for p in range(16)}
    assert leaders == {"a", "b"}
    theirs = next(p for p in range(16) if b.leader_of(row.topic_id, p) == "b")
    with pytest.raises(NotLeaderError) as refused:
        await topics_a.produce_nowait(row.topic_id, theirs, batch("x"))
    assert refused.value.leader == "b"
    await topics_a.aclose()
    await a.aclose()
    world.nodes.remove(topics_a)
    for partition in range(16):
        await produce(partition, "four")
    for partition in range(16):
        assert [v for _, v in await read_all(world, row.topic_id, partition)] == sent[partition]
        assert sent[partition] == ["one", "two", "three", "four"]
    await world.aclose()
    await b.aclose()


@pytest.mark.parametrize("together", [False, True], ids=["later", "in one term"])
async def test_a_leader_that_was_deposed_and_has_nothing_to_write_keeps_no_reader_waiting(together: bool) -> None:
    """A node with an outdated view takes the partition over, writes, and releases it. A fetch that waits at the first
    leader, which leads again in every view, gets the written records.

    If both nodes fence the same term, the one that wrote leads.
    """
    world = World(leaders_check_s=0.02)
    row = await world.topic()
    first, second = world.node(), world.node()
    await first.start()
    if together:
        fence, arrived = world.consensus.fence, asyncio.Barrier(2)

        async def both(log: str, term: int) -> LogHead:
            await arrived.wait()
            return await fence(log, term)

        world.consensus.fence = both  # type: ignore[method-assign]
        await asyncio.gather(first.offsets(row.topic_id, 0), second.offsets(row.topic_id, 0))
        world.consensus.fence = fence  # type: ignore[method-assign]
    waiting = asyncio.create_task(fetch(first, row.topic_id, 0, 0, wait_s=600.0))
    await until(lambda: (led := first._led.get((row.topic_id, 0))) is not None and len(led.watchers) == 1)
    await second.produce_nowait(row.topic_id, 0, batch("v"))
    assert values_of((await waiting).batches) == [(0, "v")]
    await world.aclose()


@pytest.mark.parametrize("renewed", [False, True], ids=["before it is renewed", "renewed"])
async def test_a_node_whose_lease_ran_out_answers_nothing_before_it_has_asked_who_leads(renewed: bool) -> None:
    """The node was frozen, or could not reach consensus, while another one led. In its own view it leads all the
    time."""
    world = World(leaders_check_s=600.0)
    row, plain = await world.topic(partitions=8), world.consensus
    halting = Halting(plain.state)
    world.consensus = halting
    a = await member(world, "a", ttl_ms=1_000)
    world.consensus = plain
    b = await member(world, "b", ttl_ms=600_000)
    await until(lambda: len(a.members()) == len(b.members()) == 2)
    first, second = world.node(a), world.node(b)
    mine = next(p for p in range(8) if a.leader_of(row.topic_id, p) == "a")
    await first.produce_nowait(row.topic_id, mine, batch("v"))
    halting.goes_on.clear()
    await until(lambda: [m.name for m in b.members()] == ["b"])
    await second.produce_nowait(row.topic_id, mine, batch("w"))
    assert a.leader_of(row.topic_id, mine) == "a"
    if renewed:
        before = a.lease_lapses()
        halting.goes_on.set()
        await until(lambda: a.lease_lapses() == before + 1)
    [found] = await first.fetch(
        [FetchRead(row.topic_id, mine, 0, 1 << 20)], max_wait_s=0, min_bytes=1, max_bytes=1 << 20
    )
    assert isinstance(found.error, NotLeaderError) or values_of(found.batches) == [(0, "v"), (1, "w")]
    halting.goes_on.set()

    async def end() -> int:
        try:
            return (await first.offsets(row.topic_id, mine)).high_watermark
        except NotLeaderError:
            await asyncio.sleep(0.001)
            return 0

    while not (reported := await end()):
        pass
    assert reported == 2, "what the other one acknowledged"
    await world.aclose()
    for each in (a, b):
        await each.aclose()


async def test_a_lease_expires_while_its_machine_is_suspended() -> None:
    """Another node may have led in between. The lease is found to have lapsed before it is renewed, and also after."""
    clock = ManualClock()
    lease = NodeLease(MemoryConsensus(clock), LeaseRequest("node/a", "a", ttl_ms=6_000), clock)
    await lease.acquire()
    before, awake_s = lease.lapses(), clock.monotonic_s()
    clock.suspend(6_000)
    assert clock.monotonic_s() == awake_s, "timers of the process did not advance"
    expired = lease.lapses()
    await lease.renew()
    assert len({before, expired, lease.lapses()}) == 3
    clock.suspend(5_999)
    assert lease.lapses() == before + 2


async def test_reads_go_on_while_consensus_is_away_for_longer_than_a_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_check, "CONFIRM_TIMEOUT_S", 0.05)
    world = World(leaders_check_s=600.0)
    row, plain = await world.topic(), world.consensus
    halting = Halting(plain.state)
    world.consensus = halting
    a = await member(world, "a", ttl_ms=300)
    node = world.node(a)
    await node.produce_nowait(row.topic_id, 0, batch("v"))
    before = a.lease_lapses()
    halting.goes_on.clear()
    await until(lambda: a.lease_lapses() != before)
    for _ in range(3):
        assert (await node.offsets(row.topic_id, 0)).high_watermark == 1
        assert values_of((await fetch(node, row.topic_id, 0, 0)).batches) == [(0, "v")]
    halting.goes_on.set()
    await world.aclose()
    await a.aclose()


async def test_offsets_that_are_to_be_proved_are_of_no_deposed_leader() -> None:
    world = World()
    row = await world.topic()
    first, second = world.node(), world.node()
    await first.produce_nowait(row.topic_id, 0, batch("v"))
    assert (await first.offsets(row.topic_id, 0, proved=True)).high_watermark == 1
    await second.produce_nowait(row.topic_id, 0, batch("w"))
    assert (await first.offsets(row.topic_id, 0)).high_watermark == 1
    with pytest.raises(NotLeaderError):
        await first.offsets(row.topic_id, 0, proved=True)
    assert (await second.offsets(row.topic_id, 0, proved=True)).high_watermark == 2
    await world.aclose()


async def test_a_leader_that_was_deposed_while_it_opened_hears_of_it() -> None:
    world = World()
    row = await world.topic()
    first, second = world.node(), world.node()
    await second.produce_nowait(row.topic_id, 0, batch("v"))
    read, asked, answered = world.consensus.read, asyncio.Event(), asyncio.Event()

    async def late(*args: Any, **kwargs: Any) -> LogSlice:
        found = await read(*args, **kwargs)
        world.consensus.read = read  # type: ignore[method-assign]
        asked.set()
        await answered.wait()
        return found

    world.consensus.read = late  # type: ignore[method-assign]
    opening = asyncio.create_task(first.offsets(row.topic_id, 0))
    await asked.wait()
    with pytest.raises(NotLeaderError):
        await second.produce_nowait(row.topic_id, 0, batch("w"))
    await second.produce_nowait(row.topic_id, 0, batch("w"))
    await first._partitions.heads.check_heads()
    answered.set()
    with pytest.raises(NotLeaderError):
        await opening
    assert (await first.offsets(row.topic_id, 0)).high_watermark == 2
    await world.aclose()


async def test_a_leader_that_writes_is_not_taken_for_deposed() -> None:
    """The append is in the log, and so in its head, before the leader gets the answer."""
    world = World()
    row = await world.topic()
    node = world.node()
    await node.offsets(row.topic_id, 0)
    led = node._led[row.topic_id, 0]

    async def slow(append: Any) -> LogHead:
        head: LogHead = await append()
        await node._partitions.heads.check_heads()
        return head

    world.consensus.on_append = slow
    for number in range(3):
        assert (await node.produce_nowait(row.topic_id, 0, batch("v"))).base_offset == number
        await node._partitions.heads.check_heads()
    assert node._led[row.topic_id, 0] is led and led.is_open
    await world.aclose()


async def test_producer_ids_are_unique_over_processes() -> None:
    world = World()
    one, two = ProducerIds(world.consensus, Rand()), ProducerIds(world.consensus, Rand())
    ids = await asyncio.gather(*(source.allocate() for _ in range(BLOCK_IDS) for source in (one, two)))
    assert len(set(ids)) == 2 * BLOCK_IDS
    assert min(ids) > 0
