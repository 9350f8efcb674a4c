"""`tidemill pipeline` and `tidemill dead-letters`: pipelines, their drivers and their dead letters."""
