"""Manifests: their encoding, and their storage in the bucket."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import crc32c
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.metastore.sst_world import PREFIX, on_memory_and_local, opener
from tidemill.base.clock import Rand
from tidemill.base.errors import ConflictError, CorruptError, FencedError, InvalidError, MissingError, UnavailableError
from tidemill.metastore.lsm.manifest import FORMAT, FileMeta, Manifest, decode_manifest, encode_manifest
from tidemill.metastore.lsm.manifest_store import BucketManifests
from tidemill.objects.store import ObjectStore

UUID = "11111111-2222-4333-8444-555555555555"
counts = st.integers(0, 2**63 - 1)
files = st.builds(
    FileMeta,
    epoch=counts,
    number=counts,
    nonce=st.text("0123456789abcdef", max_size=32),
    size_bytes=counts,
    rows=counts,
    smallest=st.binary(max_size=20),
    largest=st.binary(max_size=20),
    min_seqno=counts,
    max_seqno=counts,
    meta_start=counts,
)
manifests = st.builds(
    Manifest,
    domain_uuid=st.just(UUID),
    epoch=counts,
    number=counts,
    last_seqno=counts,
    next_file_number=counts,
    created_ms=counts,
    levels=st.lists(st.lists(files, max_size=2).map(tuple), max_size=3).map(tuple),
)


def manifest(number: int = 1, epoch: int = 1, last_seqno: int | None = None) -> Manifest:
    file = FileMeta(epoch, number, "abc", 1000, 10, b"a", b"z", 1, 9, 800)
    return Manifest(UUID, epoch, number, number if last_seqno is None else last_seqno, 7, 1_000, ((file,), (), ()))


@given(manifests)
def test_a_manifest_comes_back_as_it_was(wanted: Manifest) -> None:
    assert decode_manifest(encode_manifest(wanted)) == wanted


@settings(max_examples=20)
@given(manifests, st.integers(1, 255))
def test_every_flipped_byte_is_found(wanted: Manifest, flip: int) -> None:
    good = encode_manifest(wanted)
    for at in range(len(good)):
        with pytest.raises(CorruptError):
            decode_manifest(good[:at] + bytes((good[at] ^ flip,)) + good[at + 1 :])


@settings(max_examples=20)
@given(manifests)
def test_every_truncation_and_every_addition_is_found(wanted: Manifest) -> None:
    good = encode_manifest(wanted)
    for bad in [good[:end] for end in range(len(good))] + [good + b"\0", b"\0" + good]:
        with pytest.raises(CorruptError):
            decode_manifest(bad)


def resealed(data: bytes) -> bytes:
    return data[:-4] + int(crc32c.crc32c(data[:-4])).to_bytes(4, "little")


def test_a_manifest_of_a_newer_format_is_refused_with_both_numbers() -> None:
    good = encode_manifest(manifest())
    newer = resealed(good[:4] + (FORMAT + 1).to_bytes(2, "little") + good[6:])
    with pytest.raises(
        InvalidError, match=f"newer version of tidemill: .* format={FORMAT + 1} supported={FORMAT}"
    ) as found:
        decode_manifest(newer, "somewhere")
    assert "manifest=somewhere" in str(found.value) and found.value.fix


def test_a_sealed_body_that_is_no_manifest_is_corrupt() -> None:
    good = encode_manifest(manifest())
    with pytest.raises(CorruptError, match="is undecodable though its checksum is valid"):
        decode_manifest(resealed(good[:6] + msgspec.msgpack.encode({"levels": 5}) + good[-4:]))


def test_the_bytes_of_a_manifest_never_change() -> None:
    """Later programs read manifests: the digest may only change with the format's number."""
    assert hashlib.sha256(encode_manifest(manifest())).hexdigest()[:16] == "e424f9be3bee1157"


@asynccontextmanager
async def opened_bucket(kind: str, folder: Path) -> AsyncIterator[tuple[BucketManifests, ObjectStore]]:
    async with opener(kind, folder)() as objects:
        yield BucketManifests(objects, PREFIX, Rand(1)), objects


@on_memory_and_local
async def test_the_newest_is_the_greatest_epoch_then_number_up_to_the_epoch_asked(kind: str, tmp_path: Path) -> None:
    async with opened_bucket(kind, tmp_path) as (bucket, _):
        assert await bucket.newest(100) is None and await bucket.read(100) is None
        for epoch, number in [(2, 9), (2, 10), (3, 4), (12, 1)]:
            key = await bucket.upload(manifest(number, epoch))
            assert key.startswith(f"{PREFIX}manifest/{epoch:020d}-{number:020d}-")
        found = {}
        for max_epoch in (1, 2, 3, 11, 12, 99):
            name = await bucket.newest(max_epoch)
            read = await bucket.read(max_epoch)
            assert (name is None) == (read is None)
            found[max_epoch] = None if name is None else (name.epoch, name.number)
            if name is not None and read is not None:
                assert (read.epoch, read.number) == (name.epoch, name.number)
        assert found == {1: None, 2: (2, 10), 3: (3, 4), 11: (3, 4), 12: (12, 1), 99: (12, 1)}


@on_memory_and_local
async def test_a_damaged_newest_manifest_is_told_and_never_passed_over(kind: str, tmp_path: Path) -> None:
    async with opened_bucket(kind, tmp_path) as (bucket, objects):
        older = await bucket.upload(manifest(1))
        bad = f"{PREFIX}manifest/{1:020d}-{2:020d}-abc"
        await objects.put(bad, encode_manifest(manifest(2))[:-1])
        with pytest.raises(CorruptError, match=bad):
            await bucket.read(1)
        with pytest.raises(CorruptError, match=bad):
            await bucket.write(manifest(3))
        assert await bucket.load(older) == manifest(1)  # an older one is a choice that a restore makes by name


@on_memory_and_local
async def test_uploads_of_one_manifest_have_names_of_their_own(kind: str, tmp_path: Path) -> None:
    async with opened_bucket(kind, tmp_path) as (bucket, _):
        keys = [await bucket.upload(manifest()) for _ in range(3)]
        assert len(set(keys)) == 3
        assert sorted(keys) == [name.key async for name in bucket.list()]
        for key in keys[:2]:
            await bucket.delete(key)
            await bucket.delete(key)
        (left,) = [name async for name in bucket.list()]
        assert (left.key, left.epoch, left.number) == (keys[2], 1, 1) and left.size_bytes > 0 and left.modified_ms > 0
        with pytest.raises(MissingError, match=keys[0]):
            await bucket.load(keys[0])


async def test_a_manifest_under_another_ones_name_is_corrupt(tmp_path: Path) -> None:
    async with opened_bucket("memory", tmp_path) as (bucket, objects):
        await objects.put(f"{PREFIX}manifest/{5:020d}-{2:020d}-abc", encode_manifest(manifest(1, 5)))
        with pytest.raises(CorruptError, match="does not match its name"):
            await bucket.read(9)


async def test_foreign_keys_are_left_out_of_the_list(tmp_path: Path) -> None:
    async with opened_bucket("memory", tmp_path) as (bucket, objects):
        key = await bucket.upload(manifest())
        for foreign in (key + ".bak", f"{PREFIX}manifest/readme", f"{PREFIX}manifest/1-2-abc", f"{PREFIX}sst/x"):
            await objects.put(foreign, b"?")
        assert [name.key async for name in bucket.list()] == [key]


@on_memory_and_local
async def test_alone_the_number_the_epoch_and_the_last_seqno_never_go_back(kind: str, tmp_path: Path) -> None:
    async with opened_bucket(kind, tmp_path) as (bucket, _):
        await bucket.write(manifest(5, epoch=3, last_seqno=50))
        for refused in (manifest(5, 3, 50), manifest(4, 3, 60), manifest(5, 4, 60), manifest(6, 3, 49)):
            with pytest.raises(ConflictError) as conflict:
                await bucket.write(refused)
            assert conflict.value.current == manifest(5, 3, 50)
        with pytest.raises(FencedError) as fenced:
            await bucket.write(manifest(6, epoch=2, last_seqno=60))
        assert fenced.value.current == manifest(5, 3, 50)
        assert await bucket.read(9) == manifest(5, 3, 50)
        await bucket.write(manifest(6, epoch=3, last_seqno=50))
        await bucket.write(manifest(7, epoch=4, last_seqno=51))
        assert await bucket.read(9) == manifest(7, 4, 51)
        assert await bucket.read(3) == manifest(6, 3, 50)


@on_memory_and_local
async def test_of_two_who_write_the_same_number_at_once_one_meets_conflict(kind: str, tmp_path: Path) -> None:
    async with opened_bucket(kind, tmp_path) as (bucket, objects):
        await bucket.write(manifest(1))
        writers = [BucketManifests(objects, PREFIX, Rand(seed)).write(manifest(2)) for seed in range(4)]
        outcomes = await asyncio.gather(*writers, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes].count(ConflictError) == 3 and None in outcomes


async def test_a_failing_bucket_is_not_an_empty_one() -> None:
    class Away:
        async def list(self, prefix: str, start_after: str = ""):  # type: ignore[no-untyped-def]
            raise UnavailableError("The bucket is away.")
            yield

    away = BucketManifests(Away(), PREFIX, Rand(1))  # type: ignore[arg-type]
    with pytest.raises(UnavailableError):
        await away.read(1)
    with pytest.raises(UnavailableError):
        await away.write(manifest())


def test_a_prefix_without_its_slash_is_refused() -> None:
    with pytest.raises(InvalidError, match="must end with a slash"):
        BucketManifests(None, PREFIX.rstrip("/"), Rand(1))  # type: ignore[arg-type]
