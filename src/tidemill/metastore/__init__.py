"""metastore: the catalogue of what exists (topics, captures, pipelines).

Owns the typed rows. Does not own what a topic or shard means by a row. Step 2 puts an LSM database
on object storage beneath it; callers keep this front.
"""
