"""Leveled compaction, as in RocksDB.

    compactor (when) ─► picker (which files) ─► executor (where) ─► compaction_job (the merge)
                                                └─► inline_executor, or a worker process (`worker`)

`picker` and `compaction_job` are pure. A compaction reads immutable files and writes new ones. Only the edit that the
database commits afterwards has an effect, so an interrupted compaction leaves orphans and nothing else.
"""
