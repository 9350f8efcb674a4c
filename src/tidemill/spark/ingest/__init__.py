"""ingest: from bound records to tables.

    sources ─► feed ─► table_schedule ─► step_planner ─► offset_ranges ─► prefetch ─► fetch_decode
           └─► streaming_query                                              └─► feed_sink ─► table_writer ─► shard
    larger steps: distributed_step, shuffle, range_mirror, oversized_step
    dead_letters, unresolved_updates: records that cannot be applied

Owns the position of each table, derived from its own upper. Decoding is `decode`, the operator is `upsert`.
"""
