"""Checkpoint and restore of the metastore.

    consensus ─► checkpoint.py ─► rows ─► bucket ─► restore_source.py ─► restore.py ─► empty consensus

Owns rows and domains. Logs of topics and shards are restored by their own packages.
"""
