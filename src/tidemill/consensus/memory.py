"""The contract in one process and without threads, for tests and for the simulation's virtual time.

`apply` is pure except for the state that it owns; `MemoryConsensus` only schedules. Every operation yields to the event
loop once before it takes effect, so that two callers interleave here as they would on a real engine.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from tidemill.base.clock import Clock
from tidemill.base.errors import ClosedError
from tidemill.consensus import transitions
from tidemill.consensus.api import LogHead, LogRecord, LogSlice, Versioned
from tidemill.consensus.change_journal import ChangeJournal
from tidemill.consensus.client_base import ConsensusClientBase
from tidemill.consensus.operations import (
    Acquire,
    AnyOp,
    Append,
    Cas,
    Changed,
    Drop,
    Fence,
    Head,
    HeadOfLog,
    Leases,
    Read,
    Release,
    Scan,
    Truncate,
    Wait,
)
from tidemill.consensus.rollback_detection import RollbackDetector
from tidemill.consensus.transitions import UNWRITTEN, EngineClock, LeaseRow


class MemoryState:
    """Durable state of the engine, and the waiters of each log. `records[log][i]` is at heads[log].start + i."""

    def __init__(self) -> None:
        self.registers: dict[str, Versioned] = {}
        self.heads: dict[str, LogHead] = {}
        self.records: dict[str, list[LogRecord]] = {}
        self.leases: dict[str, LeaseRow] = {}
        self.journal = ChangeJournal("memory")
        self.waiters: dict[str, list[tuple[int, asyncio.Future[None]]]] = {}


def apply(state: MemoryState, op: AnyOp, now_ms: int) -> Any:
    """Check, then write, then return the result. Raises the outcome without having written."""
    match op:
        case Append(log=log):
            head = state.heads.get(log, UNWRITTEN)
            grown = transitions.append(head, op)
            state.heads[log] = grown
            state.journal.record_changes((log,))
            state.records.setdefault(log, []).extend(
                LogRecord(head.next + i, op.term, op.nonce, data) for i, data in enumerate(op.records)
            )
            return grown
        case Cas(key=key):
            version = transitions.cas(state.registers.get(key), op)
            state.registers[key] = version
            return version
        case Drop(key=key):
            transitions.drop(state.registers.get(key), op)
            del state.registers[key]
            return None
        case Head(key=key):
            return state.registers.get(key)
        case HeadOfLog(log=log):
            return state.heads.get(log, UNWRITTEN)
        case Read(log=log):
            head = state.heads.get(log, UNWRITTEN)
            transitions.check_read(head, op)
            first = op.start - head.start
            return LogSlice(
                transitions.prefix_within(state.records.get(log, [])[first : first + op.limit_records], op.limit_bytes),
                head,
            )
        case Fence(log=log):
            head = state.heads.get(log, UNWRITTEN)
            raised = transitions.fence(head, op)
            if raised is not head:
                state.heads[log] = raised
                state.journal.record_changes((log,))
            return raised
        case Truncate(log=log):
            head = state.heads.get(log, UNWRITTEN)
            cut = transitions.truncate(head, op)
            if cut is not head:
                state.heads[log] = cut
                state.journal.record_changes((log,))
                del state.records[log][: cut.start - head.start]
            return cut
        case Acquire(name=name):
            row = transitions.acquire(state.leases.get(name), op, now_ms)
            state.leases[name] = row
            return row.view(now_ms)
        case Release(name=name):
            given_up = transitions.release(state.leases.get(name), op)
            if given_up is not None:
                state.leases[name] = given_up
            return None
        case Scan(prefix=prefix):
            return [(key, state.registers[key]) for key in sorted(state.registers) if key.startswith(prefix)]
        case Leases(prefix=prefix):
            return [state.leases[name].view(now_ms) for name in sorted(state.leases) if name.startswith(prefix)]
        case Changed():
            return state.journal.changes_since(
                op, partial(_list_heads, state), lambda log: state.heads.get(log, UNWRITTEN)
            )
        case Wait(log=log, beyond=beyond):
            return state.heads.get(log, UNWRITTEN).next > beyond


def _list_heads(state: MemoryState, prefix: str, after: str, limit: int) -> list[tuple[str, LogHead]]:
    names = sorted(name for name in state.heads if name.startswith(prefix) and name > after)
    return [(name, state.heads[name]) for name in names[:limit]]


class MemoryConsensus(ConsensusClientBase):
    """Deterministic client. Clients of one engine share one `state`, and then wake each other, too."""

    def __init__(self, clock: Clock, state: MemoryState | None = None) -> None:
        self.state = state if state is not None else MemoryState()
        self._clock = EngineClock(clock)
        self._waiting: set[asyncio.Future[None]] = set()
        self._closed = False
        self.seen = RollbackDetector("memory:")

    async def _submit(self, op: AnyOp) -> Any:
        self._check_open()
        await asyncio.sleep(0)
        self._check_open()
        result = apply(self.state, op, self._clock.now_ms())
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
