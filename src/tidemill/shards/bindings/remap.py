"""`Remap` on a fenced log: one record per binding, appended at the expected position in term 0.

The append is the compare-and-append: the writer that lands at position n minted the n-th binding, and every other
minter gets ConflictError before or after its attempt. No rollup is needed, since the newest record is the state.
Records are msgpack:

    whole = [1, time_ms, {topic id: [next offset…]}, lsn, source_time_ms, tag, era]
    delta = [2, back, time_ms, {topic id: [next offset…]}, lsn, source_time_ms, tag, era]

A delta contains only the topics that moved, 0 for an unchanged LSN or source time, and the number of records back to
the newest whole one (at most WHOLE_RECORD_INTERVAL). A delta without any change takes about twenty bytes. The era is
absent if it is 0 or the delta has no LSN.

Opening costs one or two reads. `_window` holds the newest bindings contiguously and follows the log. Older ones are
found by bisection over log positions (times grow with positions) and read on demand.

Invariant (readable log): the log begins with a whole record. `truncate_before` truncates only bindings that no reader
may still need; a read of a truncated one raises HistoryLostError. Time -1 is before everything, and always known.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import ConflictError, CorruptError, MissingError, UnavailableError, UnknownOutcomeError
from tidemill.consensus.api import Consensus, resolve_append
from tidemill.shards.api import Binding, BindingsPage, HistoryLostError
from tidemill.shards.bindings import reclock

WHOLE_TAG = 1
DELTA_TAG = 2
WHOLE_RECORD_INTERVAL = 64
"""Maximum distance of two whole records, which bounds the cost of reading one old binding."""

WINDOW_BINDINGS = 2_000
"""Number of newest bindings kept in memory; trimmed to half when exceeded. One of 100 tables takes about 5 kB."""

RESOLVE_ATTEMPTS = 20
RESOLVE_PAUSE_S = 0.1

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder()


class StoredRecord(NamedTuple):
    """A decoded record: `binding` is complete if `back` is 0, else it has only the changes since the previous
    record.
    """

    back: int
    binding: Binding


def encode_binding(b: Binding) -> bytes:
    """Encode a whole record."""
    return _encoder.encode([WHOLE_TAG, b.time_ms, b.offsets, b.lsn, b.source_time_ms, b.tag, *_era(b)])


def encode_delta(latest: Binding, b: Binding, back: int) -> bytes:
    """Encode `b`, which follows `latest`, as a delta; the newest whole record is `back` records before."""
    moved = {topic: offsets for topic, offsets in b.offsets.items() if latest.offsets.get(topic) != offsets}
    moves = (b.era, b.lsn) != (latest.era, latest.lsn)
    lsn = b.lsn if moves else 0
    source_time_ms = b.source_time_ms if b.source_time_ms != latest.source_time_ms else 0
    return _encoder.encode([DELTA_TAG, back, b.time_ms, moved, lsn, source_time_ms, b.tag, *(_era(b) if moves else ())])


def _era(b: Binding) -> tuple[int, ...]:
    return (b.era,) if b.era else ()


def decode_record(data: bytes) -> StoredRecord:
    """Decode a record. Raises CorruptError."""
    try:
        form, *fields = _decoder.decode(data)
        if form not in (WHOLE_TAG, DELTA_TAG):
            raise CorruptError(f"unknown binding format: format={form!r}.", fix="Upgrade tidemill.")
        back = fields.pop(0) if form == DELTA_TAG else 0
        time_ms, offsets, lsn, source_time_ms, tag, *more = fields
        (era,) = more or (0,)
        return StoredRecord(
            back, Binding(time_ms, {t: tuple(o) for t, o in offsets.items()}, lsn, source_time_ms, tag, era)
        )
    except (msgspec.DecodeError, ValueError, TypeError, AttributeError) as error:
        raise CorruptError(f"binding is unreadable: bytes={len(data)} ({error}).") from error


def decode_binding(data: bytes, before: Binding | None = None) -> Binding:
    """Decode a complete binding. A delta needs `before`, the binding of the previous record. Raises CorruptError."""
    back, binding = decode_record(data)
    if not back:
        return binding
    if before is None:
        raise CorruptError(f"a binding refers to a missing previous one: time_ms={binding.time_ms}.")
    return reclock.complete_binding(before, binding)


LOG_PREFIX = "remap/"


def remap_log_name(name: str) -> str:
    return LOG_PREFIX + name


class LogRemap:
    """One process's handle; any number of them mint and read the same bindings.

    `clock` is not read: every time is in a binding, and the event loop waits.
    """

    def __init__(self, consensus: Consensus, name: str, clock: Clock, rand: Rand) -> None:
        self.name = name
        self._consensus = consensus
        self._rand = rand
        self._log = remap_log_name(name)
        self._next = 0  # position after the last binding in the window
        self._window: list[Binding] = []  # bindings at positions [_next - len, _next)
        self._whole_at = 0  # position of the newest whole record
        self._log_start = 0  # as of the last read
        self._opened = False
        self._syncing = asyncio.Lock()

    @property
    def position(self) -> int:
        """Next position of the log, as last read."""
        return self._next

    @property
    def length(self) -> int:
        """Number of records in the log, as last read."""
        return self._next - self._log_start

    async def latest(self) -> Binding | None:
        await self._sync()
        return self._window[-1] if self._window else None

    async def mint(self, binding: Binding) -> Binding:
        """Append `binding`, completed from the latest (`reclock.complete_binding`); return the stored one.

        Raises ConflictError(current=Binding | None) if another minter was first or the binding would go back,
        InvalidError if it is invalid on its own, UnavailableError (did not happen), UnknownOutcomeError (its nonce
        could not be looked up).
        """
        reclock.check_binding(binding)
        await self._sync()
        latest, position = (self._window[-1] if self._window else None), self._next
        whole = reclock.complete_binding(latest, binding)
        wrong = reclock.ordering_error(latest, whole)
        if wrong:
            raise ConflictError(f"binding does not follow the latest: remap={self.name} {wrong}.", current=latest)
        nonce = self._rand.nonce()
        back = position - self._whole_at
        data = (
            encode_binding(whole)
            if latest is None or back >= WHOLE_RECORD_INTERVAL
            else encode_delta(latest, whole, back)
        )
        try:
            await self._consensus.append(self._log, 0, position, [data], nonce)
        except ConflictError as error:
            await self._sync()
            raise ConflictError(
                f"another minter was first: remap={self.name} time_ms={whole.time_ms}.",
                current=self._window[-1] if self._window else None,
            ) from error
        except UnknownOutcomeError as error:
            if not await self._resolve_mint(position, nonce):
                await self._sync()
                if self._next > position:
                    current = self._window[-1] if self._window else None
                    raise ConflictError(f"another minter was first: remap={self.name}.", current=current) from error
                raise UnavailableError(f"binding was not stored: remap={self.name} time_ms={whole.time_ms}.") from error
        self._add_binding(position, data)
        return whole

    async def advance(self, time_ms: int) -> Binding | None:
        """Raise the newest binding's time to at least `time_ms`, everything else unchanged. None before the first.

        Any process may do so: later progress gets a later time. For consumers that need an idle source's time to
        advance, such as a derived table of an idle and a busy source; no other process mints for an idle source. Raises
        UnavailableError or UnknownOutcomeError.
        """
        while True:
            latest = await self.latest()
            if latest is None or latest.time_ms >= time_ms:
                return latest
            with contextlib.suppress(ConflictError):  # another minter's binding may be late enough
                return await self.mint(Binding(time_ms, {}))

    async def after(self, time_ms: int, limit: int = 10_000) -> list[Binding]:
        await self._sync()
        return await self._after(time_ms, limit)

    async def at(self, time_ms: int) -> Binding | None:
        await self._sync()
        return await self._at(time_ms)

    async def page(self, lower: int, limit: int = 10_000) -> BindingsPage:
        await self._sync()
        newest = self._window[-1] if self._window else None
        return BindingsPage(await self._at(lower - 1), await self._after(lower - 1, limit), newest)

    async def _after(self, time_ms: int, limit: int) -> list[Binding]:
        if self._in_window(time_ms):
            return reclock.bindings_after(self._window, time_ms, limit)
        return await self._read(await self._position_after(time_ms), limit)

    async def _at(self, time_ms: int) -> Binding | None:
        if time_ms < 0:
            return None
        if self._in_window(time_ms):
            return reclock.binding_in_force(self._window, time_ms)
        position = await self._position_after(time_ms)
        return (await self._read(position - 1, 1))[0] if position else None

    async def oldest_ms(self) -> int | None:
        """Return the time of the oldest stored binding; None before the first.

        Raises MissingError if it is truncated concurrently.
        """
        await self._sync()
        found = await self._read_records(self._log_start, 1) if self.length else []
        return found[0].binding.time_ms if found else None

    async def truncate_before(self, time_ms: int) -> int:
        """Truncate bindings that no read at `time_ms` or later needs; return their number.

        The binding in force at `time_ms` is retained, and the whole record to which it refers.
        """
        await self._sync()
        head = await self._consensus.log_head(self._log)
        if head.next - head.start <= WHOLE_RECORD_INTERVAL or time_ms < 0:
            return 0
        try:
            position = await self._position_after(time_ms) - 1
        except HistoryLostError:
            return 0
        if position <= head.start:
            return 0
        found = await self._consensus.read(self._log, position, limit_records=1)
        position -= decode_record(found.records[0].data).back
        if position <= head.start:
            return 0
        self._log_start = (await self._consensus.truncate(self._log, position)).start
        return position - head.start

    async def wait(self, beyond_ms: int, timeout_s: float) -> Binding | None:
        until_s = asyncio.get_running_loop().time() + timeout_s
        if not self._opened or timeout_s <= 0:
            await self._sync()
        while True:
            if self._window and self._window[-1].time_ms > beyond_ms:
                return self._window[-1]
            left_s = until_s - asyncio.get_running_loop().time()
            if left_s <= 0:
                return None
            # It returns immediately if the log is already longer than this handle knows.
            await self._consensus.wait(self._log, self._next, left_s)
            await self._sync()

    # ------------------------------------------------------------------------------------------------

    @property
    def _start(self) -> int:
        return self._next - len(self._window)

    def _in_window(self, time_ms: int) -> bool:
        """Return whether the window covers this time: it reaches back to the time, or to the first binding."""
        if not self._window or time_ms >= self._window[0].time_ms or self._start == 0:
            return True
        return time_ms < 0 and self._start <= self._log_start

    def _add_binding(self, position: int, data: bytes) -> None:
        """Add the binding at `position` unless a concurrent sync already did. There is no await, so it is one step."""
        if position != self._next:
            return
        back, changed = decode_record(data)
        if not self._window and back:
            raise CorruptError(f"a binding refers to a missing previous one: remap={self.name} position={position}.")
        self._window.append(reclock.complete_binding(self._window[-1], changed) if back else changed)
        self._whole_at = position - back
        self._next += 1
        if len(self._window) > WINDOW_BINDINGS:
            del self._window[: WINDOW_BINDINGS // 2]

    async def _sync(self) -> None:
        """Advance the window to the head of the log; one read if little is new."""
        async with self._syncing:
            while True:
                if not self._opened:
                    self._window = []
                    self._next = await self._newest_whole()
                    self._opened = True
                try:
                    found = await self._consensus.read(self._log, self._next)
                except MissingError:
                    self._opened = False  # truncated past the position of this handle: reopen at the newest
                    continue
                self._log_start = found.head.start
                for record in found.records:
                    self._add_binding(record.position, record.data)
                if self._next >= found.head.next:
                    return

    async def _newest_whole(self) -> int:
        """Return the position at which to open. Never raises MissingError: after a concurrent truncation it retries."""
        while True:
            head = await self._consensus.log_head(self._log)
            if head.next == head.start:
                return head.next
            try:
                found = await self._consensus.read(self._log, head.next - 1, limit_records=1)
            except MissingError:
                continue
            return head.next - 1 - decode_record(found.records[0].data).back

    async def _resolve_mint(self, position: int, nonce: str) -> bool:
        """Resolve an unknown append by its nonce, with retries: guessing would mint a binding twice or lose one."""
        for attempt in range(RESOLVE_ATTEMPTS):
            try:
                return await resolve_append(self._consensus, self._log, position, nonce)
            except UnavailableError:
                if attempt == RESOLVE_ATTEMPTS - 1:
                    break
                await asyncio.sleep(RESOLVE_PAUSE_S)
        raise UnknownOutcomeError(
            f"the outcome of a mint could not be resolved: remap={self.name} position={position} nonce={nonce}."
        )

    async def _position_after(self, time_ms: int) -> int:
        """Return the position of the first binding later than `time_ms`, by bisection, one read per step.

        Raises HistoryLostError if that binding may have been truncated.
        """
        while True:
            start = (await self._consensus.log_head(self._log)).start
            low, high = start, self._next
            try:
                while low < high:
                    middle = (low + high) // 2
                    if (await self._read_records(middle, 1))[0].binding.time_ms > time_ms:
                        high = middle
                    else:
                        low = middle + 1
            except MissingError:
                continue  # truncated in the meantime
            if low == start > 0 and time_ms >= 0:
                raise HistoryLostError(
                    f"bindings of this time were truncated: remap={self.name} wanted={time_ms}.",
                    fix="Read from a newer time; if a table was stalled until now, drop it so that it is re-created.",
                )
            return low

    async def _read(self, position: int, limit: int) -> list[Binding]:
        """Return complete bindings from `position` on. Raises HistoryLostError if they are truncated concurrently."""
        try:
            first = (await self._read_records(position, 1))[:1]
            back = first[0].back if first else 0
            found = await self._read_records(position - back, limit + back)
        except MissingError as error:
            raise HistoryLostError(f"bindings were truncated while they were read: remap={self.name}.") from error
        out: list[Binding] = []
        for stored in found:
            out.append(reclock.complete_binding(out[-1], stored.binding) if stored.back else stored.binding)
        return out[back:]

    async def _read_records(self, position: int, limit: int) -> list[StoredRecord]:
        out: list[StoredRecord] = []
        while len(out) < limit:
            found = await self._consensus.read(
                self._log, position + len(out), limit_records=min(1000, limit - len(out))
            )
            out += [decode_record(r.data) for r in found.records]
            if not found.records:
                break
        return out


if TYPE_CHECKING:
    from tidemill.shards.api import Remap

    def _is_the_front(handle: LogRemap) -> Remap:
        return handle
