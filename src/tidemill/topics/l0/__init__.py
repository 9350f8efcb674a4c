"""L0: where record batches land first, many partitions' in one object; written once, never changed."""
