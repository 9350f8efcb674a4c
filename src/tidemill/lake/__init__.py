"""lake: tables as Apache Iceberg tables over the parts that they already have (RFC 0012).

    shard's state ─► publish ─► vectors (rows that do not count) ─► format (Avro, Puffin, JSON) ─► objects
                        └─► pointer in consensus ◄─ readers: newest metadata of a table

Owns the published metadata: its bytes, its place under `lake/`, which snapshots are kept, and the deletion of what no
kept snapshot names. Does not own parts (`shards`), and never writes to a shard except holds.

Invariants:

- Exact: the rows of a snapshot are the shard's contents at the time that the snapshot's summary names.
- Whole: a snapshot becomes visible by one compare-and-set, after every object that it names is stored.
- Kept: no object that a listed snapshot names is deleted.
"""
