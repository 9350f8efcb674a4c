"""Fault model of the stores: effect or no effect, outcome reported or unknown, delay, repeated and late delivery.

    REPORTED_OK    effect, reported as ok
    REFUSED        no effect, reported as UnavailableError
    LOST_ANSWER    effect, reported as UnknownOutcomeError
    LOST_CALL      no effect, reported as UnknownOutcomeError; a put may still arrive later (its key is write-once)
    AGAIN          effect, reported as ok, and delivered a second time later; that result is ignored

Reads report ok or UnavailableError. A consensus attempt ends before its caller gets UnknownOutcomeError
(`resolve_append` relies on that contract), so only objects have late calls. A second delivery of an append or a
compare-and-set must be rejected by its expected position; it is delivered to prove that.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from enum import StrEnum
from typing import Any, TypeVar

import msgspec

from tidemill.base.errors import (
    ClosedError,
    MissingError,
    StoreRolledBackError,
    TidemillError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidemill.consensus.api import Consensus, LogHead
from tidemill.consensus.client_base import ConsensusClientBase
from tidemill.consensus.history_check import check_history
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
from tidemill.objects.store import Buffer, ObjectMeta, ObjectStore

T = TypeVar("T")


class Fault(StrEnum):
    REPORTED_OK = "ok"
    REFUSED = "refused"
    LOST_ANSWER = "lost-answer"
    LOST_CALL = "lost-call"
    AGAIN = "again"


class Rates(msgspec.Struct, frozen=True):
    """Probabilities per call; delays are drawn for every call. All zero: a healthy world with instant stores."""

    refused: float = 0.0
    lost_answer: float = 0.0
    lost_call: float = 0.0
    again: float = 0.0
    late: float = 0.5
    """Share of lost puts that arrive later."""
    slow: float = 0.0
    """Share of calls that take up to slow_s instead of delay_s, in each direction."""
    delay_s: float = 0.0
    slow_s: float = 0.0

    @classmethod
    def drawn(cls, source: random.Random) -> Rates:
        """Draw the rates of one world, from calm to stormy, so that common faults do not hide rare combinations."""
        storm = source.choice((0.0, 0.01, 0.03, 0.08))

        def rate() -> float:
            return storm * source.random() * source.choice((0, 1, 2))

        slow_s = source.choice((0.02, 0.3, 2.0))
        return cls(rate(), rate(), rate(), rate(), source.random(), source.random() / 10, source.random() / 100, slow_s)


class Faults:
    """Source of faults: draws the fate of each call and traces it. `heal` ends all faults and slowness for good."""

    def __init__(
        self,
        source: random.Random,
        rates: Rates,
        trace: Callable[[str], None],
        background: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._source = source
        self.rates = rates
        self.healed = False
        self._trace = trace
        self._background = background
        self.counts: dict[Fault, int] = dict.fromkeys(Fault, 0)

    def heal(self) -> None:
        self.healed = True
        self.rates = Rates(delay_s=self.rates.delay_s)

    def draw(self, writes: bool) -> Fault:
        rates = self.rates
        at = self._source.random() - rates.refused
        if at < 0:
            return Fault.REFUSED
        if writes:
            for fault, rate in (
                (Fault.LOST_ANSWER, rates.lost_answer),
                (Fault.LOST_CALL, rates.lost_call),
                (Fault.AGAIN, rates.again),
            ):
                at -= rate
                if at < 0:
                    return fault
        return Fault.REPORTED_OK

    async def pause(self) -> None:
        rates = self.rates
        limit_s = rates.slow_s if self._source.random() < rates.slow else rates.delay_s
        await asyncio.sleep(self._source.uniform(0, limit_s) if limit_s else 0)

    async def call(
        self,
        who: str,
        what: str,
        effect: Callable[[], Awaitable[T]],
        *,
        writes: bool,
        late: bool = False,
        repeatable: bool = True,
    ) -> T:
        """Make one call of the actor `who` through the fault model. With `late`, a lost call may arrive later."""
        fault = self.draw(writes)
        self.counts[fault] += 1
        await self.pause()
        if fault is Fault.REFUSED:
            self._trace(f"{who} {what} → refused")
            await self.pause()
            raise UnavailableError(f"the simulated store refused a call: call={what}.")
        if fault is Fault.LOST_CALL:
            arrives = late and self._source.random() < self.rates.late
            self._trace(f"{who} {what} → lost{', arrives late' if arrives else ''}")
            if arrives:
                self._background(self._deliver(who, what, effect, "late"))
            await self.pause()
            raise UnknownOutcomeError(f"the simulated store lost a call: call={what}.")
        try:
            result = await effect()
        except TidemillError as error:
            self._trace(f"{who} {what} → {type(error).__name__}{'' if fault is Fault.REPORTED_OK else f' ({fault})'}")
            await self.pause()
            if fault is Fault.LOST_ANSWER:
                raise UnknownOutcomeError(f"the simulated store lost an answer: call={what}.") from error
            raise
        self._trace(f"{who} {what} → {fault}")
        if fault is Fault.AGAIN and repeatable:
            self._background(self._deliver(who, what, effect, "again"))
        await self.pause()
        if fault is Fault.LOST_ANSWER:
            raise UnknownOutcomeError(f"the simulated store lost an answer: call={what}.")
        return result

    async def _deliver(self, who: str, what: str, effect: Callable[[], Awaitable[Any]], how: str) -> None:
        await asyncio.sleep(self._source.uniform(0, 1.0) ** 2 * 3.0)
        try:
            await effect()
            outcome = "ok"
        except TidemillError as error:
            outcome = type(error).__name__
        self._trace(f"{who} {what} delivered {how} → {outcome}")


class FaultyObjects:
    """Handle of one actor on the shared objects."""

    def __init__(self, inner: ObjectStore, faults: Faults, who: str) -> None:
        self._inner = inner
        self._faults = faults
        self._who = who
        self._closed = False

    async def put(self, key: str, data: Buffer | Sequence[Buffer]) -> None:
        # Copy now: the call sends the current contents of the caller's buffers, even if it arrives late.
        pieces = [data] if isinstance(data, bytes | bytearray | memoryview) else data
        sent = b"".join(pieces)
        await self._call(f"put {key} {len(sent)}B", lambda: self._inner.put(key, sent), writes=True, late=True)

    async def put_unpublished(self, key: str, data: Buffer | Sequence[Buffer]) -> None:
        await self.put(key, data)

    async def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        return await self._call(f"get {key} {start}:{end}", lambda: self._inner.get(key, start, end))

    async def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        return await self._call(f"get {key} ×{len(ranges)}", lambda: self._inner.get_ranges(key, ranges))

    async def head(self, key: str) -> ObjectMeta | None:
        return await self._call(f"head {key}", lambda: self._inner.head(key))

    async def list(self, prefix: str, start_after: str = "") -> AsyncIterator[ObjectMeta]:
        async def nothing() -> None:
            return None

        await self._call(f"list {prefix}", nothing)
        async for meta in self._inner.list(prefix, start_after):
            yield meta
            if self._faults.draw(False) is Fault.REFUSED:
                raise UnavailableError(f"the simulated store ended a listing early: prefix={prefix}.")

    async def delete(self, key: str) -> None:
        await self._call(f"delete {key}", lambda: self._inner.delete(key), writes=True, late=True)

    async def aclose(self) -> None:
        self._closed = True

    async def _call(
        self, what: str, effect: Callable[[], Awaitable[T]], *, writes: bool = False, late: bool = False
    ) -> T:
        if self._closed:
            raise ClosedError(f"the object store was closed: actor={self._who}.")
        return await self._faults.call(self._who, what, effect, writes=writes, late=late)


class FaultyConsensus(ConsensusClientBase):
    """Client of one actor on the shared engine. It lives as long as its process, and remembers the answers (`seen`).

    When the engine goes back to an earlier state (`Engine.lose_commits`), every connection breaks: an operation in
    flight did not happen or has an unknown outcome, and no client gets an answer from the lost state. As the client of
    PostgreSQL does, it proves that a new life continues what it has seen before it asks anything else there.
    """

    def __init__(self, inner: Consensus, faults: Faults, who: str, *, blind: bool = False) -> None:
        """Create the client. `blind` plants a fault: answers are not compared with earlier answers."""
        self._inner = inner
        self._faults = faults
        self._who = who
        self._closed = False
        self._proved = self._engine_life()
        """The last life of the engine that continued what had been seen."""
        self._proving = asyncio.Lock()
        self.seen = Blind("sim") if blind else RollbackDetector("sim")

    async def _submit(self, op: AnyOp) -> Any:
        life = self._engine_life()

        async def effect() -> Any:
            if self._engine_life() != life:
                raise UnavailableError(f"the simulated engine was replaced: actor={self._who}.")
            async with self._proving:
                if self._proved != life:
                    await check_history(self.seen, self._ask_all)
                    self._proved = life
            return await self._asked(op)

        # A repeated renewal would give a released lease back to its holder; real engines end an attempt first.
        again = not isinstance(op, Drop | Acquire)
        answer = await self._call(_said(op), effect, writes=op.writes, again=again)
        if self._engine_life() != life:
            if op.writes:
                raise UnknownOutcomeError(f"the simulated engine went away: actor={self._who}.")
            raise UnavailableError(f"the simulated engine went away: actor={self._who}.")
        return answer

    async def _ask_all(self, ops: Sequence[AnyOp]) -> list[Any]:
        found: list[Any] = []
        for op in ops:
            try:
                found.append(await self._asked(op))
            except MissingError as missing:
                found.append(missing)
        return found

    def _engine_life(self) -> int:
        return getattr(self._inner, "lives", 0)

    async def _asked(self, op: AnyOp) -> Any:
        inner = self._inner
        match op:
            case Head(key=key):
                return await inner.head(key)
            case Cas(key=key, expected_seq=seq, data=data, nonce=nonce):
                return await inner.cas(key, seq, data, nonce)
            case Drop(key=key, expected_seq=seq):
                return await inner.drop(key, seq)
            case Scan(prefix=prefix):
                return await inner.scan(prefix)
            case HeadOfLog(log=log):
                return await inner.log_head(log)
            case Fence(log=log, term=term):
                return await inner.fence(log, term)
            case Append(log=log, term=term, expected_next=at, records=records, nonce=nonce):
                return await inner.append(log, term, at, records, nonce)
            case Read(log=log, start=start, limit_records=limit_records, limit_bytes=limit_bytes):
                return await inner.read(log, start, limit_records, limit_bytes)
            case Changed(prefix=prefix, since=since):
                return await inner.changed(prefix, since)
            case Truncate(log=log, before=before):
                return await inner.truncate(log, before)
            case Acquire(name=name, holder=holder, ttl_ms=ttl_ms, info=info):
                return await inner.acquire(name, holder, ttl_ms, info)
            case Release(name=name, holder=holder, term=term):
                return await inner.release(name, holder, term)
            case Leases(prefix=prefix):
                return await inner.leases(prefix)
            case Wait():
                raise AssertionError("waits go by _wait")

    async def append(self, log: str, term: int, expected_next: int, records: Sequence[bytes], nonce: str) -> LogHead:
        return await super().append(log, term, expected_next, tuple(bytes(record) for record in records), nonce)

    async def wait(self, log: str, beyond: int, timeout_s: float) -> bool:
        """Wait for the log to grow. The result is a hint: it may come late, and it may be refused."""
        if self.seen.lost is not None:
            raise self.seen.lost
        return await self._call(f"wait {log} {beyond}", lambda: self._inner.wait(log, beyond, timeout_s))

    async def _wait(self, op: Wait, timeout_s: float) -> bool:
        raise AssertionError("`wait` is overridden")

    def trouble(self) -> str:
        return self.seen.lost.message if self.seen.lost is not None else self._inner.trouble()

    async def aclose(self) -> None:
        self._closed = True

    async def _call(
        self, what: str, effect: Callable[[], Awaitable[T]], *, writes: bool = False, again: bool = True
    ) -> T:
        if self._closed:
            raise ClosedError(f"this consensus client was closed: actor={self._who}.")
        return await self._faults.call(self._who, what, effect, writes=writes, repeatable=again)


class Blind(RollbackDetector):
    """Planted fault: continue in spite of every detected rollback."""

    def end(self, what: str) -> StoreRolledBackError:
        raise _Unseen

    def check(self, op: AnyOp, floor: Any, answer: Any, *, done: bool) -> None:
        with contextlib.suppress(_Unseen):
            super().check(op, floor, answer, done=done)

    def check_new_life(self, *args: Any) -> None:
        with contextlib.suppress(_Unseen):
            super().check_new_life(*args)


class _Unseen(Exception):
    pass


def _said(op: AnyOp) -> str:
    """Return the text of an operation in the trace."""
    match op:
        case Head(key=key):
            return f"head {key}"
        case Cas(key=key, expected_seq=seq, nonce=nonce):
            return f"cas {key} {seq} {nonce[:6]}"
        case Drop(key=key, expected_seq=seq):
            return f"drop {key} {seq}"
        case Scan(prefix=prefix) | Leases(prefix=prefix):
            return f"{type(op).__name__.lower()} {prefix}"
        case HeadOfLog(log=log):
            return f"log_head {log}"
        case Fence(log=log, term=term):
            return f"fence {log} term={term}"
        case Append(log=log, term=term, expected_next=at, records=records, nonce=nonce):
            return f"append {log} term={term} at={at} ×{len(records)} {nonce[:6]}"
        case Read(log=log, start=start):
            return f"read {log} {start}"
        case Changed(prefix=prefix, since=since):
            return f"changed {prefix} {since}"
        case Truncate(log=log, before=before):
            return f"truncate {log} {before}"
        case Acquire(name=name, holder=holder):
            return f"acquire {name} {holder[:20]}"
        case Release(name=name, term=term):
            return f"release {name} {term}"
        case Wait(log=log, beyond=beyond):
            return f"wait {log} {beyond}"
