"""`tidemill restore`: a cluster from its bucket alone.

plan (dry run) ─► restore: claim, metastore, topics, shards, groups
"""
