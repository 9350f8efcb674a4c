"""The life of captured tables: added, described, paused, repaired, re-snapshotted.

    catalog_watcher ─► schema_change ─► table_states (the only module that changes a table's state, durably)
    table_statuses: the stage statuses of the tables
    publication_repair ─► replica identities
    auto_recopy, recopy_requests ─► snapshot
    table_reasons: why a table carries no changes, as sentences

Owns the state of each table. Does not stream.
"""
