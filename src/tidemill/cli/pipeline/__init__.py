"""`tidemill pipeline`: pipelines and their restart."""
