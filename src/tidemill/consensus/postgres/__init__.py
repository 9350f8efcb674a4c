"""The PostgreSQL backend: any server from version 14, shared by any number of machines, in the schema `tidemill`.

Owns: the schema (`schema`), the SQL (`statements`), what shares a commit (`groups`), connections and what a lost
one means (`lanes`), wake-ups by NOTIFY (`wakeups`), the client that puts them together (`client`).
Does not own: the rules of the contract, though here they are stated once more, in SQL.

READ COMMITTED throughout: every write is decided by one conditional UPDATE that locks the row it judges, and rows
are locked in one global order (logs by id, registers by key, new registers by key), so groups do not deadlock.
Leases expire by the server's clock. Needs a session of its own per connection: no transaction-pooling proxy.
"""
