from __future__ import annotations

import asyncio
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.topics.world import GatedObjects
from support.waiting import until
from tidemill.base.clock import ManualClock, Rand
from tidemill.base.errors import CorruptError, TidemillError, UnavailableError
from tidemill.topics.batch_reads import select_batches
from tidemill.topics.config.settings import TopicSettings
from tidemill.topics.l0.format import L0Region, decode_footer, encode_footer, object_key
from tidemill.topics.l0.object_cache import ObjectCache
from tidemill.topics.l0.writer import L0Writer

regions = st.lists(
    st.builds(
        L0Region,
        topic_id=st.text(max_size=20),
        partition=st.integers(0, 2**32 - 1),
        position=st.integers(0, 2**40),
        length=st.integers(0, 2**40),
    ),
    max_size=20,
)


@given(regions, st.binary(max_size=50))
def test_a_footer_is_found_from_the_end(rows: list[L0Region], before: bytes) -> None:
    assert decode_footer(before + encode_footer(rows)) == rows


@given(regions, st.data())
def test_any_damage_to_a_footer_is_noticed(rows: list[L0Region], data: st.DataObject) -> None:
    footer = bytearray(encode_footer(rows))
    at = data.draw(st.integers(0, len(footer) - 1))
    footer[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CorruptError):
        decode_footer(footer)


def test_keys_list_in_epoch_order() -> None:
    keys = [object_key(epoch, "n", 255) for epoch in (2, 10, 9)]
    assert sorted(keys) == [keys[0], keys[2], keys[1]]


def test_the_cache_keeps_its_budget_and_drops_the_oldest() -> None:
    cache = ObjectCache(100)
    for number in range(5):
        cache.add(str(number), bytearray(40))
    assert (cache.bytes_held, len(cache)) == (80, 2)
    assert cache.get("2") is None and cache.get("4") is not None
    cache.add("large", bytearray(500))
    assert (cache.bytes_held, len(cache)) == (0, 0)


def test_choose_takes_whole_batches() -> None:
    sizes = [10, 20, 30]
    assert select_batches(sizes, 0, 30, 9, at_least_one=False) == (2, 30)
    assert select_batches(sizes, 0, 99, 1, at_least_one=False) == (1, 10)
    assert select_batches(sizes, 1, 5, 9, at_least_one=True) == (2, 20)
    assert select_batches(sizes, 1, 5, 9, at_least_one=False) == (1, 0)
    assert select_batches(sizes, 3, 5, 9, at_least_one=True) == (3, 0)


class Member:
    """A staged batch, which takes a millisecond to process its outcome."""

    def __init__(self, number: int, heard: list[int | str], clock: ManualClock) -> None:
        self.topic_id, self.partition, self.line = "t", number, 1
        self.buffer, self.trailer = b"batch", b""
        self.size_bytes = len(self.buffer)
        self.staged_s = 0.0
        self.abandoned = False
        self._heard = heard
        self._clock = clock

    def uploaded(self, object_key: str, first_byte: int, data: bytearray) -> None:
        self._clock.advance(1)
        self._heard.append(self.partition)

    def upload_failed(self, error: TidemillError) -> None:
        self._clock.advance(1)
        self._heard.append(f"failed {self.partition}")


class Telling:
    """A writer with fifty members in one object, whose upload waits for the gate."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.objects = GatedObjects()
        self.objects.gated = True
        self.heard: list[int | str] = []
        settings = TopicSettings(staged_expiry_s=10, uploads_in_flight=1)
        self.writer = L0Writer(
            self.objects, ObjectCache(0), node="n", epoch=lambda: 1, clock=self.clock, rand=Rand(1), settings=settings
        )

    def stage(self, *numbers: int) -> None:
        for number in numbers:
            self.writer.stage(Member(number, self.heard, self.clock))

    async def stretches(self, until: int) -> list[int]:
        """Wait until `until` acknowledgements were heard. Return their number after each turn of the loop that brought
        some."""
        seen = [len(self.heard)]
        while seen[-1] < until:
            await asyncio.sleep(0)
            if len(self.heard) > seen[-1]:
                seen.append(len(self.heard))
        return seen


@pytest.mark.parametrize("error", [None, UnavailableError("gone.")])
async def test_members_hear_in_order_and_in_stretches_while_their_object_stays_open(
    error: TidemillError | None,
) -> None:
    telling = Telling()
    telling.stage(*range(50))
    await telling.objects.let_go(error=error)
    assert telling.writer.first_open_number == 0
    seen = await telling.stretches(5)
    assert telling.writer.first_open_number == 0 and telling.writer.staged_bytes > 0, "some have not heard"
    seen += await telling.stretches(50)
    assert max(later - earlier for earlier, later in itertools.pairwise(seen)) <= 6
    assert telling.heard == [n if error is None else f"failed {n}" for n in range(50)]
    await until(lambda: telling.writer.first_open_number == 1)
    assert telling.writer.staged_bytes == 0
    await telling.writer.aclose()


async def test_who_waits_for_others_to_be_answered_waits_a_moment_from_their_answer_on() -> None:
    telling = Telling()
    first = Member(1, telling.heard, telling.clock)
    telling.writer.stage(first)
    await until(lambda: bool(telling.objects.waiting))
    await telling.objects.let_go()
    await until(lambda: telling.heard == [1])
    telling.stage(2)
    waiting = telling.writer._flush_due
    telling.writer.batch_answered(first)
    sooner = telling.writer._flush_due
    assert isinstance(waiting, asyncio.TimerHandle) and waiting.cancelled()
    assert isinstance(sooner, asyncio.TimerHandle) and sooner.when() < waiting.when()
    telling.writer.batch_answered(first)
    assert telling.writer._flush_due is sooner, "it has been answered already"
    await until(lambda: bool(telling.objects.waiting))
    await telling.objects.let_go()
    await telling.writer.aclose()


async def test_who_waited_too_long_hears_it_in_stretches_too() -> None:
    telling = Telling()
    telling.stage(100)
    await until(lambda: bool(telling.objects.waiting))
    telling.stage(*range(50))
    telling.clock.advance(11_000)
    await telling.objects.let_go()
    seen = await telling.stretches(51)
    assert max(later - earlier for earlier, later in itertools.pairwise(seen)) <= 6
    assert telling.heard == [100, *(f"failed {n}" for n in range(50))]
    await telling.writer.aclose()


async def test_whoever_has_not_heard_when_the_writer_closes_hears_of_a_failure_once() -> None:
    telling = Telling()
    telling.stage(*range(50))
    await telling.objects.let_go()
    await telling.stretches(5)
    await telling.writer.aclose()
    reported = [each for each in telling.heard if isinstance(each, int)]
    assert 5 <= len(reported) < 50
    assert telling.heard == [*reported, *(f"failed {n}" for n in range(len(reported), 50))]
