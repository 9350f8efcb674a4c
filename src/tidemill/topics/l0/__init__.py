"""Produce, stage 2: record batches of many partitions in one L0 object, written once and never changed.

batch ─► writer ─► group_commit (when its upload starts) ─► format ─► bucket
object_cache: readers
"""
