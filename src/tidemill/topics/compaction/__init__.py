"""Compaction by key (`cleanup.policy=compact`): the newest record of each key remains.

Pure; the maintenance job does the I/O.
"""
