"""Answers of a store that are wrong once: each object is listed once, and no single answer is final."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import cast

import pytest

from support.objects.odd_s3 import OddS3
from tidemill.base.clock import Rand, SystemClock
from tidemill.base.errors import (
    ConflictError,
    CorruptError,
    InvalidError,
    MissingError,
    TidemillError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidemill.metastore.lsm.file_store import SstFiles
from tidemill.metastore.lsm.manifest import FileMeta
from tidemill.metastore.metastore import Metastore
from tidemill.metastore.rows.l1 import L1ExtentRow
from tidemill.objects.buckets.s3 import S3Objects
from tidemill.objects.memory import MemoryObjects
from tidemill.objects.retrying import RetryingObjects
from tidemill.objects.store import ObjectMeta
from tidemill.topics.api import BatchRef
from tidemill.topics.batch import Record, encode_batch
from tidemill.topics.batch_reads import read_batches
from tidemill.topics.l1.extent_store import ExtentStore
from tidemill.topics.l1.reader import L1Reader

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


@pytest.mark.parametrize("status", [400, 403, 421, 431])
async def test_f621_one_rejected_read_is_retried(odd: OddS3, status: int) -> None:
    odd.put("k", DATA)
    odd.refusal = status
    store = retrying(odd)
    odd.refused_gets = 1
    assert await store.get("k", 100, 1100) == DATA[100:1100]
    odd.refused_gets = 1
    assert await store.get_ranges("k", [(100, 1100), (5000, 5100)]) == [DATA[100:1100], DATA[5000:5100]]
    odd.refused_gets = 1
    assert [meta.key async for meta in store.list("")] == ["k"]
    odd.refused_heads = 1
    assert await store.head("k") is not None
    assert (odd.refused_gets, odd.refused_heads) == (0, 0)


async def test_a_store_that_keeps_rejecting_reads_is_unavailable_but_an_invalid_key_is_not_retried(odd: OddS3) -> None:
    store = retrying(odd, budget_s=0.3)
    odd.refusal, odd.refused_gets, odd.refused_heads = 400, 1_000, 1_000
    for read in (store.get("k"), store.get_ranges("k", [(0, 1)]), store.head("k"), anext(store.list(""))):
        with pytest.raises(UnavailableError, match="rejected the request"):
            await read
    for read in (store.get("/k"), store.get_ranges("/k", [(0, 1)]), store.head("/k"), anext(store.list("/"))):
        with pytest.raises(InvalidError, match=r"invalid (object )?key"):
            await read


def l1_extent(size_bytes: int) -> L1ExtentRow:
    return L1ExtentRow("0" * 8, 0, 0, 0, 0, 0, "o", 0, size_bytes, 1, 0, 0)


async def read_as_batch(store: RetryingObjects, size_bytes: int) -> bytes:
    [found] = await read_batches(store, [[BatchRef(l1_extent(0).object_key, 0, size_bytes, 0, 1, 0)]])
    if isinstance(found, TidemillError):
        raise found
    return bytes(found[0])


async def read_as_extent(store: RetryingObjects, size_bytes: int) -> bytes:
    return await L1Reader(ExtentStore(cast(Metastore, None), store._clock, Rand()), store).data(l1_extent(size_bytes))


async def read_as_file(store: RetryingObjects, size_bytes: int) -> bytes:
    file = FileMeta(1, 1, "n", size_bytes, 1, b"", b"", 1, 1, 0)
    [piece] = await SstFiles(store, "metastore/u/").read_ranges(file, [(0, size_bytes)])
    assert piece == await SstFiles(store, "metastore/u/").read(file, 0, size_bytes)
    return piece


@pytest.mark.parametrize("read", [read_as_batch, read_as_extent, read_as_file])
async def test_a_rejected_read_is_not_taken_for_a_truncated_object(
    odd: OddS3, read: Callable[[RetryingObjects, int], Awaitable[bytes]]
) -> None:
    batch = encode_batch([Record(b"k", b"v", (), 1)])
    for key in (l1_extent(0).object_key, "metastore/u/sst/00000000000000000001-000000000001-n.sst"):
        odd.put(key, batch)
    store = retrying(odd)
    odd.refused_gets, odd.refusal = 1, 400
    assert await read(store, len(batch)) == batch
    assert odd.refused_gets == 0
    with pytest.raises(CorruptError, match="shorter than"):
        await read(store, len(batch) + 1)


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
