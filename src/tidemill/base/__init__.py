"""base: ids, frontiers, clock, randomness, errors, limits, tasks, marks, the configuration file.

Owns the vocabulary every room shares. Does no I/O but for reading the configuration, and imports no other room.
"""
