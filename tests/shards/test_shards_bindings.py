"""Bindings over a long time: deltas, advances, truncation; a handle equals the list of minted bindings."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from support.shards.world import World
from tidemill.base.errors import ConflictError, CorruptError
from tidemill.shards.api import Binding, HistoryLostError
from tidemill.shards.bindings import remap as remap_module
from tidemill.shards.bindings.remap import LogRemap, decode_binding, encode_binding, encode_delta
from tidemill.shards.registry import open_remap

TABLES = {f"0c5b1c34-7a0e-4a8e-9a60-{n:012d}": (1000, 2000, 3000, 4000) for n in range(100)}


async def opened(world: World) -> LogRemap:
    return await open_remap(world.consensus(), world.wall, world.rand, "capture/shop")


async def log_bytes(world: World) -> int:
    consensus = world.consensus()
    head = await consensus.log_head("remap/capture/shop")
    total, at = 0, head.start
    while at < head.next:
        found = (await consensus.read("remap/capture/shop", at)).records
        total += sum(len(record.data) for record in found)
        at += len(found)
    return total


async def test_an_idle_source_of_a_hundred_tables_costs_some_bytes_an_advance_and_its_log_stays_flat() -> None:
    world = World()
    remap = await opened(world)
    await remap.mint(Binding(1, TABLES, lsn=7))
    first = await log_bytes(world)
    assert first > 4000
    for time_ms in range(2, 1002):
        await remap.advance(time_ms)
    latest = await remap.latest()
    assert latest == Binding(1001, TABLES, lsn=7)
    assert await (await opened(world)).latest() == latest
    # One whole binding in 64, and some twenty bytes for each of the others.
    assert (await log_bytes(world) - first) / 1000 < first / 64 + 24
    assert await remap.truncate_before(990) > 800
    assert await log_bytes(world) < 3 * first


async def test_an_advance_repeats_nothing_and_a_later_binding_comes_after_it() -> None:
    world = World()
    remap, other = await opened(world), await opened(world)
    assert await remap.advance(5) is None
    await remap.mint(Binding(10, {"t": (3,)}, 5, 9, "tag"))
    assert await other.advance(20) == Binding(20, {"t": (3,)}, 5, 9, "")
    assert await remap.advance(15) == Binding(20, {"t": (3,)}, 5, 9, "")
    with pytest.raises(ConflictError):
        await remap.mint(Binding(20, {"t": (4,)}))
    await remap.mint(Binding(21, {"t": (4,)}))
    assert [b.offsets["t"] for b in await other.after(-1)] == [(3,), (3,), (4,)]


def test_old_records_are_still_read_and_a_delta_alone_is_not() -> None:
    before = Binding(10, {"a": (1, 2), "b": (3,)}, 5, 9, "x")
    after = Binding(11, {"a": (1, 3), "b": (3,)}, 5, 12, "y")
    data = encode_delta(before, after, 4)
    assert b"b" not in data and decode_binding(data, before) == after
    with pytest.raises(CorruptError):
        decode_binding(data)
    assert decode_binding(encode_binding(before)) == before


async def test_forgotten_bindings_are_said_to_be_forgotten_by_every_handle() -> None:
    world = World()
    remap, idle = await opened(world), await opened(world)
    for n in range(1, 301):
        await remap.mint(Binding(n * 10, {"t": (n,)}))
        if n == 5:
            assert (await idle.latest()).time_ms == 50  # type: ignore[union-attr]
    assert await remap.truncate_before(2005) > 0
    for handle in (await opened(world), idle):
        for lost in (handle.at(10), handle.after(10)):
            with pytest.raises(HistoryLostError):
                await lost
        assert await handle.at(-1) is None
        assert (await handle.at(2005)) == Binding(2000, {"t": (200,)})
        assert [b.time_ms for b in await handle.after(2005)] == list(range(2010, 3010, 10))
        whole = await handle.after(-1)
        assert whole[0].time_ms <= 2000 and whole[-1] == await handle.latest()


class BindingModel(RuleBasedStateMachine):
    """Two processes mint, advance, truncate, read and restart."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.world = World()
        self.model: list[Binding] = []
        self.kept_ms = -1
        """Start of the history to keep: the binding in force at this time and all later ones must stay known."""

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, 30))

    @initialize()
    def opens(self) -> None:
        self.handles = [self.run(opened(self.world)) for _ in range(2)]

    @rule(who=st.integers(0, 1), topics=st.dictionaries(st.sampled_from("abc"), st.integers(0, 3), max_size=2),
          step=st.integers(1, 4), lsn=st.integers(0, 2), times=st.integers(1, 5))  # fmt: skip
    def mints(self, who: int, topics: dict[str, int], step: int, lsn: int, times: int) -> None:
        for _ in range(times):
            last = self.model[-1] if self.model else Binding(0, {})
            offsets = {**last.offsets, **{t: (last.offsets.get(t, (0,))[0] + n,) for t, n in topics.items()}}
            binding = Binding(last.time_ms + step, offsets, last.lsn + lsn)
            self.model.append(self.run(self.handles[who].mint(binding)))
            assert self.model[-1] == binding

    @rule(who=st.integers(0, 1), ahead=st.integers(0, 5))
    def advances(self, who: int, ahead: int) -> None:
        if self.model:
            found = self.run(self.handles[who].advance(self.model[-1].time_ms + ahead))
            if ahead:
                self.model.append(Binding(self.model[-1].time_ms + ahead, self.model[-1].offsets, self.model[-1].lsn))
            assert found == self.model[-1]

    @precondition(lambda self: len(self.model) > 5)
    @rule(who=st.integers(0, 1), share=st.floats(0.3, 1))
    def forgets(self, who: int, share: float) -> None:
        time_ms = self.model[int((len(self.model) - 1) * share)].time_ms
        if time_ms > self.kept_ms:
            self.run(self.handles[who].truncate_before(time_ms))
            self.kept_ms = time_ms

    @rule(who=st.integers(0, 1))
    def restarts(self, who: int) -> None:
        self.handles[who] = self.run(opened(self.world))

    @invariant()
    def every_handle_knows_what_was_kept(self) -> None:
        if not self.model:
            return
        known = [b for b in self.model if b.time_ms > self.kept_ms]
        for handle in self.handles:
            assert self.run(handle.latest()) == self.model[-1]
            if self.kept_ms >= 0:
                assert self.run(handle.after(self.kept_ms)) == known
                assert self.run(handle.at(self.kept_ms)) == [b for b in self.model if b.time_ms <= self.kept_ms][-1]
            found = self.run(handle.after(-1))
            assert found == self.model[len(self.model) - len(found) :]
            assert found[0].time_ms <= max(self.kept_ms, self.model[0].time_ms)

    def teardown(self) -> None:
        self.loop.close()


def test_bindings_equal_the_list_of_what_was_minted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remap_module, "WHOLE_RECORD_INTERVAL", 4)
    monkeypatch.setattr(remap_module, "WINDOW_BINDINGS", 6)
    run_state_machine_as_test(BindingModel, settings=settings(max_examples=40, stateful_step_count=25, deadline=None))
