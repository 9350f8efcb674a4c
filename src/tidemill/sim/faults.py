"""The fault model of the stores: took effect or not × told or not, delay, delivery again, delivery late.

    TOLD_OK        effect, told ok
    REFUSED        no effect, told Unavailable
    LOST_ANSWER    effect, told Unknown
    LOST_CALL      no effect, told Unknown; a put may still arrive later (keys are write-once, so it may)
    AGAIN          effect, told ok, and delivered a second time later, its result ignored

Reads are told ok or Unavailable. A consensus attempt ends before its caller hears Unknown (that is the
contract `resolve_append` rests on), so only objects have late calls; a second delivery of an append or a
compare-and-set must be refused by its expected position, and is delivered to prove it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from enum import StrEnum
from typing import Any, TypeVar

import msgspec

from tidemill.base.errors import Closed, TidemillError, Unavailable, Unknown
from tidemill.consensus.api import Changes, Consensus, Lease, LogHead, LogSlice, Versioned
from tidemill.objects.store import Buffer, ObjectMeta, ObjectStore

T = TypeVar("T")


class Fault(StrEnum):
    TOLD_OK = "ok"
    REFUSED = "refused"
    LOST_ANSWER = "lost-answer"
    LOST_CALL = "lost-call"
    AGAIN = "again"


class Rates(msgspec.Struct, frozen=True):
    """Probabilities per call; delays are drawn for every call. All zero = a healthy world with instant stores."""

    refused: float = 0.0
    lost_answer: float = 0.0
    lost_call: float = 0.0
    again: float = 0.0
    late: float = 0.5
    """Share of lost puts that arrive after all."""
    slow: float = 0.0
    """Share of calls that take up to slow_s instead of delay_s, each way."""
    delay_s: float = 0.0
    slow_s: float = 0.0

    @classmethod
    def drawn(cls, source: random.Random) -> Rates:
        """A climate: from calm to stormy, so that rare combinations are not drowned by common ones."""
        storm = source.choice((0.0, 0.01, 0.03, 0.08))

        def rate() -> float:
            return storm * source.random() * source.choice((0, 1, 2))

        slow_s = source.choice((0.02, 0.3, 2.0))
        return cls(rate(), rate(), rate(), rate(), source.random(), source.random() / 10, source.random() / 100, slow_s)


class Faults:
    """Draws what happens to each call, and tells the trace. `heal` ends all faults and slowness for good."""

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
        return Fault.TOLD_OK

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
        """One call of actor `who` through the fault model. `late`: a lost one may arrive later."""
        fault = self.draw(writes)
        self.counts[fault] += 1
        await self.pause()
        if fault is Fault.REFUSED:
            self._trace(f"{who} {what} → refused")
            await self.pause()
            raise Unavailable(f"The simulated store refused a call: call={what}.")
        if fault is Fault.LOST_CALL:
            arrives = late and self._source.random() < self.rates.late
            self._trace(f"{who} {what} → lost{', arrives late' if arrives else ''}")
            if arrives:
                self._background(self._deliver(who, what, effect, "late"))
            await self.pause()
            raise Unknown(f"The simulated store lost a call: call={what}.")
        try:
            result = await effect()
        except TidemillError as error:
            self._trace(f"{who} {what} → {type(error).__name__}{'' if fault is Fault.TOLD_OK else f' ({fault})'}")
            await self.pause()
            if fault is Fault.LOST_ANSWER:
                raise Unknown(f"The simulated store lost an answer: call={what}.") from error
            raise
        self._trace(f"{who} {what} → {fault}")
        if fault is Fault.AGAIN and repeatable:
            self._background(self._deliver(who, what, effect, "again"))
        await self.pause()
        if fault is Fault.LOST_ANSWER:
            raise Unknown(f"The simulated store lost an answer: call={what}.")
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
    """One actor's handle on shared objects."""

    def __init__(self, inner: ObjectStore, faults: Faults, who: str) -> None:
        self._inner = inner
        self._faults = faults
        self._who = who
        self._closed = False

    async def put(self, key: str, data: Buffer | Sequence[Buffer]) -> None:
        # What is sent is what the caller's buffers hold now, however late it arrives.
        pieces = [data] if isinstance(data, bytes | bytearray | memoryview) else data
        sent = b"".join(pieces)
        await self._call(f"put {key} {len(sent)}B", lambda: self._inner.put(key, sent), writes=True, late=True)

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
                raise Unavailable(f"The simulated store broke off a listing: prefix={prefix}.")

    async def delete(self, key: str) -> None:
        await self._call(f"delete {key}", lambda: self._inner.delete(key), writes=True, late=True)

    async def aclose(self) -> None:
        self._closed = True

    async def _call(
        self, what: str, effect: Callable[[], Awaitable[T]], *, writes: bool = False, late: bool = False
    ) -> T:
        if self._closed:
            raise Closed(f"The object store was closed: actor={self._who}.")
        return await self._faults.call(self._who, what, effect, writes=writes, late=late)


class FaultyConsensus:
    """One actor's client of the shared engine."""

    def __init__(self, inner: Consensus, faults: Faults, who: str) -> None:
        self._inner = inner
        self._faults = faults
        self._who = who
        self._closed = False

    async def head(self, key: str) -> Versioned | None:
        return await self._call(f"head {key}", lambda: self._inner.head(key))

    async def cas(self, key: str, expected_seq: int, data: bytes, nonce: str) -> Versioned:
        what = f"cas {key} {expected_seq} {nonce[:6]}"
        return await self._call(what, lambda: self._inner.cas(key, expected_seq, data, nonce), writes=True)

    async def drop(self, key: str, expected_seq: int) -> None:
        what = f"drop {key} {expected_seq}"
        await self._call(what, lambda: self._inner.drop(key, expected_seq), writes=True, again=False)

    async def scan(self, prefix: str) -> list[tuple[str, Versioned]]:
        return await self._call(f"scan {prefix}", lambda: self._inner.scan(prefix))

    async def log_head(self, log: str) -> LogHead:
        return await self._call(f"log_head {log}", lambda: self._inner.log_head(log))

    async def fence(self, log: str, term: int) -> LogHead:
        return await self._call(f"fence {log} term={term}", lambda: self._inner.fence(log, term), writes=True)

    async def append(self, log: str, term: int, expected_next: int, records: Sequence[bytes], nonce: str) -> LogHead:
        kept = tuple(bytes(record) for record in records)
        what = f"append {log} term={term} at={expected_next} ×{len(kept)} {nonce[:6]}"
        return await self._call(what, lambda: self._inner.append(log, term, expected_next, kept, nonce), writes=True)

    async def read(self, log: str, start: int, limit_records: int = 1000, limit_bytes: int = 4 << 20) -> LogSlice:
        return await self._call(f"read {log} {start}", lambda: self._inner.read(log, start, limit_records, limit_bytes))

    async def changed(self, prefix: str, since: str = "") -> Changes:
        return await self._call(f"changed {prefix} {since}", lambda: self._inner.changed(prefix, since))

    async def truncate(self, log: str, before: int) -> LogHead:
        return await self._call(f"truncate {log} {before}", lambda: self._inner.truncate(log, before), writes=True)

    async def wait(self, log: str, beyond: int, timeout_s: float) -> bool:
        """A hint: it may come late, and it may be refused."""
        return await self._call(f"wait {log} {beyond}", lambda: self._inner.wait(log, beyond, timeout_s))

    async def acquire(self, name: str, holder: str, ttl_ms: int, info: bytes = b"") -> Lease:
        what = f"acquire {name} {holder[:20]}"
        # A renewal delivered again would give a released lease back to its holder: real engines end an attempt first.
        return await self._call(what, lambda: self._inner.acquire(name, holder, ttl_ms, info), writes=True, again=False)

    async def release(self, name: str, holder: str, term: int) -> None:
        await self._call(f"release {name} {term}", lambda: self._inner.release(name, holder, term), writes=True)

    async def leases(self, prefix: str) -> list[Lease]:
        return await self._call(f"leases {prefix}", lambda: self._inner.leases(prefix))

    def trouble(self) -> str:
        return self._inner.trouble()

    async def aclose(self) -> None:
        self._closed = True

    async def _call(
        self, what: str, effect: Callable[[], Awaitable[T]], *, writes: bool = False, again: bool = True
    ) -> T:
        if self._closed:
            raise Closed(f"This consensus client was closed: actor={self._who}.")
        return await self._faults.call(self._who, what, effect, writes=writes, repeatable=again)
