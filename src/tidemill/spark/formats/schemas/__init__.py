"""schemas: schemas of writers by id, from the cluster's registry or a foreign one.

lookup ─► cluster registry | foreign_registry ─► writer_schema
"""
