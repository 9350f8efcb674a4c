"""The checkpoint job: consensus state into rows of the metastore, stage by stage, and how far a restore could go."""
