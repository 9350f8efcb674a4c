"""Bytes of an Iceberg table, v2 and v3. Pure.

    schema ─► metadata.json          manifests ─► manifest list
    roaring ─► deletion_vectors ─► Puffin (v3);  position_deletes ─► Parquet (v2)

Follows the specifications of Iceberg's tables and Puffin files. Does not know shards' states or stores.
"""
