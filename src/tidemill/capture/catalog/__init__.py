"""The catalogue of the captured database: tables, columns, keys, types, and their versions.

    pg_catalog ─► catalog_cache ─► table_discovery, columns, type_dependencies ─► schema_versions ─► schema_diff
    row_lookup: current rows by primary key

Reads only.
"""
