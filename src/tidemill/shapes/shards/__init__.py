"""Shapes over shards, stage 2: from a shard's updates to log items.

shard ─► feed ─► rows, pg_text ─► log
subsets: rows at the newest final time
"""
