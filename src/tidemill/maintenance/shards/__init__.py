"""Jobs on shards: since, merges, removal of replaced objects and of orphans, bindings, deletion."""
