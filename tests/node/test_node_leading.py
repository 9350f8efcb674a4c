"""Leadership: one holder at a time, a lost lease cancels the body, topics of a capture follow it, shapes are
redirected."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from support.waiting import DEADLINE_S, until
from tidemill.base.clock import Rand, SystemClock
from tidemill.base.errors import ConflictError, InvalidError, UnavailableError
from tidemill.base.runtime.tasks import Tasks
from tidemill.base.status.status import StatusTracker
from tidemill.consensus.api import Lease
from tidemill.consensus.leader_election import LeaseRequest, run_while_leading
from tidemill.consensus.memory import MemoryConsensus
from tidemill.metastore.catalogue import CaptureRow, CaptureTableRow, Catalogue, TopicRow
from tidemill.metastore.factory import create_metastore
from tidemill.node.partition_assignment import CaptureAssignment
from tidemill.node.shape_routing import ShapeRouting
from tidemill.objects.memory import MemoryObjects
from tidemill.topics.membership import Membership, NodeInfo

TTL_MS = 300


async def test_a_second_node_leads_only_after_the_first_has_let_go() -> None:
    consensus = MemoryConsensus(SystemClock())
    running: list[str] = []
    overlaps: list[list[str]] = []

    def body(name: str) -> Any:
        async def run(_: Lease) -> None:
            running.append(name)
            overlaps.append(list(running))
            try:
                await asyncio.sleep(3600)
            finally:
                running.remove(name)

        return run

    async with Tasks(print) as tasks:
        first = tasks.spawn(run_while_leading(consensus, LeaseRequest("x", "a/1", ttl_ms=TTL_MS), body("a")), name="a")
        await until(lambda: running == ["a"])
        tasks.spawn(run_while_leading(consensus, LeaseRequest("x", "b/1", ttl_ms=TTL_MS), body("b")), name="b")
        first.cancel()
        await until(lambda: running == ["b"])
    assert overlaps == [["a"], ["b"]]


async def test_the_body_ends_when_another_takes_the_lease() -> None:
    consensus = MemoryConsensus(SystemClock())
    terms: list[int] = []
    ended: list[int] = []

    async def run(lease: Lease) -> None:
        terms.append(lease.term)
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(lease.term)

    async def stolen() -> bool:
        """Try to take the lease; if its holder renews it in between, the next try follows."""
        with contextlib.suppress(ConflictError):
            [lease] = await consensus.leases("x")
            await consensus.release("x", "a/1", lease.term)
            await consensus.acquire("x", "thief", 60_000)
            return True
        return False

    async with Tasks(print) as tasks:
        tasks.spawn(run_while_leading(consensus, LeaseRequest("x", "a/1", ttl_ms=TTL_MS), run), name="a")
        await until(lambda: terms)
        await until(stolen)
        await until(lambda: ended == terms)


async def test_an_error_of_the_body_is_raised_and_the_lease_is_given_back() -> None:
    consensus = MemoryConsensus(SystemClock())

    async def run(_: Lease) -> None:
        raise InvalidError("wrong dsn.")

    with pytest.raises(InvalidError, match="wrong dsn"):
        await run_while_leading(consensus, LeaseRequest("x", "a/1", ttl_ms=60_000), run)
    assert not (await consensus.leases("x"))[0].live


async def test_a_stopped_leader_gives_the_lease_up_once_its_body_has_ended() -> None:
    consensus = MemoryConsensus(SystemClock())
    live_at_the_end: list[bool] = []
    led = asyncio.Event()

    async def run(_: Lease) -> None:
        led.set()
        try:
            await asyncio.sleep(3600)
        finally:
            live_at_the_end.append((await consensus.leases("x"))[0].live)

    async with Tasks(print) as tasks:
        tasks.spawn(run_while_leading(consensus, LeaseRequest("x", "a/1", ttl_ms=3_600_000), run), name="a")
        await led.wait()
    assert live_at_the_end == [True]
    assert not (await consensus.leases("x"))[0].live


class Unreleasing(MemoryConsensus):
    """Consensus whose first `failing` releases fail."""

    def __init__(self, failing: int) -> None:
        super().__init__(SystemClock())
        self.failing = failing
        self.releases = 0

    async def release(self, name: str, holder: str, term: int) -> None:
        self.releases += 1
        if self.releases <= self.failing:
            raise UnavailableError("the engine cannot be reached.")
        await super().release(name, holder, term)


async def test_a_release_that_fails_does_not_hide_how_the_body_ended() -> None:
    async def wrong(_: Lease) -> None:
        raise InvalidError("wrong dsn.")

    async def done(_: Lease) -> None:
        return

    with pytest.raises(InvalidError, match="wrong dsn"):
        await run_while_leading(Unreleasing(9), LeaseRequest("x", "a/1", ttl_ms=60_000), wrong)
    await run_while_leading(Unreleasing(9), LeaseRequest("x", "a/1", ttl_ms=60_000), done)


async def test_an_own_earlier_life_that_cannot_be_released_now_is_tried_again_after_a_pause() -> None:
    consensus = Unreleasing(2)
    await consensus.acquire("x", "n/1", 3_600_000)
    led = asyncio.Event()

    async def run(_: Lease) -> None:
        led.set()

    started_s = asyncio.get_running_loop().time()
    async with asyncio.timeout(DEADLINE_S):
        await run_while_leading(
            consensus, LeaseRequest("x", "n/2", ttl_ms=TTL_MS), run, own_earlier_life=lambda h: h.startswith("n/")
        )
    assert led.is_set()
    assert asyncio.get_running_loop().time() - started_s >= 2 * TTL_MS / 3000


async def test_a_restarted_node_takes_back_what_its_killed_process_held() -> None:
    consensus = MemoryConsensus(SystemClock())
    await consensus.acquire("x", "n/1", 3_600_000)
    led = asyncio.Event()

    async def run(_: Lease) -> None:
        led.set()

    async with asyncio.timeout(DEADLINE_S):
        await run_while_leading(consensus, LeaseRequest("x", "n/2"), run, own_earlier_life=lambda h: h.startswith("n/"))
    assert led.is_set()


async def captured(consensus: MemoryConsensus, holder: str, url: bytes) -> Catalogue:
    clock = SystemClock()
    catalogue = Catalogue(create_metastore(consensus, MemoryObjects(clock), clock, Rand(1)), clock, Rand(1))
    await catalogue.create_topic("shop.public.orders", 1, kind="capture")
    await catalogue.put(CaptureRow("shop", "1", "s", "p", 1, True))
    table = CaptureTableRow("shop", "public.orders", "shop.public.orders")
    await catalogue.change_table("shop", "public.orders", lambda _: table)
    await consensus.acquire("capture/shop", holder, 60_000, url)
    return catalogue


async def test_a_captured_table_is_led_by_the_node_that_captures_it() -> None:
    consensus = MemoryConsensus(SystemClock())
    catalogue = await captured(consensus, "node-b/7/ff", b"http://b")
    row = (await catalogue.list(TopicRow))[0]
    membership = Membership(consensus, "node-a", NodeInfo("h", 1, "http://a"), SystemClock(), Rand(2))
    await membership.start()
    assignment = CaptureAssignment(membership, consensus, catalogue, StatusTracker(), SystemClock())
    await assignment.start()
    assert assignment.leader_of(row.topic_id, 0) == "node-b"
    assert assignment.leader_of("another-topic", 0) == "node-a"
    for _ in range(3):  # looks that find what they have found before; then one thing at a time is another
        assignment.request_refresh()
        await assignment.wait_for_next_poll()
    lease = (await consensus.leases("capture/"))[0]
    await consensus.release("capture/shop", "node-b/7/ff", lease.term)
    await consensus.acquire("capture/shop", "node-c/1/aa", 60_000, b"http://c")
    assignment.request_refresh()
    await assignment.wait_for_next_poll()
    await until(lambda: assignment.leader_of(row.topic_id, 0) == "node-c")
    second = await catalogue.create_topic("shop.public.second", 1, kind="capture")
    assignment.request_refresh()
    await catalogue.change_table(
        "shop", "public.second", lambda _: CaptureTableRow("shop", "public.second", second.name)
    )
    await until(lambda: assignment.leader_of(second.topic_id, 0) == "node-c")
    await catalogue.delete(TopicRow, row.name)
    await until(lambda: assignment.leader_of(row.topic_id, 0) == "node-a")
    await assignment.aclose()
    await membership.aclose()


@pytest.mark.parametrize(
    ("table", "holder", "status", "location"),
    [
        ("public.orders", "b/1", 307, "http://b/v1/shape?table=public.orders&offset=-1"),
        ("orders", "b/1", 307, "http://b/v1/shape?table=orders&offset=-1"),
        ("public.orders", "a/1", 200, None),
        ("shard.orders", "b/1", 200, None),
        ("public.unknown", "b/1", 307, "http://b/v1/shape?table=public.unknown&offset=-1"),
        ("public.unknown", "a/1", 200, None),
        ("public.orders", "a/0", 503, None),  # of this node's earlier life: its address is this one's
        ("public.orders", "aa/0", 307, "http://b/v1/shape?table=public.orders&offset=-1"),
    ],
)
def test_a_shape_is_served_where_its_changes_pass(table: str, holder: str, status: int, location: str | None) -> None:
    assert asyncio.run(answer_of(table, holder)) == (status, location)


def test_a_table_whose_node_is_gone_answers_try_again() -> None:
    async def scenario() -> tuple[int, str | None]:
        consensus = MemoryConsensus(SystemClock())
        catalogue = await captured(consensus, "b/1", b"http://b")
        lease = (await consensus.leases("capture/"))[0]
        await consensus.release("capture/shop", "b/1", lease.term)
        return await ask(ShapeRouting(here, catalogue, consensus, "a/1", SystemClock()), "public.orders")

    assert asyncio.run(scenario()) == (503, None)


async def answer_of(table: str, holder: str) -> tuple[int, str | None]:
    consensus = MemoryConsensus(SystemClock())
    catalogue = await captured(consensus, holder, b"http://b")
    return await ask(ShapeRouting(here, catalogue, consensus, "a/1", SystemClock()), table)


async def here(_: Any, __: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def ask(app: Any, table: str) -> tuple[int, str | None]:
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request"}

    query = f"table={table}&offset=-1".encode()
    scope = {"type": "http", "path": "/v1/shape", "method": "GET", "query_string": query, "headers": []}
    await app(scope, receive, send)
    headers = dict(sent[0]["headers"])
    location = headers.get(b"location")
    return sent[0]["status"], location.decode() if location else None
