"""The contract in one process and without threads, for tests and for the simulation's virtual time.

Operations apply themselves to `MemoryState` (`operations`); `MemoryConsensus` only schedules. Every operation yields to
the event loop once before it takes effect, so that two callers interleave here as they would on a real engine.
"""

from __future__ import annotations

import asyncio
from typing import Any

from tidemill.base.clock import Clock
from tidemill.base.errors import ClosedError
from tidemill.consensus.api import Changes, LogHead, LogRecord, Versioned
from tidemill.consensus.change_journal import ChangeJournal
from tidemill.consensus.client_base import ConsensusClientBase
from tidemill.consensus.engine_state import UNWRITTEN, EngineClock, LeaseRow, prefix_within
from tidemill.consensus.operations import Append, Changed, Op, Read, Wait
from tidemill.consensus.rollback_detection import RollbackDetector


class MemoryState:
    """Durable state of the engine, and the waiters of each log. `records[log][i]` is at heads[log].start + i."""

    def __init__(self) -> None:
        self.registers: dict[str, Versioned] = {}
        self.heads: dict[str, LogHead] = {}
        self.records: dict[str, list[LogRecord]] = {}
        self.leases: dict[str, LeaseRow] = {}
        self.journal = ChangeJournal("memory")
        self.waiters: dict[str, list[tuple[int, asyncio.Future[None]]]] = {}

    def head(self, log: str) -> LogHead:
        return self.heads.get(log, UNWRITTEN)

    def put_head(self, log: str, head: LogHead, appended: Append | None = None) -> None:
        records = self.records.setdefault(log, [])
        if appended is not None:
            at, term, nonce = appended.expected_next, appended.term, appended.nonce
            records.extend(LogRecord(at + i, term, nonce, data) for i, data in enumerate(appended.records))
        del records[: head.start - self.head(log).start]
        self.heads[log] = head
        self.journal.record_changes((log,))

    def records_of(self, op: Read, head: LogHead) -> tuple[LogRecord, ...]:
        first = op.start - head.start
        return prefix_within(self.records[op.log][first : first + op.limit_records], op.limit_bytes)

    def changes(self, op: Changed) -> Changes:
        return self.journal.changes_since(op, self._list_heads, self.head)

    def _list_heads(self, prefix: str, after: str, limit: int) -> list[tuple[str, LogHead]]:
        names = sorted(name for name in self.heads if name.startswith(prefix) and name > after)
        return [(name, self.heads[name]) for name in names[:limit]]

    def version(self, key: str) -> Versioned | None:
        return self.registers.get(key)

    def put_version(self, key: str, version: Versioned | None) -> None:
        if version is None:
            del self.registers[key]
        else:
            self.registers[key] = version

    def versions(self, prefix: str) -> list[tuple[str, Versioned]]:
        return [(key, self.registers[key]) for key in sorted(self.registers) if key.startswith(prefix)]

    def lease(self, name: str) -> LeaseRow | None:
        return self.leases.get(name)

    def put_lease(self, row: LeaseRow) -> None:
        self.leases[row.name] = row

    def leases_of(self, prefix: str) -> list[LeaseRow]:
        return [self.leases[name] for name in sorted(self.leases) if name.startswith(prefix)]


class MemoryConsensus(ConsensusClientBase):
    """Deterministic client. Clients of one engine share one `state`, and then wake each other, too."""

    def __init__(self, clock: Clock, state: MemoryState | None = None) -> None:
        self.state = state if state is not None else MemoryState()
        self._clock = EngineClock(clock)
        self._waiting: set[asyncio.Future[None]] = set()
        self._closed = False
        self.seen = RollbackDetector("memory:")

    async def _submit(self, op: Op[Any]) -> Any:
        self._check_open()
        await asyncio.sleep(0)
        self._check_open()
        result = op.apply(self.state, self._clock.now_ms())
        if isinstance(op, Append):
            self._wake(op.log, result.next)
        return result

    async def _wait(self, op: Wait, timeout_s: float) -> bool:
        if await self._submit(op):
            return True
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (op.beyond, future)
        self._waiting.add(future)
        self.state.waiters.setdefault(op.log, []).append(entry)
        try:
            async with asyncio.timeout(max(0.0, timeout_s)):
                await future
        except TimeoutError:
            return False
        finally:
            self._waiting.discard(future)
            waiting = self.state.waiters.get(op.log, [])
            if entry in waiting:
                waiting.remove(entry)
        self._check_open()
        return True

    def _wake(self, log: str, next_position: int) -> None:
        for entry in list(self.state.waiters.get(log, ())):
            beyond, future = entry
            if next_position > beyond:
                self.state.waiters[log].remove(entry)
                if not future.done():
                    future.set_result(None)

    def trouble(self) -> str:
        if self.seen.lost is not None:
            return self.seen.lost.message
        return "the consensus client was closed" if self._closed else ""

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this consensus client was closed.")

    async def aclose(self) -> None:
        self._closed = True
        for future in list(self._waiting):
            if not future.done():
                future.set_result(None)
