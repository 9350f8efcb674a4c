"""Cache of topic rows, and partitions as Metadata responses encode them."""
