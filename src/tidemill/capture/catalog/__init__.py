"""The catalogue of the captured database: tables, columns, keys, types, and their versions.

    pg_catalog ─► catalog_cache ─► table_discovery ─► table_choice
                                   columns, type_dependencies ─► schema_versions ─► schema_diff
    relations: descriptions of relations, and current rows by primary key

Reads only.
"""
