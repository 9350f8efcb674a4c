"""metastore: what exists and where it is stored, as typed rows in replicated domains.

    catalogue (typed access) ─► metastore (routing) ─► domain (replication, leader) ─► lsm (files on object storage)
    rows: families and key encoding;  backup: checkpoint and restore;  check: verification of stored data

Owns row layouts and routing, the database of each domain, its replication through consensus, and the input of a
restore. Does not own what a topic or a shard means by a row. Other rooms use `catalogue`, `metastore`, `rows` and
`factory`.
"""
