"""Splitting of one connection's byte stream into frames, and the pool of their buffers. Pure: no socket, no clock.

    frame   size int32 (> 0, at most the limit) · size bytes

Invariant (scratch is free): between calls no byte is in the shared scratch buffer. Each byte is in a finished frame, in
the partial frame's own buffer, or in the carry of fewer than four bytes. Data in the scratch buffer that begins with a
large frame is not copied out: the buffer becomes the frame's, and a new one becomes the scratch buffer.

Invariant (no loss): every received byte is in exactly one frame, in order.

Invariant (memory follows data): a buffer grows with the bytes received, not with the announced size. It is ahead of
them by at most FIRST_BYTES, or the size of the connection's last frame, or three times the received bytes, and by none
while there is no room. `hold` counts every byte of it while the frame is unfinished. So of thousands of unfinished
frames, most hold only the bytes that arrived with their size.

Buffers are pooled, because the first touch of fresh memory costs more than all handling of a request. They have powers
of two as sizes, from 32 KiB to 4 MiB. Smaller frames are plain copies out of the scratch buffer, which is a pool buffer
too. Larger frames are never pooled. The buffer of a frame grows as its bytes arrive, so an announced length alone
allocates little.

Invariant (single use): a buffer is in use by one frame or is in the pool, never both.

Invariant (bounded pool): the pool retains at most `keep_bytes`; buffers that are returned beyond that go to the garbage
collector.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tidemill.base.limits import MIB
from tidemill.kafka.schema.primitives import I32, MalformedFrameError

SMALLEST_BYTES = 32 << 10
LARGEST_BYTES = 4 * MIB
SCRATCH_BYTES = 128 << 10
_PREFIX: Final = 4

FIRST_BYTES: Final = SCRATCH_BYTES
"""Size of the first buffer of a frame, however large its announced size: batches of 64 KiB, a common size, need no
second.
"""

HEAD_BYTES: Final = 16 << 10
"""Bytes received in one call while there is no room: the most that a connection with only a begun frame can hold."""

_RETAIN_BUFFER_BYTES: Final = SCRATCH_BYTES * 3 // 8
"""Size above which a frame stays in the buffer that received it.

Smaller frames are copied into buffers of their own size. Batches of 64 KiB are larger.
"""


class BufferPool:
    def __init__(self, keep_bytes: int = 64 * MIB) -> None:
        self._keep_bytes = keep_bytes
        self._kept_bytes = 0
        self._free: dict[int, list[bytearray]] = {}
        self.scratch = bytearray(SCRATCH_BYTES)
        """Shared by all connections: it holds no data between two calls of a FrameReader."""

    def detach_scratch(self) -> bytearray:
        """Hand out the scratch buffer to the frame that was received into it, and replace it by another one."""
        taken, self.scratch = self.scratch, self.acquire(SCRATCH_BYTES)
        return taken

    def acquire(self, size_bytes: int) -> bytearray:
        """Return a buffer of at least `size_bytes`, contents undefined; of LARGEST_BYTES, to be grown, if more is
        wanted.
        """
        wanted = max(SMALLEST_BYTES, 1 << (min(size_bytes, LARGEST_BYTES) - 1).bit_length())
        free = self._free.get(wanted)
        if free:
            self._kept_bytes -= wanted
            return free.pop()
        return bytearray(wanted)

    def release(self, buffer: bytearray) -> None:
        size = len(buffer)
        if size > LARGEST_BYTES or size < SMALLEST_BYTES or size & (size - 1):
            return
        if self._kept_bytes + size <= self._keep_bytes:
            self._kept_bytes += size
            self._free.setdefault(size, []).append(buffer)


class Frame:
    """Bytes of one request, without the size prefix. Call `release` when `view` is not read any more."""

    __slots__ = ("_buffer", "_pool", "view")

    def __init__(self, view: memoryview, buffer: bytearray | None = None, pool: BufferPool | None = None) -> None:
        self.view = view
        self._buffer = buffer
        self._pool = pool

    def release(self) -> None:
        """Return the buffer to the pool. Idempotent."""
        buffer, self._buffer = self._buffer, None
        if buffer is not None and self._pool is not None:
            self._pool.release(buffer)


class FrameReader:
    """Reader that turns received bytes into frames.

    `hold(delta)` is called at every change of the unfinished frame's buffer, with the negative size when the buffer is
    released. `roomy(size)` is true if there is room for a first buffer of `size` bytes.
    """

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
        """Position of the frame in the buffer."""
        self._size = 0
        self._filled = 0
        self._held = 0
        self._usual_bytes = 0
        """Size of the last frame that had a buffer."""

    @property
    def has_partial(self) -> bool:
        """True if a frame has begun and is not complete."""
        return self._buffer is not None or bool(self._carry)

    @property
    def growth_bytes(self) -> int:
        """Bytes that the next call of `buffer` will allocate: check first that there is room for them."""
        if self._buffer is None or self._at + self._filled < len(self._buffer):
            return 0
        return max(self._next_size(len(self._buffer)) - len(self._buffer), 0)

    def _next_size(self, size: int) -> int:
        """Return the next size of a full buffer: FIRST_BYTES, then four times its size, beyond LARGEST_BYTES twice its
        size.
        """
        return min(self._size, max(FIRST_BYTES, (4 if size < LARGEST_BYTES else 2) * size))

    def buffer(self) -> memoryview:
        """Return the memory to receive into: the allocated rest of the partial frame, or the scratch
        buffer.

        The view must be released before the next call.
        """
        if self._buffer is not None:
            if self._at + self._filled == len(self._buffer):
                self._grow(self._buffer)
            return memoryview(self._buffer)[self._at + self._filled : min(self._at + self._size, len(self._buffer))]
        scratch = memoryview(self._pool.scratch)
        carried = len(self._carry)
        scratch[:carried] = self._carry
        return scratch[carried : None if self._roomy(SCRATCH_BYTES) else HEAD_BYTES]

    def add_received(self, count: int) -> list[Frame]:
        """Account for `count` bytes written to `buffer()` and return the frames that they complete.

        Raises MalformedFrameError if a size is out of bounds.
        """
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
                self._begin_frame(size, scratch[start:end], first=position == 0)
                return frames
            if position == 0 and size > _RETAIN_BUFFER_BYTES:
                frames.append(Frame(scratch[start : start + size], self._pool.detach_scratch(), self._pool))
                self._usual_bytes = size
            else:
                frames.append(Frame(memoryview(bytes(scratch[start : start + size]))))
            position = start + size
        self._carry = bytes(scratch[position:end])
        self.frames_begun += bool(self._carry)
        return frames

    def drop_partial(self) -> None:
        """Release the unfinished frame, because its connection has ended."""
        buffer, self._buffer, self._carry = self._buffer, None, b""
        if buffer is not None:
            self._pool.release(buffer)
            self._hold(-self._held)

    def _begin_frame(self, size: int, head: memoryview, *, first: bool) -> None:
        """Begin a partial frame. `first` is true if the frame is the first one in the scratch buffer."""
        self._at = 0
        wanted = min(size, max(FIRST_BYTES, self._usual_bytes), LARGEST_BYTES)
        if not self._roomy(wanted):
            wanted = min(size, FIRST_BYTES)
        if not self._roomy(wanted):
            buffer = bytearray(max(len(head), 1))
        elif first and _RETAIN_BUFFER_BYTES < wanted <= FIRST_BYTES:
            buffer, self._at = self._pool.detach_scratch(), _PREFIX
        else:
            buffer = self._pool.acquire(wanted)
        if not self._at:
            buffer[: len(head)] = head
        self._buffer, self._size, self._filled, self._held = buffer, size, len(head), len(buffer)
        self.frames_begun += 1
        self._hold(self._held)

    def _grow(self, buffer: bytearray) -> None:
        """Enlarge the buffer of the partial frame.

        The view that `buffer` returned must be released before: a large buffer grows in place, without a second copy.
        """
        size = self._next_size(len(buffer))
        if size <= LARGEST_BYTES:
            grown = self._pool.acquire(size)
            grown[: self._filled] = memoryview(buffer)[self._at : self._at + self._filled]
            self._pool.release(buffer)
            self._buffer, self._at = grown, 0
        else:
            buffer.extend(bytes(size - len(buffer)))
            grown = buffer
        delta, self._held = len(grown) - self._held, len(grown)
        self._hold(delta)
