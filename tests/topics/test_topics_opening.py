"""Finding topics, opening partitions, and uploads that break."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from topics_world import World, batch, eventually, run

from tidemill.base.errors import Unavailable
from tidemill.topics.front import FetchRead


def test_a_topic_made_while_the_catalogue_is_being_read_is_found() -> None:
    """The read under way began before the topic was made: its answer says nothing about it."""

    async def scenario() -> None:
        world = World()
        node = world.node()
        reads, gate = 0, asyncio.Event()
        whole = world.catalogue.list

        async def slow(kind: Any) -> Any:
            nonlocal reads
            reads += 1
            rows = await whole(kind)
            if reads == 1:
                await gate.wait()
            return rows

        world.catalogue.list = slow  # type: ignore[method-assign]
        early = asyncio.ensure_future(node.refresh())
        await eventually(lambda: reads == 1)
        row = await world.topic()
        produced = [node.produce_nowait(row.topic_id, p, batch("a")) for p in range(2)]
        await asyncio.sleep(0)
        gate.set()
        assert [(await each).base_offset for each in produced] == [0, 0]
        await early
        assert reads == 2, "those who asked meanwhile share the next read"
        await world.aclose()

    run(scenario())


def test_a_fetch_opens_its_partitions_side_by_side_and_waits_for_all_of_them_once() -> None:
    async def scenario() -> None:
        world = World()
        node = world.node()
        row = await world.topic(partitions=8)
        await node.refresh()
        asked, gate, head = 0, asyncio.Event(), world.consensus.log_head

        async def slow(log: str) -> Any:
            nonlocal asked
            asked += 1
            await gate.wait()
            return await head(log)

        world.consensus.log_head = slow  # type: ignore[method-assign]
        reads = [FetchRead(row.topic_id, partition, 0, 1) for partition in range(8)]
        begun_s = asyncio.get_running_loop().time()
        fetching = asyncio.ensure_future(node.fetch(reads, max_wait_s=0.0, min_bytes=0, max_bytes=1))
        await eventually(lambda: asked == 8)
        found = await fetching
        assert asyncio.get_running_loop().time() - begun_s < 3.0, "one second for all, not for each"
        assert all(isinstance(each.error, Unavailable) for each in found)
        gate.set()
        found = await node.fetch(reads, max_wait_s=0.0, min_bytes=0, max_bytes=1)
        assert [each.error for each in found] == [None] * 8
        await world.aclose()

    run(scenario())


def test_an_upload_that_breaks_ends_what_waited_for_it_and_frees_its_place() -> None:
    async def scenario() -> None:
        world = World(uploads_in_flight=1)
        node = world.node()
        row = await world.topic()
        reported: list[str] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["message"]))
        put, broken = world.objects.put, [True]

        async def breaks(*given: Any) -> None:
            if broken:
                broken.clear()
                raise RuntimeError("a bug")
            await put(*given)

        world.objects.put = breaks  # type: ignore[method-assign]
        with pytest.raises(Unavailable, match="a bug"):
            await node.produce_nowait(row.topic_id, 0, batch("a"))
        assert (await node.produce_nowait(row.topic_id, 0, batch("b"))).base_offset == 0
        assert len(reported) == 1
        await world.aclose()

    run(scenario())
