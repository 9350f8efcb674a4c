"""Build an L1 object: ranges of offsets, partition by partition, with their batches. Pure."""

from __future__ import annotations

from tidemill.metastore.rows.l1 import NO_TIMESTAMP
from tidemill.objects.store import Buffer
from tidemill.topics.l1.format import REGION_BATCHES, Footer, L1Region, encode_footer, encode_index


class ObjectBuilder:
    """Builder of one L1 object.

    For each range of a partition call `begin_range`, `add` for each batch in offset order, and `end`; then `finish`.

    A range of more than REGION_BATCHES becomes several regions, each beginning where the previous one ends.
    """

    def __init__(self, topic_id: str) -> None:
        self._topic_id = topic_id
        self._parts: list[Buffer] = []
        self._size_bytes = 0
        self._regions: list[L1Region] = []
        self._indexes: list[bytes] = []
        self._partition = -1
        self._base = 0
        self._first_byte = 0
        self._batches: list[tuple[int, int, int, int]] = []

    @property
    def size_bytes(self) -> int:
        """Size of the batches so far."""
        return self._size_bytes

    def begin_range(self, partition: int, base_offset: int) -> None:
        """Begin a range of `partition` that covers the offsets from `base_offset`, with or without records."""
        self._partition, self._base = partition, base_offset
        self._first_byte = self._size_bytes

    def add(self, batch: Buffer, base_offset: int, next_offset: int, max_timestamp_ms: int) -> None:
        """Add one whole record batch with its base offset patched; it covers [base_offset, next_offset).

        The first batch of a range may begin before the range.
        """
        at = self._batches[-1][1] if self._batches else self._base
        if next_offset <= max(at, base_offset) or (self._batches and base_offset < at):
            raise ValueError(f"batches must ascend: at={at} base_offset={base_offset} next_offset={next_offset}")
        if len(self._batches) >= REGION_BATCHES:
            self._close_region(at)
        self._parts.append(batch)
        self._size_bytes += len(batch)
        self._batches.append((base_offset, next_offset, len(batch), max_timestamp_ms))

    def end(self, next_offset: int) -> None:
        """End the range before `next_offset`; an empty range adds nothing."""
        at = self._batches[-1][1] if self._batches else self._base
        if next_offset < at:
            raise ValueError(f"a range ends before its batches do: next_offset={next_offset} at={at}")
        if next_offset > self._base:
            self._close_region(next_offset)

    def finish(self) -> tuple[list[Buffer], Footer]:
        """Return the parts to upload, and the footer."""
        at = self._size_bytes
        regions = []
        for region, index in zip(self._regions, self._indexes, strict=True):
            regions.append(
                L1Region(
                    region.partition,
                    region.first_byte,
                    region.size_bytes,
                    region.base_offset,
                    region.last_offset,
                    region.max_timestamp_ms,
                    region.batch_count,
                    at,
                    len(index),
                )
            )
            at += len(index)
        footer = Footer(self._topic_id, tuple(regions))
        return [*self._parts, *self._indexes, encode_footer(footer)], footer

    def _close_region(self, next_offset: int) -> None:
        newest = max((batch[3] for batch in self._batches), default=NO_TIMESTAMP)
        size = self._size_bytes - self._first_byte
        self._regions.append(
            L1Region(
                self._partition, self._first_byte, size, self._base, next_offset - 1, newest, len(self._batches), 0, 0
            )
        )
        self._indexes.append(encode_index(self._batches))
        self._batches = []
        self._base, self._first_byte = next_offset, self._size_bytes
