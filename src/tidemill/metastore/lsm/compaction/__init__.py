"""Leveled compaction: which files are merged (`pick`), how (`job`), where (`inline`, `worker`), when (`compactor`).

`pick` and `job` are pure. A merge reads immutable files and writes new ones; only the edit that the
database commits afterwards has an effect, so a merge cut off anywhere leaves orphans and nothing else.
"""
