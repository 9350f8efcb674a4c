"""Shapes over shards, stage 2: turns a shard's updates into log items.

shard ─► feed ─► pg_text ─► log
subsets: rows at the newest final time
"""
