"""The first copy of tables, and every later one.

    exported_snapshot ─► chunks ─► copier ─► topic
    changes during the copy ─► side_topic ─► side_topic_append ─► topic (RFC 0009)
    wal_hold: WAL that PostgreSQL retains for copies

Owns copies and their progress. Does not decide which tables are copied (`tables`).
"""
