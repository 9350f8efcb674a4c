"""Reading half of a `StateLog`: replays commands and rollups into `state`, and follows the log.

Byte layout of its records:

    command   0x00 | command bytes
    rollup    0x01 | uint32 little-endian: number of parts that follow | state bytes of this part
              (a large state spans several records of one append: concatenate the parts)
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from tidemill.base.errors import CorruptError, MissingError, TidemillError
from tidemill.base.limits import MIB
from tidemill.consensus.api import Consensus, LogRecord

S = TypeVar("S")

COMMAND = 0
ROLLUP = 1
PART_BYTES = 4 * MIB


def encode_command(command: bytes) -> bytes:
    return b"\x00" + command


def encode_rollup(state: bytes) -> list[bytes]:
    """Return at least one record; the last one has 0 parts following."""
    whole = memoryview(state)
    parts = [whole[at : at + PART_BYTES] for at in range(0, max(1, len(state)), PART_BYTES)]
    return [b"".join((b"\x01", (len(parts) - 1 - i).to_bytes(4, "little"), part)) for i, part in enumerate(parts)]


def decode_part(record: bytes) -> tuple[int, bytes]:
    """Return (parts that follow, state bytes) of a rollup record."""
    return int.from_bytes(record[1:5], "little"), record[5:]


class Replica(Generic[S]):
    """State of one log up to `position`. Only `_replay` and `_load_rollup` change state and position, both in one step.

    Invariant (exact state): `state` is the result of applying every command below `position`, all of them durable.
    """

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
        """Position of the next record to apply."""
        self.records_since_rollup = 0
        self._loaded = False
        self._following = 0  # number of rollup parts still to skip
        self._last_rollup = 0  # position of the last part of the newest rollup passed
        self._rolled_over = 0  # start of the log at the last restart from a rollup
        self._reading = asyncio.Lock()
        self._broken: TidemillError | None = None

    async def load(self) -> S:
        """Replay from the log's start; same as the first `catch_up`."""
        await self.catch_up()
        return self.state

    async def catch_up(self) -> bool:
        """Apply everything that is durable now (a linearizable read). Return whether anything was new."""
        async with self._reading:
            self._check_usable()
            before = self.position
            while True:
                try:
                    found = await self._consensus.read(self.log, self.position)
                except MissingError:
                    await self._load_rollup()
                    continue
                for record in found.records:
                    self._replay(record)
                if self.position >= found.head.next:
                    self._loaded = True
                    return self.position != before
                if not found.records:
                    raise self._fail_corrupt(f"the log has a gap: position={self.position} next={found.head.next}")

    async def wait(self, timeout_s: float) -> bool:
        """Wait until the log has more records than were applied, then catch up. Return False after the timeout."""
        if not await self._consensus.wait(self.log, self.position, timeout_s):
            return False
        return await self.catch_up()

    async def wait_until(self, reached: Callable[[S], bool], timeout_s: float) -> bool:
        """Follow the log until `reached(state)`. Return False after the timeout, having caught up at least once."""
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
        """Apply one record. A plain function, so that no await splits it."""
        if record.position != self.position:
            raise self._fail_corrupt(f"a record is out of place: expected={self.position} got={record.position}")
        kind = record.data[0] if record.data else -1
        if kind == ROLLUP:
            # A replica that has applied everything before a rollup already has its state.
            self._following, _ = decode_part(record.data)
            self.records_since_rollup = 0
            self._last_rollup = self.position
            self.position += 1
            return
        if kind != COMMAND or self._following:
            raise self._fail_corrupt(f"a record has an unknown kind: position={record.position} kind={kind}")
        refused: TidemillError | None = None
        try:
            self.state = self._apply(self.state, record.data[1:], record.position, record.term)
        except TidemillError as error:
            refused = error
        except Exception as error:
            raise self._fail_corrupt(f"apply failed: position={record.position} reason={error!r}") from error
        self.position += 1
        self.records_since_rollup += 1
        self._on_replayed(record, refused)

    def _on_replayed(self, record: LogRecord, refused: TidemillError | None) -> None:
        """Hook: a command was applied or rejected. The writing half passes the outcome to its proposer."""

    async def _load_rollup(self) -> None:
        """Load the rollup at the log's start, because the log was truncated past `position`. State changes in one step.

        Returns without effect if the log is truncated again in the meantime; the caller then calls again.
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
                if not record.data or record.data[0] != ROLLUP:
                    raise self._fail_corrupt(f"the log does not start with a rollup: start={start} position={position}")
                following, part = decode_part(record.data)
                parts.append(part)
                position += 1
                if following == 0:
                    break
            if not found.records:
                raise self._fail_corrupt(f"the rollup is incomplete: start={start} next={found.head.next}")
        decoded = self._decode(b"".join(parts))
        self.state = await decoded if isinstance(decoded, Awaitable) else decoded
        self.position = position
        self.records_since_rollup = 0
        self._following = 0
        self._rolled_over = start

    def _fail_corrupt(self, reason: str) -> CorruptError:
        """Return the error that every further call raises: the state of this process is no longer reliable."""
        error = CorruptError(
            f"{reason} log={self.log!r}.", fix="Report this with the log's records; nothing was overwritten."
        )
        self._broken = self._broken or error
        return error

    @property
    def failure(self) -> TidemillError | None:
        """The error that every call raises from now on (also ClosedError); None while the state is reliable."""
        return self._broken

    def _check_usable(self) -> None:
        if self._broken is not None:
            raise self._broken
