"""maintenance: background jobs that keep a cluster's data in order and delete what is not needed any more.

    scheduler ─► job_list ─► shards, topics (garbage collection, merges, compaction)
    checkpoint ─► restore;  check: `tidemill doctor --deep`

The room owns checkpoint, restore, the deep check, compaction, retention and garbage collection: every kind of stored
data has a job here that deletes it. The room owns no format: the rooms below define how data is stored and read.
"""
