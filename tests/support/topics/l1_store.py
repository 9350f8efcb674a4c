"""The L1 rows of a partition over a store that fails on request."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

from tidemill.base.clock import ManualClock, Rand, SystemClock
from tidemill.consensus.memory import MemoryConsensus
from tidemill.metastore.factory import create_metastore
from tidemill.metastore.metastore import Metastore
from tidemill.objects.memory import MemoryObjects
from tidemill.topics.l1.extent_store import ExtentStore
from tidemill.topics.l1.format import L1Region
from tidemill.topics.l1.row_transitions import AddRequest

Rows = Sequence[tuple[bytes, bytes]]

Commit = Callable[[], Awaitable[int]]


def add_of(name: str, *spans: tuple[int, int, int], partition: int = 0, max_ms: Sequence[int] = ()) -> AddRequest:
    """Regions of (base, last, size)."""
    times = max_ms or [base for base, _, _ in spans]
    regions = tuple(
        L1Region(partition, 0, size, base, last, ms, 1, 0, 10)
        for (base, last, size), ms in zip(spans, times, strict=True)
    )
    return AddRequest("t", name, 1000, regions, {partition: [(1, spans[0][0])]})


class Faulty(ExtentStore):
    """`fault` decides what each commit does: it is given the real one to call or not."""

    def __init__(self, metastore: Metastore) -> None:
        super().__init__(metastore, SystemClock(), Rand(1))
        self.fault: Callable[[Commit], Awaitable[int]] | None = None
        self.commits = 0
        real = metastore.commit

        async def commit(rows: Rows, *, expects: Mapping[bytes, int] = {}) -> int:
            self.commits += 1
            if self.fault is None:
                return await real(rows, expects=expects)
            return await self.fault(lambda: real(rows, expects=expects))

        metastore.commit = commit  # type: ignore[method-assign]


@asynccontextmanager
async def opened() -> AsyncIterator[Faulty]:
    clock = ManualClock()
    metastore = create_metastore(
        MemoryConsensus(SystemClock()), MemoryObjects(clock), SystemClock(), Rand(7), domains=2
    )
    try:
        yield Faulty(metastore)
    finally:
        await metastore.aclose()


async def added(rows: ExtentStore, request: AddRequest) -> dict[int, int]:
    await rows.register(request.topic_id, request.object_id)
    return await rows.add(request)
