"""The PostgreSQL engine: any server from version 14, shared by any number of machines, in the schema `tidemill`.

    operation ─► client ─► group_commit (what shares a commit) or single_ops ─► connections ─► sql ─► server
    notifications: LISTEN/NOTIFY;  change_detection: which logs changed;  session_checks: a primary with our history

Owns the schema, the SQL, group commit, and what a lost connection means. Does not own the rules of the contract, which
are stated here once more, in SQL.

READ COMMITTED throughout: every write is decided by one conditional UPDATE that locks the row it judges, and rows
are locked in one global order (logs by id, registers by key, new registers by key), so groups do not deadlock.
Leases expire by the server's clock. Needs a session of its own per connection: no transaction-pooling proxy.
"""
