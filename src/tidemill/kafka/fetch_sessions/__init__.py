"""What clients fetch again and again: one reader's partitions (`interest`), and those kept for it (`sessions`)."""
