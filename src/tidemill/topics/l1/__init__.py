"""Long-term storage: objects of one topic, and extents as rows of the metastore (RFC 0005).

L0 ─► reconcile_scheduler ─► reconciler ─► object_planner ─► builder ─► bucket ─► extent_store (row_transitions)
extent_merge: fewer and larger extents
offset ─► extent_store (extent_cache) ─► reader (read_ahead)
"""
