"""Cuts one connection's byte stream into frames. Pure: no socket, no clock.

    frame   size int32 (> 0, at most the limit) · size bytes

R1  Between calls no byte lives in the shared scratch buffer: it belongs to a finished frame, to the
    partial frame's own buffer, or to the carry of fewer than four bytes.
R2  Every byte received is in exactly one frame, in order.
R3  Memory follows the bytes received, not the announced size: at most LARGEST_BYTES ahead of them.
"""

from __future__ import annotations

from typing import Final

from tidemill.kafka.pool import LARGEST_BYTES, BufferPool
from tidemill.kafka.schema.wire import I32, BadFrame

_PREFIX: Final = 4


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
    def __init__(self, pool: BufferPool, request_bytes_max: int) -> None:
        self._pool = pool
        self._max = request_bytes_max
        self._carry = b""
        self._buffer: bytearray | None = None
        self._size = 0
        self._filled = 0

    @property
    def partial(self) -> bool:
        """A frame has begun and is not complete."""
        return self._buffer is not None or bool(self._carry)

    def buffer(self) -> memoryview:
        """Where to receive next: exactly the rest of a partial frame, else the scratch buffer."""
        if self._buffer is not None:
            return memoryview(self._buffer)[self._filled : self._size]
        scratch = memoryview(self._pool.scratch)
        carried = len(self._carry)
        scratch[:carried] = self._carry
        return scratch[carried:]

    def received(self, count: int) -> list[Frame]:
        """Account for `count` bytes put into `buffer()`; the frames they complete. Raises BadFrame on a bad size."""
        if self._buffer is not None:
            self._filled += count
            if self._filled < self._size:
                self._grow(self._buffer)
                return []
            frame = Frame(memoryview(self._buffer)[: self._size], self._buffer, self._pool)
            self._buffer = None
            return [frame]
        scratch = memoryview(self._pool.scratch)[: len(self._carry) + count]
        self._carry = b""
        frames: list[Frame] = []
        position, end = 0, len(scratch)
        while end - position >= _PREFIX:
            size = I32.unpack_from(scratch, position)[0]
            if not 0 < size <= self._max:
                raise BadFrame(
                    f"request size out of bounds: size={size} limit={self._max}.",
                    fix="Point only Kafka clients without TLS at this port, with message.max.bytes below the limit.",
                )
            start = position + _PREFIX
            if start + size <= end:
                frames.append(Frame(memoryview(bytes(scratch[start : start + size]))))
                position = start + size
            else:
                self._begin(size, scratch[start:end])
                return frames
        self._carry = bytes(scratch[position:end])
        return frames

    def _begin(self, size: int, head: memoryview) -> None:
        buffer = self._pool.take(size)
        buffer[: len(head)] = head
        self._buffer, self._size, self._filled = buffer, size, len(head)

    def _grow(self, buffer: bytearray) -> None:
        """Only frames above LARGEST_BYTES outgrow their buffer: it doubles when full."""
        if self._filled == len(buffer):
            grown = bytearray(min(self._size, max(2 * len(buffer), LARGEST_BYTES)))
            grown[: self._filled] = memoryview(buffer)[: self._filled]
            self._buffer = grown
            self._pool.give(buffer)
