"""The checkpoint job, which copies consensus state into rows of the metastore, stage by stage, and the restore
horizon."""
