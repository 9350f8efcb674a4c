"""Pool of receive buffers: the first touch of fresh memory costs more than all handling of a request.

Invariant (single use): a buffer is in use by one frame or is in the pool, never both.

Invariant (bounded pool): the pool retains at most `keep_bytes`; buffers that are returned beyond that go to the garbage
collector.

Buffers have powers of two as sizes, from 32 KiB to 4 MiB. Smaller frames are plain copies out of the scratch buffer,
which is a pool buffer too. Larger frames are never pooled. The buffer of a frame grows as its bytes arrive, so an
announced length alone allocates little.
"""

from __future__ import annotations

from tidemill.base.limits import MIB

SMALLEST_BYTES = 32 << 10
LARGEST_BYTES = 4 * MIB
SCRATCH_BYTES = 128 << 10


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
