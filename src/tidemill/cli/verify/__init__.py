"""verify: is the shard what its source says, at one and the same point?

`compare` merges two sorted streams of rows (pure). `postgres` fixes a point in the source and streams its
tables as of it; `spool` brings a shard, or the fold of a topic, into key order on disk, so that neither
side need fit in memory. `table` puts them together. The SQL side never uses the parsers that fed the
shard: a value that was parsed wrongly must not be compared with itself.
"""
