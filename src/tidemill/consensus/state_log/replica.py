"""The reading half of a `StateLog`: replay of commands and rollups into `state`, and following the log."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from tidemill.base.errors import CorruptError, MissingError, TidemillError
from tidemill.consensus.api import Consensus, LogRecord
from tidemill.consensus.state_log import codec

S = TypeVar("S")


class Replica(Generic[S]):
    """SL1 and SL3 of `state_log`. Only `_replay` and `_restart` change state and position, both in one step."""

    def __init__(
        self,
        consensus: Consensus,
        log: str,
        initial: Callable[[], S],
        apply: Callable[[S, bytes, int, int], S],
        decode: Callable[[bytes], S | Awaitable[S]],
    ) -> None:
        self._consensus = consensus
        self.log = log
        self._apply = apply
        self._decode = decode
        self.state: S = initial()
        self.position = 0
        """The position the next record will have."""
        self.records_since_rollup = 0
        self._loaded = False
        self._following = 0  # parts of a rollup still to be passed
        self._last_rollup = 0  # position of the last part of the newest rollup passed
        self._rolled_over = 0  # start of the log when we last had to begin again from a rollup
        self._reading = asyncio.Lock()
        self._broken: TidemillError | None = None

    async def load(self) -> S:
        """Replay from the log's start. Same as the first `catch_up`."""
        await self.catch_up()
        return self.state

    async def catch_up(self) -> bool:
        """Apply everything durable as of now (a linearizable read); True if anything was new."""
        async with self._reading:
            self._check()
            before = self.position
            while True:
                try:
                    found = await self._consensus.read(self.log, self.position)
                except MissingError:
                    await self._restart()
                    continue
                for record in found.records:
                    self._replay(record)
                if self.position >= found.head.next:
                    self._loaded = True
                    return self.position != before
                if not found.records:
                    raise self._break(f"The log has a gap: position={self.position} next={found.head.next}")

    async def wait(self, timeout_s: float) -> bool:
        """Wait until the log has more than was applied, then catch up; False after the timeout."""
        if not await self._consensus.wait(self.log, self.position, timeout_s):
            return False
        return await self.catch_up()

    async def until(self, reached: Callable[[S], bool], timeout_s: float) -> bool:
        """Follow the log until `reached(state)`; False after the timeout (caught up at least once)."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        await self.catch_up()
        while not reached(self.state):
            left_s = deadline_s - loop.time()
            if left_s <= 0:
                return False
            await self.wait(left_s)
        return True

    def _replay(self, record: LogRecord) -> None:
        """Apply one record. A plain function: no await splits it."""
        if record.position != self.position:
            raise self._break(f"A record is out of place: expected={self.position} got={record.position}")
        kind = record.data[0] if record.data else -1
        if kind == codec.ROLLUP:
            # Whoever has applied everything before a rollup already has its state.
            self._following, _ = codec.decode_part(record.data)
            self.records_since_rollup = 0
            self._last_rollup = self.position
            self.position += 1
            return
        if kind != codec.COMMAND or self._following:
            raise self._break(f"A record of unknown kind: position={record.position} kind={kind}")
        refused: TidemillError | None = None
        try:
            self.state = self._apply(self.state, record.data[1:], record.position, record.term)
        except TidemillError as error:
            refused = error
        except Exception as error:
            raise self._break(f"apply failed: position={record.position} reason={error!r}") from error
        self.position += 1
        self.records_since_rollup += 1
        self._replayed(record, refused)

    def _replayed(self, record: LogRecord, refused: TidemillError | None) -> None:
        """A command was applied or refused; the writing half tells its proposer."""

    async def _restart(self) -> None:
        """We were rolled over: take the state of the rollup at the log's start (SL4), all at once.

        Returns without effect when the log is rolled over again meanwhile; the caller comes back.
        """
        start = (await self._consensus.log_head(self.log)).start
        parts: list[bytes] = []
        following = -1
        position = start
        while following != 0:
            try:
                found = await self._consensus.read(self.log, position)
            except MissingError:
                return
            for record in found.records:
                if not record.data or record.data[0] != codec.ROLLUP:
                    raise self._break(f"The log does not start with a rollup: start={start} position={position}")
                following, part = codec.decode_part(record.data)
                parts.append(part)
                position += 1
                if following == 0:
                    break
            if not found.records:
                raise self._break(f"The rollup is not whole: start={start} next={found.head.next}")
        decoded = self._decode(b"".join(parts))
        self.state = await decoded if isinstance(decoded, Awaitable) else decoded
        self.position = position
        self.records_since_rollup = 0
        self._following = 0
        self._rolled_over = start

    def _break(self, reason: str) -> CorruptError:
        """What this process holds can no longer be trusted: refuse everything from here on."""
        error = CorruptError(
            f"{reason} log={self.log!r}.", fix="Report it with the log's records; nothing was overwritten."
        )
        self._broken = self._broken or error
        return error

    @property
    def broken(self) -> TidemillError | None:
        """Why every call is refused from here on (also Closed); None while this view can be trusted."""
        return self._broken

    def _check(self) -> None:
        if self._broken is not None:
            raise self._broken
