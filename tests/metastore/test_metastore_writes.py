"""The leader's write path on memory backends: groups, the queue of claims, back-pressure, results, persisting and
status."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from sim.scenarios.metastore_plants import planted
from support.metastore.domain_world import FOLLOWS, LEADS, DomainWorld, rows_of
from support.waiting import until
from tidemill.base.errors import (
    ConflictError,
    CorruptError,
    FencedError,
    InvalidError,
    TidemillError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidemill.base.limits import MIB
from tidemill.base.runtime.tasks import Tasks
from tidemill.base.status.status import StatusTracker
from tidemill.consensus.api import LogHead
from tidemill.consensus.memory import MemoryConsensus
from tidemill.consensus.state_log.state_log import StateLog
from tidemill.metastore.domain.codec import decode_command, encode_command
from tidemill.metastore.domain.commands import PersistManifest, ResetManifest, SetDomainUuid
from tidemill.metastore.domain.commit.write_path import ROOM_WAIT_S
from tidemill.metastore.domain.domain import Domain
from tidemill.metastore.domain.follower import APPLY_ROWS
from tidemill.metastore.domain.leader import REPLAY_ROWS
from tidemill.metastore.domain.settings import DomainContext
from tidemill.metastore.domain.state import DomainState, PersistedManifest, assert_invariants
from tidemill.metastore.lsm.database import Database
from tidemill.metastore.lsm.manifest import MAGIC
from tidemill.metastore.lsm.options import Options
from tidemill.objects.memory import MemoryObjects
from tidemill.objects.store import Buffer


def proposed(log: StateLog[Any], command: bytes) -> asyncio.Future[Any]:
    return log.propose_deferred(lambda _: command)


class Trouble(MemoryConsensus):
    """Consensus with faults on appends to the domain's log: `lose` lists the fates of the next ones; `hold` stops them
    while it is set."""

    def __init__(self, world: DomainWorld) -> None:
        super().__init__(world.clock, world.memory)
        self.lose: list[str] = []
        self.hold: asyncio.Event | None = None
        self.hold_answer: asyncio.Event | None = None
        self.appends = 0
        self.heads = 0
        self.deaf = False
        """Suppresses wake-ups: a follower stays where its last sync left it."""

    async def wait(self, log: str, beyond: int, timeout_s: float) -> bool:
        if self.deaf:
            await asyncio.sleep(timeout_s)
            return False
        return await super().wait(log, beyond, timeout_s)

    async def log_head(self, log: str) -> LogHead:
        self.heads += log == "metastore/main"
        return await super().log_head(log)

    async def append(self, log: str, term: int, expected_next: int, records: Sequence[bytes], nonce: str) -> LogHead:
        if log != "metastore/main":
            return await super().append(log, term, expected_next, records, nonce)
        if self.hold is not None:
            await self.hold.wait()
        self.appends += 1
        how = self.lose.pop(0) if self.lose else ""
        if how == "unavailable":
            raise UnavailableError("not sent")
        if how == "before":
            raise UnknownOutcomeError("lost before")
        head = await super().append(log, term, expected_next, records, nonce)
        if self.hold_answer is not None:
            await self.hold_answer.wait()
        if how == "after":
            raise UnknownOutcomeError("lost after")
        return head


class Bucket(MemoryObjects):
    """A store that refuses writes while it is `down`."""

    def __init__(self, world: DomainWorld) -> None:
        super().__init__(world.clock)
        self.down = asyncio.Event()
        self.only = ""
        """Restricts failures to keys that contain this text."""
        self.error: type[TidemillError] = UnavailableError

    async def put(self, key: str, data: Buffer | Sequence[Buffer]) -> None:
        if self.down.is_set() and self.only in key:
            raise self.error(f"the bucket is down: key={key}")
        await super().put(key, data)


async def held(world: DomainWorld) -> tuple[Domain, Trouble]:
    consensus = Trouble(world)
    return await world.node(consensus=consensus), consensus


# groups ---------------------------------------------------------------------------------------------------------


async def test_commits_that_touch_different_keys_share_one_record() -> None:
    async with DomainWorld() as world:
        leader, consensus = await held(world)
        before = leader.state.newest_seqno
        seqnos = await asyncio.gather(*[leader.commit([(b"k%d" % i, b"v")]) for i in range(100)])
        assert len(set(seqnos)) == 1 and seqnos[0] > before
        assert len(leader.state.volatile[-1].keys) == 100
        assert consensus.appends <= 3


async def test_two_commits_of_one_key_never_share_a_seqno_and_the_later_one_stays() -> None:
    async with DomainWorld() as world:
        leader, consensus = await held(world)
        seqnos = await asyncio.gather(*[leader.commit([(b"hot", b"%d" % i)]) for i in range(50)])
        assert len(set(seqnos)) == 50 and sorted(seqnos) == seqnos
        row = await leader.get_row(b"hot")
        assert row is not None and (row.seqno, row.value) == (seqnos[-1], b"49")
        assert consensus.appends <= 5  # different records, yet one append


async def test_a_read_after_a_commit_sees_it_and_a_read_before_its_end_does_not() -> None:
    async with DomainWorld() as world:
        leader, consensus = await held(world)
        consensus.hold = asyncio.Event()
        committing = asyncio.ensure_future(leader.commit([(b"a", b"1")]))
        for _ in range(20):
            await asyncio.sleep(0)
        assert await leader.get(b"a") is None and not committing.done()
        consensus.hold.set()
        await committing
        assert await leader.get(b"a") == b"1"


async def test_the_last_of_a_key_given_twice_in_one_commit_counts() -> None:
    async with DomainWorld() as world:
        leader = await world.node()
        await leader.commit([(b"a", b"1"), (b"a", b"2")])
        assert await leader.get(b"a") == b"2"


async def test_the_volatile_buffer_and_the_memtable_hold_the_same_bytes() -> None:
    """R4, checked by identity, at the leader and at a follower."""
    async with DomainWorld() as world:
        leader, follower = await world.node(), await world.node(FOLLOWS)
        key, value = b"a key that nobody interned", b"a value that nobody interned"
        await leader.commit([(key, value)])
        await follower.sync()
        assert leader._leader is not None and follower._follower.database is not None
        for domain, database in ((leader, leader._leader.database), (follower, follower._follower.database)):
            [batch] = domain.state.volatile
            assert batch.keys[0] is not key
            [values] = [layer.values for layer in database.memtable.layers if layer.values]
            [stored] = values
            assert stored is batch.keys[0] and values[key] is batch.values[0]


async def test_bad_batches_are_refused_each_in_its_own_words_and_disturb_nobody() -> None:
    async with DomainWorld() as world:
        leader = await world.node()
        fine = asyncio.ensure_future(leader.commit([(b"fine", b"1")]))
        await asyncio.sleep(0)
        for rows, words in (
            ([], "at least one row"),
            ([(b"", b"x")], "key must not be empty"),
            ([(b"k" * 2000, b"x")], "key is too long"),
            ([(b"k", b"x" * MIB)], "value is too large"),
            ([(b"%d" % i, b"x" * 200_000) for i in range(30)], "batch is too large"),
        ):
            with pytest.raises(InvalidError, match=words):
                await leader.commit(rows)
        await fine
        assert leader.leading and await rows_of(leader) == {b"fine": b"1"}


# expectations ---------------------------------------------------------------------------------------------------


async def test_an_expected_seqno_holds_or_the_commit_conflicts_with_the_current_rows() -> None:
    async with DomainWorld() as world:
        leader = await world.node()
        first = await leader.commit([(b"a", b"1")], expects={b"a": 0, b"b": 0})
        second = await leader.commit([(b"a", b"2")], expects={b"a": first})
        for stale in ({b"a": first}, {b"a": 0}, {b"a": second, b"b": 7}):
            with pytest.raises(ConflictError) as caught:
                await leader.commit([(b"a", b"3")], expects=stale)
            assert isinstance(caught.value.current, dict)
            row = caught.value.current[b"a"]
            assert (row.seqno, row.value) == (second, b"2")
            assert caught.value.current.get(b"b") is None
        await leader.commit([(b"a", b"")], expects={b"a": second})
        await leader.commit([(b"a", b"4")], expects={b"a": 0})  # deleted is absent
        assert await leader.get(b"a") == b"4"


async def test_racing_increments_of_a_counter_lose_none() -> None:
    async with DomainWorld() as world:
        leader = await world.node()
        await leader.commit([(b"n", b"0")])

        async def increment(times: int) -> None:
            while times:
                row = await leader.get_row(b"n")
                assert row is not None
                try:
                    await leader.commit([(b"n", b"%d" % (int(row.value) + 1))], expects={b"n": row.seqno})
                    times -= 1
                except ConflictError:
                    continue

        await asyncio.gather(*[increment(10) for _ in range(8)])
        assert await leader.get(b"n") == b"80"


async def test_an_expectation_waits_for_the_commit_that_is_writing_its_key() -> None:
    async with DomainWorld() as world:
        leader, consensus = await held(world)
        first = await leader.commit([(b"a", b"1")])
        consensus.hold = asyncio.Event()
        writing = asyncio.ensure_future(leader.commit([(b"a", b"2")]))
        await asyncio.sleep(0)
        expecting = asyncio.ensure_future(leader.commit([(b"a", b"3")], expects={b"a": first}))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not expecting.done()  # by the memtable alone it would hold
        consensus.hold.set()
        await writing
        with pytest.raises(ConflictError):
            await expecting
        assert await leader.get(b"a") == b"2"


async def test_nobody_overtakes_a_commit_in_line_and_it_is_not_starved() -> None:
    async with DomainWorld() as world:
        leader, consensus = await held(world)
        consensus.hold = asyncio.Event()
        order: list[str] = []

        async def commit(name: str, expects: dict[bytes, int] | None = None) -> None:
            try:
                await leader.commit([(b"a", name.encode())], expects=expects or {})
            except ConflictError:
                name += " refused"
            order.append(name)

        tasks = []
        for name, expects in (("blind 1", None), ("expects", {b"a": 0}), ("blind 2", None), ("blind 3", None)):
            tasks.append(asyncio.ensure_future(commit(name, expects)))
            await asyncio.sleep(0)
        other = asyncio.ensure_future(leader.commit([(b"other", b"1")]))
        await asyncio.sleep(0)
        consensus.hold.set()
        await asyncio.gather(*tasks, other)
        assert order[0] == "blind 1" and sorted(order[1:]) == ["blind 2", "blind 3", "expects refused"]
        assert await leader.get(b"a") == b"blind 3"


async def test_what_a_commit_in_line_expects_is_not_written_while_it_reads_from_the_bucket() -> None:
    async with DomainWorld() as world:
        old = await world.node()
        first = await old.commit([(b"a", b"1")])
        await old.flush(10)
        await old.aclose()
        leader = await world.node()  # its cache is empty
        assert leader._leader is not None
        database, going = leader._leader.database, asyncio.Event()
        get_row = database.get_row

        async def slow(key: bytes) -> Any:
            await going.wait()
            return await get_row(key)

        database.get_row = slow  # type: ignore[method-assign]
        expecting = asyncio.ensure_future(leader.commit([(b"a", b"2")], expects={b"a": first}))
        await asyncio.sleep(0)
        blind = asyncio.ensure_future(leader.commit([(b"a", b"3")]))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not blind.done()
        going.set()
        assert await expecting < await blind
        assert await leader.get(b"a") == b"3"


async def test_nobody_joins_an_open_group_or_leaves_the_line_while_an_expected_key_is_read() -> None:
    """Rules Q2 and Q3 in the critical schedule: a group is open, and two waiting commits wake together."""
    async with DomainWorld() as world:
        leader, consensus = await held(world)
        assert leader._leader is not None
        database, going = leader._leader.database, asyncio.Event()
        get_row = database.get_row

        async def slow(key: bytes) -> Any:
            await going.wait()
            return await get_row(key)

        database.get_row = slow  # type: ignore[method-assign]
        consensus.hold = asyncio.Event()
        tasks = [asyncio.ensure_future(leader.commit([(b"a", b"1")]))]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        tasks.append(asyncio.ensure_future(leader.commit([(b"other", b"1")])))  # in a group that stays open
        await asyncio.sleep(0)
        expecting = asyncio.ensure_future(leader.commit([(b"a", b"expecting")], expects={b"a": 1}))
        await asyncio.sleep(0)
        blind = asyncio.ensure_future(leader.commit([(b"a", b"blind")]))
        await asyncio.sleep(0)
        consensus.hold.set()
        await asyncio.gather(*tasks)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not expecting.done() and not blind.done()
        going.set()
        assert await expecting < await blind
        assert await leader.get(b"a") == b"blind"


async def test_a_commit_that_gives_up_in_line_lets_the_others_go_on() -> None:
    async with DomainWorld() as world:
        leader, consensus = await held(world)
        consensus.hold = asyncio.Event()
        first = asyncio.ensure_future(leader.commit([(b"a", b"1")]))
        await asyncio.sleep(0)
        gone = asyncio.ensure_future(leader.commit([(b"a", b"2")], expects={b"a": 0}))
        await asyncio.sleep(0)
        last = asyncio.ensure_future(leader.commit([(b"a", b"3")]))
        await asyncio.sleep(0)
        gone.cancel()
        consensus.hold.set()
        await asyncio.gather(first, last)
        assert await leader.get(b"a") == b"3"


# outcomes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["before", "after"])
async def test_an_append_whose_answer_is_lost_is_resolved_and_counts_once(how: str) -> None:
    async with DomainWorld() as world:
        leader, consensus = await held(world)
        consensus.lose = [how]
        seqno = await leader.commit([(b"a", b"1")])
        assert leader.leading
        assert [(b.seqno, b.values) for b in leader.state.volatile] == [(seqno, [b"1"])]


async def test_unavailable_means_that_it_did_not_happen_and_the_leader_goes_on() -> None:
    async with DomainWorld() as world:
        leader, consensus = await held(world)
        consensus.lose = ["unavailable"]
        with pytest.raises(UnavailableError):
            await leader.commit([(b"a", b"1")])
        assert leader.leading and await leader.get(b"a") is None
        await leader.commit([(b"a", b"2")], expects={b"a": 0})


async def test_a_batch_made_in_one_term_is_not_appended_in_the_next_one_of_the_same_process() -> None:
    """W4: the rows that its commit checked may have changed in between."""
    async with DomainWorld() as world:
        leader, consensus = await held(world)
        first = leader._leader
        assert first is not None
        consensus.hold = asyncio.Event()
        under_way = asyncio.ensure_future(leader.commit([(b"a", b"1")]))
        await asyncio.sleep(0)
        for _ in range(5):
            await asyncio.sleep(0)
        queued = asyncio.ensure_future(leader.commit([(b"b", b"1")], expects={b"b": 0}))
        await asyncio.sleep(0)
        first.step_down(UnavailableError("for the test"))
        consensus.hold.set()
        await under_way  # its append was already sent: it took effect, and its client gets the success
        with pytest.raises(FencedError):
            await queued
        await leader.wait_until_leading(10)
        assert leader._leader is not first
        assert await rows_of(leader) == {b"a": b"1"}


async def test_a_group_is_made_only_in_the_term_it_was_opened_in() -> None:
    async with DomainWorld() as world:
        leader = await world.node()
        first = leader._leader
        assert first is not None
        leader._log.term += 1
        with pytest.raises(FencedError, match="term has ended"):
            await first.writing.commit([(b"a", b"1")])
        assert first.has_ended and not leader.state.volatile


async def test_a_leader_whose_replica_went_on_without_it_feeds_nothing_over_the_gap() -> None:
    """LD3: another term trimmed records that this one never applied."""
    async with DomainWorld() as world:
        old = await world.node()
        await world.depose(old)
        new = await world.node()
        await new.commit([(b"a", b"1")])
        await new.flush(10)
        await new.commit([(b"b", b"2")])
        leader = old._leader
        assert leader is not None and not leader.has_ended
        await old._log.catch_up()
        leader.apply_log()
        assert leader.has_ended and await leader_rows(leader.database) == {}
        assert await rows_of(old) == {b"a": b"1", b"b": b"2"}


async def test_a_refused_batch_changes_nothing_and_its_client_and_leader_are_told() -> None:
    """[F21] A record of the leader's own term renames the domain."""
    async with DomainWorld() as world:
        leader = await world.node()
        old = leader._leader
        assert old is not None
        reset = proposed(leader._log, encode_command(ResetManifest("renamed", None)))
        with pytest.raises(FencedError, match=r"rejected|no longer leads"):
            await leader.commit([(b"a", b"1")])
        await reset
        await until(lambda: old.has_ended)
        await leader.wait_until_leading(10)
        assert leader.domain_uuid == "renamed" and await rows_of(leader) == {}
        assert await leader.commit([(b"a", b"2")]) > 0


async def leader_rows(database: Database) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    async for keys, values in database.scan():
        found.update(zip(keys, values, strict=True))
    return found


# reads ----------------------------------------------------------------------------------------------------------


async def test_those_who_sync_at_once_share_one_read_of_consensus() -> None:
    async with DomainWorld() as world:
        leader, consensus = await held(world)
        before = consensus.heads
        await asyncio.gather(*[leader.sync() for _ in range(50)])
        assert 1 <= consensus.heads - before <= 2


async def test_a_leader_s_sync_waits_for_what_landed_before_it_was_answered() -> None:
    """Another process may have read it already: this process must not read an older state."""
    async with DomainWorld() as world:
        leader, consensus = await held(world)
        follower = await world.node(FOLLOWS)
        consensus.hold_answer = asyncio.Event()
        committing = asyncio.ensure_future(leader.commit([(b"a", b"1")]))
        while await follower.get(b"a") is None:
            await follower.sync()
        assert await leader.get(b"a") is None and not committing.done()
        await leader.sync()
        assert await leader.get(b"a") == b"1"
        consensus.hold_answer.set()
        await committing


async def test_a_follower_goes_over_to_a_renamed_domain() -> None:
    async with DomainWorld() as world:
        leader, follower = await world.node(), await world.node(FOLLOWS)
        await follower.sync()
        before = follower._follower.database
        assert before is not None
        await leader.reset("renamed", None)
        await leader.commit([(b"a", b"1")])
        assert await rows_of(follower) == {b"a": b"1"}
        assert follower._follower.database is not before and follower.domain_uuid == "renamed"


async def test_a_sync_does_not_join_a_read_that_began_before_it() -> None:
    async with DomainWorld() as world:
        leader = await world.node()
        consensus = Trouble(world)
        consensus.deaf = True
        follower = await world.node(FOLLOWS, consensus=consensus)
        read, going, began = consensus.read, asyncio.Event(), asyncio.Event()

        async def slow(*args: Any, **kwargs: Any) -> Any:
            found = await read(*args, **kwargs)
            began.set()
            await going.wait()
            return found

        consensus.read = slow  # type: ignore[method-assign]
        early = asyncio.ensure_future(follower.sync())
        await began.wait()
        await leader.commit([(b"a", b"1")])
        late = asyncio.ensure_future(follower.sync())
        await asyncio.sleep(0)
        going.set()
        await asyncio.gather(early, late)
        assert await follower.get(b"a") == b"1"


async def test_a_follower_whose_file_was_collected_refreshes_and_reads_on() -> None:
    async with DomainWorld() as world:
        options = Options(gc_delay_ms=0, manifests_kept=1, l0_compact=8)  # compacted only when the test asks
        leader = await world.node(replace(LEADS, options=options))
        for i in range(4):
            await leader.commit([(b"k", b"%d" % i), (b"k%d" % i, b"v")])
            await leader.flush(10)
        consensus = Trouble(world)
        consensus.deaf = True
        follower = await world.node(replace(FOLLOWS, options=options), consensus=consensus)
        await follower.sync()
        old = follower.state.manifest
        assert leader._leader is not None
        await leader._leader.database.background.compact()
        await asyncio.sleep(0.01)
        await leader._leader.database.background.collect_garbage()
        objects = [meta.key async for meta in world.objects().list("") if "/sst/" in meta.key]
        assert len(objects) == 1 and follower.state.manifest is old
        assert await follower.get(b"k") == b"3"
        assert follower.state.manifest is not old
        assert await rows_of(follower) == await rows_of(leader)


async def test_a_follower_released_while_it_refreshed_stays_closed() -> None:
    """Otherwise reads would use its outdated state once this process stops leading again."""
    async with DomainWorld() as world:
        leader = await world.node()
        await leader.commit([(b"a", b"1")])
        consensus = Trouble(world)
        consensus.deaf = True
        node = await world.node(FOLLOWS, consensus=consensus)
        assert await rows_of(node) == {b"a": b"1"}
        read, going, began = consensus.read, asyncio.Event(), asyncio.Event()

        async def slow(*args: Any, **kwargs: Any) -> Any:
            began.set()
            await going.wait()
            return await read(*args, **kwargs)

        consensus.read = slow  # type: ignore[method-assign]
        refreshing = asyncio.ensure_future(node._follower.refresh())
        await began.wait()
        await node._follower.release()  # as when this process begins to lead
        going.set()
        await refreshing
        assert node._follower.database is None
        assert await rows_of(node) == {b"a": b"1"}


async def test_the_loop_turns_while_a_long_buffer_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader that opens and a follower yield while they replay; neither shows a row before the replay is complete."""
    fed, longest = 0, 0
    apply = Database.apply

    def counted(self: Database, seqno: int, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        nonlocal fed
        fed += len(keys)
        apply(self, seqno, keys, values)

    async def turn() -> None:
        nonlocal fed, longest
        while True:
            longest, fed = max(longest, fed), 0
            await asyncio.sleep(0)

    async with DomainWorld() as world:
        first = await world.node()
        for i in range(3 * REPLAY_ROWS):
            await first.commit([(b"%06d" % i, b"v")])
        await first.aclose()
        monkeypatch.setattr(Database, "apply", counted)
        async with Tasks(print) as tasks:
            tasks.spawn(turn(), name="turn")
            second = await world.node()
            assert await second.get(b"%06d" % (3 * REPLAY_ROWS - 1)) == b"v"
            assert 0 < longest <= REPLAY_ROWS
            follower = await world.node(FOLLOWS)
            reading = [asyncio.ensure_future(follower.get(b"%06d" % (3 * REPLAY_ROWS - 1))) for _ in range(3)]
            assert await asyncio.gather(*reading) == [b"v"] * 3
            assert longest <= max(REPLAY_ROWS, APPLY_ROWS)
        assert len(await rows_of(second)) == 3 * REPLAY_ROWS


# persisting -----------------------------------------------------------------------------------------------------


async def test_a_row_is_persisted_within_the_interval_without_anybody_asking() -> None:
    async with DomainWorld() as world:
        leader = await world.node(replace(LEADS, persist_interval_s=0.1))
        for _ in range(3):
            seqno = await leader.commit([(b"a", b"1")])
            await until(lambda seqno=seqno: leader.state.persisted_seqno >= seqno)  # type: ignore[misc]
        manifest = leader.state.manifest
        await asyncio.sleep(0.3)
        assert leader.state.manifest is manifest  # nothing new: nothing written


async def test_a_full_write_buffer_is_persisted_and_trims_the_log() -> None:
    async with DomainWorld() as world:
        settings = replace(LEADS, rollup_after_records=4, options=Options(write_buffer_bytes=100_000))
        leader = await world.node(settings)
        for i in range(100):
            await leader.commit([(b"k%d" % i, b"x" * 5_000)])
        await until(lambda: leader.state.persisted_seqno > 0)
        await until(lambda: world.memory.heads["metastore/main"].start > 0)
        assert leader.state.volatile_bytes < 400_000
        assert_invariants(leader.state)
        assert len(await rows_of(await world.node(FOLLOWS))) == 100


async def test_commits_wait_for_room_while_the_bucket_is_down_and_go_on_when_it_is_back() -> None:
    async with DomainWorld() as world:
        bucket = Bucket(world)
        leader = await world.node(replace(LEADS, volatile_bytes=50_000), objects=bucket)
        bucket.down.set()
        commits = [asyncio.ensure_future(leader.commit([(b"k%d" % i, b"x" * 5_000)])) for i in range(40)]
        await until(lambda: sum(task.done() for task in commits) >= 8)
        await asyncio.sleep(0.2)
        stuck = [task for task in commits if not task.done()]
        assert stuck and leader.leading
        assert leader.state.volatile_bytes < 100_000
        leader._leader.mark()  # type: ignore[union-attr]
        [mark] = leader.marks.report("p", 0).marks
        assert mark.held_by == "objects" and "bucket" in mark.reason
        bucket.down.clear()
        await asyncio.gather(*commits)
        assert len(await rows_of(leader)) == 40
        assert ROOM_WAIT_S > 0


async def test_a_manifest_upload_without_known_outcome_is_tried_again() -> None:
    async with DomainWorld() as world:
        bucket = Bucket(world)
        leader = await world.node(objects=bucket)
        bucket.error, bucket.only = UnknownOutcomeError, "/manifest/"
        seqno = await leader.commit([(b"a", b"1")])
        bucket.down.set()
        with pytest.raises(UnavailableError):
            await leader.flush(10)
        bucket.down.clear()
        assert await leader.flush(10) == seqno and leader.leading


async def test_a_manifest_whose_append_has_no_known_outcome_ends_the_term_and_loses_nothing() -> None:
    """[L6]"""
    async with DomainWorld() as world:
        leader, consensus = await held(world)
        await leader.commit([(b"a", b"1")])
        term = leader.term
        log_head, read = consensus.log_head, consensus.read

        async def silent(*args: Any, **kwargs: Any) -> Any:
            raise UnavailableError("nobody answers")

        consensus.lose = ["after"]
        consensus.read = silent  # type: ignore[method-assign]
        with pytest.raises((UnknownOutcomeError, FencedError)):
            await leader.flush(30)
        consensus.read, consensus.log_head = read, log_head  # type: ignore[method-assign]
        await leader.wait_until_leading(20)
        assert leader.term > term and await rows_of(leader) == {b"a": b"1"}
        await leader.commit([(b"b", b"2")])
        await leader.flush(10)
        assert not leader.state.volatile


async def test_a_manifest_of_a_newer_format_is_named_and_the_domain_not_led() -> None:
    async with DomainWorld() as world:
        import crc32c

        leader = await world.node()
        data = MAGIC + (9).to_bytes(2, "little") + b"body"
        data += crc32c.crc32c(data).to_bytes(4, "little")
        reset = ResetManifest(leader.domain_uuid, PersistedManifest(data, 5, 1))
        await leader._log.propose(encode_command(reset))
        await leader.aclose()
        other = await Domain.open(
            DomainContext(await world.client(), world.objects(), "main", holder="x", clock=world.clock, rand=world.rand)
        )
        with pytest.raises(UnavailableError, match="newer version of tidemill"):
            await other.wait_until_leading(1)
        await other.aclose()


async def test_a_manifest_of_another_domain_is_refused() -> None:
    async with DomainWorld() as world:
        one = await world.node()
        await one.commit([(b"a", b"1")])
        await one.flush(10)
        assert one.state.manifest is not None
        from tidemill.metastore.lsm.manifest import decode_manifest

        with pytest.raises(InvalidError, match="another domain"):
            await one.reset("other", decode_manifest(one.state.manifest.data))
        other = DomainWorld()
        stray = await other.node()
        await stray._log.propose(encode_command(ResetManifest("other", one.state.manifest)))
        await stray.aclose()
        follower = await Domain.open(
            DomainContext(
                await other.client(),
                world.objects(),
                "main",
                holder="x",
                clock=world.clock,
                rand=world.rand,
                settings=FOLLOWS,
            )
        )
        with pytest.raises(CorruptError, match="another domain"):
            await follower.sync()
        await follower.aclose()
        await other.aclose()


async def test_marks_say_how_far_the_bucket_is() -> None:
    async with DomainWorld() as world:
        tracker = StatusTracker()
        leader = await world.node(tracker=tracker)
        seqno = await leader.commit([(b"a", b"1")])
        assert leader._leader is not None
        leader._leader.mark()
        [mark] = tracker.report("p", 0).marks
        assert (mark.name, mark.position, mark.target) == ("metastore:main", 0, 0)  # on time: waits for its interval
        assert f"seqno {seqno} " in mark.reason
        await leader.flush(10)
        leader._leader.mark()
        [mark] = tracker.report("p", 0).marks
        assert (mark.position, mark.target, mark.reason) == (seqno, seqno, "")
        await leader.aclose()
        assert not tracker.report("p", 0).marks


async def test_a_leader_whose_database_lost_its_background_work_opens_anew() -> None:
    async with DomainWorld() as world:
        leader = await world.node(replace(LEADS, lease_ttl_ms=300))
        await leader.commit([(b"a", b"1")])
        assert leader._leader is not None
        first = leader._leader
        first.database.background._task_failed("metastore collection", RuntimeError("a bug"))
        await until(lambda: leader.leading and leader._leader is not first)
        assert await rows_of(leader) == {b"a": b"1"}


async def test_a_closed_domain_answers_closed_and_gives_its_lease_up() -> None:
    async with DomainWorld() as world:
        leader = await world.node()
        await leader.commit([(b"a", b"1")])
        await leader.aclose()
        await leader.aclose()
        assert await world.lease() is None
        for call in (leader.sync, leader.flush, lambda: leader.get(b"a"), lambda: leader.commit([(b"a", b"2")])):
            with pytest.raises(TidemillError, match="closed"):
                await call()


# planted faults -------------------------------------------------------------------------------------------------


async def test_planted_replay_at_persisted_loses_the_first_batch_after_the_manifest() -> None:
    async with DomainWorld() as world:
        old = await world.node()
        await old.commit([(b"a", b"1")])
        await old.commit([(b"b", b"1")])
        await old.aclose()
        with planted("replay-at-persisted"):
            broken = await world.node()
        assert await rows_of(broken) == {b"b": b"1"}


async def test_planted_silent_reject_trims_nothing_and_calls_it_persisted() -> None:
    async with DomainWorld() as world:
        with planted("silent-reject"):
            leader = await world.node()
        seqno = await leader.commit([(b"a", b"1")])
        higher = PersistedManifest(b"someone else's", seqno, leader.state.epoch(leader.term) + 1)
        leader.state.manifest = higher  # what the rule protects
        assert await leader.flush(10) == seqno
        assert leader.state.manifest is higher and len(leader.state.volatile) == 1


async def test_every_persisted_manifest_claims_only_what_was_written() -> None:
    """[F22] Check every manifest that a run proposes."""
    async with DomainWorld() as world:
        leader = await world.node()
        for round_ in range(5):
            flushing = asyncio.ensure_future(leader.flush(10))
            await asyncio.gather(*[leader.commit([(b"%d-%d" % (round_, i), b"v")]) for i in range(20)])
            await flushing
        state, issued = DomainState(), 0
        for record in world.memory.records["metastore/main"]:
            if record.data[:1] != b"\x00":
                continue
            command = decode_command(record.data[1:])
            if isinstance(command, PersistManifest):
                assert command.manifest.last_seqno <= issued
            elif not isinstance(command, SetDomainUuid):
                issued = state.seqno(record.position)
        assert issued
