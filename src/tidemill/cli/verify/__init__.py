"""verify: compare a shard with its source at the same point.

`compare` merges two sorted streams of rows (pure). `postgres` fixes a point in the source and streams its tables as of
it. `spool` brings a shard, or the fold of a topic, into key order on disk, so that neither side needs to fit in memory.
`table` puts them together. The SQL side never uses the parsers that fed the shard: a wrongly parsed value must not be
compared with itself.
"""
