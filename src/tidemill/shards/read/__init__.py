"""Readers of shards.

    time ─► holds (lease) ─► read_handle ─► part_reader ─► snapshot, batches, listeners
                                  ├─► state_reader: the state, and waits for it
                                  └─► read_plan ─► deletion_vectors ─► planned_rows; engines: verified_file, part_reader
    hash_ranges: contents by range, or counted

Owns read holds, caches and plans. Does not change a shard.
"""
