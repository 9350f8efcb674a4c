"""The leader's write path: commits become groups, a group is one write batch of the log, its end feeds the database.

    commit ──┬────────────────────────► group (open) ──► append ──► applied ──► database fed ──► commits answered
             └► line (if it expects) ──►

W1  Order is decided in plain calls: a commit joins a group in the same step in which its expectations were found
    to hold, and groups are appended in the order they were opened.
W2  One group holds a key at most once, so a row's seqno names one commit's value. Commits that touch different
    keys share a group, its record, its append and its seqno.
W3  Nobody is answered before the database holds its rows: a read after a commit sees it.
W4  A group belongs to one term. One that was not appended in it is withdrawn, also when the same process leads
    again: what its commits looked at may have changed in between.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from typing import Protocol

from tidemill.base.errors import ConflictError, FencedError, InvalidError, MissingError, TidemillError, UnavailableError
from tidemill.base.limits import METASTORE_KEY_BYTES, METASTORE_VALUE_BYTES, MIB
from tidemill.consensus.state_log.state_log import Applied, StateLog
from tidemill.metastore.domain.codec import encode_command
from tidemill.metastore.domain.commands import WriteBatch
from tidemill.metastore.domain.key_claims import Claim, ClaimQueue
from tidemill.metastore.domain.state import ROW_OVERHEAD_BYTES, DomainState
from tidemill.metastore.lsm.batch_validation import batch_bytes

GROUP_BYTES = 1 * MIB
"""A group stops taking more beyond this; a single larger commit has a group of its own."""

VOLATILE_BYTES = 32 * MIB
"""Rows of a domain that are in no persisted manifest. Commits beyond wait for a flush."""

ROOM_WAIT_S = 30.0
"""A commit that found no room for so long ends as Unavailable."""

NOTHING: Mapping[bytes, int] = {}


class ReadRow(Protocol):
    """A row as `Database.get_row` gives it; `value` b"" is a deletion."""

    @property
    def seqno(self) -> int: ...
    @property
    def value(self) -> bytes: ...


class Rows(Protocol):
    """What the write path needs of the database."""

    async def get_row(self, key: bytes) -> ReadRow | None: ...
    async def room(self) -> None: ...


class _Group:
    __slots__ = ("limit_bytes", "rows", "size_bytes", "waiters")

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.rows: dict[bytes, bytes] = {}
        self.size_bytes = 0
        self.waiters: list[asyncio.Future[int]] = []


class Writing:
    """The commits of one leader in one term. `stop` ends it for good.

    feed      plain: brings what is applied into the database, in seqno order
    stands    raises FencedError unless this term stood after it was called
    failed    a group was refused, fenced or has no known outcome: the leader must step down (R3)
    crowded   there is no room: persist something
    """

    def __init__(
        self,
        log: StateLog[DomainState],
        database: Rows,
        *,
        term: int,
        feed: Callable[[], None],
        stands: Callable[[], Awaitable[None]],
        failed: Callable[[TidemillError], None],
        crowded: Callable[[], None],
        volatile_bytes: int = VOLATILE_BYTES,
    ) -> None:
        self._log = log
        self._database = database
        self._term = term
        self._domain_uuid = log.state.domain_uuid
        self._seqno_delta = log.state.seqno_delta
        self._feed = feed
        self._stands = stands
        self._failed = failed
        self._crowded = crowded
        self._volatile_bytes = volatile_bytes
        self._open: _Group | None = None
        self._groups: deque[_Group] = deque()
        self._group_bytes = 0
        self._line = ClaimQueue()
        self._waiting_for_room: list[asyncio.Future[None]] = []
        self._stopped: TidemillError | None = None
        self._loop = asyncio.get_running_loop()

    # commits --------------------------------------------------------------------------------------

    def take(self, rows: Sequence[tuple[bytes, bytes]]) -> asyncio.Future[int] | None:
        """The way of most commits: into the open group, without waiting; None when it takes `commit`.

        Whoever opened the group has waited for room, and the group ends where that room does.
        """
        group = self._open
        if group is None or self._line:
            return None
        written = group.rows
        size_bytes = ROW_OVERHEAD_BYTES * len(rows)
        for key, value in rows:
            if key in written or not 0 < len(key) <= METASTORE_KEY_BYTES or len(value) > METASTORE_VALUE_BYTES:
                return None
            size_bytes += len(key) + len(value)
        if not rows or group.size_bytes + size_bytes > group.limit_bytes:
            return None
        written.update(rows)
        group.size_bytes += size_bytes
        self._group_bytes += size_bytes
        waiter = self._loop.create_future()
        group.waiters.append(waiter)
        return waiter

    async def commit(self, rows: Sequence[tuple[bytes, bytes]], expects: Mapping[bytes, int] = NOTHING) -> int:
        """As `Domain.commit`, at the leader."""
        size_bytes = measured(rows)
        await self._make_room()
        if expects or (self._line and self._line.holds([key for key, _ in rows])):
            return await (await self._in_line(rows, size_bytes, expects, NO_ROWS))
        return await self._join(rows, size_bytes, NO_ROWS)

    async def admit(
        self,
        rows: Sequence[tuple[bytes, bytes]],
        expects: Mapping[bytes, int],
        beside: Sequence[tuple[bytes, bytes]],
    ) -> asyncio.Future[int]:
        """A commit that is on its way when this returns; the future is its seqno. Raises as `commit` before that.

        `beside` are rows of the domain's own that nobody expects: in a group the last writer's stay.
        """
        size_bytes = measured([*rows, *beside])
        await self._make_room()
        if expects or (self._line and self._line.holds([key for key, _ in rows])):
            return await self._in_line(rows, size_bytes, expects, beside)
        return self._join(rows, size_bytes, beside)

    async def _in_line(
        self,
        rows: Sequence[tuple[bytes, bytes]],
        size_bytes: int,
        expects: Mapping[bytes, int],
        beside: Sequence[tuple[bytes, bytes]],
    ) -> asyncio.Future[int]:
        claim = Claim(expects.keys(), {key for key, _ in rows})
        try:
            if not self._line.enter(claim, self._writes):
                assert claim.turn is not None
                await claim.turn
            found = await self._rows(expects)
            if all(as_expected(found[key], seqno) for key, seqno in expects.items()):
                return self._join(rows, size_bytes, beside)
        finally:
            self._line.leave(claim, self._writes)
        # A leader that was deposed meanwhile may have looked at old rows: its refusal would be no answer.
        await self._stands()
        raise ConflictError(
            f"A row is not as expected: keys={[key.hex() for key in expects][:3]} count={len(expects)}.",
            current=found,
            fix="Read again and decide anew.",
        )

    async def _rows(self, keys: Iterable[bytes]) -> dict[bytes, ReadRow | None]:
        try:
            return {key: await self._database.get_row(key) for key in keys}
        except MissingError:
            # Deposed without knowing it: the next leader may have collected what this one still reads.
            await self._stands()
            raise

    # groups ---------------------------------------------------------------------------------------

    def _join(
        self,
        rows: Sequence[tuple[bytes, bytes]],
        size_bytes: int,
        beside: Sequence[tuple[bytes, bytes]],
    ) -> asyncio.Future[int]:
        """Take a place in the open group, or open one (W1, W2)."""
        if self._stopped is not None:
            raise self._stopped
        group = self._open
        if group is None or group.size_bytes + size_bytes > group.limit_bytes or _touches(group, rows):
            group = self._open_group()
        group.rows.update(rows)
        if beside:
            group.rows.update(beside)
        group.size_bytes += size_bytes
        self._group_bytes += size_bytes
        waiter = self._loop.create_future()
        group.waiters.append(waiter)
        return waiter

    def _open_group(self) -> _Group:
        left_bytes = self._volatile_bytes - self._log.state.volatile_bytes - self._group_bytes
        group = _Group(min(GROUP_BYTES, left_bytes))
        future = self._log.propose_late_nowait(lambda state: self._made(group, state))
        self._open = group
        self._groups.append(group)
        future.add_done_callback(lambda done: self._settled(group, done))
        return group

    def _made(self, group: _Group, state: DomainState) -> bytes:
        """Its append is being put together: the group is closed, and checked a last time (W4)."""
        if self._open is group:
            self._open = None
        if self._stopped is not None:
            raise self._stopped
        if self._log.term != self._term:
            raise FencedError(f"The term is over: term={self._term} current={self._log.term}.", fix="Commit again.")
        command = WriteBatch(self._domain_uuid, list(group.rows.keys()), list(group.rows.values()))
        command.check(state)
        return encode_command(command)

    def _settled(self, group: _Group, done: asyncio.Future[Applied[DomainState]]) -> None:
        if self._open is group:
            self._open = None
        error = _error_of(done)
        if error is None:
            self._feed()
        elif not isinstance(error, UnavailableError):
            self._failed(error)
            if isinstance(error, ConflictError | InvalidError):
                # The log holds it and refuses it for ever (R2); to a commit that means: ask who leads now.
                error = FencedError(f"The log refused the batch: reason={error.message!r}.", fix="Commit again.")
        self._groups.remove(group)
        self._group_bytes -= group.size_bytes
        self._line.advance(self._writes)
        if self._waiting_for_room:
            self.trimmed()
        if error is None:
            seqno = done.result().position + self._seqno_delta
            for waiter in group.waiters:
                if not waiter.done():
                    waiter.set_result(seqno)
        else:
            for waiter in group.waiters:
                if not waiter.done():
                    waiter.set_exception(error)

    def _writes(self, keys: Set[bytes]) -> bool:
        return any(not group.rows.keys().isdisjoint(keys) for group in self._groups)

    # room -----------------------------------------------------------------------------------------

    def _full(self) -> bool:
        return self._log.state.volatile_bytes + self._group_bytes > self._volatile_bytes

    async def _make_room(self) -> None:
        """Raise UnavailableError when none comes, FencedError when the term is over: nothing of the commit has
        happened."""
        if self._stopped is not None:
            raise self._stopped
        if self._full():
            await self._room()
        try:
            await self._database.room()
        except TidemillError:
            if self._stopped is not None:
                raise self._stopped from None
            raise

    async def _room(self) -> None:
        """Wait until the volatile buffer is below its limit. Nothing that waits here holds anything.

        A persisted manifest wakes it, and a group that ended: only then is there something new to persist.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + ROOM_WAIT_S
        while self._full():
            if self._stopped is not None:
                raise self._stopped
            self._crowded()
            trimmed: asyncio.Future[None] = loop.create_future()
            self._waiting_for_room.append(trimmed)
            try:
                async with asyncio.timeout(max(0.0, deadline_s - loop.time())):
                    await trimmed
            except TimeoutError as error:
                raise UnavailableError(
                    f"Rows wait for the bucket and there is no room for more: "
                    f"volatile_bytes={self._log.state.volatile_bytes} limit_bytes={self._volatile_bytes}.",
                    fix="Look why the bucket takes no files: tidemill why metastore.",
                ) from error

    def trimmed(self) -> None:
        """There may be room: those who wait for it look again."""
        waiting, self._waiting_for_room = self._waiting_for_room, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    # the end --------------------------------------------------------------------------------------

    def stop(self, error: TidemillError) -> None:
        """No commit joins from now on. Those in groups learn their own outcome from the log."""
        if self._stopped is None:
            self._stopped = error
        self._line.fail(error)
        self.trimmed()


NO_ROWS: Sequence[tuple[bytes, bytes]] = ()


def measured(rows: Sequence[tuple[bytes, bytes]]) -> int:
    """What the rows count for in limits. Raises InvalidError for what the database would refuse: no record holds it
    then."""
    if len(rows) == 1:
        key, value = rows[0]
        size_bytes = len(key) + len(value)
        if key and len(key) <= METASTORE_KEY_BYTES and len(value) <= METASTORE_VALUE_BYTES:
            return size_bytes + ROW_OVERHEAD_BYTES
    return batch_bytes([key for key, _ in rows], [value for _, value in rows]) + ROW_OVERHEAD_BYTES * len(rows)


def as_expected(row: ReadRow | None, seqno: int) -> bool:
    """0 expects no live row: never written, or deleted."""
    if seqno == 0:
        return row is None or not row.value
    return row is not None and row.seqno == seqno


def _touches(group: _Group, rows: Sequence[tuple[bytes, bytes]]) -> bool:
    written = group.rows
    for key, _ in rows:  # noqa: SIM110  # a generator costs as much as ten look-ups
        if key in written:
            return True
    return False


def _error_of(done: asyncio.Future[Applied[DomainState]]) -> TidemillError | None:
    if done.cancelled():
        return UnavailableError("The commit was cancelled.")
    error = done.exception()
    if error is None or isinstance(error, TidemillError):
        return error
    raise error
