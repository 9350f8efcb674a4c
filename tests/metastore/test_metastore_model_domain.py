"""A replicated domain against a plain dict: three nodes, any two of which may lead, die, be deposed or return.

Commits, expectations, deletes, reads in both directions, snapshots, flushes, merges, collections, reopenings and
failovers occur in any order, also in the middle of commits. After any such history, a synced read equals the dict. A
stale read equals the dict at some earlier moment and never moves backwards. Seqnos only grow, and a commit that was
refused or fenced is never visible.

The test runs in virtual time, so waiting for leases costs nothing; the schedule of the tasks is drawn too.
test_metastore_model tests one engine in the same way, in more detail.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, rule

from sim.clock import SimClock
from sim.loop import LIFE, Life, SimLoop
from support.metastore.lsm_world import expected
from support.metastore.strategies import batches, bounds, keys, options
from support.waiting import until
from tidemill.base.clock import Rand
from tidemill.base.errors import (
    ClosedError,
    ConflictError,
    FencedError,
    MissingError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidemill.consensus.memory import MemoryConsensus, MemoryState
from tidemill.metastore.domain.domain import Domain
from tidemill.metastore.domain.settings import DomainContext, DomainSettings
from tidemill.metastore.domain.state import assert_invariants
from tidemill.metastore.lsm.manifest import Manifest, decode_manifest
from tidemill.metastore.lsm.options import Options
from tidemill.metastore.lsm.snapshot import Snapshot
from tidemill.metastore.lsm.version import prefix_end
from tidemill.objects.memory import MemoryObjects

T = TypeVar("T")
Rows = dict[bytes, bytes]
Batch = list[tuple[bytes, bytes]]

PATIENCE_S = 120.0
"""Limit in virtual seconds. Two nodes want to lead and no failure is permanent, so every operation ends within it."""

OF_CHANGE = (FencedError, UnavailableError)
"""Errors of a commit without effect; the caller retries."""

slots = st.sampled_from([0, 1, 2])
prefixes = st.sampled_from([b"a", b"a\xff", b"k/", b"k/1", b"long/", b"\xff", b"none"])


class Node:
    """One run of one process: all its code runs in `context`, and ends when `life` is killed."""

    def __init__(self, name: str, number: int) -> None:
        self.life = Life(name, number)
        self.context = contextvars.copy_context()
        self.context.run(LIFE.set, self.life)
        self.domain: Domain
        self.seen = 0
        """Index of the newest moment in the history that its stale reads have reached."""


class Replicated(RuleBasedStateMachine):
    snapshots = Bundle("snapshots")

    def __init__(self) -> None:
        super().__init__()
        self.loop: Any = None

    @initialize(
        seed=st.integers(0, 10_000),
        options=options,
        persist_interval_s=st.sampled_from([0.2, 5.0, 100.0]),
        volatile_bytes=st.sampled_from([2_000, 1 << 20]),
        rollup_after_records=st.sampled_from([3, 64]),
        restored=st.booleans(),
    )
    def start(
        self,
        seed: int,
        options: Options,
        persist_interval_s: float,
        volatile_bytes: int,
        rollup_after_records: int,
        restored: bool,
    ) -> None:
        self.loop = SimLoop(random.Random(seed))
        self.clock = SimClock(self.loop)
        self.rand = Rand(seed)
        self.memory = MemoryState()
        self.objects = MemoryObjects(self.clock)
        self.settings = DomainSettings(
            lease_ttl_ms=1_000,
            persist_interval_s=persist_interval_s,
            follow_pause_s=0.02,
            volatile_bytes=volatile_bytes,
            rollup_after_records=rollup_after_records,
            options=options,
        )
        self.marks = 0
        self.taken: list[Snapshot] = []
        self.history: list[tuple[int, Rows]] = [(0, {})]
        self.seqnos: dict[bytes, int] = {}
        self.nodes = [Node(f"node-{slot}", 0) for slot in range(3)]
        for slot in range(3):
            self.open(slot)
        self.run(self.node(0), lambda domain: self.lead_somewhere())
        if restored:  # so that seqnos and epochs are not positions and terms
            goes_on = Manifest("restored", 50, 1, 1_000, 1, 0, ((),))
            leader = self.leader()
            assert leader is not None
            self.run(leader, lambda domain: domain.reset("restored", goes_on, timeout_s=5.0))
            self.run(leader, lambda _: self.lead_somewhere())
            self.history = [(1_000, {})]
            for slot in range(3):
                self.read(slot, persisted_seqno)

    # the world ---------------------------------------------------------------------------------------

    @property
    def rows(self) -> Rows:
        return self.history[-1][1]

    def node(self, slot: int) -> Node:
        return self.nodes[slot]

    def run(self, node: Node, work: Callable[[Domain], Awaitable[T]]) -> T:
        async def bounded() -> T:
            async with asyncio.timeout(PATIENCE_S):
                return await work(node.domain)

        result: T = self.loop.run_until_complete(self.loop.create_task(bounded(), context=node.context))
        assert not self.loop.failures, self.loop.failures
        return result

    def apart(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run work of the test itself, which survives every node."""

        async def bounded() -> T:
            async with asyncio.timeout(PATIENCE_S):
                return await work()

        result: T = self.loop.run_until_complete(self.loop.create_task(bounded()))
        return result

    def open(self, slot: int) -> None:
        """Start a process. Two of the three want to lead; the third follows, and forwards requests to them."""
        node = Node(f"node-{slot}", self.nodes[slot].life.number + 1)

        async def build() -> None:
            reported = self.settings if slot < 2 else as_follower(self.settings)
            node.domain = await Domain.open(
                DomainContext(
                    MemoryConsensus(self.clock, self.memory),
                    self.objects,
                    "main",
                    holder=f"node-{slot}",
                    clock=self.clock,
                    rand=self.rand,
                    settings=reported,
                )
            )

        self.loop.run_until_complete(self.loop.create_task(build(), context=node.context))
        self.nodes[slot], node.seen = node, len(self.history) - 1

    def leader(self) -> Node | None:
        """Return the node that leads or believes so; among several the one of the newest term."""
        leading = [node for node in self.nodes if node.domain.leading]
        return max(leading, key=lambda node: node.domain.term, default=None)

    async def lead_somewhere(self) -> None:
        await until(lambda: self.leader() is not None)

    # writes ------------------------------------------------------------------------------------------

    def happened(self, outcomes: list[tuple[int, Batch]]) -> None:
        """Record commits in the order of their seqnos. Commits with one seqno touch different keys and are one
        moment."""
        for seqno in sorted({seqno for seqno, _ in outcomes}):
            assert seqno > self.history[-1][0], "a seqno went back"
            rows, touched = dict(self.rows), set[bytes]()
            for batch in [batch for at, batch in outcomes if at == seqno]:
                assert touched.isdisjoint(dict(batch)), "two commits of one key shared a seqno"
                touched |= set(dict(batch))
                rows.update(batch)
            self.seqnos.update(dict.fromkeys(touched, seqno))
            self.history.append((seqno, {key: value for key, value in rows.items() if value}))

    def marked(self, rows: Batch) -> tuple[bytes, Batch]:
        """Add a unique row that shows whether the commit took effect."""
        self.marks += 1
        mark = b"mark/%06d" % self.marks
        return mark, [*rows, (mark, b"1")]

    async def fate(self, domain: Domain, mark: bytes) -> int:
        """Return the seqno of the commit with this mark, or 0 if it never took effect."""
        while True:
            try:
                await domain.sync()
                row = await domain.get_row(mark)
                return row.seqno if row is not None else 0
            except (*OF_CHANGE, ClosedError):
                await asyncio.sleep(0.1)

    @rule(slot=slots, rows=batches)
    def commit(self, slot: int, rows: Batch) -> None:
        mark, rows = self.marked(rows)

        async def work(domain: Domain) -> int:
            while True:
                try:
                    return await domain.commit(rows)
                except OF_CHANGE:
                    await asyncio.sleep(0.1)
                except UnknownOutcomeError:
                    found = await self.fate(domain, mark)
                    if found:
                        return found

        self.happened([(self.run(self.node(slot), work), rows)])

    @rule(slot=slots, key=keys, rows=batches, stale=st.booleans())
    def commit_if(self, slot: int, key: bytes, rows: Batch, stale: bool) -> None:
        """Commit if the row is unchanged. On another version the commit conflicts and reports the current one."""
        mark, rows = self.marked(rows)
        there = self.seqnos[key] if key in self.rows else 0
        expects = {key: there + 1 if stale else there}

        async def work(domain: Domain) -> tuple[int, Any]:
            while True:
                try:
                    return await domain.commit(rows, expects=expects), None
                except OF_CHANGE:
                    await asyncio.sleep(0.1)
                except UnknownOutcomeError:
                    found = await self.fate(domain, mark)
                    if found:
                        return found, None
                except ConflictError as conflict:
                    return 0, conflict.current

        seqno, current = self.run(self.node(slot), work)
        if not stale:
            self.happened([(seqno, rows)])
            return
        assert seqno == 0
        if current is not None:
            found = current[key]
            assert (found and (found.seqno, found.value)) == ((there, self.rows[key]) if there else None)

    @rule(
        data=st.lists(batches, min_size=1, max_size=5),
        how=st.sampled_from(["depose", "kill"]),
        turns=st.integers(0, 30),
    )
    def fail_over_amid_commits(self, data: list[Batch], how: str, turns: int) -> None:
        """Depose or kill the leader during commits: each takes effect as a whole or not at all."""
        leader = self.leader()
        if leader is None:
            return
        marked = [self.marked(rows) for rows in data]
        reported: dict[bytes, int] = {}

        async def one(mark: bytes, rows: Batch) -> None:
            try:
                reported[mark] = await leader.domain.commit(rows)
            except OF_CHANGE:
                reported[mark] = 0
            except UnknownOutcomeError:
                pass

        tasks = [self.loop.create_task(one(mark, rows), context=leader.context) for mark, rows in marked]

        async def let_run() -> None:
            for _ in range(turns):
                await asyncio.sleep(0)

        self.apart(let_run)
        if how == "kill":
            self.kill(self.nodes.index(leader))
        else:
            self.depose()
            self.run(leader, lambda _: asyncio.wait(tasks))
            assert all(task.exception() is None for task in tasks)
        reader = self.node(2)
        outcomes = []
        for mark, rows in marked:
            seqno = self.run(reader, lambda domain, mark=mark: self.fate(domain, mark))  # type: ignore[misc]
            assert reported.get(mark, seqno) == seqno, "an answer and the log say different things"
            if seqno:
                outcomes.append((seqno, rows))
        self.happened(outcomes)

    # reads -------------------------------------------------------------------------------------------

    def read(self, slot: int, work: Callable[[Domain], Awaitable[T]]) -> T:
        """Read after a sync; start again if leadership changed in between."""

        async def synced(domain: Domain) -> T:
            while True:
                try:
                    await domain.sync()
                    return await work(domain)
                except OF_CHANGE:
                    await asyncio.sleep(0.1)

        found = self.run(self.node(slot), synced)
        self.node(slot).seen = len(self.history) - 1
        return found

    @rule(slot=slots, wanted=st.lists(keys, min_size=1, max_size=8))
    def get(self, slot: int, wanted: list[bytes]) -> None:
        key = wanted[0]
        assert self.read(slot, lambda domain: domain.get_many(wanted)) == [self.rows.get(each) for each in wanted]
        assert self.read(slot, lambda domain: domain.get(key)) == self.rows.get(key)
        row = self.read(slot, lambda domain: domain.get_row(key))
        assert (row and (row.seqno, row.value)) == ((self.seqnos[key], self.rows[key]) if key in self.rows else None)

    @rule(slot=slots, lower=bounds, upper=st.none() | bounds, reverse=st.booleans())
    def scan(self, slot: int, lower: bytes, upper: bytes | None, reverse: bool) -> None:
        lower = max(lower, b"\x01")  # below it are the domain's own rows
        found = self.read(slot, lambda domain: pairs(domain.scan(lower, upper, reverse=reverse)))
        assert found == expected(self.rows, lower, upper, reverse=reverse)

    @rule(slot=slots, prefix=prefixes, reverse=st.booleans())
    def prefix(self, slot: int, prefix: bytes, reverse: bool) -> None:
        found = self.read(slot, lambda domain: pairs(domain.prefix(prefix, reverse=reverse)))
        assert found == expected(self.rows, prefix, prefix_end(prefix), reverse=reverse)

    @rule(slot=slots)
    def read_stale(self, slot: int) -> None:
        """Read without a sync. The result is a complete past state, no older than the last one that this node has
        shown."""
        node = self.node(slot)
        try:
            found = dict(self.run(node, lambda domain: pairs(domain.scan(b"\x01"))))
        except UnavailableError:
            return
        moments = [at for at in range(node.seen, len(self.history)) if self.history[at][1] == found]
        assert moments, "a stale read is no moment of the past, or went back"
        node.seen = moments[0]

    @rule(target=snapshots, slot=slots, of_the_leader=st.booleans())
    def take_snapshot(self, slot: int, of_the_leader: bool) -> tuple[Node, int, Snapshot, Rows]:
        leader = self.leader()
        if of_the_leader and leader is not None:
            slot = self.nodes.index(leader)
        term, snapshot = self.read(slot, snapshot_of)
        self.taken.append(snapshot)
        return self.node(slot), term, snapshot, dict(self.rows)

    @rule(taken=snapshots, wanted=st.lists(keys, min_size=1, max_size=5))
    def read_snapshot(self, taken: tuple[Node, int, Snapshot, Rows], wanted: list[bytes]) -> None:
        """Read a snapshot with its term, which is 0 if it was taken by a process that did not lead."""
        node, term, snapshot, rows = taken
        if not node.life.alive:
            return

        async def work(_: Domain) -> None:
            assert await snapshot.get_many(wanted) == [rows.get(key) for key in wanted]
            for reverse in (False, True):
                assert await pairs(snapshot.scan(b"\x01", reverse=reverse)) == expected(rows, b"\x01", reverse=reverse)
                for prefix in (b"a", b"k/", b"long/"):
                    wished = expected(rows, prefix, prefix_end(prefix), reverse=reverse)
                    assert await pairs(snapshot.prefix(prefix, reverse=reverse)) == wished

        try:
            self.run(node, work)
        except (ClosedError, FencedError, UnknownOutcomeError, MissingError):
            # A snapshot ends with its database, and the files of a process that does not lead are not pinned.
            deposed = self.leader() is not node or node.domain.term != term
            assert term == 0 or deposed, "a leader's snapshot ended before its term"

    @rule(taken=consumes(snapshots))
    def close_snapshot(self, taken: tuple[Node, int, Snapshot, Rows]) -> None:
        taken[2].close()

    # operations and failures of nodes --------------------------------------------------------------------

    @rule(slot=slots)
    def flush(self, slot: int) -> None:
        async def work(domain: Domain) -> int:
            while True:
                try:
                    return await domain.flush(20)
                except (*OF_CHANGE, UnknownOutcomeError, ConflictError):
                    await asyncio.sleep(0.1)

        assert self.run(self.node(slot), work) >= self.history[-1][0]
        reached = self.read(slot, persisted_seqno)
        assert reached >= self.history[-1][0]

    @rule(collect=st.booleans())
    def compact(self, collect: bool) -> None:
        leader = self.leader()

        async def work(domain: Domain) -> None:
            assert domain._leader is not None
            database = domain._leader.database
            try:
                await database.background.compact()
                for _ in range(2 if collect else 0):  # a file goes when it was seen dead before
                    await database.background.collect_garbage()
            except (FencedError, ClosedError, UnknownOutcomeError, UnavailableError, ConflictError, MissingError):
                return  # the term ended, as the log reported, or the next leader collected a file

        if leader is not None:
            self.run(leader, work)

    @rule(seconds=st.sampled_from([0.0, 0.05, 0.5, 3.0]))
    def time_passes(self, seconds: float) -> None:
        self.apart(lambda: asyncio.sleep(seconds))

    @rule()
    def depose(self) -> None:
        """Release the leader's lease for the next candidate, without notice to the leader."""

        async def work() -> None:
            client = MemoryConsensus(self.clock, self.memory)
            for lease in await client.leases("metastore/main"):
                if lease.name == "metastore/main" and lease.live:
                    await client.release(lease.name, lease.holder, lease.term)

        self.apart(work)

    @rule(rows=batches)
    def read_at_the_deposed(self, rows: Batch) -> None:
        """Another node leads and has committed, while the old leader may still believe that it leads."""
        old = self.leader()
        if old is None:
            return
        self.depose()
        term = old.domain.term

        async def another() -> Node | None:
            while (leader := self.leader()) is None or leader.domain.term == term:
                await asyncio.sleep(0.002)
            return leader

        new = self.apart(another)
        if new is not None and new is not old:
            self.commit(self.nodes.index(new), rows)
            slot = self.nodes.index(old)
            assert dict(self.read(slot, lambda domain: pairs(domain.scan(b"\x01")))) == self.rows

    @rule(slot=slots)
    def kill(self, slot: int) -> None:
        """Stop the process and start another in its place. Its lease has to expire."""
        self.loop.kill(self.node(slot).life)
        self.open(slot)

    @rule(slot=slots)
    def reopen(self, slot: int) -> None:
        self.run(self.node(slot), lambda domain: domain.aclose())
        self.loop.kill(self.node(slot).life)
        self.open(slot)

    # the end -------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        if self.loop is None:
            return
        try:
            for slot in (0, 1):  # the last leaders die: what is in the log and the bucket must do
                self.kill(slot)
            assert dict(self.read(2, lambda domain: pairs(domain.scan(b"\x01")))) == self.rows
            self.run(self.node(0), lambda _: self.lead_somewhere())
            assert dict(self.read(0, lambda domain: pairs(domain.scan(b"\x01")))) == self.rows
            self.flush(1)
            self.loop.kill(self.node(0).life)
            self.loop.kill(self.node(1).life)
            state = self.node(2).domain.state
            self.read(2, persisted_seqno)
            assert_invariants(state)
            self.apart(lambda: self.every_file_is_there())
        finally:
            for snapshot in self.taken:
                snapshot.close()
            self.loop.dispose()

    async def every_file_is_there(self) -> None:
        domain = self.node(2).domain
        context: DomainContext = domain._context
        manifest = domain.state.manifest
        if manifest is not None:
            files = context.files(domain.domain_uuid)
            for file in (file for level in decode_manifest(manifest.data).levels for file in level):
                assert await self.objects.head(files.key(file)) is not None, "a file of the newest manifest is gone"


async def pairs(chunks: Any) -> Batch:
    return [pair async for keys_, values in chunks for pair in zip(keys_, values, strict=True)]


async def snapshot_of(domain: Domain) -> tuple[int, Snapshot]:
    """Return a snapshot, and the term in which it was taken; 0 if the process led only before or after."""
    term = domain.term
    snapshot = await domain.snapshot()
    return (term if domain.term == term else 0), snapshot


async def persisted_seqno(domain: Domain) -> int:
    return domain.state.persisted_seqno


def as_follower(reported: DomainSettings) -> DomainSettings:
    values = {name: getattr(reported, name) for name in reported.__struct_fields__}
    return DomainSettings(**values | {"lead": False, "may_lead": False})


TestReplicatedDomain = Replicated.TestCase
TestReplicatedDomain.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_a_leader_that_was_deposed_unawares_flushes_what_another_committed_since() -> None:
    """Found by the model above. The old leader has no rows to flush, and does not know of the other leader's."""
    state = Replicated()
    small = Options(write_buffer_bytes=1000, block_bytes=40, file_bytes=200, cache_bytes=0)
    state.start(0, small, persist_interval_s=0.2, volatile_bytes=2_000, rollup_after_records=3, restored=False)
    try:
        for _ in range(12):
            state.depose()
        state.kill(slot=1)
        state.depose()
        state.fail_over_amid_commits(data=[[(b"a", b"")]], how="depose", turns=0)
        assert state.node(0).domain.leading and state.node(0).domain.term < state.node(1).domain.term
        state.flush(slot=0)
    finally:
        state.teardown()


def test_a_flush_asked_for_by_request_covers_what_another_leader_committed_since() -> None:
    """Found by the model above: a superseded leader executed the request, and flushed nothing."""
    state = Replicated()
    small = Options(
        write_buffer_bytes=1000, block_bytes=40, file_bytes=200, cache_bytes=0, bloom_bits_per_key=0, l0_compact=2,
        l0_slow=4, l0_stop=6, level_base_bytes=300, level_factor=3, levels=2, slice_rows=1, gc_delay_ms=0,
        manifests_kept=1,
    )  # fmt: skip
    state.start(38, small, persist_interval_s=0.2, volatile_bytes=2_000, rollup_after_records=3, restored=False)
    try:
        for _ in range(2):
            state.depose()
        state.read(0, persisted_seqno)
        state.kill(slot=1)
        state.read(0, persisted_seqno)
        state.fail_over_amid_commits(data=[[(b"a", b"")]], how="kill", turns=1)
        state.flush(slot=1)
    finally:
        state.teardown()
