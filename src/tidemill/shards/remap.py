"""`Remap` on a fenced log: one record a binding, appended at the expected position in term 0.

The append *is* the compare-and-append: whoever lands at position n minted the n-th binding, and every
other minter is told Conflict before or after the attempt. No rollup is needed: the newest record is the
state. A record is

    binding = [1, time_ms, {topic id: [next offset…]}, lsn, source_time_ms, tag]      msgpack, format 1

Opening costs one read. `_window` holds the newest bindings contiguously and follows the log; older ones
are found by bisection over log positions (times grow with positions) and read when asked for.
Truncation below a since is not done yet: the log keeps every binding (about 100 bytes each).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import Conflict, Corrupt, Unavailable, Unknown
from tidemill.consensus.api import Consensus, resolve_append
from tidemill.shards import reclock
from tidemill.shards.front import Binding

FORMAT = 1
WINDOW_BINDINGS = 20_000
"""Newest bindings kept in memory; trimmed to half of it when it grows past."""

RESOLVE_ATTEMPTS = 20
RESOLVE_PAUSE_S = 0.1

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder()


def encode_binding(b: Binding) -> bytes:
    return _encoder.encode([FORMAT, b.time_ms, b.offsets, b.lsn, b.source_time_ms, b.tag])


def decode_binding(data: bytes) -> Binding:
    """Raises Corrupt."""
    try:
        form, time_ms, offsets, lsn, source_time_ms, tag = _decoder.decode(data)
        if form != FORMAT:
            raise Corrupt(f"unknown binding format: format={form!r}.", fix="Upgrade tidemill.")
        return Binding(time_ms, {t: tuple(o) for t, o in offsets.items()}, lsn, source_time_ms, tag)
    except (msgspec.DecodeError, ValueError, TypeError, AttributeError) as error:
        raise Corrupt(f"binding is unreadable: bytes={len(data)} ({error}).") from error


def log_name(name: str) -> str:
    return f"remap/{name}"


class LogRemap:
    """One process's handle; any number of them mint and read the same bindings.

    `clock` is not read: every time is in a binding, and waiting is the event loop's.
    """

    def __init__(self, consensus: Consensus, name: str, clock: Clock, rand: Rand) -> None:
        self.name = name
        self._consensus = consensus
        self._rand = rand
        self._log = log_name(name)
        self._next = 0  # position after the last binding in the window
        self._window: list[Binding] = []  # bindings at positions [_next - len, _next)
        self._opened = False
        self._syncing = asyncio.Lock()

    async def latest(self) -> Binding | None:
        await self._sync()
        return self._window[-1] if self._window else None

    async def mint(self, binding: Binding) -> Binding:
        """Append `binding`, completed by what it leaves out (`reclock.carried`); returns what was stored.

        Raises Conflict(current=Binding | None) when somebody was first or B1 would break, Invalid when it is wrong
        in itself, Unavailable (did not happen), Unknown (not even its nonce could be looked up).
        """
        reclock.check_alone(binding)
        await self._sync()
        latest, position = (self._window[-1] if self._window else None), self._next
        whole = reclock.carried(latest, binding)
        wrong = reclock.follows(latest, whole)
        if wrong:
            raise Conflict(f"binding does not follow the latest: remap={self.name} {wrong}.", current=latest)
        nonce = self._rand.nonce()
        try:
            await self._consensus.append(self._log, 0, position, [encode_binding(whole)], nonce)
        except Conflict as error:
            await self._sync()
            raise Conflict(
                f"another minter was first: remap={self.name} time_ms={whole.time_ms}.",
                current=self._window[-1] if self._window else None,
            ) from error
        except Unknown as error:
            if not await self._landed(position, nonce):
                await self._sync()
                if self._next > position:
                    current = self._window[-1] if self._window else None
                    raise Conflict(f"another minter was first: remap={self.name}.", current=current) from error
                raise Unavailable(f"binding was not stored: remap={self.name} time_ms={whole.time_ms}.") from error
        self._push(position, whole)
        return whole

    async def after(self, time_ms: int, limit: int = 10_000) -> list[Binding]:
        await self._sync()
        if not self._window or self._start == 0 or time_ms >= self._window[0].time_ms:
            return reclock.later_than(self._window, time_ms, limit)
        return await self._read(await self._position_after(time_ms), limit)

    async def at(self, time_ms: int) -> Binding | None:
        await self._sync()
        if not self._window or self._start == 0 or time_ms >= self._window[0].time_ms:
            return reclock.in_force(self._window, time_ms)
        position = await self._position_after(time_ms)
        return (await self._read(position - 1, 1))[0] if position else None

    async def wait(self, beyond_ms: int, timeout_s: float) -> bool:
        until_s = asyncio.get_running_loop().time() + timeout_s
        while True:
            await self._sync()
            if self._window and self._window[-1].time_ms > beyond_ms:
                return True
            left_s = until_s - asyncio.get_running_loop().time()
            if left_s <= 0:
                return False
            await self._consensus.wait(self._log, self._next, left_s)

    # ------------------------------------------------------------------------------------------------

    @property
    def _start(self) -> int:
        return self._next - len(self._window)

    def _push(self, position: int, binding: Binding) -> None:
        """Add the binding at `position` unless a concurrent sync already did. No await: it is one step."""
        if position != self._next:
            return
        self._window.append(binding)
        self._next += 1
        if len(self._window) > WINDOW_BINDINGS:
            del self._window[: WINDOW_BINDINGS // 2]

    async def _sync(self) -> None:
        """Bring the window to the head of the log: one read when nothing or little is new."""
        async with self._syncing:
            if not self._opened:
                head = await self._consensus.log_head(self._log)
                self._next = max(head.start, head.next - 1)
                self._opened = True
            while True:
                found = await self._consensus.read(self._log, self._next)
                for record in found.records:
                    self._push(record.position, decode_binding(record.data))
                if self._next >= found.head.next:
                    return

    async def _landed(self, position: int, nonce: str) -> bool:
        """Resolve an unknown append by its nonce, patiently: guessing would mint a binding twice or lose one."""
        for attempt in range(RESOLVE_ATTEMPTS):
            try:
                return await resolve_append(self._consensus, self._log, position, nonce)
            except Unavailable:
                if attempt == RESOLVE_ATTEMPTS - 1:
                    break
                await asyncio.sleep(RESOLVE_PAUSE_S)
        raise Unknown(f"a mint could not be resolved: remap={self.name} position={position} nonce={nonce}.")

    async def _position_after(self, time_ms: int) -> int:
        """Position of the first binding later than `time_ms`, below the window: bisection, one read a step."""
        low, high = (await self._consensus.log_head(self._log)).start, self._start
        while low < high:
            middle = (low + high) // 2
            if (await self._read(middle, 1))[0].time_ms > time_ms:
                high = middle
            else:
                low = middle + 1
        return low

    async def _read(self, position: int, limit: int) -> list[Binding]:
        out: list[Binding] = []
        while len(out) < limit:
            found = await self._consensus.read(
                self._log, position + len(out), limit_records=min(1000, limit - len(out))
            )
            out += [decode_binding(r.data) for r in found.records]
            if not found.records:
                break
        return out


if TYPE_CHECKING:
    from tidemill.shards.front import Remap

    def _is_the_front(handle: LogRemap) -> Remap:
        return handle
