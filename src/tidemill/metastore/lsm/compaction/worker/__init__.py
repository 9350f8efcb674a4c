"""Compaction in a worker process.

    client.py (parent) ◄── protocol.py ──► main.py (worker)

Owns the process and its protocol. The merge itself is in `compaction_job`.
"""
