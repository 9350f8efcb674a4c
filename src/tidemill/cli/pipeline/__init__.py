"""`tidemill pipeline` and `tidemill dlq`: pipelines, their drivers and their dead letters."""
