"""O2: an acknowledged put survives power loss, and no name ever holds torn bytes."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from support.objects.crash_model import Recorder, crash
from support.unprivileged import call_unprivileged, enterable_directory
from support.waiting import SCENARIO_S
from tidemill.base.clock import ManualClock, Rand, SystemClock
from tidemill.base.errors import ConflictError, InvalidError, UnavailableError, UnknownOutcomeError
from tidemill.objects.durable_create import DirectorySyncer, GroupedDirectorySyncs, RealSyscalls
from tidemill.objects.local import TEMPORARY_AGE_MS, LocalObjects
from tidemill.objects.retrying import RetryingObjects
from tidemill.objects.store import MisconfiguredError

KEYS = [f"{first}/{second}/{leaf}" for first in "ab" for second in ("x", "y/z") for leaf in range(4)] + ["top", "a/1"]


def content(key: str) -> bytes:
    return (key.encode() + b"|") * 50


def record(root: Path, skip: frozenset[str] = frozenset()) -> Recorder:
    """Record a run with concurrent writers, some of which lose a race, into directories that do not exist yet."""
    recorder = Recorder(skip)

    async def main() -> None:
        store = LocalObjects.open(root, SystemClock(), Rand(1), recorder)

        async def write(key: str) -> None:
            try:
                await store.put(key, [content(key)[:7], content(key)[7:]])
            except ConflictError:
                assert await store.get(key) == content(key)
            # A loser that saw the winner's object relies on it as much as the winner does.
            recorder.acknowledged(key)

        await asyncio.gather(*(write(key) for key in KEYS + KEYS[::3]))
        await store.aclose()

    asyncio.run(main())
    return recorder


def record_unpublished(root: Path, skip: frozenset[str] = frozenset()) -> Recorder:
    """Record a run with concurrent writers of keys without readers."""
    recorder = Recorder(skip)

    async def main() -> None:
        store = LocalObjects.open(root, SystemClock(), Rand(1), recorder)

        async def write(key: str) -> None:
            await store.put_unpublished(key, [content(key)[:7], content(key)[7:]])
            recorder.acknowledged(key)

        await asyncio.gather(*map(write, KEYS))
        await store.aclose()

    asyncio.run(main())
    return recorder


def damage_of_acknowledged(recorder: Recorder, root: Path, states: int) -> int:
    """Return how many acknowledged objects are missing or torn over random crash states."""
    source = random.Random(0)
    lost = 0
    for _ in range(states):
        found, acknowledged = crash(recorder.events, source.randrange(recorder.duration + 2), str(root), source)
        lost += sum(found.get(key) != content(key) for key in acknowledged)
    return lost


def damage(recorder: Recorder, root: Path, states: int, seed: int = 0) -> tuple[int, int]:
    """Return (acknowledged objects missing, torn objects visible) over random crash states."""
    source = random.Random(seed)
    missing = torn = 0
    for _ in range(states):
        found, acknowledged = crash(recorder.events, source.randrange(recorder.duration + 2), str(root), source)
        missing += len(acknowledged - found.keys())
        torn += sum(found[key] != content(key) for key in found)
    return missing, torn


def test_no_crash_loses_or_tears_an_acknowledged_object(tmp_path: Path) -> None:
    recorder = record(tmp_path / "new" / "root")
    assert damage(recorder, tmp_path / "new" / "root", 600) == (0, 0)


def test_the_model_finds_a_store_that_does_not_sync_data(tmp_path: Path) -> None:
    _, torn = damage(record(tmp_path, frozenset({"fdatasync"})), tmp_path, 100)
    assert torn > 0


def test_the_model_finds_a_store_that_does_not_sync_directories(tmp_path: Path) -> None:
    missing, _ = damage(record(tmp_path, frozenset({"fsync_directory"})), tmp_path, 100)
    assert missing > 0


def test_the_model_finds_a_store_that_does_not_sync_new_ancestors(tmp_path: Path) -> None:
    # Every parent of an object is synced, but not `y`, which only holds the new directory `z`.
    missing, _ = damage(record(tmp_path, frozenset({"fsync y"})), tmp_path, 300)
    assert missing > 0


def test_no_crash_loses_or_tears_an_unpublished_object_that_was_acknowledged(tmp_path: Path) -> None:
    assert damage_of_acknowledged(record_unpublished(tmp_path / "new"), tmp_path / "new", 600) == 0


@pytest.mark.parametrize("skipped", ["fdatasync", "fsync_directory", "fsync y"])
def test_the_model_finds_an_unpublished_object_that_is_acknowledged_without_a_sync(
    tmp_path: Path, skipped: str
) -> None:
    assert damage_of_acknowledged(record_unpublished(tmp_path, frozenset({skipped})), tmp_path, 300) > 0


class SyncWaits(RealSyscalls):
    """File operations in which the first sync of the directory `sub` waits for `proceed`."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.proceed = threading.Event()
        self.synced = 0

    def fsync_directory(self, path: str) -> None:
        if path.endswith("sub"):
            self.synced += 1
            if self.synced == 1:
                self.began.set()
                assert self.proceed.wait(SCENARIO_S)
        super().fsync_directory(path)


def test_one_sync_of_a_directory_serves_all_that_wait_and_none_that_had_begun(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    calls = SyncWaits()
    syncs = GroupedDirectorySyncs(DirectorySyncer(calls, str(tmp_path)), threads=2)
    first = syncs.begin_sync(f"{tmp_path}/sub")
    assert calls.began.wait(SCENARIO_S)
    later = [syncs.begin_sync(f"{tmp_path}/sub") for _ in range(5)]
    syncs.begin_sync(str(tmp_path)).result(SCENARIO_S)  # A sync of another directory does not wait.
    assert not any(sync.done() for sync in (first, *later))
    calls.proceed.set()
    for sync in (first, *later):
        sync.result(SCENARIO_S)
    assert calls.synced == 2
    syncs.close()


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_the_real_system_calls_come_in_the_durable_order(tmp_path: Path) -> None:
    program = (
        "import asyncio, sys\n"
        "from tidemill.base.clock import Rand, SystemClock\n"
        "from tidemill.objects.local import LocalObjects\n"
        "async def main():\n"
        "    store = LocalObjects.open(sys.argv[1], SystemClock(), Rand())\n"
        "    await store.put('n/m/key', b'DATA')\n"
        "    print('acknowledged', flush=True)\n"
        "    await store.aclose()\n"
        "asyncio.run(main())\n"
    )
    trace = tmp_path / "trace"
    calls = "trace=openat,write,writev,fdatasync,fsync,link,linkat,unlink,unlinkat,mkdir,mkdirat"
    command = ["strace", "-f", "-y", "-o", str(trace), "-e", calls, sys.executable, "-c", program, str(tmp_path / "r")]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and "ptrace" in done.stderr.lower():
        pytest.skip("tracing is not permitted here")
    assert done.returncode == 0, done.stderr
    lines = trace.read_text().splitlines()

    def at(*needles: str, after: int = -1) -> int:
        for index, line in enumerate(lines):
            if index > after and all(needle in line for needle in needles):
                return index
        raise AssertionError(f"no such call after line {after}: {needles}")

    root = str(tmp_path / "r")
    linked = at("link", "/.tmp/", "n/m/key", "= 0")
    unlinked = at("unlink", "/.tmp/", after=linked)  # opening left one behind before
    order = [
        at("writev(", "DATA"),
        at("fdatasync(", "/.tmp/"),
        linked,
        unlinked,
        at("fsync(", f"<{root}/n/m>"),
        at("fsync(", f"<{root}/n>"),
        at("fsync(", f"<{root}>", after=unlinked),
        at("write(1", "acknowledged"),
    ]
    assert order == sorted(order)


async def test_what_was_acknowledged_before_kill_9_is_there_afterwards(tmp_path: Path) -> None:
    program = (
        "import asyncio, sys\n"
        "from tidemill.base.clock import Rand, SystemClock\n"
        "from tidemill.objects.local import LocalObjects\n"
        "async def main():\n"
        "    store = LocalObjects.open(sys.argv[1], SystemClock(), Rand())\n"
        "    async def one(i):\n"
        "        key = f'd{i % 7}/k{i}'\n"
        "        await store.put(key, (key + '|').encode() * 3000)\n"
        "        print(key, flush=True)\n"
        "    for start in range(0, 10**6, 16):\n"
        "        await asyncio.gather(*(one(i) for i in range(start, start + 16)))\n"
        "asyncio.run(main())\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    acknowledged = [process.stdout.readline().strip() for _ in range(200)]
    os.kill(process.pid, signal.SIGKILL)
    rest = process.stdout.read().split("\n")
    acknowledged += rest[:-1]  # the last line may be cut
    process.wait()
    later = ManualClock(SystemClock().now_ms() + TEMPORARY_AGE_MS + 60_000)
    store = LocalObjects.open(tmp_path, later, Rand())
    for key in acknowledged:
        assert await store.get(key) == (key + "|").encode() * 3000
    for key in [meta.key async for meta in store.list("")]:
        assert await store.get(key) == (key + "|").encode() * 3000, "visible, so it must be whole"
    assert os.listdir(tmp_path / ".tmp") == []
    await store.aclose()


async def test_old_temporary_files_are_swept_at_open_and_young_ones_kept(tmp_path: Path) -> None:
    (tmp_path / ".tmp").mkdir()
    (tmp_path / ".tmp" / "old").write_bytes(b"x")
    (tmp_path / ".tmp" / "young").write_bytes(b"x")
    two_hours_ago = time.time() - 7200
    os.utime(tmp_path / ".tmp" / "old", (two_hours_ago, two_hours_ago))
    store = LocalObjects.open(tmp_path, SystemClock(), Rand())
    assert os.listdir(tmp_path / ".tmp") == ["young"]
    assert [meta.key async for meta in store.list("")] == []
    await store.aclose()


async def test_a_temporary_name_left_by_an_equally_seeded_process_is_no_conflict(tmp_path: Path) -> None:
    (tmp_path / ".tmp").mkdir()
    (tmp_path / ".tmp" / f"{Rand(5).nonce()}.0").write_bytes(b"left over")
    store = LocalObjects.open(tmp_path, SystemClock(), Rand(5))
    await store.put("k", b"mine")
    assert await store.get("k") == b"mine"
    await store.aclose()


class Failing(RealSyscalls):
    """File operations in which one kind of call fails with one error number."""

    def __init__(self, name: str, code: int) -> None:
        self._name = name
        self._code = code

    def repair(self) -> None:
        self._name = ""

    def _maybe(self, name: str) -> None:
        if name == self._name:
            raise OSError(self._code, os.strerror(self._code))

    def write(self, fd: int, buffers: Sequence[memoryview]) -> int:
        self._maybe("write")
        return super().write(fd, buffers)

    def fdatasync(self, fd: int) -> None:
        self._maybe("fdatasync")
        super().fdatasync(fd)

    def link(self, source: str, target: str) -> None:
        self._maybe("link")
        super().link(source, target)

    def create(self, path: str) -> int:
        self._maybe("create")
        return super().create(path)

    def fsync_directory(self, path: str) -> None:
        if path.endswith("sub"):
            self._maybe("fsync_directory")
        super().fsync_directory(path)


@pytest.mark.parametrize(
    ("call", "code", "kind", "word"),
    [
        ("write", errno.ENOSPC, UnavailableError, "Free space"),
        ("fdatasync", errno.EIO, UnavailableError, "Check the disk"),
        ("create", errno.EROFS, MisconfiguredError, "writable"),
        ("create", errno.EMFILE, UnavailableError, "EMFILE"),
        ("link", errno.EPERM, MisconfiguredError, "writable"),
        ("link", errno.EOPNOTSUPP, InvalidError, "hard links"),
        ("fsync_directory", errno.EIO, UnknownOutcomeError, "syncing it failed"),
    ],
)
async def test_each_failure_of_the_disk_has_its_kind(
    tmp_path: Path, call: str, code: int, kind: type[Exception], word: str
) -> None:
    store = LocalObjects.open(tmp_path, SystemClock(), Rand(), Failing(call, code))
    with pytest.raises(kind, match=word) as raised:
        await store.put("sub/key", b"data")
    assert type(raised.value) is kind
    assert os.listdir(tmp_path / ".tmp") == []
    assert (await store.head("sub/key") is None) == (kind is not UnknownOutcomeError)
    await store.aclose()


@pytest.mark.parametrize("call", ["write", "fdatasync", "fsync_directory"])
async def test_an_unpublished_object_that_is_not_safe_leaves_its_name(tmp_path: Path, call: str) -> None:
    """A retry then writes a new file: a second sync of the same one would succeed although its pages were lost."""
    calls = Failing(call, errno.EIO)
    store = LocalObjects.open(tmp_path, SystemClock(), Rand(), calls)
    with pytest.raises(UnavailableError, match="Check the disk"):
        await store.put_unpublished("sub/key", b"data")
    assert os.listdir(tmp_path / ".tmp") == []
    assert await store.head("sub/key") is None
    calls.repair()
    await store.put_unpublished("sub/key", b"data")
    assert await store.get("sub/key") == b"data"
    await store.aclose()


class DirectorySyncFails(RealSyscalls):
    """File operations in which the first `times` syncs of the directory `sub` fail; `synced` counts the others."""

    def __init__(self, times: int) -> None:
        self._times = times
        self.synced = 0

    def fsync_directory(self, path: str) -> None:
        if path.endswith("sub"):
            self._times -= 1
            if self._times >= 0:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            self.synced += 1
        super().fsync_directory(path)


async def test_an_object_that_can_be_seen_but_was_never_made_safe_is_not_acknowledged(tmp_path: Path) -> None:
    """Reading it back proves nothing: the page cache shows data that a power failure would lose."""
    for times in (2, 1_000):
        calls = DirectorySyncFails(times)
        local = LocalObjects.open(tmp_path / str(times), SystemClock(), Rand(), calls)
        store = RetryingObjects(local, SystemClock(), Rand(1), store="local", budget_s=0.5)
        if times == 2:
            await store.put("sub/key", b"data")
            assert calls.synced == 1
        else:
            with pytest.raises(UnknownOutcomeError):
                await store.put("sub/key", b"data")
        assert await store.get("sub/key") == b"data"
        await store.aclose()


def test_a_root_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InvalidError, match="directory"):
            LocalObjects.open(root, SystemClock(), Rand())
    assert (tmp_path / "file").read_bytes() == b""


async def test_a_key_below_an_object_is_refused(tmp_path: Path) -> None:
    store = LocalObjects.open(tmp_path, SystemClock(), Rand())
    await store.put("a", b"object")
    with pytest.raises(InvalidError, match="directory of another key"):
        await store.put("a/b", b"below")
    await store.put("c/d", b"object")
    with pytest.raises(InvalidError, match="directory of"):
        await store.put("c", b"above")
    await store.aclose()


def test_a_read_only_directory_is_refused_at_open() -> None:
    with enterable_directory() as directory:
        root = directory / "ro"
        root.mkdir()
        root.chmod(0o555)
        said = call_unprivileged(lambda: LocalObjects.open(root, SystemClock(), Rand()))
        assert said.startswith("MisconfiguredError: ")
        assert "Make the directory writable" in said
        assert str(root) in said
        assert list(root.iterdir()) == []
