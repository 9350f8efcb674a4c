"""Commits of processes that do not lead: sent through the request log, executed once, and answered."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from support.metastore.domain_world import FOLLOWS, LEADS, DomainWorld, rows_of
from support.waiting import DEADLINE_S, until
from tidemill.base.errors import ConflictError, InvalidError, MissingError, UnavailableError, UnknownOutcomeError
from tidemill.consensus.api import LogHead, LogSlice
from tidemill.consensus.memory import MemoryConsensus
from tidemill.metastore.domain.domain import Domain
from tidemill.metastore.domain.forwarding import client as requests_module
from tidemill.metastore.domain.forwarding import server as serving_module
from tidemill.metastore.domain.forwarding.request_log import (
    POSITION_KEY,
    Reply,
    Request,
    RequestPosition,
    decode_position,
    decode_request,
    encode_position,
    outcome_of_reply,
    rejection_reply,
    replies_log,
    requests_log,
)
from tidemill.metastore.domain.forwarding.server import REPLY_ATTEMPTS
from tidemill.metastore.domain.state import DomainState
from tidemill.objects.memory import MemoryObjects

TOOL = replace(FOLLOWS, may_lead=True, linger_s=0.2)
REQUESTS, REPLIES = requests_log("main"), replies_log("main")


@pytest.fixture(params=["memory", "sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> DomainWorld:
    if request.param == "memory":
        return DomainWorld()
    if request.param == "postgres":
        return DomainWorld(request.getfixturevalue("postgres_dsn"))
    return DomainWorld(f"sqlite://{tmp_path}/consensus.db")


class Lossy(MemoryConsensus):
    """Consensus that loses answers of appends to the request log, after or before their effect."""

    def __init__(self, world: DomainWorld, *lose: str, log: str = REQUESTS) -> None:
        super().__init__(world.clock, world.memory)
        self.lose = list(lose)
        self.log = log

    async def append(self, log: str, term: int, expected_next: int, records: Sequence[bytes], nonce: str) -> LogHead:
        how = self.lose.pop(0) if log == self.log and self.lose else ""
        if how == "before":
            raise UnknownOutcomeError("lost before")
        if how == "unavailable":
            raise UnavailableError("not sent")
        head = await super().append(log, term, expected_next, records, nonce)
        if how == "after":
            raise UnknownOutcomeError("lost after")
        return head


async def test_a_process_that_does_not_lead_commits_flushes_and_reads_its_own_writes(world: DomainWorld) -> None:
    async with world:
        leader, follower = await world.node(), await world.node(FOLLOWS)
        seqno = await follower.commit([(b"a", b"1"), (b"b", b"2")])
        row = await follower.get_row(b"a")
        assert row is not None and (row.seqno, row.value) == (seqno, b"1")
        assert await leader.get(b"b") == b"2"
        assert await follower.flush(20) >= seqno
        assert leader.state.persisted_seqno >= seqno


async def test_a_refusal_comes_back_with_the_current_rows(world: DomainWorld) -> None:
    async with world:
        leader, follower = await world.node(), await world.node(FOLLOWS)
        seqno = await leader.commit([(b"a", b"1")])
        with pytest.raises(ConflictError) as caught:
            await follower.commit([(b"a", b"2")], expects={b"a": 0, b"none": 3})
        current = caught.value.current
        assert isinstance(current, dict) and current[b"none"] is None
        assert (current[b"a"].seqno, current[b"a"].value) == (seqno, b"1")
        await follower.commit([(b"a", b"2")], expects={b"a": seqno, b"none": 0})
        with pytest.raises(InvalidError, match="key must not be empty"):
            await follower.commit([(b"", b"x")])
        assert await rows_of(leader) == {b"a": b"2"}


async def test_many_at_once_from_several_processes_are_executed_once_each(world: DomainWorld) -> None:
    async with world:
        leader = await world.node()
        tools = [await world.node(FOLLOWS) for _ in range(3)]
        await leader.commit([(b"n", b"0")])

        async def increment(tool: Domain) -> None:
            while True:
                await tool.sync()
                row = await tool.get_row(b"n")
                assert row is not None
                try:
                    await tool.commit([(b"n", b"%d" % (int(row.value) + 1))], expects={b"n": row.seqno})
                    return
                except ConflictError:
                    continue

        blind = [tool.commit([(b"%d-%d" % (i, k), b"v")]) for i, tool in enumerate(tools) for k in range(50)]
        await asyncio.gather(*blind, *[increment(tool) for tool in tools for _ in range(4)])
        rows = await rows_of(leader)
        assert rows.pop(b"n") == b"12" and len(rows) == 150


async def test_the_request_log_and_the_reply_log_do_not_grow(
    world: DomainWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill.metastore.domain.forwarding.server.REPLIES_KEPT", 20)
    async with world:
        await world.node()
        follower, client = await world.node(FOLLOWS), await world.client()
        for i in range(150):
            await follower.commit([(b"k", b"%d" % i)])
        async with asyncio.timeout(DEADLINE_S):
            while True:
                requests, replies = await client.log_head(REQUESTS), await client.log_head(REPLIES)
                if requests.start == requests.next == 150 and replies.next - replies.start <= 2 * 20 + 256:
                    break
                await asyncio.sleep(0.02)
        assert replies.start > 0


async def test_a_request_outlives_the_leader_that_did_not_execute_it(world: DomainWorld) -> None:
    async with world:
        follower = await world.node(FOLLOWS)
        waiting = asyncio.ensure_future(follower.commit([(b"a", b"1")]))
        client = await world.client()
        async with asyncio.timeout(DEADLINE_S):
            while (await client.log_head(REQUESTS)).next == 0:
                await asyncio.sleep(0.01)
        leader = await world.node()  # there was no leader until now
        await waiting
        assert await leader.get(b"a") == b"1"


async def test_a_new_leader_executes_nothing_twice(world: DomainWorld) -> None:
    async with world:
        old, follower = await world.node(), await world.node(FOLLOWS)
        await follower.commit([(b"a", b"1")])
        await old.commit([(b"a", b"later")])
        client = await world.client()
        # The request is still in the log, as for a leader that does not know which requests were executed.
        assert (await client.log_head(REQUESTS)).next == 1
        await world.depose(old)
        new = await world.node()
        await follower.commit([(b"b", b"2")])
        assert await rows_of(new) == {b"a": b"later", b"b": b"2"}


async def test_a_tool_leads_for_a_while_when_nobody_does_and_then_lets_go(world: DomainWorld) -> None:
    async with world:
        tool = await world.node(TOOL)
        assert not tool.leading
        await tool.commit([(b"a", b"1")])
        assert await tool.get(b"a") == b"1"
        await until(lambda: not tool.leading)
        async with asyncio.timeout(DEADLINE_S):
            while await world.lease() is not None:
                await asyncio.sleep(0.02)
        await tool.commit([(b"b", b"2")])  # and a second time
        node = await world.node(replace(LEADS, lease_ttl_ms=600))
        assert await rows_of(node) == {b"a": b"1", b"b": b"2"}


async def test_a_tool_leaves_the_lead_to_a_node_that_has_it(world: DomainWorld) -> None:
    async with world:
        node, tool = await world.node(), await world.node(TOOL)
        for i in range(5):
            await tool.commit([(b"k%d" % i, b"v")])
        assert node.leading and not tool.leading


async def test_what_is_no_request_is_passed_over(world: DomainWorld) -> None:
    async with world:
        leader, follower, client = await world.node(), await world.node(FOLLOWS), await world.client()
        garbage = [b"", b"\xc1", msgspec.msgpack.encode({"a": 1}), msgspec.msgpack.encode(["n", [[1, 2]]])]
        await client.append(REQUESTS, 0, 0, garbage, "x")
        await client.append(REPLIES, 0, 0, [b"\xc1"], "y")
        await follower.commit([(b"a", b"1")])
        assert leader.leading and await rows_of(leader) == {b"a": b"1"}


async def test_what_is_wrong_in_itself_is_refused_before_it_is_sent(world: DomainWorld) -> None:
    async with world:
        await world.node()
        follower, client = await world.node(FOLLOWS), await world.client()
        for rows, words in (([], "at least one row"), ([(b"%d" % i, b"x" * 200_000) for i in range(30)], "too large")):
            with pytest.raises(InvalidError, match=words):
                await follower.commit(rows)
        assert (await client.log_head(REQUESTS)).next == 0


async def test_large_requests_and_large_conflicts_pass_in_parts_or_without_their_rows(world: DomainWorld) -> None:
    async with world:
        leader, follower = await world.node(), await world.node(FOLLOWS)
        rows = [(b"%d" % i, b"x" * 200_000) for i in range(15)]
        await asyncio.gather(*[follower.commit([(b"%d-" % n + key, value) for key, value in rows]) for n in range(6)])
        everything = [b"%d-%d" % (n, i) for n in range(6) for i in range(15)]
        with pytest.raises(ConflictError) as caught:
            await follower.commit([(b"a", b"1")], expects={key: 1 for key in everything})
        assert caught.value.current is None and leader.term == 1
        assert len(await rows_of(follower)) == 90


# on memory alone ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["before", "after"])
async def test_a_request_whose_append_has_no_answer_is_executed_once(how: str) -> None:
    async with DomainWorld() as world:
        leader = await world.node()
        follower = await world.node(FOLLOWS, consensus=Lossy(world, how))
        await leader.commit([(b"n", b"0")])
        row = await leader.get_row(b"n")
        assert row is not None
        await follower.commit([(b"n", b"1")], expects={b"n": row.seqno})
        assert world.memory.heads[REQUESTS].next == 1
        assert await leader.get(b"n") == b"1"


async def test_a_reply_whose_append_has_no_answer_is_given_all_the_same() -> None:
    async with DomainWorld() as world:
        await world.node(consensus=Lossy(world, "before", "unavailable", "after", log=REPLIES))
        follower = await world.node(FOLLOWS)
        for i in range(3):
            await follower.commit([(b"k%d" % i, b"v")])


class Mute(MemoryConsensus):
    """Consensus whose appends to the log of replies wait for `let_go`."""

    def __init__(self, world: DomainWorld) -> None:
        super().__init__(world.clock, world.memory)
        self.asked, self.let_go = asyncio.Event(), asyncio.Event()

    async def append(self, log: str, term: int, expected_next: int, records: Sequence[bytes], nonce: str) -> LogHead:
        if log == REPLIES:
            self.asked.set()
            await self.let_go.wait()
        return await super().append(log, term, expected_next, records, nonce)


@pytest.mark.parametrize("what", ["commit", "flush"])
async def test_the_next_leader_says_unknown_at_once_of_what_the_last_one_executed_and_did_not_answer(what: str) -> None:
    async with DomainWorld() as world:
        consensus = Mute(world)
        old = await world.node(consensus=consensus)
        follower = await world.node(replace(FOLLOWS, request_timeout_s=1_000.0))
        asked = follower.commit([(b"a", b"1")]) if what == "commit" else follower.flush(1_000.0)
        waiting = asyncio.ensure_future(asked)
        await consensus.asked.wait()
        await world.depose(old)
        new = await world.node()
        with pytest.raises(UnknownOutcomeError, match="executed this request ended"):
            async with asyncio.timeout(20):
                await waiting
        assert await rows_of(new) == ({b"a": b"1"} if what == "commit" else {})


class Kept(MemoryConsensus):
    """Consensus that truncates nothing."""

    def __init__(self, world: DomainWorld) -> None:
        super().__init__(world.clock, world.memory)

    async def truncate(self, log: str, before: int) -> LogHead:
        return await self.log_head(log)


class Truncated(MemoryConsensus):
    """Consensus whose first read of requests finds them just truncated by the last leader."""

    def __init__(self, world: DomainWorld) -> None:
        super().__init__(world.clock, world.memory)
        self.cut = False

    async def read(self, log: str, start: int, limit_records: int = 1000, limit_bytes: int = 4 << 20) -> LogSlice:
        if log == REQUESTS and not self.cut:
            self.cut = True
            await self.truncate(log, 1)
        return await super().read(log, start, limit_records, limit_bytes)


async def test_a_leader_begins_though_the_last_one_truncates_meanwhile() -> None:
    async with DomainWorld() as world:
        old, follower = await world.node(consensus=Kept(world)), await world.node(FOLLOWS)
        await follower.commit([(b"a", b"1")])
        await world.depose(old)
        consensus = Truncated(world)
        new = await world.node(consensus=consensus)
        term = new.term
        await follower.commit([(b"b", b"2")])
        assert consensus.cut and new.term == term


async def test_unknown_is_said_once_consensus_is_back() -> None:
    async with DomainWorld() as world:
        consensus = Mute(world)
        old = await world.node(consensus=consensus)
        follower = await world.node(replace(FOLLOWS, request_timeout_s=1_000.0))
        waiting = asyncio.ensure_future(follower.commit([(b"a", b"1")]))
        await consensus.asked.wait()
        await world.depose(old)
        await world.node(consensus=Lossy(world, *["unavailable"] * (REPLY_ATTEMPTS + 1), log=REPLIES))
        with pytest.raises(UnknownOutcomeError, match="executed this request ended"):
            async with asyncio.timeout(20):
                await waiting


@pytest.mark.parametrize("what", ["commit", "flush"])
async def test_a_tool_that_leads_answers_what_it_executed_before_it_lets_go(what: str) -> None:
    """Found as a demo whose capture stalled for 30 s: the Spark driver had led for a moment."""
    async with DomainWorld() as world:
        consensus = Mute(world)
        tool = await world.node(TOOL, consensus=consensus)
        consensus.let_go.set()
        await tool.commit([(b"t", b"1")])
        consensus.let_go.clear()
        consensus.asked.clear()
        follower = await world.node(replace(FOLLOWS, request_timeout_s=1_000.0))
        asked = follower.commit([(b"a", b"1")]) if what == "commit" else follower.flush(1_000.0)
        waiting = asyncio.ensure_future(asked)
        await consensus.asked.wait()
        await asyncio.sleep(5 * TOOL.linger_s)
        assert tool.leading
        consensus.let_go.set()
        await waiting
        await until(lambda: not tool.leading)


async def test_what_was_answered_with_unavailable_is_not_executed_by_anybody_later() -> None:
    async with DomainWorld() as world:
        consensus = Lossy(world, log="metastore/main")
        old, follower = await world.node(consensus=consensus), await world.node(FOLLOWS)
        await old.commit([(b"first", b"1")])
        consensus.lose = ["unavailable"]
        with pytest.raises(UnavailableError):
            await follower.commit([(b"a", b"1")])
        await world.depose(old)
        new = await world.node()
        await follower.commit([(b"b", b"1")])
        assert await rows_of(new) == {b"first": b"1", b"b": b"1"}


async def test_a_refused_request_stays_refused_under_the_next_leader() -> None:
    """A refusal moves the position as durably as a success."""
    async with DomainWorld() as world:
        old, follower = await world.node(), await world.node(FOLLOWS)
        with pytest.raises(ConflictError):
            await follower.commit([(b"a", b"1")], expects={b"a": 7})
        assert old.state.volatile[-1].keys == [POSITION_KEY]
        await world.depose(old)
        new = await world.node()
        await follower.commit([(b"b", b"1")])
        assert await rows_of(new) == {b"b": b"1"}


async def test_without_a_leader_the_answer_is_unknown_in_time_and_never_a_guess() -> None:
    async with DomainWorld() as world:
        follower = await world.node(replace(FOLLOWS, request_timeout_s=0.2))
        with pytest.raises(UnknownOutcomeError, match="no leader answered"):
            await follower.commit([(b"a", b"1")])
        node = await world.node()
        await until(lambda: world.memory.heads[REQUESTS].start == 1)
        assert await rows_of(node) == {b"a": b"1"}  # it was executed after all


async def test_nobody_adds_to_a_backlog_that_nobody_works_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests_module, "BACKLOG_MAX", 5)
    async with DomainWorld() as world:
        client = await world.client()
        await client.append(REQUESTS, 0, 0, [b"x"] * 6, "n")
        follower = await world.node(replace(FOLLOWS, request_timeout_s=5))
        with pytest.raises(UnavailableError, match="too many requests"):
            await follower.commit([(b"a", b"1")])
        assert world.memory.heads[REQUESTS].next == 6


async def test_a_backlog_is_noticed_by_who_never_stops_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests_module, "BACKLOG_MAX", 5)
    async with DomainWorld() as world:
        follower = await world.node(replace(FOLLOWS, request_timeout_s=5))
        asked = []
        for i in range(8):
            asked.append(asyncio.ensure_future(follower.commit([(b"%d" % i, b"1")])))
            await asyncio.sleep(0)
            await until(lambda: not follower._requester._sending and not follower._requester._unsent)
        assert world.memory.heads[REQUESTS].next == 6
        for late in asked[6:]:
            with pytest.raises(UnavailableError, match="too many requests"):
                await late
        node = await world.node()
        await asyncio.gather(*asked[:6])
        await until(lambda: world.memory.heads[REQUESTS].start == 6)
        await follower.commit([(b"x", b"1")])
        assert len(await rows_of(node)) == 7


async def test_answers_are_heard_though_consensus_was_away_when_the_log_was_found_cut() -> None:
    class Cut(MemoryConsensus):
        reported = 0

        async def wait(self, log: str, beyond: int, timeout_s: float) -> bool:
            if log == REPLIES and not self.reported:
                self.reported = 1
                raise MissingError("truncated")
            return await super().wait(log, beyond, timeout_s)

        async def log_head(self, log: str) -> LogHead:
            if log == REPLIES and self.reported == 1:
                self.reported = 2
                raise UnavailableError("away")
            return await super().log_head(log)

    async with DomainWorld() as world:
        await world.node()
        consensus = Cut(world.clock, world.memory)
        follower = await world.node(FOLLOWS, consensus=consensus)
        async with asyncio.timeout(DEADLINE_S):
            await follower.commit([(b"a", b"1")])
        assert consensus.reported == 2


async def test_a_commit_that_is_done_is_never_told_as_closed() -> None:
    async with DomainWorld() as world:
        leader, follower = await world.node(), await world.node(FOLLOWS)
        sync = follower.sync

        async def closing() -> None:
            await follower.aclose()
            await sync()

        follower.sync = closing  # type: ignore[method-assign]
        seqno = await follower.commit([(b"a", b"1")])
        row = await leader.get_row(b"a")
        assert row is not None and row.seqno == seqno


async def test_a_leader_that_begins_while_the_bucket_is_away_leads_and_answers_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serving_module, "LOAD_RETRY_S", 0.01)

    class Away(MemoryObjects):
        away = True

        async def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
            return await super().get(self._there(key), start, end)

        async def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
            return await super().get_ranges(self._there(key), ranges)

        def _there(self, key: str) -> str:
            if self.away and "/sst/" in key:
                raise UnavailableError("the bucket is away")
            return key

    async with DomainWorld() as world:
        bucket = Away(world.clock)
        old, follower = await world.node(objects=bucket), await world.node(FOLLOWS, objects=bucket)
        bucket.away = False
        await follower.commit([(b"a", b"1")])
        await old.flush(10)
        await old.aclose()
        bucket.away = True
        new = await world.node(objects=bucket)
        asked = asyncio.ensure_future(follower.commit([(b"b", b"1")]))
        term = new.term
        for i in range(20):
            await new.commit([(b"c%d" % i, b"1")])
            await asyncio.sleep(0.01)
        assert new.term == term and not asked.done()
        bucket.away = False
        await asked
        assert new.term == term and len(await rows_of(new)) == 22


async def test_closing_leaves_nobody_waiting() -> None:
    async with DomainWorld() as world:
        follower = await world.node(FOLLOWS)
        waiting = asyncio.ensure_future(follower.commit([(b"a", b"1")]))
        await until(lambda: REQUESTS in world.memory.heads)
        await follower.aclose()
        with pytest.raises(UnknownOutcomeError, match="closed"):
            await waiting


def test_the_position_of_another_life_of_the_domain_is_not_taken_for_this_log() -> None:
    state = DomainState()
    assert decode_position(state, None) == 0
    assert decode_position(state, encode_position(state, 17)) == 17
    state.seqno_delta, state.epoch_delta = 950, 2
    assert decode_position(state, msgspec.msgpack.encode(RequestPosition(17, 0, 0))) == 0
    assert decode_position(state, encode_position(state, 3)) == 3


def test_layouts_are_the_ones_drawn() -> None:
    request = Request("n", [(b"k", b"v")], {b"k": 3}, 9)
    fields = ["n", [[b"k", b"v"]], {b"k": 3}, 9]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), strict=False) == fields
    assert decode_request(msgspec.msgpack.encode(fields)) == request
    conflict = ConflictError("stale", current={b"k": None})
    reply = rejection_reply("n", conflict)
    assert msgspec.to_builtins(reply, builtin_types=(bytes,)) == ["n", 1, 0, [(b"k", -1, b"")], "stale", ""]
    again = outcome_of_reply(reply)
    assert isinstance(again, ConflictError) and again.current == {b"k": None}
    assert outcome_of_reply(Reply("n", 0, 12)) == 12
    assert isinstance(outcome_of_reply(rejection_reply("n", UnavailableError("no room"))), UnavailableError)
    assert isinstance(outcome_of_reply(rejection_reply("n", InvalidError("empty"))), InvalidError)
    assert isinstance(outcome_of_reply(Reply("n", 99, text="a kind of a newer version")), UnavailableError)
    of_an_older_leader = msgspec.msgpack.decode(msgspec.msgpack.encode(["n", 3, 0, [], "no room"]), type=Reply)
    assert str(outcome_of_reply(of_an_older_leader)) == "no room Retry."


async def test_a_flush_that_finds_no_room_is_begun_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with DomainWorld() as world:
        leader, follower = await world.node(), await world.node(FOLLOWS)
        await follower.commit([(b"a", b"1")])
        leading = leader._leader
        assert leading is not None
        admit, flush, refused, flushes = leading.writing.admit, leading.flush, 5, 0

        async def no_room(*args: Any) -> asyncio.Future[int]:
            nonlocal refused
            refused -= 1
            if refused >= 0:
                raise UnavailableError("There is no room.")
            return await admit(*args)

        async def counted(timeout_s: float | None = None) -> int:
            nonlocal flushes
            flushes += 1
            return await flush(timeout_s)

        monkeypatch.setattr(leading.writing, "admit", no_room)
        monkeypatch.setattr(leading, "flush", counted)
        await follower.flush(20)
        await follower.commit([(b"a", b"2")])
        assert refused < 0 and flushes == 1


async def test_f516_a_request_that_nobody_executed_in_time_is_refused_by_the_leader_that_comes_later() -> None:
    """The requesting process got UnknownOutcomeError and may have ended. A later leader must not execute expired
    requests."""
    async with DomainWorld() as world:
        consensus = await world.client()
        now_ms = world.clock.now_ms()
        asked = [
            Request("old", [(b"a", b"old")], {}, now_ms - 1),
            Request("young", [(b"b", b"young")], {}, now_ms + 600_000),
            Request("flush", [], {}, now_ms - 1),
        ]
        await consensus.append(REQUESTS, 0, 0, [msgspec.msgpack.encode(request) for request in asked], "n")
        leader = await world.node()

        async def replies() -> dict[str, Reply]:
            found = await consensus.read(REPLIES, 0)
            decoded = [msgspec.msgpack.decode(record.data, type=Reply) for record in found.records]
            return {reply.nonce: reply for reply in decoded}

        async with asyncio.timeout(DEADLINE_S):
            while len(await replies()) < 2:
                await asyncio.sleep(0.02)
        reported = await replies()
        assert isinstance(outcome_of_reply(reported["old"]), UnavailableError) and "not be" in reported["old"].text
        assert isinstance(outcome_of_reply(reported["young"]), int)
        assert "flush" not in reported
        assert await rows_of(leader) == {b"b": b"young"}
        # The position moved past them all: they are gone from the log for good.
        async with asyncio.timeout(DEADLINE_S):
            while (await consensus.log_head(REQUESTS)).start < len(asked):
                await asyncio.sleep(0.02)


async def test_requests_that_cannot_be_sent_are_bounded_and_one_more_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Away(MemoryConsensus):
        async def append(self, log: str, *args: Any, **kwargs: Any) -> LogHead:
            if log == REQUESTS:
                await asyncio.Event().wait()
            return await super().append(log, *args, **kwargs)

    monkeypatch.setattr(requests_module, "UNSENT_MAX", 20)
    async with DomainWorld() as world:
        tool = await world.node(FOLLOWS, consensus=Away(world.clock, world.memory))
        asking = [asyncio.ensure_future(tool.commit([(b"k%d" % n, b"v")])) for n in range(50)]
        done, waiting = await asyncio.wait(asking, timeout=1)
        assert done and all(isinstance(task.exception(), UnavailableError) for task in done)
        assert len(waiting) <= 20 + requests_module.APPEND_REQUESTS
        for task in asking:
            task.cancel()
