"""maintenance: background jobs that keep a cluster's data in order and delete what is not needed any more.

    scheduler ─► job_list ─► shards, topics (garbage collection, merges, compaction) ─► failure_status
    checkpoint ─► restore;  check: `tidemill doctor --deep`

Owns checkpoint, restore, the deep check, compaction, retention and garbage collection: every stored thing has a job
here that deletes it. Owns no format: the rooms below define how a thing is stored and read.
"""
