"""Contract tests of every metastore domain, independent of its backend (metastore/api.py).

Subclass in a test file and give `open_domain`: it makes processes of one fresh domain.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager

import pytest

from tidemill.base.errors import ConflictError, InvalidError
from tidemill.metastore.api import DomainRows

OpenProcess = Callable[[], Awaitable[DomainRows]]
OpenDomain = Callable[[], AbstractAsyncContextManager[OpenProcess]]
"""A fresh domain. The yielded function opens one more process of it. All are closed at the end."""

A, B, C = b"\x01\x00\x01a\x00\x01", b"\x01\x00\x01b\x00\x01", b"\x02\x00\x01c\x00\x01"


async def read(chunks: AsyncIterator[tuple[list[bytes], list[bytes]]]) -> list[tuple[bytes, bytes]]:
    return [pair async for keys, values in chunks for pair in zip(keys, values, strict=True)]


class RowsContract:
    """Fixture `open_domain` is provided by the subclass's module."""

    async def test_what_is_committed_is_read_back(self, open_domain: OpenDomain) -> None:
        async with open_domain() as process:
            rows = await process()
            seqno = await rows.commit([(A, b"1"), (B, b"2")])
            await rows.sync()
            assert await rows.get_many([A, B, C]) == [b"1", b"2", None]
            assert [await rows.get(A), await rows.get(C)] == [b"1", None]
            found = await rows.get_row(A)
            assert found is not None
            assert (found.seqno, found.value) == (seqno, b"1")
            assert await rows.get_row(C) is None

    async def test_after_sync_another_process_reads_what_was_committed(self, open_domain: OpenDomain) -> None:
        async with open_domain() as process:
            one, other = await process(), await process()
            for number in range(5):
                await one.commit([(A, b"%d" % number)])
                await other.sync()
                assert await other.get(A) == b"%d" % number
            await other.commit([(B, b"theirs")])
            await one.sync()
            assert await one.get(B) == b"theirs"

    async def test_a_stamp_is_another_one_once_a_row_with_its_first_byte_was_written(
        self, open_domain: OpenDomain
    ) -> None:
        async with open_domain() as process:
            one, other = await process(), await process()
            await one.commit([(A, b"1"), (C, b"1")])
            for rows in (one, other):
                await rows.sync()
                stamps = {await rows.change_stamp(A[:1]), await rows.change_stamp(A[:1])}
                assert len(stamps) == 1
                for written in ([(A, b"2")], [(B, b"1"), (C, b"3")], [(A, b"")]):
                    await one.commit(written)
                    await rows.sync()
                    assert await rows.change_stamp(A[:1]) not in stamps
                    stamps.add(await rows.change_stamp(A[:1]))
                before = await rows.change_stamp(A[:1])
                await one.commit([(C, b"4")])
                await rows.sync()
                assert await rows.change_stamp(A[:1]) == before, "which is what it is for"

    async def test_seqnos_grow_with_every_commit_whoever_makes_it(self, open_domain: OpenDomain) -> None:
        async with open_domain() as process:
            one, other = await process(), await process()
            seqnos = [await rows.commit([(A, b"x")]) for rows in (one, other, one, other)]
            assert seqnos == sorted(set(seqnos))
            assert seqnos[0] > 0

    async def test_a_commit_whose_expectation_fails_changes_nothing_and_tells_what_is_there(
        self, open_domain: OpenDomain
    ) -> None:
        async with open_domain() as process:
            one, other = await process(), await process()
            first = await one.commit([(A, b"1")], expects={A: 0})
            second = await one.commit([(A, b"2")], expects={A: first, B: 0})
            for rows in (one, other):
                for wrong in ({A: first}, {A: 0}, {A: second, C: 7}):
                    with pytest.raises(ConflictError) as caught:
                        await rows.commit([(A, b"3"), (B, b"3")], expects=wrong)
                    current = caught.value.current
                    assert isinstance(current, dict)
                    assert set(current) <= set(wrong)
                    if wrong != {A: second, C: 7}:
                        assert (current[A].seqno, current[A].value) == (second, b"2")
            await other.sync()
            assert await other.get_many([A, B]) == [b"2", None]

    async def test_a_deleted_row_is_not_read_but_counts_as_a_change(self, open_domain: OpenDomain) -> None:
        async with open_domain() as process:
            rows = await process()
            written = await rows.commit([(A, b"1"), (B, b"2")])
            deleted = await rows.commit([(A, b"")], expects={A: written})
            await rows.sync()
            assert await rows.get(A) is None
            assert await read(rows.scan(b"\x01")) == [(B, b"2")]
            with pytest.raises(ConflictError):
                await rows.commit([(A, b"back")], expects={A: written})
            found = await rows.get_row(A)
            assert found is None or (found.seqno, found.value) == (deleted, b"")
            await rows.commit([(A, b"back")], expects={A: found.seqno if found is not None else 0})
            await rows.sync()
            assert await rows.get(A) == b"back"
            await rows.commit([(A, b"")])
            await rows.commit([(A, b"again")], expects={A: 0})  # 0 expects no live row

    async def test_scans_are_ordered_both_ways_and_half_open(self, open_domain: OpenDomain) -> None:
        async with open_domain() as process:
            rows = await process()
            some = [(b"\x01%03d\x00\x01" % number, b"v%d" % number) for number in range(50)]
            await rows.commit([*some[10:], *some[:10], (C, b"c")])
            await rows.sync()
            assert await read(rows.scan(b"\x01")) == [*some, (C, b"c")]
            assert await read(rows.scan(b"\x01", reverse=True)) == [(C, b"c"), *reversed(some)]
            assert await read(rows.scan(some[3][0], some[7][0])) == some[3:7]
            assert await read(rows.scan(some[3][0], some[7][0], reverse=True)) == some[6:2:-1]
            assert await read(rows.prefix(b"\x0101")) == some[10:20]
            assert await read(rows.prefix(b"\x0101", reverse=True)) == some[19:9:-1]
            assert await read(rows.prefix(b"\x03")) == []

    async def test_of_racing_commits_with_one_expectation_exactly_one_wins(self, open_domain: OpenDomain) -> None:
        async with open_domain() as process:
            processes = [await process() for _ in range(3)]

            async def try_it(rows: DomainRows, number: int) -> bool:
                try:
                    await rows.commit([(A, b"%d" % number)], expects={A: 0})
                except ConflictError:
                    return False
                return True

            won = await asyncio.gather(*(try_it(processes[n % 3], n) for n in range(12)))
            assert sum(won) == 1
            await processes[0].sync()
            assert await processes[0].get(A) == b"%d" % won.index(True)

    async def test_a_commit_without_rows_is_invalid(self, open_domain: OpenDomain) -> None:
        async with open_domain() as process:
            with pytest.raises(InvalidError):
                await (await process()).commit([])

    async def test_a_flush_persists_what_was_committed(self, open_domain: OpenDomain) -> None:
        async with open_domain() as process:
            rows = await process()
            seqno = await rows.commit([(A, b"1")])
            assert await rows.flush(10.0) >= seqno
