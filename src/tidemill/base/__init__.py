"""base: ids, frontiers, clock, randomness, errors, limits, tasks, marks.

Owns the vocabulary every room shares. Does no I/O and imports no other room.
"""
