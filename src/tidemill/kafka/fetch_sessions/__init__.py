"""Incremental fetch sessions (KIP-227): the partitions that one client fetches repeatedly.

request ─► sessions, or implicit (clients without a session) ─► request_diff ─► partitions ─► topics
"""
