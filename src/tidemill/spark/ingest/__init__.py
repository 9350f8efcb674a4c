"""ingest: from bound records to tables.

    sources ─► feed ─► table_schedule ─► step_planner ─► fetch_decode (one step ahead)
           └─► streaming_query      └─► feed_sink                    └─► steps ─► table_writer ─► shard
    dead_letters: records that cannot be applied
    table_ownership: one source per table

Owns the position of each table, derived from its own upper. Decoding is `decode`, the operator is `merge`.
"""
