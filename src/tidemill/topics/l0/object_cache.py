"""Cache of recent L0 objects in memory, shared by all fetches of the process; evicts the oldest, by a byte budget.

The buffers are those that were uploaded. Offsets are patched in place once they are known, at the latest when they are
fetched. Fetches return views into the buffers, so an evicted buffer is freed only with its last view.
"""

from __future__ import annotations


class ObjectCache:
    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._buffers: dict[str, bytearray] = {}
        self.bytes_held = 0

    def __len__(self) -> int:
        return len(self._buffers)

    def add(self, object_key: str, buffer: bytearray) -> None:
        self._buffers[object_key] = buffer
        self.bytes_held += len(buffer)
        while self.bytes_held > self._budget_bytes and self._buffers:
            oldest = next(iter(self._buffers))
            self.bytes_held -= len(self._buffers.pop(oldest))

    def get(self, object_key: str) -> bytearray | None:
        return self._buffers.get(object_key)
