"""shards: durable multisets over time, and the bindings that assign times to records.

    writer ─► handle ─► parts (Parquet) ─► compare-and-append ─► state (replicated)
    reader ─► read (holds, snapshots, listeners) ─► parts
    source ─► bindings ─► times;  compaction: fewer and larger parts

Owns the state of a shard (schema, since, upper, batches, holds, writer tokens), the format of its parts and of its row
hash, compare-and-append, snapshots, listeners, compaction and bindings. Users see a shard as a table; the room keeps
Materialize's word (persist shard), because captured tables and Arrow tables are tables too.
Interface: `api.py`; start at `registry.py`. Does not own what a pipeline computes, how records become rows, the
location of consensus and objects, the advance of since, or the deletion of replaced objects (`maintenance`: leak before
lose).

Invariants:

- Frontiers: since and upper only advance; a read at t is exact if since ≤ t < upper (`state.broken_invariant_of_step`).
- Atomic append: compare-and-append moves upper and makes the batch visible, or does neither (`state.apply`).
- Holds: since never passes a live hold (`state.apply`).
- Bindings: they only advance, and every reader gets the same time for the same offset (`bindings`).
"""
