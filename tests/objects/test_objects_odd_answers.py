"""Answers of a store that are wrong once: each object is listed once, and no single answer is final."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from support.objects.odd_s3 import OddS3
from tidemill.base.clock import Rand, SystemClock
from tidemill.base.errors import ConflictError, InvalidError, MissingError, UnavailableError, UnknownOutcomeError
from tidemill.objects.buckets.s3 import S3Objects
from tidemill.objects.memory import MemoryObjects
from tidemill.objects.retrying import RetryingObjects
from tidemill.objects.store import ObjectMeta

DATA = bytes(range(256)) * 40


@pytest.fixture
def odd() -> Iterator[OddS3]:
    server = OddS3()
    yield server
    server.close()


def retrying(odd: OddS3, budget_s: float = 5.0) -> RetryingObjects:
    config = {"endpoint": odd.endpoint, "region": "us-east-1", "access_key_id": "k", "secret_access_key": "s"}
    inner = S3Objects("bucket", "", config, Rand(1), timeout_s=2.0)
    return RetryingObjects(inner, SystemClock(), Rand(2), store="odd", budget_s=budget_s, coalesce=True)


# listings --------------------------------------------------------------------------------------------


async def test_f622_a_listing_with_a_repeated_page_yields_each_object_once_and_tells_it(odd: OddS3) -> None:
    for number in range(3):
        odd.put(f"a/{number}", b"x")
    store = retrying(odd)
    assert [meta.key async for meta in store.list("a/")] == ["a/0", "a/1", "a/2"]
    assert store.recent_fault() == ""
    odd.repeats_pages = True
    assert [meta.key async for meta in store.list("a/")] == ["a/0", "a/1", "a/2"]
    assert [meta.key async for meta in store.list("a/", "a/0")] == ["a/1", "a/2"]
    assert "repeatedly" in store.recent_fault() and store.trouble() == ""


async def test_a_listing_that_ignores_where_to_start_begins_there() -> None:
    class FromTheStart(MemoryObjects):
        async def list(self, prefix: str, start_after: str = "") -> AsyncIterator[ObjectMeta]:
            async for meta in super().list(prefix):
                yield meta

    inner = FromTheStart(SystemClock())
    for number in range(3):
        await inner.put(f"a/{number}", b"x")
    store = RetryingObjects(inner, SystemClock(), Rand(1), store="odd")
    assert [meta.key async for meta in store.list("a/", "a/1")] == ["a/2"]


# reads -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("oddity", ["short_reads", "absent_reads"])
async def test_f621_one_wrong_answer_to_a_read_is_retried_and_told(odd: OddS3, oddity: str) -> None:
    odd.put("k", DATA)
    store = retrying(odd)
    setattr(odd, oddity, 1)
    assert await store.get("k", 100, 1100) == DATA[100:1100]
    assert "answered a read" in store.recent_fault()
    for ranges in ([(100, 1100)], [(100, 1100), (5000, 5100)]):
        setattr(odd, oddity, 1)
        assert await store.get_ranges("k", ranges) == [DATA[start:end] for start, end in ranges]
    if oddity == "absent_reads":
        odd.absent_reads = 1
        assert await store.get("k") == DATA


async def test_a_store_that_keeps_answering_too_little_is_in_trouble_and_the_request_not_invalid(odd: OddS3) -> None:
    odd.put("k", DATA)
    store = retrying(odd, budget_s=0.3)
    odd.short_reads = 1_000
    with pytest.raises(UnavailableError, match="wrong number of bytes"):
        await store.get("k", 100, 1100)
    assert "wrong number of bytes" in store.recent_fault()


async def test_what_the_object_does_not_have_stays_invalid_or_missing_at_once(odd: OddS3) -> None:
    odd.put("k", DATA)
    store = retrying(odd)
    for start, end in ((len(DATA) - 5, len(DATA) + 5), (len(DATA) + 5, len(DATA) + 9)):
        with pytest.raises(InvalidError, match=f"size_bytes={len(DATA)}"):
            await store.get("k", start, end)
    assert odd.reads == 2
    with pytest.raises(MissingError):
        await store.get("none")
    with pytest.raises(MissingError):
        await store.get_ranges("none", [(0, 1)])
    assert odd.reads == 4


# reading a put back ----------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [403, 400, 503])
async def test_f621_a_put_whose_read_back_is_rejected_is_read_back_again(odd: OddS3, status: int) -> None:
    odd.unanswered_puts, odd.refused_heads, odd.refusal = 1, 2, status
    store = retrying(odd)
    await store.put("k", DATA)
    assert odd.objects["k"][0] == DATA and odd.refused_heads == 0


@pytest.mark.parametrize("status", [403, 400])
async def test_a_put_whose_read_back_is_rejected_for_the_whole_budget_has_an_unknown_outcome(
    odd: OddS3, status: int
) -> None:
    odd.unanswered_puts, odd.refused_heads, odd.refusal = 1, 1_000, status
    store = retrying(odd, budget_s=0.4)
    with pytest.raises(UnknownOutcomeError, match="cannot be read back"):
        await store.put("k", DATA)
    assert "k" in odd.objects
    assert store._health._sides["read"].since_s is not None, "the rejected reads are evidence"


@pytest.mark.parametrize("status", [403, 400, 503])
async def test_a_conflict_that_cannot_be_read_back_is_not_taken_for_a_failure_of_the_put(
    odd: OddS3, status: int
) -> None:
    odd.put("k", b"another writer's")
    odd.refused_heads, odd.refusal = 1, status
    with pytest.raises(ConflictError):
        await retrying(odd).put("k", DATA)
    odd.refused_heads = 1_000
    with pytest.raises(UnknownOutcomeError):
        await retrying(odd, budget_s=0.4).put("k", DATA)
