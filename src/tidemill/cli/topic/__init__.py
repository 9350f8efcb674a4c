"""`tidemill topic`: topics, their records and lost objects."""
