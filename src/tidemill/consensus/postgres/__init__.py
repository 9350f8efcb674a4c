"""The PostgreSQL engine: any server from version 14, shared by any number of machines, in the schema `tidemill`.

    operation ─► client ─► group_commit (operations that share a commit) or single_ops ─► connections ─► sql ─► server
    notifications: LISTEN/NOTIFY;  change_detection: which logs changed;  session_checks: a primary with our history

Owns the schema, the SQL, group commit, and the outcome of work on a lost connection. Repeats the rules of the contract
(`operations`) in SQL; does not own them.

READ COMMITTED throughout: one conditional UPDATE decides every write and locks the row that it judges. Rows are locked
in one global order (logs by id, registers by key, new registers by key), so groups do not deadlock. Leases expire by
the server's clock. Every connection needs its own session: no transaction-pooling proxy.
"""
