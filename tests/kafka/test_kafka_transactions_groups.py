"""Offsets in transactions and their groups: permission to commit them, and no late commits."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import pytest
from kio.index import load_request_schema

from support.kafka.groups.moved import World, stable
from support.kafka.harness import RealBroker
from support.kafka.raw import RawClient, encode, fields, nested
from support.waiting import eventually
from tidemill.base.clock import Rand, SystemClock
from tidemill.base.config.listeners import KafkaSection
from tidemill.base.errors import InvalidError, UnavailableError
from tidemill.kafka import KafkaSettings, error_codes
from tidemill.kafka.groups.offline_admin import OfflineGroupAdmin
from tidemill.kafka.transactions.group_offsets import CoordinatedOffsets, store_offsets
from tidemill.kafka.transactions.state import GroupOffset, Offsets, State, Transaction
from tidemill.kafka.transactions.store import (
    GROUPS_PREFIX,
    LEAVE_MS,
    add_to_index,
    change,
    drop_group_offsets,
    prune_index,
    undecided,
)
from tidemill.kafka.transactions.transitions import Decision


def offsets(offset: int) -> Offsets:
    return {"t": {0: GroupOffset(offset)}}


def wanting(offset: int) -> Callable[[], Awaitable[Offsets]]:
    async def wanted() -> Offsets:
        return offsets(offset)

    return wanted


async def test_who_comes_late_with_a_transactions_offsets_puts_nothing_back() -> None:
    """Two nodes complete one transaction. The slow one reads the prepared state and is overtaken."""
    async with World() as world:
        slow, fast = (CoordinatedOffsets(world.node(), lambda _: "", world.clock) for _ in range(2))
        asked, go_on = asyncio.Event(), asyncio.Event()

        async def slowly() -> Offsets:
            asked.set()
            await go_on.wait()
            return offsets(5)

        late = asyncio.create_task(slow.commit("g", slowly))
        await asked.wait()
        await fast.commit("g", wanting(5))
        await fast.commit("g", wanting(9))  # the next transaction
        go_on.set()
        with pytest.raises(UnavailableError):
            await late
        assert await world.offsets() == [9]

        async def completed() -> Offsets:
            return {}

        await slow.commit("g", completed)
        assert await world.offsets() == [9]


async def test_offsets_of_one_group_take_turns() -> None:
    async with World() as world:
        store = CoordinatedOffsets(world.node(), lambda _: "", world.clock)
        asked, go_on = asyncio.Event(), asyncio.Event()

        async def slowly() -> Offsets:
            asked.set()
            await go_on.wait()
            return offsets(5)

        first = asyncio.create_task(store.commit("g", slowly))
        await asked.wait()
        second = asyncio.create_task(store.commit("g", wanting(9)))
        await store.commit("other", wanting(1))
        assert await world.offsets() == []
        go_on.set()
        await asyncio.gather(first, second)
        assert await world.offsets() == [9]


async def test_offsets_wait_for_their_groups_coordinator_and_those_of_no_group_are_refused() -> None:
    async with World() as world:
        elsewhere = CoordinatedOffsets(world.node(lambda _: False), lambda _: "n2", world.clock)
        with pytest.raises(UnavailableError):
            await elsewhere.commit("g", wanting(1))
        assert elsewhere.owner_of("g") == "n2"
        with pytest.raises(InvalidError):
            await CoordinatedOffsets(world.node(), lambda _: "", world.clock).commit("", wanting(1))
        assert await world.offsets() == []


async def test_a_group_that_was_taken_over_says_so_and_takes_nothing() -> None:
    async with World() as world:
        led = await world.node().get("g")
        await stable(led)
        assert await led.check_leadership()
        await world.node().get("g")
        assert not await led.check_leadership()
        assert await led.write([]) == error_codes.NOT_COORDINATOR


class Kept:
    """Transactions that accept all offsets."""

    async def commit_offsets(self, *what: Any, **more: Any) -> int:
        return 0


async def test_a_group_that_was_taken_over_and_given_up_unnoticed_takes_offsets_again() -> None:
    """Two nodes disagreed about the owner, and the members have sent nothing but heartbeats since."""
    async with World() as world:
        owns = {"other": True}
        mine, other = world.node(), world.node(lambda _: owns["other"])
        member = await stable(await mine.get("g"))
        await other.get("g")
        owns["other"] = False
        other.apply_ownership()
        assert (await mine.get("g")).heartbeat(member, None, 1) == 0

        async def kept() -> int:
            return await store_offsets(mine, Kept(), ("id", 1, 0), "g", (member, None, 1), offsets(5), adds=True)  # type: ignore[arg-type]

        assert await kept() == error_codes.NOT_COORDINATOR
        assert await kept() == 0
        assert (await mine.get("g")).heartbeat(member, None, 1) == 0


async def test_a_group_forgets_ids_that_do_not_hold_it_in_two_steps() -> None:
    async with World() as world:
        consensus, rand = world.consensus, world.rand

        async def hold(transactional_id: str, *groups: str) -> None:
            state = Transaction(1, 0, State.ONGOING, 1, offsets={group: offsets(1) for group in groups}, started_ms=0)
            await change(consensus, rand, transactional_id, lambda _: Decision(0, state))

        async def forget(now_ms: int) -> list[str]:
            await prune_index(consensus, rand, now_ms)
            return [key.removeprefix(GROUPS_PREFIX) for key, _ in await consensus.scan(GROUPS_PREFIX)]

        for transactional_id in ("a", "b"):
            await add_to_index(consensus, rand, "g/ü", transactional_id)
        await hold("a", "g/ü")
        assert await undecided(consensus, "g/ü") == {("t", 0)}
        await forget(0)
        await hold("a")
        await hold("b", "g/ü")  # indexed before the first step, added to the transaction after it
        assert await undecided(consensus, "g/ü") == {("t", 0)}
        await forget(LEAVE_MS)
        assert await undecided(consensus, "g/ü") == {("t", 0)}
        await hold("b")
        await forget(LEAVE_MS)
        await add_to_index(consensus, rand, "g/ü", "b")
        await forget(2 * LEAVE_MS - 1)
        await hold("b", "g/ü")
        assert await undecided(consensus, "g/ü") == {("t", 0)}
        await hold("b")
        await forget(3 * LEAVE_MS)
        assert await forget(4 * LEAVE_MS) == []


# on the wire --------------------------------------------------------------------------------------
ID, GROUP = "tx", "g"
MINUTE = datetime.timedelta(minutes=1)


def ask(client: RawClient, key: int, version: int, **values: Any) -> Any:
    return client.ask(key, version, encode(fields(load_request_schema(key, version), **values)))


class Producer:
    """A transactional producer with a new epoch whose transaction includes the group, and the only member of that
    group.
    """

    def __init__(self, client: RawClient) -> None:
        self._client = client
        began = ask(
            client, 22, 4, transactional_id=ID, transaction_timeout=MINUTE, producer_id=-1, producer_epoch=-1
        )  # fmt: skip
        assert int(began.error_code) == 0
        self._named = {
            "transactional_id": ID,
            "producer_id": int(began.producer_id),
            "producer_epoch": int(began.producer_epoch),
            "group_id": GROUP,
        }
        assert int(ask(client, 25, 3, **self._named).error_code) == 0
        spoken = (nested(load_request_schema(11, 3), "protocols")(name="range", metadata=b"m"),)
        joined = ask(
            client, 11, 3, group_id=GROUP, member_id="", protocol_type="consumer", protocols=spoken,
            session_timeout=MINUTE, rebalance_timeout=MINUTE,
        )  # fmt: skip
        self.member, self.generation = str(joined.member_id), int(joined.generation_id)
        ask(client, 14, 2, group_id=GROUP, member_id=self.member, generation_id=self.generation, assignments=())

    def end(self) -> int:
        named = {key: value for key, value in self._named.items() if key != "group_id"}
        return int(ask(self._client, 26, 1, **named, committed=True).error_code)

    def commit(self, member: str, generation: int, *, version: int = 3, topic: str = "in", **more: Any) -> int:
        schema = load_request_schema(28, version)
        of_topic = nested(schema, "topics")
        place = fields(
            nested(of_topic, "partitions"), partition_index=0, committed_offset=7, committed_leader_epoch=-1,
            committed_metadata="",
        )  # fmt: skip
        values = {**self._named, "member_id": member, "generation_id": generation, "group_instance_id": None, **more}
        answer = ask(self._client, 28, version, **values, topics=(of_topic(name=topic, partitions=(place,)),))
        return int(answer.topics[0].partitions[0].error_code)


@pytest.fixture
def endpoint() -> Iterator[RealBroker]:
    broker = RealBroker(settings=KafkaSettings(KafkaSection(group_initial_rebalance_delay_ms=0)))
    broker.create_topic("in", 1)
    yield broker
    broker.close()


def test_offsets_in_transactions_are_taken_from_members_of_the_present_generation(endpoint: RealBroker) -> None:
    with RawClient(endpoint.port) as client:
        mine = Producer(client)
        assert mine.commit(mine.member, mine.generation) == 0
        assert mine.commit(mine.member, mine.generation - 1) == error_codes.ILLEGAL_GENERATION
        assert mine.commit("stranger", mine.generation) == error_codes.UNKNOWN_MEMBER_ID
        assert mine.commit(mine.member, mine.generation, group_instance_id="i") == error_codes.UNKNOWN_MEMBER_ID
        assert mine.commit("", -1) == 0, "who does not take part in the group, as producers before KIP-447"
        assert mine.commit("", -1, version=0) == 0
        assert mine.commit("", -1, group_id="never added") == error_codes.INVALID_TXN_STATE
        assert mine.commit("", -1, group_id="") == error_codes.INVALID_GROUP_ID
        assert mine.commit("", -1, producer_epoch=9) == error_codes.INVALID_PRODUCER_EPOCH
        assert mine.commit("", -1, producer_id=9) == error_codes.INVALID_PRODUCER_ID_MAPPING


def test_offsets_that_were_kept_after_their_member_was_replaced_are_refused(
    endpoint: RealBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new coordinator may have read the group's offsets before these were stored."""
    transactions = endpoint.server._transactions
    assert transactions is not None
    keep = transactions.commit_offsets

    async def while_it_leaves(*what: Any, **more: Any) -> int:
        code = await keep(*what, **more)
        led = endpoint.server._groups.loaded_group(GROUP)  # type: ignore[union-attr]
        assert led is not None and led.remove_members([(mine.member, None)]) == [0]
        return code

    with RawClient(endpoint.port) as client:
        mine = Producer(client)
        monkeypatch.setattr(transactions, "commit_offsets", while_it_leaves)
        assert mine.commit(mine.member, mine.generation) == error_codes.UNKNOWN_MEMBER_ID


@pytest.mark.parametrize("how", ["group", "offsets", "command"])
@pytest.mark.parametrize("decided", [False, True], ids=["open", "decided"])
def test_what_a_transaction_has_still_to_commit_goes_with_the_offsets_that_are_deleted(
    endpoint: RealBroker, monkeypatch: pytest.MonkeyPatch, how: str, decided: bool
) -> None:
    transactions = endpoint.server._transactions
    assert transactions is not None
    endpoint.create_topic("other", 1)
    with RawClient(endpoint.port) as client:
        mine = Producer(client)
        assert mine.commit("", -1) == 0
        assert mine.commit("", -1, topic="other") == 0
        member = nested(load_request_schema(13, 3), "members")(member_id=mine.member, group_instance_id=None)
        assert int(ask(client, 13, 3, group_id=GROUP, members=(member,)).error_code) == 0
        commits = transactions.completion.groups.commit

        async def not_yet(*_: Any) -> None:
            raise UnavailableError("the group takes no offsets now.")

        if decided:
            monkeypatch.setattr(transactions.completion.groups, "commit", not_yet)
            assert mine.end() == 0
        if how == "group":
            answer = ask(client, 42, 2, groups_names=(GROUP,))
            assert int(answer.results[0].error_code) == 0
        elif how == "offsets":
            schema = nested(load_request_schema(47, 0), "topics")
            place = nested(schema, "partitions")(partition_index=0)
            answer = ask(client, 47, 0, group_id=GROUP, topics=(schema(name="in", partitions=(place,)),))
            assert int(answer.error_code) == int(answer.topics[0].partitions[0].error_code) == 0
        else:
            clock, rand = SystemClock(), Rand()
            forget = partial(drop_group_offsets, endpoint.consensus, rand, GROUP, None, clock.now_ms())
            endpoint.portal.call(OfflineGroupAdmin(endpoint.metastore, clock, rand).delete(GROUP, forget))
        monkeypatch.setattr(transactions.completion.groups, "commit", commits)
        assert decided or mine.end() == 0
        eventually(lambda: ended(endpoint))
        found = {topic: offset for topic, offset in committed(client).items() if offset >= 0}
        assert found == ({"other": 7} if how == "offsets" else {})


def ended(endpoint: RealBroker) -> bool:
    found = endpoint.portal.call(endpoint.server._transactions.read(ID))  # type: ignore[union-attr]
    return found is not None and found.state is State.COMPLETE_COMMIT


def committed(client: RawClient) -> dict[str, int]:
    topic = nested(load_request_schema(9, 5), "topics")
    asked = tuple(topic(name=name, partition_indexes=(0,)) for name in ("in", "other"))
    answer = ask(client, 9, 5, group_id=GROUP, topics=asked)
    return {each.name: int(each.partitions[0].committed_offset) for each in answer.topics}
