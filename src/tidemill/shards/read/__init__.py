"""Readers of shards.

    time ─► holds (lease) ─► read_handle ─► part_reader ─► snapshot, batches, listeners
                                  └─► read_plan ─► engines that read Parquet themselves: verified_file, part_bytes
    hash_ranges, keyed_delta, row_count: contents by range, of some keys, counted

Owns read holds, caches and plans. Does not change a shard.
"""
