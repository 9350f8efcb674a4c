"""Bucket full, read-only, missing at the start, lost later, or slow, and descriptors used up: reports, waits, recovery.

The tests use real file systems (a small tmpfs that is remounted) and moto's server, which they stop and start.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import subprocess
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from support.mounts import run_or_skip
from support.objects.moto_access import CREDENTIALS, start_server
from support.ports import free_port
from support.waiting import until
from tidemill.base.clock import ManualClock, Rand, SystemClock
from tidemill.base.errors import ConflictError, InvalidError, MissingError, UnavailableError, UnknownOutcomeError
from tidemill.base.runtime.tasks import open_with_retry
from tidemill.objects import health, local, local_root, retrying
from tidemill.objects.durable_create import RealSyscalls
from tidemill.objects.factory import open_objects
from tidemill.objects.health import CONFIRM_S, NOTICE_S, StoreHealth
from tidemill.objects.local import CACHED_READ_BYTES, LIST_PAGE, THREADS, LocalObjects
from tidemill.objects.retrying import RetryingObjects

T = TypeVar("T")


def waited(opening: Callable[[], Awaitable[T]], said: list[str]) -> asyncio.Future[T]:
    return asyncio.ensure_future(open_with_retry(opening, SystemClock(), waiting=said.append))


class Mount:
    """A tmpfs of `size` that can be remounted; the test is skipped where this user may not mount."""

    def __init__(self, at: Path, size: str) -> None:
        self.at = at
        at.mkdir()
        run_or_skip("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(at))

    def read_only(self, on: bool) -> None:
        run_or_skip("mount", "-o", f"remount,{'ro' if on else 'rw'}", str(self.at))


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Mount]:
    mount = Mount(tmp_path / "mount", "4m")
    yield mount
    subprocess.run(["umount", "-l", str(mount.at)], check=False)


# descriptors -------------------------------------------------------------------------------------


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_f507_thousands_of_reads_cancelled_at_any_moment_leave_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_NOWAIT", 0)  # every large read goes through the pool
    store = LocalObjects.open(tmp_path, SystemClock(), Rand())
    await store.put("large", os.urandom(CACHED_READ_BYTES + 1))
    rand = Rand(7)
    before = descriptors()
    for _ in range(100):
        reads = [asyncio.ensure_future(store.get("large")) for _ in range(40)]
        for _ in range(rand.below(4)):
            await asyncio.sleep(0)
        for read in reads:
            read.cancel()
        await asyncio.gather(*reads, return_exceptions=True)
    await until(lambda: descriptors() <= before + THREADS)
    assert await store.get("large", 0, 10)
    await store.aclose()
    assert descriptors() <= before


async def test_f507_a_read_that_finds_the_pool_closed_leaves_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_NOWAIT", 0)
    store = LocalObjects.open(tmp_path, SystemClock(), Rand())
    await store.put("large", os.urandom(CACHED_READ_BYTES + 1))
    store._pool.shutdown()
    before = descriptors()
    for _ in range(50):
        with contextlib.suppress(Exception):
            await store.get("large")
    assert descriptors() == before


# a directory -------------------------------------------------------------------------------------


async def test_f508_a_directory_that_goes_read_only_is_waited_for_and_told_and_heals(
    small: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retrying, "PROBE_INTERVAL_S", 0.2)
    monkeypatch.setattr(health, "CONFIRM_S", 0.2)
    store = await open_objects(str(small.at / "bucket"), SystemClock(), Rand(), retry_budget_s=20)
    await store.put("a", b"1")
    small.read_only(True)
    writing = asyncio.ensure_future(store.put("b", b"2"))
    await until(store.trouble)
    assert "EROFS" in store.trouble() and "writable" in store.trouble()
    assert await store.get("a") == b"1"  # reads continue
    assert not writing.done()
    small.read_only(False)
    await writing
    assert store.trouble() == "" and await store.get("b") == b"2"
    # A cancelled writer leaves its trouble; `probe_while_suspected` clears it.
    small.read_only(True)
    with pytest.raises(UnavailableError, match="EROFS"):
        await RetryingObjects(store.inner, SystemClock(), Rand(), store="l", budget_s=0).put("c", b"")
    giving_up = asyncio.ensure_future(store.put("c", b"3"))
    await until(store.trouble)
    giving_up.cancel()
    small.read_only(False)
    proving = asyncio.ensure_future(store.probe_while_suspected())
    await until(lambda: not store.trouble())
    proving.cancel()
    await store.aclose()


async def test_f508_a_full_directory_refuses_writes_as_unavailable_serves_reads_and_heals(small: Mount) -> None:
    store = await open_objects(str(small.at / "bucket"), SystemClock(), Rand(), retry_budget_s=0.2)
    await store.put("a", b"1")
    filler = small.at / "filler"
    with contextlib.suppress(OSError), filler.open("wb") as file:
        while True:
            file.write(b"x" * 65536)
            file.flush()
    with pytest.raises(UnavailableError, match="space"):
        await store.put("b", os.urandom(1 << 20))
    assert "Free space" in store.recent_fault()
    await until(store.trouble)
    assert "Free space" in store.trouble()
    assert await store.get("a") == b"1"
    assert os.listdir(small.at / "bucket" / ".tmp") == []
    filler.unlink()
    await store.put("b", os.urandom(1 << 20))
    assert store.trouble() == ""
    await store.aclose()


async def test_f616_a_file_system_without_inodes_is_told_as_that(small: Mount) -> None:
    run_or_skip("mount", "-o", "remount,nr_inodes=12", str(small.at))
    store = await open_objects(str(small.at / "bucket"), SystemClock(), Rand(), retry_budget_s=0.1)
    puts = (store.put(f"k{number}", b"x") for number in range(20))
    outcomes = await asyncio.gather(*puts, return_exceptions=True)
    assert any(isinstance(each, UnavailableError) and "no free inode" in str(each) for each in outcomes), outcomes
    assert "no free inode" in store.recent_fault()
    await store.aclose()


async def test_f508_a_directory_that_is_gone_proves_nothing_missing(small: Mount) -> None:
    store = await open_objects(str(small.at / "bucket"), SystemClock(), Rand(), retry_budget_s=0.2)
    await store.put("a/b", b"1")
    (small.at / "bucket").rename(small.at / "elsewhere")
    (small.at / "bucket").mkdir()  # an empty mount point
    for ask in (store.get("a/b"), store.head("a/b"), store.put("a/c", b"2")):
        with pytest.raises(UnavailableError):
            await ask
    with pytest.raises(UnavailableError):
        async for _ in store.list(""):
            pass
    await until(store.trouble)
    (small.at / "bucket").rmdir()
    (small.at / "elsewhere").rename(small.at / "bucket")
    assert await store.get("a/b") == b"1"
    await store.put("a/c", b"2")
    assert store.trouble() == ""
    with pytest.raises(MissingError):
        await store.get("a/none")
    await store.aclose()


class Swapped:
    """A bucket's directory that another, empty one replaces and gives back, as an unmount and a mount do."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._aside = directory.with_name("aside")

    def unmount(self) -> None:
        self.directory.rename(self._aside)
        self.directory.mkdir()

    def mount(self) -> None:
        self.directory.rename(self.directory.with_name("mount point"))
        self._aside.rename(self.directory)


async def test_f508_another_directory_in_its_place_is_not_the_store_even_if_a_process_prepares_it(
    tmp_path: Path,
) -> None:
    swapped = Swapped(tmp_path / "bucket")
    store = LocalObjects.open(swapped.directory, SystemClock(), Rand(1))
    await store.put("a/b", b"1")
    swapped.unmount()
    other = LocalObjects.open(swapped.directory, SystemClock(), Rand(2))
    await other.put("a/d", b"other")
    for ask in (
        store.get("a/b"),
        store.head("a/b"),
        store.put("a/c", b"2"),
        store.put_unpublished("a/c", b"2"),
        store.delete("a/d"),
    ):
        with pytest.raises(UnavailableError, match="another directory") as raised:
            await ask
        assert "mounted" in raised.value.fix
    with pytest.raises(UnavailableError, match="another directory"):
        async for _ in store.list(""):
            pass
    assert [meta.key async for meta in other.list("")] == ["a/d"]
    assert os.listdir(swapped.directory / ".tmp") == []
    await other.aclose()
    swapped.mount()
    await store.put("a/c", b"2")
    assert [meta.key async for meta in store.list("")] == ["a/b", "a/c"]
    await store.aclose()


async def test_f508_another_directory_with_the_same_inodes_is_not_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The roots of two file systems, and the first directories in them, have the same inodes on XFS, btrfs, tmpfs."""
    swapped, stat = Swapped(tmp_path / "bucket"), os.stat
    roots = {str(swapped.directory) + end for end in ("", "/", "/.tmp")}

    def equal(path: Any, **options: Any) -> Any:
        found = stat(path, **options)
        return SimpleNamespace(st_ino=256, st_mode=found.st_mode) if str(path) in roots else found

    monkeypatch.setattr(local_root.os, "stat", equal)
    swapped.directory.mkdir()
    (swapped.directory / ".tmp").mkdir()  # of a former version
    store = LocalObjects.open(swapped.directory, SystemClock(), Rand(1))
    await store.put("a/b", b"1")
    swapped.unmount()
    other = LocalObjects.open(swapped.directory, SystemClock(), Rand(2))
    for ask in (store.get("a/b"), store.head("a/b"), store.put("a/c", b"2"), store.delete("a/d")):
        with pytest.raises(UnavailableError, match="another directory"):
            await ask
    await other.aclose()
    swapped.mount()
    again = LocalObjects.open(swapped.directory, SystemClock(), Rand(3), create=False)
    assert await store.get("a/b") == b"1" == await again.get("a/b")
    with pytest.raises(MissingError):
        await store.get("a/none")
    await again.aclose()
    await store.aclose()


@pytest.mark.parametrize("unpublished", [False, True])
async def test_f508_a_directory_that_is_replaced_during_a_write_receives_no_name(
    tmp_path: Path, unpublished: bool
) -> None:
    swapped = Swapped(tmp_path / "bucket")

    class ReplacedAfterWrite(RealSyscalls):
        def write(self, fd: int, buffers: Sequence[memoryview]) -> int:
            swapped.unmount()
            LocalObjects.open(swapped.directory, SystemClock(), Rand(2))
            return super().write(fd, buffers)

    store = LocalObjects.open(swapped.directory, SystemClock(), Rand(1), ReplacedAfterWrite())
    with pytest.raises(UnavailableError, match="another directory"):
        await (store.put_unpublished if unpublished else store.put)("a/b", b"1")
    assert sorted(os.listdir(swapped.directory)) == [".id", ".tmp"]
    await store.aclose()


async def test_f508_a_directory_that_is_replaced_during_a_listing_ends_it(tmp_path: Path) -> None:
    swapped = Swapped(tmp_path / "bucket")
    store = LocalObjects.open(swapped.directory, SystemClock(), Rand())
    for number in range(LIST_PAGE + 1):
        (swapped.directory / f"{number // LIST_PAGE}").mkdir(exist_ok=True)
        (swapped.directory / f"{number // LIST_PAGE}" / f"{number:04d}").touch()
    found = store.list("")
    await anext(found)
    swapped.unmount()
    with pytest.raises(UnavailableError):
        async for _ in found:
            pass
    await store.aclose()


@pytest.mark.parametrize("exists", [True, False])
async def test_f508_a_directory_that_must_exist_is_not_created(tmp_path: Path, exists: bool) -> None:
    root = tmp_path / "mount" / "bucket"
    if exists:
        root.mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UnavailableError, match="is empty" if exists else "does not exist") as raised:
        await open_objects(f"file://{root}", SystemClock(), Rand(), create=False)
    assert "mounted" in raised.value.fix
    assert sorted(tmp_path.rglob("*")) == before
    await (await open_objects(f"file://{root}", SystemClock(), Rand())).aclose()
    await (await open_objects(f"file://{root}", SystemClock(), Rand(), create=False)).aclose()


@pytest.mark.parametrize("stray", ["NOT_MOUNTED", "data/x"])
async def test_f508_a_mount_point_with_stray_files_is_no_copy_of_a_store(tmp_path: Path, stray: str) -> None:
    (tmp_path / stray).parent.mkdir(exist_ok=True)
    (tmp_path / stray).touch()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UnavailableError, match="is no store") as raised:
        await open_objects(f"file://{tmp_path}", SystemClock(), Rand(), create=False)
    assert "mounted" in raised.value.fix
    assert sorted(tmp_path.rglob("*")) == before


async def test_a_copy_of_a_directory_without_its_temporary_one_is_the_directory(tmp_path: Path) -> None:
    store = await open_objects(f"file://{tmp_path}/bucket", SystemClock(), Rand())
    await store.put("metastore/a", b"1")
    (tmp_path / "bucket" / ".tmp").rmdir()
    again = await open_objects(f"file://{tmp_path}/bucket", SystemClock(), Rand(), create=False)
    assert await again.get("metastore/a") == b"1"
    await again.put("b", b"2")
    await again.aclose()
    await store.aclose()


async def test_a_directory_of_another_user_is_not_taken_for_one_that_is_not_mounted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bucket" / ".tmp").mkdir(parents=True)
    stat = os.stat

    def refused(path: Any, **options: Any) -> Any:
        if str(path).endswith("/.tmp"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return stat(path, **options)

    monkeypatch.setattr(local_root.os, "stat", refused)
    with pytest.raises(InvalidError, match="not permitted") as raised:
        await open_objects(f"file://{tmp_path}/bucket", SystemClock(), Rand(), create=False)
    assert "mounted" not in raised.value.fix


async def test_f508_a_read_only_directory_is_waited_for_at_the_start(small: Mount) -> None:
    (small.at / "bucket").mkdir()
    small.read_only(True)
    with pytest.raises(UnavailableError, match="EROFS"):
        await open_objects(str(small.at / "bucket"), SystemClock(), Rand())
    said: list[str] = []
    opening = asyncio.ensure_future(
        open_with_retry(
            lambda: open_objects(str(small.at / "bucket"), SystemClock(), Rand()),
            SystemClock(),
            waiting=said.append,
        )
    )
    await until(lambda: len(said) > 1)
    small.read_only(False)
    store = await opening
    await store.put("a", b"1")
    assert all("EROFS" in sentence for sentence in said if sentence)
    await store.aclose()


async def test_a_new_directory_is_private_and_a_link_in_an_objects_place_is_not_followed(tmp_path: Path) -> None:
    store = LocalObjects.open(tmp_path / "bucket", SystemClock(), Rand())
    assert (tmp_path / "bucket").stat().st_mode & 0o777 == 0o700
    (tmp_path / "secret").write_bytes(b"elsewhere")
    (tmp_path / "bucket" / "link").symlink_to(tmp_path / "secret")
    for ask in (store.get("link"), store.get("link", 0, 3), store.get_ranges("link", [(0, 3)])):
        with pytest.raises(UnavailableError, match="ELOOP"):
            await ask
    with pytest.raises(Exception, match="exists"):
        await store.put("link", b"new")
    assert (tmp_path / "secret").read_bytes() == b"elsewhere"
    await store.aclose()


# S3 ----------------------------------------------------------------------------------------------


class Moto:
    """moto's server on one port, which can be stopped and started; its buckets survive that."""

    def __init__(self) -> None:
        self.port = free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._server: Any = None

    def start(self) -> None:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._server = start_server(port=self.port)

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None

    def make_bucket(self, name: str) -> None:
        import boto3

        client = boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id="test",
            aws_secret_access_key="test",
            region_name="us-east-1",
        )
        client.create_bucket(Bucket=name)


@pytest.fixture
def moto() -> Iterator[Moto]:
    server = Moto()
    yield server
    server.stop()


async def test_f509_an_s3_endpoint_that_is_down_at_the_start_is_waited_for_and_told(moto: Moto) -> None:
    url = f"s3://away-at-start/p?endpoint={moto.endpoint}"
    said: list[str] = []
    opening = asyncio.ensure_future(
        open_with_retry(
            lambda: open_objects(url, SystemClock(), Rand(), env=CREDENTIALS), SystemClock(), waiting=said.append
        )
    )
    await until(lambda: len(said) > 1)
    assert all("cannot be reached" in sentence and moto.endpoint in sentence for sentence in said if sentence)
    assert not opening.done()
    await asyncio.to_thread(moto.start)
    # The endpoint is up but the bucket does not exist. Only the operator can fix that: fail without waiting.
    with pytest.raises(InvalidError, match="away-at-start"):
        await opening
    await asyncio.to_thread(moto.make_bucket, "away-at-start")
    store = await open_objects(url, SystemClock(), Rand(), env=CREDENTIALS)
    await store.put("a", b"1")
    await store.aclose()


async def test_f509_an_s3_endpoint_that_goes_away_later_is_waited_for_and_told(moto: Moto) -> None:
    await asyncio.to_thread(moto.start)
    await asyncio.to_thread(moto.make_bucket, "away-later")
    url = f"s3://away-later?endpoint={moto.endpoint}"
    store = await open_objects(url, SystemClock(), Rand(), env=CREDENTIALS, retry_budget_s=30)
    await store.put("a", b"1")
    await asyncio.to_thread(moto.stop)
    writing, reading = asyncio.ensure_future(store.put("b", b"2")), asyncio.ensure_future(store.get("a"))
    await until(store.trouble)
    assert moto.endpoint in store.trouble()
    await asyncio.to_thread(moto.start)
    await writing
    assert await reading == b"1" and store.trouble() == ""
    await store.aclose()


async def test_f509_rights_lost_later_are_waited_for_and_told(moto: Moto) -> None:
    """moto cannot revoke rights, so a deleted bucket stands in for it: both answers take the same path."""
    import boto3

    await asyncio.to_thread(moto.start)
    await asyncio.to_thread(moto.make_bucket, "taken-away")
    url = f"s3://taken-away?endpoint={moto.endpoint}"
    store = await open_objects(url, SystemClock(), Rand(), env=CREDENTIALS, retry_budget_s=20)
    client = boto3.client(
        "s3",
        endpoint_url=moto.endpoint,
        aws_access_key_id="test",
        aws_secret_access_key="test",
        region_name="us-east-1",
    )
    await asyncio.to_thread(client.delete_bucket, Bucket="taken-away")
    writing = asyncio.ensure_future(store.put("b", b"2"))
    await until(store.trouble)
    assert "does not exist" in store.trouble() and "Create it" in store.trouble()
    await asyncio.to_thread(moto.make_bucket, "taken-away")
    await writing
    assert store.trouble() == ""
    await store.aclose()


def test_a_store_without_an_answer_is_trouble_before_its_requests_have_failed() -> None:
    clock = ManualClock()
    store = StoreHealth(clock)
    first = store.begin_attempt("write")
    clock.advance(int(CONFIRM_S * 1000))
    assert store.trouble() == "" and "does not answer" in store.recent_fault()
    assert store.is_suspected("write") and not store.is_suspected("read")
    clock.advance(1)
    assert "does not answer: operation=write" in store.trouble()
    # A later write that succeeds proves that the store works: the first one alone is a notice.
    store.end_attempt(store.begin_attempt("write"), "write", None)
    assert store.trouble() == "" and "does not answer" in store.recent_fault()
    store.end_attempt(first, "write", None)
    assert store.recent_fault() == ""


def test_a_request_that_its_caller_gives_up_on_is_evidence_when_it_waited_long() -> None:
    clock = ManualClock()
    store = StoreHealth(clock)
    for waited_ms, expected in ((500, ""), (1_500, "does not answer")):
        number = store.begin_attempt("read")
        clock.advance(waited_ms)
        store.end_attempt(number, "read", asyncio.CancelledError())
        assert expected in store.recent_fault() and bool(expected) == bool(store.recent_fault())
    clock.advance(2_000)
    assert "does not answer" in store.trouble()


@pytest.mark.parametrize(
    "error",
    [MissingError("m."), InvalidError("i."), UnknownOutcomeError("u."), UnavailableError("n."), ValueError("v")],
)
def test_a_write_that_was_not_done_is_trouble_whatever_its_error(error: Exception) -> None:
    clock = ManualClock()
    store = StoreHealth(clock)
    for _ in range(30):
        store.end_attempt(store.begin_attempt("write"), "write", error)
        store.end_attempt(store.begin_attempt("read"), "read", None)  # says nothing of writes
        store.end_attempt(store.begin_attempt("delete"), "delete", None)
        clock.advance(100)
    assert str(error) in store.trouble()
    store.end_attempt(store.begin_attempt("write"), "write", ConflictError("another was first"))
    assert store.trouble() == ""


@pytest.mark.parametrize("error", [InvalidError("i."), UnknownOutcomeError("u."), UnavailableError("n.")])
def test_a_read_that_was_not_done_is_trouble_but_a_missing_object_is_none(error: Exception) -> None:
    clock = ManualClock()
    store = StoreHealth(clock)
    for _ in range(30):
        store.end_attempt(store.begin_attempt("read"), "read", error)
        clock.advance(100)
    assert str(error) in store.trouble() and store.is_suspected("read")
    store.end_attempt(store.begin_attempt("read"), "read", MissingError("m."))
    assert store.trouble() == ""


def test_f618_one_failed_write_among_successes_is_a_notice_and_no_trouble() -> None:
    clock = ManualClock()
    store = StoreHealth(clock)
    for number in range(60):
        error = UnknownOutcomeError("status=500") if number % 3 == 0 else None
        store.end_attempt(store.begin_attempt("write"), "write", error)
        assert store.trouble() == "" and "status=500" in store.recent_fault()
        clock.advance(500)
    clock.advance(int(NOTICE_S * 1000))
    assert store.recent_fault() == ""
