"""shards: durable multisets over time, and the bindings that give records their time. Users see a shard as a table.

    writer ─► handle ─► parts (Parquet) ─► compare-and-append ─► state (replicated)
    reader ─► read (holds, snapshots, listeners) ─► parts
    source ─► bindings ─► times;  compaction: fewer and larger parts

Owns the state of a shard (schema, since, upper, batches, holds, writer tokens), the format of its parts and of its row
hash, compare-and-append, snapshots, listeners, compaction and bindings. The name is Materialize's (persist shard).
Interface: `api.py`; start at `registry.py`. Does not own what a pipeline computes, how records become rows, where
consensus and objects are, when since advances or a replaced object is deleted (`maintenance`: leak before lose).

S1  since and upper only advance; a read at t is exact when since ≤ t < upper.     state.broken_step, tests/shards
S2  compare-and-append moves upper and shows the batch, or does neither.           apply, machine M2
S3  since never passes a live hold.                                                 apply._settle
B1  bindings only go forward; B2: same offset, same time, for every reader.         reclock, remap
"""
