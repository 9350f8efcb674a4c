"""Sizes and triggers of one database. The defaults suit a node with 64 MiB for its metastore."""

from __future__ import annotations

import msgspec

from tidemill.base.errors import InvalidError
from tidemill.base.limits import MIB

KIB = 1 << 10


class Options(msgspec.Struct, frozen=True):
    """Options. Raises InvalidError if a size is not positive or the three triggers of level 0 are out of order."""

    write_buffer_bytes: int = 16 * MIB
    """Size of the memtable from which it is flushed; counts keys, values and their overhead."""

    block_bytes: int = 8 * KIB
    """Size of a block before compression. A block may hold up to twice this, or one larger row."""

    file_bytes: int = 16 * MIB
    """Target size of a file written by a compaction."""

    pre_open: int = 0
    """Number of files whose filter and index are read right after opening, newest first; others at their first use."""

    cache_bytes: int = 32 * MIB
    """Budget for decoded blocks, indexes and filters, counted as the memory they take when decoded."""

    bloom_bits_per_key: int = 12
    """Bloom filter size; 12 gives about 1 % false positives; 0 = no filter."""

    l0_compact: int = 4
    l0_slow: int = 8
    l0_stop: int = 12
    """Numbers of files in level 0 at which a compaction starts, writers are slowed, writers wait."""

    level_base_bytes: int = 64 * MIB
    level_factor: int = 10
    levels: int = 7
    """Level 1 holds `level_base_bytes`, each deeper level `level_factor` times the one above; `levels` counts level
    0."""

    inline_merge_rows: int = 100_000
    """A compaction of more rows runs in a worker process."""

    slice_rows: int = 500
    """Rows between two yields to the event loop."""

    compaction_bytes_per_s: int = 0
    """Rate limit of compactions; 0 = unlimited."""

    gc_delay_ms: int = 600_000
    """Minimum age of an unreferenced file before it is deleted."""

    manifests_kept: int = 3
    """Number of the newest manifests in the bucket whose files are never deleted."""

    def __post_init__(self) -> None:
        positive = (
            "write_buffer_bytes block_bytes file_bytes l0_compact level_base_bytes level_factor slice_rows"
            " manifests_kept"
        )
        for name in positive.split():
            if getattr(self, name) <= 0:
                raise InvalidError(f"the option must be positive: option={name} value={getattr(self, name)}.")
        for name in (
            "pre_open",
            "cache_bytes",
            "bloom_bits_per_key",
            "inline_merge_rows",
            "compaction_bytes_per_s",
            "gc_delay_ms",
        ):
            if getattr(self, name) < 0:
                raise InvalidError(f"the option must not be negative: option={name} value={getattr(self, name)}.")
        if self.levels < 2:
            raise InvalidError(f"a database needs level 0 and one below it: option=levels value={self.levels}.")
        if not self.l0_compact <= self.l0_slow <= self.l0_stop:
            raise InvalidError(
                "the level 0 triggers must ascend from compaction over slowing to stopping: "
                f"l0_compact={self.l0_compact} l0_slow={self.l0_slow} l0_stop={self.l0_stop}."
            )
