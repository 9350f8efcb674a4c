"""Receive buffers, used again: the first touch of fresh memory costs more than all handling of a request.

P1  A buffer is in use by one frame or in the pool, never both.
P2  The pool keeps at most `keep_bytes`; what comes back beyond that is left to the garbage collector.

Buffers come in powers of two from 32 KiB to 4 MiB. Smaller frames are plain copies out of the scratch
buffer, which is one of these itself; larger ones are never pooled. A frame's buffer grows as its bytes arrive,
so a length alone allocates little.
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
        """Shared by all connections: it holds nothing between two calls of a FrameReader."""

    def take_scratch(self) -> bytearray:
        """The scratch buffer, for the frame that it was filled with; from now on there is another one."""
        taken, self.scratch = self.scratch, self.take(SCRATCH_BYTES)
        return taken

    def take(self, size_bytes: int) -> bytearray:
        """A buffer of at least size_bytes (contents undefined); above LARGEST_BYTES of LARGEST_BYTES, to be grown."""
        wanted = max(SMALLEST_BYTES, 1 << (min(size_bytes, LARGEST_BYTES) - 1).bit_length())
        free = self._free.get(wanted)
        if free:
            self._kept_bytes -= wanted
            return free.pop()
        return bytearray(wanted)

    def give(self, buffer: bytearray) -> None:
        size = len(buffer)
        if size > LARGEST_BYTES or size < SMALLEST_BYTES or size & (size - 1):
            return
        if self._kept_bytes + size <= self._keep_bytes:
            self._kept_bytes += size
            self._free.setdefault(size, []).append(buffer)
