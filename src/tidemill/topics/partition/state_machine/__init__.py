"""The state machine of a partition: its state, and the commands that change it. Pure.

    command ─► apply (checks everything, then writes) ─► state;  producer_state, transactions: their rules
    codec: log records and rollup objects;  row_codec: rows of the metastore

Invariant (replicated state): the state is a function of the partition's fenced log. A rejected command is a no-op on
every reader.
"""
