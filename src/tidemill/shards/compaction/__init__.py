"""Compaction of a shard: consecutive batches become one, times at or below since become one sum."""
