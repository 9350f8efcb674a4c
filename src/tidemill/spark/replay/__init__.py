"""replay: dead letters into the tables that lack them, once, after their cause was repaired.

    letters (stored_letters) ─► their records ─► decode with today's file ─┐
    records after them (newer_records): keys that have a newer one ────────┴─► table_replay: one append for each table
    pipeline_replay: all tables of the letters' topics; then the letters are removed

Invariant (as if read in order): a table is afterwards as if each replayed record had been good when it was read. A
record whose key has a newer one in the log changes nothing.
Invariant (the output is the state): a letter is removed after the table has its record. A replay that was killed in
between finds the letter again, and the row in the table: it changes nothing.
"""
