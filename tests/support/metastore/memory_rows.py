"""A domain in memory, with faults on demand: what unit tests of routing and the catalogue stand on.

It passes the contract suite of `tests/contracts/rows.py`, as the real domain does. All handles of one `Shared`
are processes of one cluster.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, insort
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import NamedTuple

from tidemill.base.errors import ClosedError, ConflictError, InvalidError
from tidemill.metastore.api import DomainRows
from tidemill.metastore.cluster import Cluster

CHUNK_ROWS = 3


class StoredRow(NamedTuple):
    seqno: int
    value: bytes


class Shared:
    """One domain's rows. `commits` and `syncs` count calls; `fault`, when set, sees every commit first."""

    def __init__(self) -> None:
        self.keys: list[bytes] = []
        self.rows: dict[bytes, StoredRow] = {}
        self.seqno = 0
        self.commits = 0
        self.syncs = 0
        self.fault: Callable[[Callable[[], int]], int] | None = None

    def write(self, rows: Sequence[tuple[bytes, bytes]], expects: Mapping[bytes, int]) -> int:
        current = {key: self.rows.get(key) for key in expects}
        if not all(_as_expected(current[key], seqno) for key, seqno in expects.items()):
            raise ConflictError("a row is not as expected.", current=current)
        self.seqno += 1
        for key, value in rows:
            if key not in self.rows:
                insort(self.keys, key)
            self.rows[key] = StoredRow(self.seqno, value)
        return self.seqno


def _as_expected(row: StoredRow | None, seqno: int) -> bool:
    return (row is None or not row.value) if seqno == 0 else row is not None and row.seqno == seqno


class MemoryRows:
    """One process's handle. It reads the state of its last sync; not even its own commits are newer."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._seen: dict[bytes, StoredRow] = {}
        self._closed = False

    async def sync(self) -> None:
        self._check()
        self._shared.syncs += 1
        await asyncio.sleep(0)
        self._seen = dict(self._shared.rows)

    async def get(self, key: bytes) -> bytes | None:
        row = await self.get_row(key)
        return row.value if row is not None and row.value else None

    async def get_row(self, key: bytes) -> StoredRow | None:
        self._check()
        return self._seen.get(key)

    async def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return [await self.get(key) for key in keys]

    async def change_stamp(self, first: bytes) -> object:
        self._check()
        return max((row.seqno for key, row in self._seen.items() if key.startswith(first)), default=0)

    async def scan(
        self, lower: bytes = b"", upper: bytes | None = None, *, reverse: bool = False
    ) -> AsyncIterator[tuple[list[bytes], list[bytes]]]:
        self._check()
        seen = self._seen
        keys = sorted(key for key, row in seen.items() if row.value)
        keys = keys[bisect_left(keys, lower) : len(keys) if upper is None else bisect_left(keys, upper)]
        if reverse:
            keys.reverse()
        for at in range(0, len(keys), CHUNK_ROWS):
            chunk = keys[at : at + CHUNK_ROWS]
            await asyncio.sleep(0)
            yield chunk, [seen[key].value for key in chunk]

    async def prefix(self, prefix: bytes, *, reverse: bool = False) -> AsyncIterator[tuple[list[bytes], list[bytes]]]:
        async for keys, values in self.scan(prefix, reverse=reverse):
            pairs = [(key, value) for key, value in zip(keys, values, strict=True) if key.startswith(prefix)]
            if pairs:
                yield [key for key, _ in pairs], [value for _, value in pairs]

    async def commit(self, rows: Sequence[tuple[bytes, bytes]], *, expects: Mapping[bytes, int] = {}) -> int:
        self._check()
        if not rows:
            raise InvalidError("A write batch needs rows: keys=0.")
        await asyncio.sleep(0)
        self._shared.commits += 1
        fault, self._shared.fault = self._shared.fault, None

        def write() -> int:
            return self._shared.write(rows, expects)

        return write() if fault is None else fault(write)

    async def flush(self, timeout_s: float | None = None) -> int:
        self._check()
        return self._shared.seqno

    def trouble(self) -> str:
        return ""

    async def wait_until_ended(self) -> None:
        await asyncio.Event().wait()

    async def aclose(self) -> None:
        self._closed = True

    def _check(self) -> None:
        if self._closed:
            raise ClosedError("the domain was closed.")


def opener(shared: Sequence[Shared]) -> Callable[[Cluster, int], object]:
    """`OpenDomain` of a metastore over these domains."""

    async def open_domain(cluster: Cluster, index: int) -> DomainRows:
        return MemoryRows(shared[index])

    return open_domain
