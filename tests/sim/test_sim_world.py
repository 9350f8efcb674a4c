"""Faults of every kind happen, actors die without a last word, connections keep order."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sim.faults import Fault, FaultyConsensus, FaultyObjects, Rates
from sim.world import Actor, Down, Link, Outcome, World
from tidemill.base.errors import ConflictError, TidemillError, UnavailableError, UnknownOutcomeError

CALM = Rates()


def test_each_kind_of_fault_does_what_it_says_to_objects() -> None:
    seen: set[tuple[str, str]] = set()

    async def scenario(world: World) -> None:
        objects = FaultyObjects(world.objects, world.faults, "me")
        for number in range(400):
            key = f"k{number}"
            before = dict(world.faults.counts)
            reported = "ok"
            try:
                await objects.put(key, b"data")
            except TidemillError as error:
                reported = type(error).__name__
            [fault] = [f for f, count in world.faults.counts.items() if count != before[f]]
            there = await world.objects.head(key) is not None
            seen.add((str(fault), reported))
            assert there == (fault in (Fault.REPORTED_OK, Fault.LOST_ANSWER, Fault.AGAIN)), fault
        await asyncio.sleep(10)
        for number in range(400):
            if await world.objects.head(f"k{number}") is not None:
                assert await world.objects.get(f"k{number}") == b"data"

    outcome = World(1, rates=Rates(0.1, 0.1, 0.1, 0.1, late=0.5, delay_s=0.0)).run(scenario)
    assert outcome.ok, outcome.error
    assert seen == {
        ("ok", "ok"),
        ("refused", "UnavailableError"),
        ("lost-answer", "UnknownOutcomeError"),
        ("lost-call", "UnknownOutcomeError"),
        ("again", "ok"),
    }
    assert any("delivered again → Conflict" in line for line in outcome.trace)
    assert any("delivered late → ok" in line for line in outcome.trace)
    assert all(outcome.faults[str(fault)] for fault in Fault)


def test_a_second_delivery_of_an_append_or_a_cas_is_refused() -> None:
    async def scenario(world: World) -> None:
        consensus = FaultyConsensus(world.consensus, world.faults, "me")
        for number in range(20):
            await consensus.append("log", 0, number, [b"r"], f"n{number}")
            await consensus.cas("register", number, b"v", f"n{number}")
        await asyncio.sleep(10)
        assert (await world.consensus.log_head("log")).next == 20
        found = await world.consensus.head("register")
        assert found is not None and found.seq == 20

    outcome = World(1, rates=Rates(again=1.0)).run(scenario)
    assert outcome.ok, outcome.error
    # One may arrive before the next call and still change nothing.
    assert sum("delivered again → Conflict" in line for line in outcome.trace) == 40


def test_reads_are_refused_but_never_unknown() -> None:
    async def scenario(world: World) -> None:
        objects = FaultyObjects(world.objects, world.faults, "me")
        for _ in range(100):
            with pytest.raises(UnavailableError):
                await objects.head("k")

    assert World(1, rates=Rates(refused=1.0)).run(scenario).ok


def test_healing_ends_every_fault() -> None:
    async def scenario(world: World) -> None:
        objects = FaultyObjects(world.objects, world.faults, "me")
        with pytest.raises(UnknownOutcomeError):
            await objects.put("k", b"")
        await world.heal()
        for number in range(50):
            await objects.put(f"n{number}", b"")

    assert World(1, rates=Rates(lost_answer=1.0)).run(scenario).ok


class Counter:
    task: asyncio.Future[None]

    def __init__(self) -> None:
        self.value = 0
        self.last_words = False

    async def count(self) -> None:
        try:
            while True:
                await asyncio.sleep(0.01)
                self.value += 1
        finally:
            self.last_words = True


def test_a_dead_actor_takes_no_further_step_and_its_successor_starts_anew() -> None:
    nodes: list[Counter] = []

    async def build(actor: Actor[Counter]) -> Counter:
        nodes.append(Counter())
        nodes[-1].task = asyncio.ensure_future(nodes[-1].count())
        return nodes[-1]

    async def scenario(world: World) -> None:
        actor = Actor(world, "a", build)
        await actor.start()
        await asyncio.sleep(1)
        assert actor.node.value > 10
        waiting = asyncio.ensure_future(actor.enter(lambda node: asyncio.sleep(100)))
        await asyncio.sleep(0.1)
        actor.crash()
        stopped_at = nodes[0].value
        with pytest.raises(Down):
            await waiting
        with pytest.raises(Down):
            _ = actor.node
        await asyncio.sleep(5)
        assert nodes[0].value == stopped_at
        assert not nodes[0].last_words
        await actor.start()
        await asyncio.sleep(1)
        assert str(actor.life) == "a#2" and actor.node is nodes[1] and nodes[1].value > 10

    outcome = World(1, rates=CALM).run(scenario)
    assert outcome.ok, outcome.error


def test_an_actor_that_dies_while_it_starts_leaves_nobody_waiting() -> None:
    async def build(actor: Actor[int]) -> int:
        await asyncio.sleep(100)
        return 1

    async def scenario(world: World) -> None:
        actor = Actor(world, "a", build)
        starting = asyncio.ensure_future(actor.start())
        await asyncio.sleep(1)
        actor.crash()
        await starting
        assert not actor.up

    assert World(1, rates=CALM).run(scenario).ok


def test_a_put_of_a_dead_actor_has_happened_or_not_but_is_whole() -> None:
    async def build(actor: Actor[Any]) -> Any:
        return actor.objects()

    landed: set[bool] = set()
    for seed in range(0, 40, 2):

        async def scenario(world: World) -> None:
            actor = Actor(world, "a", build)
            await actor.start()
            putting = asyncio.ensure_future(actor.enter(lambda objects: objects.put("k", b"whole")))
            await asyncio.sleep(world.source.uniform(0, 0.2))
            actor.crash()
            await asyncio.wait([putting])
            await asyncio.sleep(5)
            there = await world.objects.head("k") is not None
            landed.add(there)
            assert not there or await world.objects.get("k") == b"whole"

        assert World(seed, rates=Rates(delay_s=0.1)).run(scenario).ok
    assert landed == {True, False}


def test_requests_on_one_link_arrive_in_the_order_sent() -> None:
    arrived: list[int] = []

    async def build(actor: Actor[int]) -> int:
        return 0

    async def take(number: int) -> int:
        return number

    def work(number: int) -> Any:
        def arrive(node: int) -> Any:
            arrived.append(number)
            return take(number)

        return arrive

    async def scenario(world: World) -> None:
        actor = Actor(world, "a", build)
        await actor.start()
        link = Link(actor, delay_s=0.1)
        answers = await asyncio.gather(*(link.request_nowait(work(number)) for number in range(30)))
        assert answers == list(range(30))
        assert arrived == list(range(30))
        link.close()
        with pytest.raises(Down):
            await link.request(work(99))

    for seed in range(5):
        arrived.clear()
        outcome = World(seed, rates=CALM).run(scenario)
        assert outcome.ok, outcome.error


def test_a_request_that_is_never_answered_is_found_though_its_client_hung_up() -> None:
    async def build(actor: Actor[int]) -> int:
        return 0

    async def asked(world: World, work: Any) -> Actor[int]:
        actor = Actor(world, "a", build)
        await actor.start()
        link = Link(actor)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await link.request(work)
        link.close()
        return actor

    async def late(world: World) -> None:
        await asked(world, lambda node: asyncio.sleep(30.0))
        await world.answered()

    async def never(world: World) -> None:
        await asked(world, lambda node: world.loop.create_future())
        await world.answered()

    async def died(world: World) -> None:
        (await asked(world, lambda node: world.loop.create_future())).crash()
        await world.answered()

    for seed in range(5):
        assert World(seed, rates=CALM).run(late).ok
        assert World(seed, rates=CALM).run(died).ok
        assert "requests are not answered: {'a#1': 1}" in World(seed, rates=CALM).run(never).error


def failing(error: BaseException) -> Outcome:
    async def scenario(world: World) -> None:
        raise error

    return World(1).run(scenario)


def test_every_way_to_fail_is_an_outcome() -> None:
    assert failing(ConflictError("x")).error == "ConflictError: x"
    assert failing(ExceptionGroup("g", [ValueError("inner")])).error == "ValueError: inner"

    async def endless(world: World) -> None:
        while True:
            await asyncio.sleep(1)

    assert World(1).run(endless).error.startswith("NotLive")

    async def stuck(world: World) -> None:
        world.loop.call_later(700, lambda: None)
        await world.loop.create_future()

    assert World(1).run(stuck).error.startswith("NotLive")
