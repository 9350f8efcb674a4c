"""capture: a PostgreSQL database as a stream of committed changes in topics.

    WAL ─► postgres ─► decode ─► delivery ─► encode ─► topics ─► bindings
           (wire)     (changes)  (fan-out)  (records)             └─► confirmed LSN, back through delivery
    catalog ─► setup ─► tables ─► snapshot ─► session    the way from a database to a running stream

Owns the replication connection, decoding, publication, slot and snapshots, fragments, the flush tracker, and the
topics and bindings of captured tables. Does not own the logs of shapes, or what a pipeline makes of the records.

    P1  the LSN confirmed to Postgres never passes what every sink has flushed            collector, flush_tracker
    X1  whatever a tap raises ends that tap alone                                          taps
    P2  within a transaction ordinals grow; a key change takes two                         converter
    P3  a fragment never shares its last position with its successor                       converter
    V1  what is not plainly a whole row goes to the per-row functions                      walk, burst, tuples
    R1  by columns or one by one, records have the same bytes                              encoded, ranges, values
    L1  the n-th record capture decides to write has offset n, and sequence n: it lands once   lane
    B1  a binding describes exactly one commit boundary; confirmed ≤ bound ≤ durable       bindings, topic_writer
"""
