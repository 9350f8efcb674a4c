"""Each way to read a local directory: directly, only from the page cache, in a thread."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tidemill.base.clock import Rand, SystemClock
from tidemill.base.errors import InvalidError, MissingError
from tidemill.objects import local
from tidemill.objects.local import CACHED_READ_BYTES, INLINE_READ_BYTES, LocalObjects

CONTENT = os.urandom(2 * CACHED_READ_BYTES)
SIZES = (1, INLINE_READ_BYTES, INLINE_READ_BYTES + 1, CACHED_READ_BYTES, CACHED_READ_BYTES + 1, len(CONTENT) - 7)


@asynccontextmanager
async def opened_store(directory: Path) -> AsyncIterator[LocalObjects]:
    store = LocalObjects.open(directory, SystemClock(), Rand())
    await store.put("a/b", CONTENT)
    yield store
    await store.aclose()


async def read_every_size(directory: Path) -> None:
    async with opened_store(directory) as store:
        for size in SIZES:
            assert await store.get("a/b", 7, 7 + size) == CONTENT[7 : 7 + size]
            half = size // 2
            assert await store.get_ranges("a/b", [(half, size), (0, half)]) == [CONTENT[half:size], CONTENT[:half]]
        assert await store.get("a/b") == CONTENT


async def test_every_size_is_read_exactly(tmp_path: Path) -> None:
    await read_every_size(tmp_path)


def not_cached(*_: Any) -> int:
    raise BlockingIOError(errno.EAGAIN, "not in the page cache")


def unsupported(*_: Any) -> int:
    raise OSError(errno.EOPNOTSUPP, "a file system that cannot tell")


def partly_cached(_fd: int, buffers: Any, _offset: int, _flags: int) -> int:
    return len(buffers[0]) - 1


@pytest.mark.parametrize("answer", [not_cached, unsupported, partly_cached])
async def test_what_the_page_cache_lacks_is_read_in_a_thread(
    answer: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local.os, "preadv", answer)
    await read_every_size(tmp_path)


async def test_a_system_without_the_flag_reads_in_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_NOWAIT", 0)
    monkeypatch.setattr(local.os, "preadv", lambda *_: pytest.fail("asked without the flag: it would wait"))
    await read_every_size(tmp_path)


@pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="Linux only")
async def test_a_medium_read_of_a_cached_file_needs_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened_store(tmp_path) as store:
        await store.get("a/b")  # now in the page cache
        with (tmp_path / "a/b").open("rb") as file:
            try:
                os.preadv(file.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT)
            except OSError:
                pytest.skip("this file system cannot tell what is cached")
        monkeypatch.setattr(store, "_run_in_pool", lambda _: pytest.fail("a thread was asked"))
        assert await store.get("a/b", 0, CACHED_READ_BYTES) == CONTENT[:CACHED_READ_BYTES]
        monkeypatch.undo()


@pytest.mark.parametrize("size", SIZES)
async def test_a_range_past_the_end_and_a_directory_are_refused_and_leave_no_file_open(
    size: int, tmp_path: Path
) -> None:
    async with opened_store(tmp_path) as store:
        before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
        with pytest.raises(InvalidError, match="outside the object"):
            await store.get("a/b", len(CONTENT) - size + 1, len(CONTENT) + 1)
        with pytest.raises(MissingError):
            await store.get("a", 0, size)
        with pytest.raises(MissingError):
            await store.get_ranges("a", [(0, size)])
        assert (len(os.listdir("/proc/self/fd")) if before else 0) == before
