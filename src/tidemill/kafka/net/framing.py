"""Cuts one connection's byte stream into frames. Pure: no socket, no clock.

    frame   size int32 (> 0, at most the limit) · size bytes

R1  Between calls no byte lives in the shared scratch buffer: it belongs to a finished frame, to the
    partial frame's own buffer, or to the carry of fewer than four bytes. What is received into it and begins with a
    large frame is not copied out: the buffer becomes the frame's, and another one the scratch buffer.
R2  Every byte received is in exactly one frame, in order.
R3  Memory follows the bytes received, not the announced size: at most FIRST_BYTES, or what the connection's last frame
    had, or three times as much again, ahead of them, and where there is no room for that none, until there is; and
    every byte of it is counted by `hold` while the frame is unfinished. So of thousands of unfinished frames most hold
    what came with their size alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tidemill.kafka.net.buffer_pool import LARGEST_BYTES, SCRATCH_BYTES, BufferPool
from tidemill.kafka.schema.primitives import I32, MalformedFrameError

_PREFIX: Final = 4

FIRST_BYTES: Final = SCRATCH_BYTES
"""The first buffer of a frame, however large it says it will be: batches of 64 KiB, a usual size, need no second."""

HEAD_BYTES: Final = 16 << 10
"""Where there is no room so much is received at once: what a connection can hold that only began a frame."""

_KEEPS_FROM: Final = SCRATCH_BYTES * 3 // 8
"""A frame of more keeps the buffer that it was received into; what holds a smaller one is as small. Batches of 64 KiB
are larger."""


class Frame:
    """One request's bytes, without the size prefix. `release` once no one will read `view` again."""

    __slots__ = ("_buffer", "_pool", "view")

    def __init__(self, view: memoryview, buffer: bytearray | None = None, pool: BufferPool | None = None) -> None:
        self.view = view
        self._buffer = buffer
        self._pool = pool

    def release(self) -> None:
        """Idempotent."""
        buffer, self._buffer = self._buffer, None
        if buffer is not None and self._pool is not None:
            self._pool.give(buffer)


class FrameReader:
    """`hold(delta)` hears of every change of the unfinished frame's buffer; −its size when there is none any more.
    `roomy(size)`: is there room for a first buffer of so many bytes?"""

    def __init__(
        self,
        pool: BufferPool,
        request_bytes_max: int,
        hold: Callable[[int], None],
        roomy: Callable[[int], bool] = lambda size: True,
    ) -> None:
        self._pool = pool
        self.request_bytes_max = request_bytes_max
        self._hold = hold
        self._roomy = roomy
        self.frames_begun = 0
        self._carry = b""
        self._buffer: bytearray | None = None
        self._at = 0
        """Where the frame begins in the buffer."""
        self._size = 0
        self._filled = 0
        self._held = 0
        self._usual_bytes = 0
        """The size of the last frame that had a buffer."""

    @property
    def partial(self) -> bool:
        """A frame has begun and is not complete."""
        return self._buffer is not None or bool(self._carry)

    @property
    def growth_bytes(self) -> int:
        """What the next `buffer` will take in addition: ask whether there is room before."""
        if self._buffer is None or self._at + self._filled < len(self._buffer):
            return 0
        return max(self._larger(len(self._buffer)) - len(self._buffer), 0)

    def _larger(self, size: int) -> int:
        """A full buffer grows to FIRST_BYTES, then to four times its size, beyond LARGEST_BYTES to twice."""
        return min(self._size, max(FIRST_BYTES, (4 if size < LARGEST_BYTES else 2) * size))

    def buffer(self) -> memoryview:
        """Where to receive next: the rest of a partial frame, or of what there is room for; else the scratch buffer.

        The view must be released before this is called again.
        """
        if self._buffer is not None:
            if self._at + self._filled == len(self._buffer):
                self._grow(self._buffer)
            return memoryview(self._buffer)[self._at + self._filled : min(self._at + self._size, len(self._buffer))]
        scratch = memoryview(self._pool.scratch)
        carried = len(self._carry)
        scratch[:carried] = self._carry
        return scratch[carried : None if self._roomy(SCRATCH_BYTES) else HEAD_BYTES]

    def received(self, count: int) -> list[Frame]:
        """Account for `count` bytes put into `buffer()`; the frames they complete. Raises MalformedFrameError on a bad
        size."""
        if self._buffer is not None:
            self._filled += count
            if self._filled < self._size:
                return []
            frame = Frame(memoryview(self._buffer)[self._at : self._at + self._size], self._buffer, self._pool)
            self._buffer = None
            self._usual_bytes = self._size
            self._hold(-self._held)
            return [frame]
        scratch = memoryview(self._pool.scratch)[: len(self._carry) + count]
        self._carry = b""
        frames: list[Frame] = []
        position, end = 0, len(scratch)
        while end - position >= _PREFIX:
            size = I32.unpack_from(scratch, position)[0]
            if not 0 < size <= self.request_bytes_max:
                raise MalformedFrameError(
                    f"request size out of bounds: size={size} limit={self.request_bytes_max}.",
                    fix="Point only Kafka clients without TLS at this port, with message.max.bytes below the limit.",
                )
            start = position + _PREFIX
            if start + size > end:
                self._begin(size, scratch[start:end], first=position == 0)
                return frames
            if position == 0 and size > _KEEPS_FROM:
                frames.append(Frame(scratch[start : start + size], self._pool.take_scratch(), self._pool))
                self._usual_bytes = size
            else:
                frames.append(Frame(memoryview(bytes(scratch[start : start + size]))))
            position = start + size
        self._carry = bytes(scratch[position:end])
        self.frames_begun += bool(self._carry)
        return frames

    def drop(self) -> None:
        """Give the unfinished frame up: its connection has ended."""
        buffer, self._buffer, self._carry = self._buffer, None, b""
        if buffer is not None:
            self._pool.give(buffer)
            self._hold(-self._held)

    def _begin(self, size: int, head: memoryview, *, first: bool) -> None:
        """`first`: it is the first in the scratch buffer."""
        self._at = 0
        wanted = min(size, max(FIRST_BYTES, self._usual_bytes), LARGEST_BYTES)
        if not self._roomy(wanted):
            wanted = min(size, FIRST_BYTES)
        if not self._roomy(wanted):
            buffer = bytearray(max(len(head), 1))
        elif first and _KEEPS_FROM < wanted <= FIRST_BYTES:
            buffer, self._at = self._pool.take_scratch(), _PREFIX
        else:
            buffer = self._pool.take(wanted)
        if not self._at:
            buffer[: len(head)] = head
        self._buffer, self._size, self._filled, self._held = buffer, size, len(head), len(buffer)
        self.frames_begun += 1
        self._hold(self._held)

    def _grow(self, buffer: bytearray) -> None:
        """What `buffer` returned must be released by now: a large buffer grows in place, without a second copy."""
        size = self._larger(len(buffer))
        if size <= LARGEST_BYTES:
            grown = self._pool.take(size)
            grown[: self._filled] = memoryview(buffer)[self._at : self._at + self._filled]
            self._pool.give(buffer)
            self._buffer, self._at = grown, 0
        else:
            buffer.extend(bytes(size - len(buffer)))
            grown = buffer
        delta, self._held = len(grown) - self._held, len(grown)
        self._hold(delta)
