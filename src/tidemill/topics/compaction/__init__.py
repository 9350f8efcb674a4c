"""Compaction by key (`cleanup.policy=compact`): of each key the newest record stays. Pure; the keeper does the rest."""
