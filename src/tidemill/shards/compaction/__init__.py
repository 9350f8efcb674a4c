"""Compaction of a shard: consecutive batches are merged, and updates at or below since are summed."""
