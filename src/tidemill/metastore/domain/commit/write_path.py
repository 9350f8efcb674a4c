"""The leader's write path: commits form groups, a group is one write batch of the log, and its end feeds the database.

    commit ──┬───────────────────────────► group (open) ──► append ──► applied ──► database fed ──► commits answered
             └► queue (if it expects) ──►

- Invariant (order): order is decided in synchronous calls. A commit joins a group in the same step in which its
  expectations were verified, and groups are appended in the order in which they were opened.
- Invariant (one value per key): a group holds a key at most once, so a row's seqno identifies one commit's value.
  Commits of different keys share a group, its record, its append and its seqno.
- Invariant (read your writes): a commit is answered only when the database holds its rows.
- Invariant (one term): a group belongs to one term. If it was not appended in that term it is withdrawn, even if the
  same process leads again: the rows that its commits checked may have changed in between.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from typing import Protocol

from tidemill.base.errors import (
    ConflictError,
    FencedError,
    InvalidError,
    MissingError,
    TidemillError,
    UnavailableError,
)
from tidemill.base.limits import METASTORE_KEY_BYTES, METASTORE_VALUE_BYTES, MIB
from tidemill.consensus.state_log.state_log import Applied, StateLog
from tidemill.metastore.domain.codec import encode_command
from tidemill.metastore.domain.commands import WriteBatch
from tidemill.metastore.domain.commit.key_claims import ClaimQueue, KeyClaim
from tidemill.metastore.domain.state import ROW_OVERHEAD_BYTES, DomainState
from tidemill.metastore.lsm.file_store import lost_file_error
from tidemill.metastore.lsm.memtable import batch_bytes

GROUP_BYTES = 1 * MIB
"""Size limit of a group. A single larger commit gets its own group."""

VOLATILE_BYTES = 32 * MIB
"""Limit of a domain's rows that no persisted manifest holds. Further commits wait for a flush."""

ROOM_WAIT_S = 30.0
"""Time after which a commit that waits for room ends with UnavailableError."""

NO_EXPECTATIONS: Mapping[bytes, int] = {}


class ReadRow(Protocol):
    """A row as returned by `Database.get_row`; `value` b"" is a deletion."""

    @property
    def seqno(self) -> int: ...
    @property
    def value(self) -> bytes: ...


class RowReader(Protocol):
    """Interface of the database that the write path uses."""

    async def get_row(self, key: bytes) -> ReadRow | None: ...


class TermOwner(Protocol):
    """Part of `Leader` that the write path uses."""

    @property
    def term(self) -> int: ...
    def apply_log(self) -> None:
        """Apply the batches that the log has applied to the database, in seqno order."""
        ...

    async def check_still_leading(self) -> None:
        """Raise FencedError unless this term was still the newest after the call."""
        ...

    def step_down(self, error: TidemillError) -> None:
        """End the term: a group was rejected or fenced, or its outcome is unknown."""
        ...


class _Group:
    __slots__ = ("limit_bytes", "rows", "size_bytes", "waiters")

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.rows: dict[bytes, bytes] = {}
        self.size_bytes = 0
        self.waiters: list[asyncio.Future[int]] = []


class WritePath:
    """Commits of one leader in one term. `stop` ends it permanently.

    `stall`: wait until the database accepts another batch. `crowded`: the volatile buffer is full: persist something.
    """

    def __init__(
        self,
        log: StateLog[DomainState],
        database: RowReader,
        leader: TermOwner,
        *,
        stall: Callable[[], Awaitable[None]],
        crowded: Callable[[], None],
        volatile_bytes: int = VOLATILE_BYTES,
    ) -> None:
        self._log = log
        self._database = database
        self._term = leader.term
        self._domain_uuid = log.state.domain_uuid
        self._seqno_delta = log.state.seqno_delta
        self._feed = leader.apply_log
        self._stands = leader.check_still_leading
        self._failed = leader.step_down
        self._stall = stall
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

    def try_join_open_group(self, rows: Sequence[tuple[bytes, bytes]]) -> asyncio.Future[int] | None:
        """Add rows to the open group without waiting, as most commits can; return None if `commit` is needed.

        The commit that opened the group has waited for room; the group's size limit keeps it within that room.
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

    async def commit(self, rows: Sequence[tuple[bytes, bytes]], expects: Mapping[bytes, int] = NO_EXPECTATIONS) -> int:
        """Commit at the leader, as `Domain.commit`."""
        size_bytes = checked_size(rows)
        await self._wait_for_room()
        if expects or (self._line and self._line.must_queue([key for key, _ in rows])):
            return await (await self._commit_in_queue(rows, size_bytes, expects, NO_ROWS))
        return await self._join_group(rows, size_bytes, NO_ROWS)

    async def admit(
        self,
        rows: Sequence[tuple[bytes, bytes]],
        expects: Mapping[bytes, int],
        own_rows: Sequence[tuple[bytes, bytes]],
    ) -> asyncio.Future[int]:
        """Start a commit; its order is fixed when this returns. The future is its seqno. Until then raises as `commit`.

        `own_rows` are rows of the domain itself that no commit expects. If commits of one group have the same, the last
        wins.
        """
        size_bytes = checked_size([*rows, *own_rows])
        await self._wait_for_room()
        if expects or (self._line and self._line.must_queue([key for key, _ in rows])):
            return await self._commit_in_queue(rows, size_bytes, expects, own_rows)
        return self._join_group(rows, size_bytes, own_rows)

    async def _commit_in_queue(
        self,
        rows: Sequence[tuple[bytes, bytes]],
        size_bytes: int,
        expects: Mapping[bytes, int],
        own_rows: Sequence[tuple[bytes, bytes]],
    ) -> asyncio.Future[int]:
        claim = KeyClaim(expects.keys(), {key for key, _ in rows})
        try:
            if not self._line.enqueue(claim, self._is_being_written):
                assert claim.turn is not None
                await claim.turn
            found = await self._read_rows(expects)
            if all(has_expected_seqno(found[key], seqno) for key, seqno in expects.items()):
                return self._join_group(rows, size_bytes, own_rows)
        finally:
            self._line.remove(claim, self._is_being_written)
        # A leader that was superseded in the meantime may have read old rows: then its conflict is not authoritative.
        await self._stands()
        raise ConflictError(
            f"a row is not as expected: keys={[key.hex() for key in expects][:3]} count={len(expects)}.",
            current=found,
            fix="Read again and retry.",
        )

    async def _read_rows(self, keys: Iterable[bytes]) -> dict[bytes, ReadRow | None]:
        try:
            return {key: await self._database.get_row(key) for key in keys}
        except MissingError as error:
            # Possibly superseded without knowing: the new leader may have deleted a file that this one still reads.
            await self._stands()
            raise lost_file_error(error) from error

    # groups ---------------------------------------------------------------------------------------

    def _join_group(
        self,
        rows: Sequence[tuple[bytes, bytes]],
        size_bytes: int,
        own_rows: Sequence[tuple[bytes, bytes]],
    ) -> asyncio.Future[int]:
        """Join the open group, or open a new one if a key is already in it or it is full."""
        if self._stopped is not None:
            raise self._stopped
        group = self._open
        if group is None or group.size_bytes + size_bytes > group.limit_bytes or _shares_key(group, rows):
            group = self._open_group()
        group.rows.update(rows)
        if own_rows:
            group.rows.update(own_rows)
        group.size_bytes += size_bytes
        self._group_bytes += size_bytes
        waiter = self._loop.create_future()
        group.waiters.append(waiter)
        return waiter

    def _open_group(self) -> _Group:
        left_bytes = self._volatile_bytes - self._log.state.volatile_bytes - self._group_bytes
        group = _Group(min(GROUP_BYTES, left_bytes))
        future = self._log.propose_deferred(lambda state: self._encode_group(group, state))
        self._open = group
        self._groups.append(group)
        future.add_done_callback(lambda done: self._group_ended(group, done))
        return group

    def _encode_group(self, group: _Group, state: DomainState) -> bytes:
        """Encode a group when its append is assembled: close it, and check the term a last time."""
        if self._open is group:
            self._open = None
        if self._stopped is not None:
            raise self._stopped
        if self._log.term != self._term:
            raise FencedError(f"the term has ended: term={self._term} current={self._log.term}.", fix="Commit again.")
        command = WriteBatch(self._domain_uuid, list(group.rows.keys()), list(group.rows.values()))
        command.check(state)
        return encode_command(command)

    def _group_ended(self, group: _Group, done: asyncio.Future[Applied[DomainState]]) -> None:
        if self._open is group:
            self._open = None
        error = _error_of(done)
        if error is None:
            self._feed()
        elif not isinstance(error, UnavailableError):
            self._failed(error)
            if isinstance(error, ConflictError | InvalidError):
                # The log holds the record but every replica rejects it. For the commit that means: retry at the leader.
                error = FencedError(f"the log rejected the batch: reason={error.message!r}.", fix="Commit again.")
        self._groups.remove(group)
        self._group_bytes -= group.size_bytes
        self._line.wake_ready(self._is_being_written)
        if self._waiting_for_room:
            self.wake_waiting_for_room()
        if error is None:
            seqno = done.result().position + self._seqno_delta
            for waiter in group.waiters:
                if not waiter.done():
                    waiter.set_result(seqno)
        else:
            for waiter in group.waiters:
                if not waiter.done():
                    waiter.set_exception(error)

    def _is_being_written(self, keys: Set[bytes]) -> bool:
        return any(not group.rows.keys().isdisjoint(keys) for group in self._groups)

    # room -----------------------------------------------------------------------------------------

    def _is_full(self) -> bool:
        return self._log.state.volatile_bytes + self._group_bytes > self._volatile_bytes

    async def _wait_for_room(self) -> None:
        """Wait for room. Raises UnavailableError if none becomes free, FencedError if the term has ended. Then nothing
        of the commit has happened."""
        if self._stopped is not None:
            raise self._stopped
        if self._is_full():
            await self._wait_for_flush()
        try:
            await self._stall()
        except TidemillError:
            if self._stopped is not None:
                raise self._stopped from None
            raise

    async def _wait_for_flush(self) -> None:
        """Wait until the volatile buffer is below its limit. A waiting commit holds no resource.

        A persisted manifest wakes it, and so does the end of a group: only then is there something new to persist.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + ROOM_WAIT_S
        while self._is_full():
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
                    f"the buffer of unpersisted rows is full: "
                    f"volatile_bytes={self._log.state.volatile_bytes} limit_bytes={self._volatile_bytes}.",
                    fix="Find out why the bucket accepts no files: tidemill why metastore.",
                ) from error

    def wake_waiting_for_room(self) -> None:
        """Wake the commits that wait for room; they check again."""
        waiting, self._waiting_for_room = self._waiting_for_room, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    # closing --------------------------------------------------------------------------------------

    def stop(self, error: TidemillError) -> None:
        """Reject commits from now on. Commits in groups still get their outcome from the log."""
        if self._stopped is None:
            self._stopped = error
        self._line.fail(error)
        self.wake_waiting_for_room()


NO_ROWS: Sequence[tuple[bytes, bytes]] = ()


def checked_size(rows: Sequence[tuple[bytes, bytes]]) -> int:
    """Return the size of the rows as limits count it. Raises InvalidError for rows that the database would reject, so
    that no log record contains them."""
    if len(rows) == 1:
        key, value = rows[0]
        size_bytes = len(key) + len(value)
        if key and len(key) <= METASTORE_KEY_BYTES and len(value) <= METASTORE_VALUE_BYTES:
            return size_bytes + ROW_OVERHEAD_BYTES
    return batch_bytes([key for key, _ in rows], [value for _, value in rows]) + ROW_OVERHEAD_BYTES * len(rows)


def has_expected_seqno(row: ReadRow | None, seqno: int) -> bool:
    """Return whether a row has the expected seqno. 0 expects no live row: never written, or deleted."""
    if seqno == 0:
        return row is None or not row.value
    return row is not None and row.seqno == seqno


def _shares_key(group: _Group, rows: Sequence[tuple[bytes, bytes]]) -> bool:
    written = group.rows
    for key, _ in rows:  # noqa: SIM110  # a generator costs as much as ten look-ups
        if key in written:
            return True
    return False


def _error_of(done: asyncio.Future[Applied[DomainState]]) -> TidemillError | None:
    if done.cancelled():
        return UnavailableError("the commit was cancelled.")
    error = done.exception()
    if error is None or isinstance(error, TidemillError):
        return error
    raise error
