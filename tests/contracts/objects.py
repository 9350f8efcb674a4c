"""Contract tests of every object store, independent of its backend. Subclass in a test file and give `store`.

`with_store` runs one coroutine on a fresh, empty store in its own event loop.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest

from tidemill.base.errors import ClosedError, ConflictError, InvalidError, MissingError
from tidemill.objects import ObjectStore

OpenStore = Callable[[], AbstractAsyncContextManager[ObjectStore]]
RACERS = 32


async def keys(store: ObjectStore, prefix: str, start_after: str = "") -> list[str]:
    return [meta.key async for meta in store.list(prefix, start_after)]


class ObjectsContract:
    """Fixture `open_store` is provided by the subclass's module."""

    async def test_what_was_put_is_read_back_whole_and_by_range(self, open_store: OpenStore) -> None:
        async with open_store() as store:
            await store.put("a/b/c", b"0123456789")
            assert await store.get("a/b/c") == b"0123456789"
            assert await store.get("a/b/c", 3, 7) == b"3456"
            assert await store.get("a/b/c", 4) == b"456789"
            assert await store.get("a/b/c", 0, 10) == b"0123456789"

    async def test_a_sequence_of_buffers_is_written_back_to_back(self, open_store: OpenStore) -> None:
        async with open_store() as store:
            await store.put("x", [b"ab", bytearray(b"cd"), b"", memoryview(b"-ef-")[1:3]])
            await store.put("many", [bytes([i % 256]) for i in range(3000)])
            await store.put("one", memoryview(b"--view--")[2:6])
            assert await store.get("x") == b"abcdef"
            assert await store.get("many") == bytes(i % 256 for i in range(3000))
            assert await store.get("one") == b"view"

    async def test_an_empty_object_exists(self, open_store: OpenStore) -> None:
        async with open_store() as store:
            await store.put("empty", b"")
            await store.put("hollow", [])
            for key in ("empty", "hollow"):
                assert await store.get(key) == b""
                assert await store.get(key, 0, 0) == b""
                found = await store.head(key)
                assert found is not None
                assert found.size_bytes == 0

    async def test_a_large_object_survives(self, open_store: OpenStore) -> None:
        async with open_store() as store:
            data = random.Random(1).randbytes(3 << 20)
            await store.put("big", [data[: 1 << 20], data[1 << 20 :]])
            assert await store.get("big") == data
            assert await store.get("big", 1 << 19, 5 << 19) == data[1 << 19 : 5 << 19]

    async def test_a_second_put_is_refused_and_changes_nothing(self, open_store: OpenStore) -> None:
        async with open_store() as store:
            await store.put("once", b"first")
            for other in (b"second", b"first", b""):
                with pytest.raises(ConflictError, match="once"):
                    await store.put("once", other)
            assert await store.get("once") == b"first"
            assert await keys(store, "") == ["once"]

    async def test_an_unpublished_object_is_like_any_other_once_it_is_acknowledged(self, open_store: OpenStore) -> None:
        async with open_store() as store:
            await asyncio.gather(*(store.put_unpublished(f"new/{n}", bytearray(b"x") * n) for n in range(9)))
            assert await keys(store, "new/") == [f"new/{n}" for n in range(9)]
            assert [await store.get(f"new/{n}") for n in range(9)] == [b"x" * n for n in range(9)]
            with pytest.raises(ConflictError, match="new/3"):
                await store.put_unpublished("new/3", b"other")
            with pytest.raises(ConflictError, match="new/3"):
                await store.put("new/3", b"other")
            assert await store.get("new/3") == b"xxx"
            await store.delete("new/3")
            assert await store.head("new/3") is None

    async def test_of_racing_creates_exactly_one_wins(self, open_store: OpenStore) -> None:
        async with open_store() as store:
            barrier = asyncio.Event()

            async def write(writer: int) -> int | None:
                await barrier.wait()
                try:
                    await store.put("race/key", f"writer {writer}".encode())
                except ConflictError:
                    return None
                return writer

            racers = [asyncio.ensure_future(write(writer)) for writer in range(RACERS)]
            await asyncio.sleep(0)
            barrier.set()
            winners = [winner for winner in await asyncio.gather(*racers) if winner is not None]
            assert len(winners) == 1
            assert await store.get("race/key") == f"writer {winners[0]}".encode()

    async def test_an_absent_object_is_missing(self, open_store: OpenStore) -> None:
        async with open_store() as store:
            await store.put("there/leaf", b"x")
            for key in ("nothing", "there", "there/leaf/below", "deep/er/nothing"):
                with pytest.raises(MissingError):
                    await store.get(key)
                with pytest.raises(MissingError):
                    await store.get(key, 0, 1)
                with pytest.raises(MissingError):
                    await store.get_ranges(key, [(0, 1), (0, 0)])
                assert await store.head(key) is None

    @pytest.mark.parametrize(("start", "end"), [(0, 11), (11, 11), (11, 12), (11, None), (7, 3), (-1, 3), (9, 100)])
    async def test_a_range_past_the_end_is_invalid(self, open_store: OpenStore, start: int, end: int | None) -> None:
        async with open_store() as store:
            await store.put("ten", b"0123456789")
            with pytest.raises(InvalidError, match="ten"):
                await store.get("ten", start, end)
            if end is not None:
                with pytest.raises(InvalidError, match="ten"):
                    await store.get_ranges("ten", [(0, 1), (start, end)])

    async def test_ranges_at_the_very_end_are_empty_not_errors(self, open_store: OpenStore) -> None:
        async with open_store() as store:
            await store.put("ten", b"0123456789")
            assert await store.get("ten", 10) == b""
            assert await store.get("ten", 10, 10) == b""
            assert await store.get("ten", 4, 4) == b""
            assert await store.get_ranges("ten", []) == []
            assert await store.get_ranges("ten", [(10, 10), (3, 4)]) == [b"", b"3"]

    async def test_many_ranges_come_back_in_the_order_asked(self, open_store: OpenStore) -> None:
        async with open_store() as store:
            data = random.Random(2).randbytes(600_000)
            await store.put("ranges", data)
            source = random.Random(3)
            wanted = []
            for _ in range(40):
                start = source.randrange(len(data))
                wanted.append((start, min(len(data), start + source.randrange(0, 5_000))))
            wanted += [wanted[0], (0, 10), (5, 8)]  # repeated and overlapping
            assert await store.get_ranges("ranges", wanted) == [data[a:b] for a, b in wanted]

    async def test_a_listing_is_in_key_order_and_honours_prefix_and_start(self, open_store: OpenStore) -> None:
        async with open_store() as store:
            names = ["a", "a-b", "a.c/x", "a0", "b/2", "b/1/z", "b/1-/z", "b/10", "bb/1", "c/d/e/f", "c/d/e-"]
            for name in names:
                await store.put(name, name.encode())
            ordered = sorted(names)
            assert await keys(store, "") == ordered
            for prefix in ("a", "b/", "b/1", "b/1/", "c/d/e", "c/d/e/", "bb", "zzz", "b/3", "a.c/x", "a.c/xy"):
                assert await keys(store, prefix) == [n for n in ordered if n.startswith(prefix)], prefix
            for after in ("", "a", "a.", "a.c/x", "b/1-/z", "b/1/", "b/1/z", "b/2", "c/d", "zz"):
                assert await keys(store, "", after) == [n for n in ordered if n > after], after
                assert await keys(store, "b/", after) == [n for n in ordered if n > after and n.startswith("b/")], after

    async def test_a_listing_and_head_give_sizes(self, open_store: OpenStore) -> None:
        async with open_store() as store:
            for size in (0, 1, 1000):
                await store.put(f"s/{size:04d}", bytes(size))
            found = [meta async for meta in store.list("s/")]
            assert [meta.size_bytes for meta in found] == [0, 1, 1000]
            for meta in found:
                head = await store.head(meta.key)
                assert head is not None
                assert (head.key, head.size_bytes) == (meta.key, meta.size_bytes)
                assert head.modified_ms > 0

    async def test_deleting_is_idempotent_and_frees_the_listing(self, open_store: OpenStore) -> None:
        async with open_store() as store:
            await store.put("d/1", b"x")
            await store.put("d/2", b"y")
            await store.delete("d/1")
            await store.delete("d/1")
            await store.delete("never/was")
            await store.delete("d")  # a prefix of other keys, but no object
            assert await keys(store, "") == ["d/2"]
            assert await store.head("d/1") is None
            assert await store.get("d/2") == b"y"

    @pytest.mark.parametrize(
        "key", ["", "/a", "a/", "a//b", ".", "..", "a/../b", "a/.hidden", "a b", "é", "a\n", "a%2f", "a\\b", "x" * 901]
    )
    async def test_a_bad_key_is_invalid_everywhere(self, open_store: OpenStore, key: str) -> None:
        async with open_store() as store:
            for call in (store.put(key, b""), store.get(key), store.head(key), store.delete(key)):
                with pytest.raises(InvalidError):
                    await call
            with pytest.raises(InvalidError):
                await store.get_ranges(key, [(0, 1)])
            assert await keys(store, "") == []

    async def test_every_permitted_character_makes_its_own_key(self, open_store: OpenStore) -> None:
        async with open_store() as store:
            names = [f"k/a{mark}b" for mark in "-_.=+,:@!Zz09"]
            for name in names:
                await store.put(name, name.encode())
            assert await keys(store, "k/") == sorted(names)
            for name in names:
                assert await store.get(name) == name.encode()

    async def test_a_closed_store_says_so(self, open_store: OpenStore) -> None:
        async with open_store() as store:
            await store.put("k", b"v")
            await store.aclose()
            await store.aclose()
            for call in (store.put("l", b""), store.get("k"), store.head("k"), store.delete("k")):
                with pytest.raises(ClosedError):
                    await call
            with pytest.raises(ClosedError):
                await keys(store, "")
