"""capture: a PostgreSQL database as a stream of committed changes in topics.

    WAL ─► postgres ─► decode ─► delivery ─► encode ─► topics ─► bindings
           (wire)     (changes)  (fan-out)  (records)             └─► confirmed LSN, back through delivery
    catalog ─► setup ─► tables ─► snapshot ─► session    the way from a database to a running stream

Owns the replication connection, decoding, publication, slot and snapshots, fragments, the flush tracker, and the
topics and bindings of captured tables. Does not own the logs of shapes, or what a pipeline makes of the records.

    P1  the LSN confirmed to Postgres never passes what every sink has flushed    collector, flush_tracker
    X1  whatever a tap raises ends that tap alone                                 taps
    P2  within a transaction ordinals grow; a key change takes two                transaction_builder
    P3  a fragment never shares its last position with its successor              transaction_builder
    V1  what is not plainly a whole row goes to the per-row functions             columnar_tuples, receive_batch,
                                                                                  row_tuples
    R1  by columns or one by one, records have the same bytes                     columnar_encoder, batch_builder
    L1  the n-th record of a partition has offset n and sequence n: it lands once    partition_writer
    B1  a binding describes exactly one commit boundary; confirmed ≤ bound ≤ durable    binder, topic_writer
"""
