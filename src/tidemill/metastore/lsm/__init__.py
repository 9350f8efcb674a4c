"""lsm: a log-structured merge tree on object storage, with one writer, many readers and no write-ahead log.

Owns: files and manifests and their formats, rows in memory, versions, reads, flush, compaction, garbage collection.
Does not own: the order of batches (the caller assigns seqnos), which manifest is current (`manifest_store`), or
the meaning of a row. The rules are in RFC 0002; the byte layouts in docs/internals/metastore-format.md.
"""
