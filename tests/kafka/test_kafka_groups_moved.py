"""Groups between coordinators: late writes of a replaced coordinator, the state that its successor finds, and the state
that is carried over.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from support.kafka.groups.moved import World, ask, stable
from support.waiting import until
from tidemill.base.errors import ConflictError, InvalidError, UnavailableError, UnknownOutcomeError
from tidemill.base.limits import METASTORE_BATCH_BYTES
from tidemill.kafka import error_codes
from tidemill.kafka.groups import group_runner, group_writer
from tidemill.kafka.groups.classic.state import Phase, SyncAnswer, SyncRequest
from tidemill.kafka.groups.consumer.state import HeartbeatRequest, Topic
from tidemill.kafka.groups.coordinator import GroupUnavailableError
from tidemill.kafka.groups.group_runner import GroupRunner
from tidemill.metastore.metastore import Metastore
from tidemill.metastore.rows import GROUP_MEMBERS, GROUP_OFFSETS, GROUPS
from tidemill.metastore.rows.groups import GroupOffsetRow


class OneTopic:
    version = 1

    def topic(self, name: str) -> Topic | None:
        return Topic("t", 2) if name == "t" else None

    def matching(self, pattern: str) -> frozenset[str]:
        return frozenset()


def joins(member_id: str, **more: Any) -> HeartbeatRequest:
    values: dict[str, Any] = {"rebalance_ms": 1_000, "topics": frozenset("t"), "owned": {}, **more}
    return HeartbeatRequest(member_id, 0, **values)


def committed(offset: int) -> list[tuple[bytes, bytes]]:
    return [GROUP_OFFSETS.encode(GroupOffsetRow("g", "t", 0, offset))]


async def nothing() -> None:
    """Stand in for a check that finds no offsets held by transactions."""


async def test_the_next_coordinator_finds_the_generation_its_members_and_their_assignment() -> None:
    async with World() as world:
        member = await stable(await world.node().get("g"))
        found = await world.node().get("g")
        assert (found.group.phase, found.group.generation, found.group.leader) == (Phase.STABLE, 1, member)
        assert found.heartbeat(member, None, 1) == 0
        assert (await found.sync(SyncRequest(member, None, 1))).assignment == b"all"
        head = await world.metastore.get(GROUPS, "g")
        assert head is not None
        assert (head.members, head.protocol, head.kind) == (1, "range", "classic")


async def test_a_coordinator_that_was_replaced_writes_nothing_more() -> None:
    async with World() as world:
        old = await world.node().get("g")
        assert await old.write(committed(5)) == 0
        new = await world.node().get("g")
        assert await new.write(committed(7)) == 0
        assert await old.write(committed(6)) == error_codes.NOT_COORDINATOR
        assert old.is_closed
        assert await world.offsets() == [7]


async def test_the_next_coordinator_finds_the_members_of_the_consumer_protocol_and_the_old_one_tells_nothing() -> None:
    async with World() as world:
        seen, old = OneTopic(), await world.node().get("g")
        reported = await old.consumer_heartbeat(joins("m1"), seen)
        assert (reported.epoch, reported.assignment) == (1, {"t": frozenset({0, 1})})
        new = await world.node().get("g")
        assert (await new.consumer_heartbeat(HeartbeatRequest("m1", 1), seen)).assignment is None, (
            "nothing is told anew"
        )
        assert new.group.phase is Phase.STABLE
        assert new.commit_error("m1", None, 1) == 0
        assert (await old.consumer_heartbeat(joins("m2"), seen)).error == error_codes.NOT_COORDINATOR
        assert (
            old.is_closed
            and (await old.consumer_heartbeat(HeartbeatRequest("m1", 1), seen)).error == error_codes.NOT_COORDINATOR
        )
        assert [row.member_id for row in await world.metastore.rows(GROUP_MEMBERS, "g")] == ["m1"]
        assert await new.delete(nothing) == error_codes.NON_EMPTY_GROUP
        assert (await new.join(ask())).error == error_codes.REBALANCE_IN_PROGRESS, "who sees no topics"
        assert (await new.join(ask(), seen)).error == error_codes.INCONSISTENT_GROUP_PROTOCOL, "who is no consumer"
        assert (await new.consumer_heartbeat(HeartbeatRequest("m1", -1), seen)).error == 0
        member = await stable(new)
        assert (await new.consumer_heartbeat(joins("m1"), seen)).error == error_codes.GROUP_ID_NOT_FOUND
        assert (await new.consumer_heartbeat(HeartbeatRequest("m1", 1), seen)).error == error_codes.UNKNOWN_MEMBER_ID
        head = await world.metastore.get(GROUPS, "g")
        assert head is not None and (head.kind, head.generation) == ("classic", 3)
        assert [row.member_id for row in await world.metastore.rows(GROUP_MEMBERS, "g")] == [member]


async def test_f231_a_group_of_the_consumer_protocol_that_cannot_be_written_tells_what_is_durable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group_writer, "WRITE_BUDGET_S", 0.3)
    async with World() as world:
        node, seen = world.node(), OneTopic()
        led = await node.get("g")
        await led.consumer_heartbeat(joins("m1"), seen)
        for fault in ("broken", "away", "refused"):
            unsure = Unsure(world.metastore)
            unsure.next = [fault] * 1_000
            led = await node.get("g")
            assert (await led.consumer_heartbeat(joins("m2"), seen)).error == error_codes.COORDINATOR_NOT_AVAILABLE
            world.metastore.commit = unsure._commit  # type: ignore[method-assign]
            again = await node.get("g")
            assert again is not led and list(again.group.members) == ["m1"]
            assert (await again.consumer_heartbeat(HeartbeatRequest("m1", 1), seen)).error == 0


async def test_an_assignment_of_a_coordinator_that_was_replaced_reaches_nobody() -> None:
    async with World() as world:
        old = await world.node().get("g")
        answer = await old.join(ask())
        new = await world.node().get("g")
        assert await stable(new, new_id="m2") == "m2"
        reported = await old.sync(SyncRequest(answer.member_id, None, answer.generation, assignments=(("m1", b"all"),)))
        assert reported.error == error_codes.NOT_COORDINATOR
        assert [row.member_id for row in await world.metastore.rows(GROUP_MEMBERS, "g")] == ["m2"]


class Unsure:
    """Commits whose answer is lost: they happen immediately, later, or never."""

    def __init__(self, metastore: Metastore) -> None:
        self._commit = metastore.commit
        self.late: list[Any] = []
        self.next: list[str] = []
        metastore.commit = self  # type: ignore[method-assign, assignment]

    async def __call__(self, rows: Any, *, expects: Any) -> int:
        how = self.next.pop(0) if self.next else ""
        if not how:
            return await self._commit(rows, expects=expects)
        if how == "away":
            raise UnavailableError("it did not happen")
        if how == "refused":
            raise InvalidError("it is too large")
        if how == "broken":
            raise MemoryError("nobody listed this")
        if how == "done":
            await self._commit(rows, expects=expects)
        if how == "late":
            self.late.append((rows, expects))
        raise UnknownOutcomeError("it may have happened")

    async def arrive(self) -> None:
        for rows, expects in self.late:
            with pytest.raises(ConflictError):
                await self._commit(rows, expects=expects)


@pytest.mark.parametrize("how", ["done", "late", "never", "away"])
@pytest.mark.parametrize("renewed", ["", "done", "late", "never"])
async def test_a_write_of_unknown_outcome_is_made_once_and_never_later(how: str, renewed: str) -> None:
    async with World() as world:
        led = await world.node().get("g")
        unsure = Unsure(world.metastore)
        unsure.next = [how, *([renewed] if renewed and how != "away" else [])]
        assert await led.write(committed(5)) == 0
        assert await led.write(committed(7)) == 0
        await unsure.arrive()
        assert await world.offsets() == [7], "what was on its way came too late"
        member = await stable(led)
        unsure.next = [how]
        await stable(led, member)
        await unsure.arrive()
        assert led.heartbeat(member, None, 2) == 0
        assert await world.offsets() == [7]


async def test_f231_a_group_that_cannot_be_written_ends_here_and_nothing_else_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group_writer, "WRITE_BUDGET_S", 0.3)
    async with World() as world:
        node = world.node()
        broken, other = await node.get("g"), await node.get("other")
        member = await stable(broken)
        waiting = asyncio.ensure_future(broken.join(ask(new_id="m9")))
        await asyncio.sleep(0)
        for fault in ("broken", "away"):
            unsure = Unsure(world.metastore)
            unsure.next = [fault] * 1_000
            assert await (await node.get("g")).write(committed(5)) == error_codes.COORDINATOR_NOT_AVAILABLE
            unsure.next = []
            world.metastore.commit = unsure._commit  # type: ignore[method-assign]
            assert "group:g" in {mark.name for mark in world.tracker.report("p", 0).marks}
            assert (await waiting).error == error_codes.COORDINATOR_NOT_AVAILABLE
            assert not other.is_closed
            again = await node.get("g")
            assert again.heartbeat(member, None, 1) == 0, "what was durable goes on"


def noted(partition: int, count: int, letters: int = 4_096) -> list[tuple[bytes, bytes]]:
    """Offsets with long metadata."""
    rows = [GroupOffsetRow("g", "t", partition + n, 5, -1, "n" * letters) for n in range(count)]
    return [GROUP_OFFSETS.encode(row) for row in rows]


async def syncing(led: GroupRunner) -> asyncio.Future[SyncAnswer]:
    """Join a member and start its sync, so that its membership is about to be written."""
    answer = await led.join(ask())
    return led.sync(
        SyncRequest(answer.member_id, None, answer.generation, assignments=((answer.member_id, b"a" * 1_000),))
    )


async def test_commits_that_come_together_are_no_more_than_one_write_may_hold_and_each_is_taken() -> None:
    async with World() as world:
        led = await world.node().get("g")
        commit, sizes = world.metastore.commit, []

        async def counted(rows: Any, **more: Any) -> int:
            sizes.append(sum(len(key) + len(value) for key, value in rows))
            return await commit(rows, **more)

        world.metastore.commit = counted  # type: ignore[method-assign, assignment]
        synced = await syncing(led)
        writes = [asyncio.ensure_future(led.write(noted(n * 100, 100))) for n in range(20)]
        assert {await write for write in writes} == {0}
        assert (await synced).error == 0
        assert max(sizes) <= group_writer.WRITE_BYTES and sum(sizes) > METASTORE_BATCH_BYTES
        assert len(sizes) < 10, "what fits is written together"
        assert len(await world.offsets()) == 2_000


async def test_a_commit_that_is_refused_is_refused_alone() -> None:
    async with World() as world:
        led = await world.node().get("g")
        synced = await syncing(led)
        parts = [noted(0, 1), noted(1, 1, 300 << 10), noted(2, 1)]
        codes = await asyncio.gather(*(led.write(part) for part in parts))
        assert codes == [0, error_codes.INVALID_REQUEST, 0]
        assert (await synced).assignment == b"a" * 1_000
        assert await world.offsets() == [5, 5]
        assert await led.write(committed(7)) == 0, "the group goes on"


async def test_a_membership_that_keeps_changing_does_not_keep_offsets_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_writer, "WRITE_BYTES", 0)
    async with World() as world:
        led = await world.node().get("g")
        commit, written = world.metastore.commit, []

        async def changing(rows: Any, **more: Any) -> int:
            written.append(any(key == GROUPS.key("g") for key, _ in rows))
            led.group.unstored = len(written) < 20
            return await commit(rows, **more)

        world.metastore.commit = changing  # type: ignore[method-assign, assignment]
        synced = await syncing(led)
        assert await led.write(committed(7)) == 0
        assert len(written) <= 3 and True in written
        assert (await synced).error == 0


async def test_a_membership_is_durable_after_the_commits_that_were_accepted_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group_writer, "WRITE_BYTES", 0)  # each write has one part, as those of very large groups
    async with World() as world:
        led = await world.node().get("g")
        synced = await syncing(led)
        assert (await synced).error == 0
        commit, written = world.metastore.commit, []

        async def recorded(rows: Any, **more: Any) -> int:
            written.append("membership" if any(key == GROUPS.key("g") for key, _ in rows) else "offsets")
            return await commit(rows, **more)

        world.metastore.commit = recorded  # type: ignore[method-assign, assignment]
        commits = [asyncio.ensure_future(led.write(noted(partition, 1))) for partition in range(3)]
        await asyncio.sleep(0)
        led.group.unstored = True  # a rebalance: the next member reads the offset of its partition afterwards
        assert await asyncio.gather(*commits) == [0, 0, 0]
        await until(lambda: not led.group.unstored and len(written) == 4)
        assert written == ["offsets", "offsets", "offsets", "membership"]


async def test_a_group_that_ends_while_its_membership_waits_stays_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_writer, "WRITE_BYTES", 0)
    async with World() as world:
        led = await world.node().get("g")
        answer = await led.join(ask())
        commit, may_write = world.metastore.commit, asyncio.Semaphore(0)

        async def held_up(rows: Any, **more: Any) -> int:
            await may_write.acquire()
            return await commit(rows, **more)

        world.metastore.commit = held_up  # type: ignore[method-assign, assignment]
        commits = [asyncio.ensure_future(led.write(noted(partition, 1))) for partition in range(2)]
        await asyncio.sleep(0)
        assigned = ((answer.member_id, b"a"),)
        synced = led.sync(SyncRequest(answer.member_id, None, answer.generation, assignments=assigned))
        may_write.release()
        await until(lambda: any(part.members is not None for part in led._writer._parts))
        led.end(error_codes.NOT_COORDINATOR)
        assert (await synced).error == error_codes.NOT_COORDINATOR
        for _ in range(3):
            may_write.release()
        await asyncio.gather(*commits)
        assert led.group.phase is Phase.DEAD and led.is_closed


async def test_a_member_that_joins_while_the_group_is_deleted_does_not_bring_it_back() -> None:
    async with World() as world:
        node = world.node()
        led = await node.get("g")
        assert await led.write(committed(5)) == 0
        joins: list[asyncio.Future[Any]] = []

        async def join_meanwhile() -> None:
            joins.append(led.join(ask()))
            await asyncio.sleep(0)

        assert await led.delete(join_meanwhile) == 0
        assert (await joins[0]).error == error_codes.COORDINATOR_NOT_AVAILABLE
        assert await world.offsets() == [] and await node.rows.head("g") is None
        assert not (await node.get("g")).group.members


async def test_a_group_moves_when_nodes_come_and_go_and_members_are_missed_without_being_asked() -> None:
    async with World() as world:
        owns = {"a": True}
        first = world.node(lambda _: owns["a"])
        second = world.node(lambda _: not owns["a"])
        led = await first.get("g")
        await stable(led)
        waiting = asyncio.ensure_future(led.join(ask(new_id="m2")))
        await asyncio.sleep(0)
        owns["a"] = False
        first.apply_ownership()
        assert (await waiting).error == error_codes.NOT_COORDINATOR
        with pytest.raises(GroupUnavailableError) as refused:
            await first.get("g")
        assert refused.value.code == error_codes.NOT_COORDINATOR
        second.apply_ownership()
        await until(lambda: second.loaded_group("g") is not None)
        found = second.loaded_group("g")
        assert found is not None and found.group.phase is Phase.STABLE


async def test_groups_that_hold_only_offsets_leave_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_runner, "IDLE_S", 0.05)
    async with World() as world:
        node = world.node()
        assert await (await node.get("g")).write(committed(5)) == 0
        await until(lambda: node.loaded_group("g") is None)
        assert await (await node.get("g")).write(committed(6)) == 0
        assert await world.offsets() == [6]


async def test_f232_more_groups_or_bytes_than_the_node_holds_are_refused_and_those_there_go_on() -> None:
    async with World() as world:
        node = world.node(groups_max=1, bytes_max=10)
        led = await node.get("g")
        with pytest.raises(GroupUnavailableError) as refused:
            await node.get("more")
        assert refused.value.code == error_codes.COORDINATOR_NOT_AVAILABLE
        answer = await led.join(ask(protocols=(("range", b"x" * 20),)))
        with pytest.raises(GroupUnavailableError) as refused:
            node.check_room(led, "", None)
        assert refused.value.code == error_codes.COORDINATOR_NOT_AVAILABLE, "clients retry it"
        node.check_room(led, answer.member_id, None)
        assert led.heartbeat(answer.member_id, None, 1) == 0
        for name in ("", "x" * 600, "\x00" * 300):
            with pytest.raises(GroupUnavailableError) as refused:
                await node.get(name)
            assert refused.value.code == error_codes.INVALID_GROUP_ID


async def test_a_deletion_ends_with_an_error_if_its_group_moves_away_meanwhile() -> None:
    async with World() as world:
        led = await world.node().get("g")

        async def move_away() -> None:
            led.end(error_codes.NOT_COORDINATOR)

        assert await led.delete(move_away) == error_codes.NOT_COORDINATOR


async def test_a_group_is_deleted_with_everything_and_begins_anew() -> None:
    async with World() as world:
        node = world.node()
        led = await node.get("g")
        member = await stable(led)
        assert await led.delete(nothing) == error_codes.NON_EMPTY_GROUP
        assert led.remove_members([(member, None)]) == [0]
        writes = [asyncio.ensure_future(led.write(committed(n))) for n in range(3)]
        await asyncio.sleep(0)
        assert await led.delete(nothing) == 0
        assert {await write for write in writes} == {0}
        assert await world.offsets() == []
        assert await world.metastore.get(GROUPS, "g") is None
        again = await node.get("g")
        assert again is not led
        assert (await again.join(ask())).generation == 1
