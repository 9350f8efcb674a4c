"""lsm: a log-structured database on object storage, with one writer, many readers and no log of its own.

Owns: files and manifests and their formats, rows in memory, versions, reads, flush, merges, collection.
Does not own: the order of batches (the caller gives seqnos), which manifest counts (`manifest_store`), or
what a row means. Rules L1 to L8 are in RFC 0002; the byte layouts in docs/metastore-format.md.
"""
