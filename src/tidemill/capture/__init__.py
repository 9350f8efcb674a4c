"""capture: a PostgreSQL database as a stream of committed changes in topics.

    WAL ─► postgres ─► decode ─► delivery ─► encode ─► topics ─► bindings
           (wire)     (changes)  (fan-out)  (records)             └─► confirmed LSN, back through delivery
    catalog ─► setup ─► tables ─► snapshot ─► session    the way from a database to a running stream

Owns the replication connection, decoding, publication, slot and snapshots, fragments, the flush tracker, and the topics
and bindings of captured tables. Does not own the logs of shapes, or what a pipeline does with the records.

Invariants, and the modules that keep them:

    no early confirm: the LSN confirmed to PostgreSQL never
        passes what every sink has flushed                       collector, flush_tracker
    tap isolation: an error that a tap raises ends only that tap consumers
    ordinals grow within a transaction; a key change takes two   transaction_builder
    distinct ends: a fragment never shares its last position
        with its successor                                       transaction_builder
    whole rows by columns: any other message goes to the per-row
        functions                                                columnar_tuples, receive_batch, row_tuples
    same bytes: records are identical whether they are encoded
        by columns or one by one                                 columnar_encoder, batch_builder
    one landing: the n-th record of a partition has offset n and
        sequence n                                               partition_writer
    commit boundaries: a binding describes exactly one of them;
        confirmed ≤ bound ≤ durable                              binder, topic_writer
"""
