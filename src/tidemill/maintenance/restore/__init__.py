"""Restore of a cluster from its bucket alone: `tidemill restore`.

plan (dry run) ─► restore: claim, metastore, topics, shards, groups
"""
