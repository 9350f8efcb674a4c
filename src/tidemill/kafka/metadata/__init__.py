"""Topic rows in memory, and partitions as Metadata responses encode them."""
