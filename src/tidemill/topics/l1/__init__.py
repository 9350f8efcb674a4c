"""L1: what partitions no longer keep in their hot state: objects of one topic, and rows of the metastore (RFC 0005)."""
