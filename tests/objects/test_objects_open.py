"""Opening a store from `objects.url`, the doctor's probe, and the planning of ranged reads."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.objects.moto_access import CREDENTIALS
from tidemill.base.clock import Rand, SystemClock
from tidemill.base.errors import InvalidError, TidemillError, UnavailableError
from tidemill.objects import MemoryObjects, open_objects
from tidemill.objects.buckets.s3 import parse_s3
from tidemill.objects.buckets.urls import redact
from tidemill.objects.probe import probe_objects, probe_url
from tidemill.objects.reads import plan_reads, split_response
from tidemill.objects.store import Buffer


async def test_each_form_of_the_url_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for url in (f"file://{tmp_path}/a", f"{tmp_path}/b", "c/d", "./e", "memory:", f"file://{tmp_path}/f%23g", "h#i"):
        store = await open_objects(url, SystemClock(), Rand())
        await store.put("k", b"v")
        assert await store.get("k") == b"v"
        await store.aclose()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "c", "e", "f#g", "h#i"]


async def test_nodes_that_open_a_directory_that_does_not_exist_together_create_it_once_and_none_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, exists, peers = f"{tmp_path}/a", os.path.lexists, list[str]()

    def overtaken(path: str) -> bool:
        if path == root and not peers:
            peers.append(path)
            os.mkdir(path)  # by a node that starts at the same time
        return exists(path)

    with monkeypatch.context() as patched:
        patched.setattr(os.path, "lexists", overtaken)
        store = await open_objects(f"file://{root}", SystemClock(), Rand())
    await store.put("k", b"v")
    await store.aclose()
    assert peers
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "link"):
        with pytest.raises(InvalidError, match="not a directory"):
            await open_objects(f"file://{tmp_path}/{name}", SystemClock(), Rand())


@pytest.mark.parametrize(
    ("url", "word"),
    [
        ("", "empty"),
        ("ftp://bucket", "unknown scheme"),
        ("http://host/bucket", "unknown scheme"),
        ("file://host/dir", "absolute path"),
        ("file:relative", "absolute path"),
        ("file:///srv/C#/objects", "fragment"),
        ("file:///srv/what?/objects", "parameters"),
        ("s3://", "no bucket"),
        ("s3:///prefix", "no bucket"),
        ("s3://b?colour=red", "colour"),
        ("s3://b?endpoint=ftp://x", "http address"),
        ("s3://b/bad key", "prefix"),
        ("s3://KEY:SECRET@b", "in front of the bucket"),
        ("s3://b", "credentials"),
    ],
)
async def test_a_wrong_url_is_refused_with_its_fix(url: str, word: str) -> None:
    with pytest.raises(InvalidError, match=word) as raised:
        await open_objects(url, SystemClock(), Rand(), env={})
    assert raised.value.fix


def test_secrets_never_reach_a_message() -> None:
    url = "s3://b/p?access_key_id=AKIA&secret_access_key=hush&session_token=psst&region=eu-west-1&bad=1"
    assert redact(url) == "s3://b/p?access_key_id=***&secret_access_key=***&session_token=***&region=eu-west-1&bad=1"
    with pytest.raises(InvalidError) as raised:
        parse_s3(url, {})
    assert "hush" not in str(raised.value) and "psst" not in str(raised.value)


@pytest.mark.parametrize(
    "url",
    [
        "s3://KEY:HU/SH@b/p",
        "s3://KEY:HU?SH@b/p",
        "r2://KEY:HUSH@b/p",
        "file://KEY:HUSH@b/p",
        "gs://KEY:HUSH@b/p",
        "az://KEY:HUSH@b/p?account=a",
        "s3://b?endpoint=ftp://KEY:HUSH@x",
        "s3://b?endpoint=http://KEY:HUSH@x&bad=1",
        "s3://b?endpoint=http://KEY:HUSH@127.0.0.1:1",
    ],
)
async def test_credentials_in_the_place_of_a_host_never_reach_a_message(url: str) -> None:
    with pytest.raises(TidemillError) as raised:
        await open_objects(url, SystemClock(), Rand(), env=CREDENTIALS, retry_budget_s=0.1)
    assert "HU" not in str(raised.value) and "KEY" not in str(raised.value)


def test_credentials_come_from_the_query_before_the_environment() -> None:
    bucket, prefix, config = parse_s3("s3://b/x/y/?access_key_id=q&secret_access_key=r", CREDENTIALS)
    assert (bucket, prefix) == ("b", "x/y/")
    assert (config["access_key_id"], config["secret_access_key"], config["region"]) == ("q", "r", "us-east-1")
    _, _, config = parse_s3("s3://b?region=eu-west-1", {**CREDENTIALS, "AWS_SESSION_TOKEN": "t"})
    assert (config["access_key_id"], config["session_token"], config["region"]) == ("test", "t", "eu-west-1")
    _, _, config = parse_s3("s3://b?credentials=instance", CREDENTIALS)
    assert "access_key_id" not in config


async def test_a_bucket_that_is_not_there_is_named_at_open(s3_endpoint: str) -> None:
    with pytest.raises(InvalidError, match="no-such-bucket"):
        await open_objects(f"s3://no-such-bucket?endpoint={s3_endpoint}", SystemClock(), Rand(), env=CREDENTIALS)
    with pytest.raises(UnavailableError, match="endpoint"):
        await open_objects("s3://b?endpoint=http://127.0.0.1:1", SystemClock(), Rand(), env=CREDENTIALS)


async def test_the_probe_passes_on_stores_that_keep_the_contract(
    tmp_path: Path, s3_endpoint: str, new_bucket: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    for url in ("memory:", str(tmp_path / "p"), f"s3://{new_bucket()}/p?endpoint={s3_endpoint}"):
        checks = await probe_url(url, SystemClock(), Rand())
        assert [check.name for check in checks if not check.ok] == []
        assert len(checks) == 7
        store = await open_objects(url, SystemClock(), Rand())
        assert [meta.key async for meta in store.list("")] == [], "the probe cleans up"
        await store.aclose()


class Overwrites(MemoryObjects):
    """A server that accepts If-None-Match and ignores it."""

    async def put(self, key: str, data: Buffer | Sequence[Buffer]) -> None:
        await self.delete(key)
        await super().put(key, data)


class ChecksThenWrites(MemoryObjects):
    """A server that honours the condition, but not atomically."""

    async def put(self, key: str, data: Buffer | Sequence[Buffer]) -> None:
        existed = await self.head(key) is not None
        await asyncio.sleep(0)
        if not existed:
            await self.delete(key)
        await super().put(key, data)


class ReadOnly(MemoryObjects):
    async def put(self, key: str, data: Buffer | Sequence[Buffer]) -> None:
        raise InvalidError("No right.", fix="Grant s3:PutObject.")


@pytest.mark.parametrize(
    ("store", "failed"),
    [
        (Overwrites, ["objects conditional create", "objects racing creates"]),
        (ChecksThenWrites, ["objects racing creates"]),
        (ReadOnly, ["objects create"]),
    ],
)
async def test_the_probe_names_what_a_bad_store_gets_wrong(store: type[MemoryObjects], failed: list[str]) -> None:
    checks = await probe_objects(store(SystemClock()), Rand())
    assert [check.name for check in checks if not check.ok] == failed
    assert all(check.fix for check in checks if not check.ok)


async def test_the_probe_of_a_wrong_url_is_one_failed_check() -> None:
    [check] = await probe_url("ftp://x", SystemClock(), Rand())
    assert not check.ok and "objects.url" in check.detail and check.fix


RANGES = st.lists(st.tuples(st.integers(0, 500), st.integers(0, 60)).map(lambda t: (t[0], t[0] + t[1])), max_size=30)


@given(RANGES, st.integers(0, 50), st.integers(60, 300))
def test_planned_reads_serve_every_range_once(ranges: list[tuple[int, int]], gap: int, most: int) -> None:
    data = bytes(i % 251 for i in range(600))
    into = [b"?"] * len(ranges)
    requests = plan_reads(ranges, gap, most)
    for request in requests:
        assert request.end - request.start <= max([most] + [b - a for a, b in ranges])
        split_response(request, data[request.start : request.end], into)
    assert into == [data[a:b] for a, b in ranges]
    assert [r.start for r in requests] == sorted(r.start for r in requests)


def test_near_ranges_travel_together_and_far_ones_do_not() -> None:
    assert [(r.start, r.end) for r in plan_reads([(0, 10), (15, 20), (200, 210)], 10, 1000)] == [(0, 20), (200, 210)]
    assert len(plan_reads([(i * 10, i * 10 + 10) for i in range(100)], 10, 100)) == 10
    assert plan_reads([]) == []


async def test_errors_are_of_our_kinds_only(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"")
    with pytest.raises(TidemillError):
        await open_objects(str(tmp_path / "f"), SystemClock(), Rand())


async def test_memory_keeps_one_buffer_that_it_is_given_and_copies_several() -> None:
    store = await open_objects("memory:", SystemClock(), Rand())
    given, again = bytearray(b"given away"), bytearray(b"used again")
    await store.put("k/one", given)
    await store.put("k/two", [memoryview(again)])
    given[:5], again[:4] = b"GIVEN", b"gone"
    assert await store.get("k/one") == b"GIVEN away"
    assert await store.get_ranges("k/two", [(0, 4), (5, 10)]) == [b"used", b"again"]
    found = await store.get("k/one", 1, 3)
    assert type(found) is bytes
    given[1:3] = b"--"
    assert found == b"IV"
    await store.aclose()
