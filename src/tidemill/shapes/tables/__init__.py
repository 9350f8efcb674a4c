"""Shapes over captured tables, stage 2: turns changes into log items.

    capture ─► capture_tap ─► filter_index (candidate shapes) ─► table_consumer ─► change_translator ─► log
    initial_snapshot: initial rows, joined to the stream
    backlog: what is not evaluated yet;  restore: shapes of an earlier run

Owns evaluation and its limits. Does not own logs or HTTP.
"""
